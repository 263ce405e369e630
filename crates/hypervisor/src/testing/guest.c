// The only program of a guest that tests move about: it writes numbered records to its disk, each durable before the next,
// and says so. Whatever goes wrong, it says in a line with BAD.
//
// A record fills a block: magic, number, words that follow from the number, a checksum. Record n is in block n modulo the
// blocks of the disk; the first is 1. On the console:
//
//   guest: booted         it has not looked at its disks yet
//   guest: start N        the last record that was found at boot
//   guest: beat N         record N is durable, and N-1 was still there
//   guest: verified N     every record that must be there is, up to N: the answer to a line that begins with v
//   guest: edited N       N bytes of files were written to the second disk, an ext4, and what was written to it before is there:
//                         the answer to a line `eKIND`, where KIND is p, s, v or t: somebody views a PDF, edits slides, views a
//                         video, edits a text, and a browser keeps what it has seen
//
// Parameters on the kernel's command line: pace=MS between records, dirty=MIB of memory that change with each (a byte of
// each page, which is what it was before), noise=MIB of memory that does not compress and stays as it is, both=1 to write each record to the second disk, too, after the first,
// rest=MS before it looks at its disks.

#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
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

// A file of the second disk. Its contents follow from its seed.
static struct file {
  char path[48];
  uint64_t seed, size;
  int text;
} files[1024];
static int count;
static uint64_t seed, written;

// The bytes of a file at an offset, into a buffer of a block: random, or words of text.
static void contents(const struct file *file, uint64_t offset, uint64_t *block) {
  for (int i = 0; i < WORDS; i++) {
    uint64_t random = mixed(file->seed + offset + i * 8);
    if (file->text) {
      uint64_t word = mixed(random % 4096), letters = 0;
      for (int j = 0; j < 7; j++) letters = letters << 8 | ('a' + (word >> j * 8) % 26);
      random = letters << 8 | ' ';
    }
    block[i] = random;
  }
}

// Saves a file as programs do: beside, durably, then renamed.
static void save(const char *path, uint64_t size, int text) {
  static uint64_t block[WORDS];
  int place = 0;
  while (place < count && strcmp(files[place].path, path)) place++;
  if (place == count) count++;
  struct file *file = &files[place];
  snprintf(file->path, sizeof file->path, "%s", path);
  file->seed = ++seed << 32, file->size = size, file->text = text;
  int out = open("/mnt/new", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (out < 0) fail("/mnt/new");
  for (uint64_t offset = 0; offset < size; offset += BLOCK) {
    contents(file, offset, block);
    if (write(out, block, BLOCK) != BLOCK) fail(path);
  }
  if (fsync(out) || close(out) || rename("/mnt/new", path)) fail(path);
  written += size;
}

static void check(void) {
  static uint64_t block[WORDS], wanted[WORDS];
  int caches = open("/proc/sys/vm/drop_caches", O_WRONLY | O_CLOEXEC);
  if (caches < 0 || write(caches, "3", 1) != 1) fail("drop_caches");
  close(caches);
  for (int i = 0; i < count; i++) {
    int in = open(files[i].path, O_RDONLY | O_CLOEXEC);
    if (in < 0) fail(files[i].path);
    for (uint64_t offset = 0; offset < files[i].size; offset += BLOCK) {
      contents(&files[i], offset, wanted);
      if (read(in, block, BLOCK) != BLOCK || memcmp(block, wanted, BLOCK)) {
        printf("guest: BAD file %s at %llu\n", files[i].path, (unsigned long long)offset);
        return;
      }
    }
    close(in);
  }
}

// What a browser writes meanwhile: its cache, a quarter of which is text, and a small database.
static void browse(char kind, int pieces) {
  char path[48];
  for (int i = 0; i < pieces; i++) {
    snprintf(path, sizeof path, "/mnt/cache/%c%d", kind, i);
    save(path, 256 << 10, i % 4 == 0);
  }
  int database = open("/mnt/history", O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (database < 0) fail("/mnt/history");
  for (int i = 0; i < 100; i++) {
    fill(buffer, seed + i);
    if (pwrite(database, buffer, BLOCK, i * 7 % 32 * BLOCK) != BLOCK || fdatasync(database)) fail("/mnt/history");
    written += BLOCK;
  }
  close(database);
}

static void edit(char kind) {
  static int mounted;
  if (!mounted) {
    mkdir("/mnt", 0755);
    if (mount("/dev/vdb", "/mnt", "ext4", 0, "")) fail("/dev/vdb");
    mkdir("/mnt/cache", 0755);
    mounted = 1;
  }
  check();
  written = 0;
  switch (kind) {
    case 'p': save("/mnt/paper.pdf", 3 << 20, 0); break;
    case 's': for (int i = 0; i < 3; i++) save("/mnt/talk.pptx", 8 << 20, 0); break;
    case 'v': browse('v', 240); break;
    case 't': for (int i = 0; i < 3; i++) save("/mnt/kokoro.txt", 400 << 10, 1); break;
  }
  browse('b', 64);
  sync();
  printf("guest: edited %llu\n", (unsigned long long)written);
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
  for (int i = 0; i < 16; i++) {
    snprintf(name, sizeof name, "/%d.ko", i);
    load(name);
  }
  FILE *line = fopen("/proc/cmdline", "r");
  if (line) fgets(text, sizeof text, line);
  unsigned long pace = parameter(text, "pace="), dirty = parameter(text, "dirty=") << 20;
  uint8_t age = 0, *memory = dirty ? calloc(1, dirty) : NULL;
  unsigned long noise = parameter(text, "noise=") << 17;
  uint64_t *words = noise ? malloc(noise * 8) : NULL;
  for (unsigned long i = 0; i < noise; i++) words[i] = mixed(i + 1);

  printf("guest: booted\n");
  usleep(parameter(text, "rest=") * 1000);
  for (int tries = 0; (disk = open("/dev/vda", O_RDWR | O_DIRECT | O_DSYNC | O_CLOEXEC)) < 0; tries++) {
    if (tries == 500) fail("/dev/vda");
    usleep(10000);
  }
  int second = parameter(text, "both=") ? open("/dev/vdb", O_WRONLY | O_DIRECT | O_DSYNC | O_CLOEXEC) : -1;
  if (parameter(text, "both=") && second < 0) fail("/dev/vdb");
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
    if (second >= 0 && pwrite(second, buffer, BLOCK, (last + 1) % blocks * BLOCK) != BLOCK) fail("second write");
    printf("guest: beat %llu\n", (unsigned long long)++last);
    for (unsigned long i = 0; i < dirty; i += BLOCK) {
      if (memory[i]++ != age) printf("guest: BAD memory at %lu of %lu\n", i, dirty);
    }
    age++;
    struct pollfd console = {.fd = 0, .events = POLLIN};
    if (poll(&console, 1, pace) > 0) {
      if (!fgets(text, sizeof text, stdin)) continue;
      if (text[0] == 'v') verify(last);
      if (text[0] == 'e') edit(text[1]);
    }
  }
}
