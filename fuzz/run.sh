#!/bin/bash
# Usage: fuzz/run.sh SECONDS [TARGET...]
# Builds every fuzz target with coverage instrumentation on stable Rust and runs each for
# SECONDS. Fails at the first crash and leaves the input in fuzz/artifacts/TARGET/.
set -euo pipefail
cd "$(dirname "$0")"

seconds=${1:?usage: run.sh SECONDS [TARGET...]}
shift
targets=("$@")
if [ ${#targets[@]} -eq 0 ]; then
    for file in targets/*.rs; do targets+=("$(basename "$file" .rs)"); done
fi

# Given with --target below, so that build scripts and macros stay uninstrumented.
export RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1"
export CARGO_TARGET_DIR=$PWD/target
host=$(rustc -vV | sed -n 's/^host: //p')
cargo build --release --quiet --target "$host" --bins

./seeds.sh
for name in "${targets[@]}"; do
    mkdir -p "corpus/$name" "artifacts/$name"
    echo "== $name: $seconds s"
    seeds=()
    if [ -d "corpus/seeds/$name" ]; then seeds=("corpus/seeds/$name"); fi
    log=$(mktemp)
    if ! "target/$host/release/$name" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=1024 \
        -max_len=400000 -use_value_profile=1 -print_final_stats=1 \
        -artifact_prefix="artifacts/$name/" "corpus/$name" "${seeds[@]}" >"$log" 2>&1; then
        tail -n 40 "$log"
        rm -f "$log"
        echo "== $name: FAILED"
        exit 1
    fi
    sed -n 's/^stat:://p' "$log" | head -n 2
    grep -o 'cov: [0-9]*' "$log" | tail -n 1
    rm -f "$log"
done
