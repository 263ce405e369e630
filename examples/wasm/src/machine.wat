;; A machine that counts, writes all over its memory and its disk, and can check both.
;;
;; Page 0: the count. Pages 1 and 2: by which count each block of the disk was last written. Page 3: for reading blocks.
;; From page 16 on: pages with the count that wrote them last, and that times a constant.
(module
  (import "host" "disk_write" (func $disk_write (param i32 i32)))
  (import "host" "disk_read" (func $disk_read (param i32 i32)))
  (memory (export "memory") 1024 1024)
  (global $random (export "random") (mut i64) (i64.const 88172645463325252))

  (func $next (result i64)
    (global.set $random
      (i64.xor (global.get $random) (i64.shl (global.get $random) (i64.const 13))))
    (global.set $random
      (i64.xor (global.get $random) (i64.shr_u (global.get $random) (i64.const 7))))
    (global.set $random
      (i64.xor (global.get $random) (i64.shl (global.get $random) (i64.const 17))))
    (global.get $random))

  (func (export "run") (param $steps i32) (result i64)
    (local $count i64) (local $page i32) (local $block i32)
    (loop $again
      (local.set $count (i64.add (i64.load (i32.const 0)) (i64.const 1)))
      (i64.store (i32.const 0) (local.get $count))
      (local.set $page
        (i32.shl
          (i32.add (i32.const 16) (i32.wrap_i64 (i64.rem_u (call $next) (i64.const 16368))))
          (i32.const 12)))
      (i64.store (local.get $page) (local.get $count))
      (i64.store offset=8 (local.get $page)
        (i64.mul (local.get $count) (i64.const 0x9e3779b97f4a7c15)))
      (if (i64.eqz (i64.and (local.get $count) (i64.const 31)))
        (then
          (local.set $block (i32.wrap_i64 (i64.rem_u (call $next) (i64.const 1024))))
          (call $disk_write (local.get $block) (local.get $page))
          (i64.store offset=4096 (i32.shl (local.get $block) (i32.const 3)) (local.get $count))))
      (local.set $steps (i32.sub (local.get $steps) (i32.const 1)))
      (br_if $again (local.get $steps)))
    (i64.load (i32.const 0)))

  (func (export "check") (result i64)
    (local $wrong i64) (local $page i32) (local $block i32) (local $count i64)
    (local.set $page (i32.const 65536))
    (loop $pages
      (if (i64.ne
            (i64.load offset=8 (local.get $page))
            (i64.mul (i64.load (local.get $page)) (i64.const 0x9e3779b97f4a7c15)))
        (then (local.set $wrong (i64.add (local.get $wrong) (i64.const 1)))))
      (local.set $page (i32.add (local.get $page) (i32.const 4096)))
      (br_if $pages (i32.lt_u (local.get $page) (i32.const 67108864))))
    (loop $blocks
      (local.set $count (i64.load offset=4096 (i32.shl (local.get $block) (i32.const 3))))
      (call $disk_read (local.get $block) (i32.const 12288))
      (if (i64.ne (i64.load (i32.const 12288)) (local.get $count))
        (then (local.set $wrong (i64.add (local.get $wrong) (i64.const 1)))))
      (local.set $block (i32.add (local.get $block) (i32.const 1)))
      (br_if $blocks (i32.lt_u (local.get $block) (i32.const 1024))))
    (local.get $wrong)))
