# The commands of this repository. `just` lists them. `.ci/run` runs what a change must pass.

set shell := ["bash", "-euo", "pipefail", "-c"]

export CARGO_TERM_COLOR := "never"

cases := env("STRATAKV_SIM_CASES", "200000")
seed := `.ci/seed`
sim_seed := env("STRATAKV_SIM_SEED", seed)
kill_seed := env("STRATAKV_KILL_SEED", seed)
replay_seed := env("STRATAKV_REPLAY_SEED", seed)
model_seed := env("STRATAKV_TEST_SEED", seed)
kills := env("STRATAKV_KILLS", "500")
images := env("STRATAKV_IMAGES", "2000")
histories := env("STRATAKV_HISTORIES", "10000")
fuzz_seconds := env("FUZZ_SECONDS", "120")
scratch := env("TMPDIR", "/tmp")

_default:
  @just --list --unsorted

# Formatting, lints, documentation, spelling, licences and sources of dependencies.
check: docs
  cargo fmt --all --check
  cargo clippy --workspace --all-targets --quiet -- -D warnings
  typos
  cargo deny --log-level error check bans licenses sources

# All tests of the workspace, with every driver, codec and event.
test:
  STRATAKV_TEST_BATCHES=2000 cargo test --workspace

# Simulated crashes, planted faults, killed processes, power failures under ext4 and XFS (root), random histories.
crash:
  cargo build --release --quiet -p stratakv-tests --bin crash
  target/release/crash sim --cases {{cases}} --seed {{sim_seed}}
  target/release/crash history tests/histories/*.json
  target/release/crash mutants
  target/release/crash kill --cycles {{kills}} --seed {{kill_seed}} --dir {{scratch}}
  target/release/crash replay --images {{images}} --seed {{replay_seed}}
  STRATAKV_TEST_HISTORIES={{histories}} STRATAKV_TEST_SEED={{model_seed}} cargo test --release --quiet -p stratakv-tests --test model

# Every crash layer in turn with seeds from the clock, for example `just soak 8`. What fails is kept in soak/.
soak hours:
  cargo build --release --quiet -p stratakv-tests --bin crash
  target/release/crash soak --hours {{hours}} --dir {{scratch}}

# Every interleaving of the engine's threads, up to a bound on preemptions.
loom:
  .ci/loom

# Every fuzz target one after another, or the named ones (nightly and cargo-fuzz).
fuzz *targets:
  #!/usr/bin/env bash
  set -euo pipefail
  cargo +nightly fuzz build --fuzz-dir fuzz --features gguf
  names='{{targets}}'
  for name in ${names:-$(cargo +nightly fuzz list --fuzz-dir fuzz)}; do
    mkdir -p "fuzz/corpus/$name" "fuzz/seeds/$name"
    cargo +nightly fuzz run --fuzz-dir fuzz --features gguf "$name" "fuzz/corpus/$name" "fuzz/seeds/$name" -- \
      -max_total_time={{fuzz_seconds}} -verbosity=0 -print_final_stats=1 -rss_limit_mb=2048
  done

# One area of kvbench, for example `just bench read --device /mnt/nvme --fio --json`.
bench area *args:
  cargo run --release --quiet -p stratakv-bench --bin kvbench -- {{area}} {{args}}

# The API documentation without warnings, and the rendered tables and plots.
docs:
  RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet
  docs/measurements/render --check

# Measure every figure of docs/performance.md again on the disk below DIR, then render (an hour, an idle machine).
figures dir *areas:
  cargo build --release --quiet -p stratakv-bench --bin kvbench -p stratakv-llama --bin kvrun
  cargo build --release --quiet -p stratakv --example big_context
  cargo bench --quiet -p stratakv --bench attention_bandwidth --no-run
  docs/measurements/measure --dir {{dir}} {{areas}}
  docs/measurements/render
