// The only program of a guest that tests move about: it writes numbered records to its disk, each durable before the next,
// and says so. Whatever goes wrong, it says in a line with BAD.
//
// A record fills a block: magic, number, words that follow from the number, a checksum. Record n is in block n modulo the
// blocks of the disk; the first is 1. On the console:
//
//   guest: start N        the last record that was found at boot
//   guest: beat N         record N is durable, and N-1 was still there
//   guest: verified N     every record that must be there is, up to N: the answer to a line that begins with v
//
// Parameters on the kernel's command line: pace=MS between records, dirty=MIB of memory that change with each (a byte of
// each page, which is what it was before).

#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { BLOCK = 4096, WORDS = BLOCK / 8 };
static const uint64_t MAGIC = 0x64726f7665723031;

static int disk;
static uint64_t blocks;
static uint64_t *buffer;

static void fail(const char *what) {
  printf("guest: BAD %s: %m\n", what);
  for (;;) pause();
}

static uint64_t mixed(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9;
  x ^= x >> 27;
  x *= 0x94d049bb133111eb;
  return x ^ x >> 31;
}

static void fill(uint64_t *block, uint64_t n) {
  uint64_t sum = 0;
  block[0] = MAGIC;
  block[1] = n;
  for (int i = 2; i < WORDS - 1; i++) block[i] = mixed(n * WORDS + i);
  for (int i = 0; i < WORDS - 1; i++) sum = mixed(sum + block[i]);
  block[WORDS - 1] = sum;
}

// The number of the whole record in the buffer, or 0.
static uint64_t found(void) {
  static uint64_t wanted[WORDS];
  if (buffer[0] != MAGIC) return 0;
  fill(wanted, buffer[1]);
  return memcmp(wanted, buffer, BLOCK) ? 0 : buffer[1];
}

static uint64_t at(uint64_t block) {
  if (pread(disk, buffer, BLOCK, block * BLOCK) != BLOCK) fail("read");
  return found();
}

static void verify(uint64_t last) {
  uint64_t first = last > blocks ? last - blocks + 1 : 1;
  for (uint64_t n = first; n <= last; n++) {
    uint64_t there = at(n % blocks);
    if (there != n) {
      printf("guest: BAD record %llu of %llu: found %llu\n", (unsigned long long)n, (unsigned long long)last,
             (unsigned long long)there);
      return;
    }
  }
  printf("guest: verified %llu\n", (unsigned long long)last);
}

static unsigned long parameter(const char *text, const char *name) {
  const char *found = strstr(text, name);
  return found ? strtoul(found + strlen(name), NULL, 10) : 0;
}

static void load(const char *module) {
  int file = open(module, O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  // 4: MODULE_INIT_COMPRESSED_FILE.
  if (syscall(SYS_finit_module, file, "", 4) && syscall(SYS_finit_module, file, "", 0)) fail(module);
  close(file);
}

int main(void) {
  setvbuf(stdout, NULL, _IOLBF, 0);
  mount("none", "/dev", "devtmpfs", 0, NULL);
  mount("none", "/proc", "proc", 0, NULL);
  char name[16], text[1024] = "";
  for (int i = 0; i < 10; i++) {
    snprintf(name, sizeof name, "/%d.ko", i);
    load(name);
  }
  FILE *line = fopen("/proc/cmdline", "r");
  if (line) fgets(text, sizeof text, line);
  unsigned long pace = parameter(text, "pace="), dirty = parameter(text, "dirty=") << 20;
  uint8_t age = 0, *memory = dirty ? calloc(1, dirty) : NULL;

  for (int tries = 0; (disk = open("/dev/vda", O_RDWR | O_DIRECT | O_DSYNC | O_CLOEXEC)) < 0; tries++) {
    if (tries == 500) fail("/dev/vda");
    usleep(10000);
  }
  blocks = lseek(disk, 0, SEEK_END) / BLOCK;
  if (blocks < 2 || posix_memalign((void **)&buffer, BLOCK, BLOCK)) fail("disk");
  uint64_t last = 0;
  for (uint64_t block = 0; block < blocks; block++) {
    uint64_t n = at(block);
    if (n > last) last = n;
  }
  printf("guest: start %llu\n", (unsigned long long)last);

  for (;;) {
    if (last && at(last % blocks) != last) printf("guest: BAD record %llu is gone\n", (unsigned long long)last);
    fill(buffer, last + 1);
    if (pwrite(disk, buffer, BLOCK, (last + 1) % blocks * BLOCK) != BLOCK) fail("write");
    printf("guest: beat %llu\n", (unsigned long long)++last);
    for (unsigned long i = 0; i < dirty; i += BLOCK) {
      if (memory[i]++ != age) printf("guest: BAD memory at %lu of %lu\n", i, dirty);
    }
    age++;
    struct pollfd console = {.fd = 0, .events = POLLIN};
    if (poll(&console, 1, pace) > 0) {
      if (fgets(text, sizeof text, stdin) && text[0] == 'v') verify(last);
    }
  }
}
