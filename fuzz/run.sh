#!/bin/bash
# Usage: fuzz/run.sh SECONDS [TARGET...]
# Builds the fuzz targets with coverage instrumentation on stable Rust and runs each for SECONDS, as many at a time as
# there are processors. Fails when one crashes and leaves the input in fuzz/artifacts/TARGET/.
set -euo pipefail
cd "$(dirname "$0")"

export FUZZ_SECONDS=${1:?usage: run.sh SECONDS [TARGET...]}
shift
if [ $# -eq 0 ]; then mapfile -t targets < <(sed -n 's/^mod \(.*\);/\1/p' src/main.rs); else targets=("$@"); fi
# What has a table entry is what is run.
if [ $# -eq 0 ] && [ ${#targets[@]} -ne "$(grep -cE '^    \("[a-z_]+", ' src/main.rs)" ]; then
    echo "$0: the modules and TARGETS in src/main.rs differ" >&2
    exit 1
fi

target=$(cargo metadata --format-version 1 --no-deps --manifest-path ../Cargo.toml |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')
RUSTC_WRAPPER=$PWD/rustc-wrapper CARGO_TARGET_DIR=$target cargo build --quiet
export FUZZ_PROGRAM=$target/debug/drover-fuzz

./seeds.sh

# one TARGET: runs it, and shows what came of it in one piece.
one() {
    local name=$1 seeds=() log
    mkdir -p "corpus/$name" "artifacts/$name"
    if [ -d "corpus/seeds/$name" ]; then seeds=("corpus/seeds/$name"); fi
    log=$(mktemp)
    if FUZZ_TARGET=$name "$FUZZ_PROGRAM" -max_total_time="$FUZZ_SECONDS" -timeout=10 -rss_limit_mb=1024 \
        -max_len=400000 -use_value_profile=1 -print_final_stats=1 \
        -artifact_prefix="artifacts/$name/" "corpus/$name" "${seeds[@]}" >"$log" 2>&1; then
        echo "== $name: $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") inputs," \
            "$(grep -o 'cov: [0-9]*' "$log" | tail -n 1)"
        rm -f "$log"
    else
        tail -n 40 "$log"
        rm -f "$log"
        echo "== $name: FAILED"
        return 1
    fi
}
export -f one
printf '%s\n' "${targets[@]}" | xargs -P "$(nproc)" -I{} bash -c 'one {}'
