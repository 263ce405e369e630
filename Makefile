# What a person types. Everything works from a clean clone with a Rust toolchain on PATH.

.PHONY: help demo test guests examples lint bench dist deps

help:
	@echo "make demo    two sites on loopback, two related images, and what crossed the wire"
	@echo "make test    every test; ends with the counts"
	@echo "make guests  the tests that boot machines: block drivers of Debian's kernel, live migration, nodes over NFS, a system that boots from afar"
	@echo "make examples  programs whose state is elsewhere: a database, a film, an application, a list; a WebAssembly machine that moves"
	@echo "make lint    format, clippy, documentation, layers"
	@echo "make bench   the lab: drover against its rivals and the limit, for an hour (MINUTES=60, FULL=1); makes docs/benchmarks.md"
	@echo "make dist    an optimised, stripped drover with man pages, completions and the systemd unit"
	@echo "make deps    install what the tests need (Debian)"

demo:
	@scripts/install-deps build demo
	@scripts/demo

test:
	@scripts/install-deps build test
	@scripts/test

guests:
	@scripts/install-deps build test guests lab
	@scripts/guests drivers migrate nfs boot

examples:
	@scripts/install-deps build examples
	@cargo build -p drover-mount --examples
	@cargo test -p drover-mount --test it examples:: -- --nocapture --test-threads 1
	@cargo test --manifest-path examples/wasm/Cargo.toml

lint:
	@scripts/install-deps build
	@scripts/lint

bench:
	@scripts/install-deps build lab
	@scripts/bench

dist:
	@scripts/install-deps build
	@scripts/dist

deps:
	@scripts/install-deps build test
