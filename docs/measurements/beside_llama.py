#!/usr/bin/env python3
"""Compares kvrun with llama.cpp on the same GGUF file, prompt and machine.

Needs the package llama-cpp-python (`pip install --no-binary llama-cpp-python llama-cpp-python`), a kvrun built with
`cargo build --release -p stratakv-llama`, and root for a memory limit (cgroup v2, or v1). With a limit, swap must be on
the same disk as the store. The page cache is dropped before each program runs, because a cached page of the weights
counts in the cgroup that read it first.

For every context length, each program reads the prompt once and saves its session. Then each round runs both programs
in a process of their own, one after the other, from the saved sessions:

- `first_s`: from the start of the prompt to the first token
- `prefill_resident_bytes`: resident memory after the prompt
- `tokens_per_s`: decode steps after the first token
- `resident_bytes`: resident memory after the last token
- `resume_s`: from the start of a new process to its first token

With `--folder` the sessions stay, and a second call measures them again, such as with another limit.

    python3 docs/measurements/beside_llama.py --model random.gguf --device /mnt/ssd/kv --contexts 8192,32768
    python3 docs/measurements/beside_llama.py --model random.gguf --device /mnt/ssd/kv --limit-mib 1200 --rounds 5
"""

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
UNIFIED = (CGROUPS / "cgroup.controllers").exists()
GROUP = CGROUPS / ("kvrun-compare" if UNIFIED else "memory/kvrun-compare")
LIMIT = GROUP / ("memory.max" if UNIFIED else "memory.limit_in_bytes")


def resident_bytes():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return None


def peer(args):
    """Runs llama.cpp on a prompt or on a saved session, and prints its figures as JSON."""
    import ctypes

    from llama_cpp import Llama, llama_state_load_file, llama_state_save_file

    ids = json.loads(Path(args.ids).read_text())
    llama = Llama(
        model_path=args.model, n_ctx=len(ids) + args.tokens + 8, n_threads=args.threads,
        n_threads_batch=args.threads, use_mmap=True, verbose=False, n_batch=512,
    )
    state = args.state.encode()
    begin = time.monotonic()
    if args.resume:
        loaded = (ctypes.c_int * (len(ids) + args.tokens + 8))()
        count = ctypes.c_size_t(0)
        assert llama_state_load_file(llama.ctx, state, loaded, len(loaded), ctypes.byref(count)), "no state"
        llama.n_tokens = count.value
        llama.input_ids[: count.value] = loaded[: count.value]
        llama.eval([ids[0]])
    else:
        llama.eval(ids)
    first = time.monotonic()
    for _ in range(args.tokens):
        # kvrun decodes the ids that it draws. The time of a step does not depend on the id.
        llama.eval([ids[0]])
    seconds = time.monotonic() - first
    figures = {"first_s": first - begin, "tokens_per_s": args.tokens / max(seconds, 1e-9), "decode_s": seconds}
    print(json.dumps({**figures, "resident_bytes": resident_bytes()}))
    if not args.resume:
        tokens = [int(id) for id in llama.input_ids[: llama.n_tokens]]
        llama_state_save_file(llama.ctx, state, (ctypes.c_int * len(tokens))(*tokens), len(tokens))


def drop_page_cache():
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("1")


def limited(command, limit):
    """Runs a command, in a cgroup with a memory limit if there is one. Returns its stdout and its seconds."""

    def join():
        (GROUP / "cgroup.procs").write_text(str(os.getpid()))

    if limit:
        GROUP.mkdir(exist_ok=True)
        LIMIT.write_text(str(limit << 20))
    subprocess.run(["sync"], check=True)
    begin = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=join if limit else None, check=False)
    seconds = time.monotonic() - begin
    if limit and done.returncode == -signal.SIGKILL:
        raise MemoryError("killed by the memory limit")
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout, seconds


def kvrun(args, folder, ids, tokens):
    """Runs kvrun. A session that exists goes on. Returns its figures and its seconds."""
    base = [args.kvrun, "--threads", str(args.threads), "generate", "--model", args.model, "--json"]
    base += ["--session", "s", "--device", str(folder / "store"), "--memory-limit", f"{args.store_mib}MiB"]
    base += [*args.options, "--prompt-ids", str(ids), "--max-tokens", str(tokens + 1)]
    out, seconds = limited(base, args.limit_mib)
    found = json.loads(out)
    figures = {"first_s": found["seconds_to_first_token"], "tokens_per_s": found["tokens_per_s"]}
    figures["resident_bytes"] = found["process_resident_bytes"]
    figures["decode_s"] = tokens / found["tokens_per_s"] if tokens else 0
    return figures, seconds


def llama_cpp(args, folder, ids, tokens):
    """Runs llama.cpp. A session that exists goes on. Returns its figures and its seconds."""
    state = folder / "llama.state"
    base = [sys.executable, __file__, "--peer", "--model", args.model, "--ids", str(folder / "ids.json")]
    base += ["--state", str(state), "--tokens", str(tokens), "--threads", str(args.threads)]
    out, seconds = limited([*base, *(["--resume"] if state.exists() else [])], args.limit_mib)
    return json.loads(out), seconds


PROGRAMS = {"kvrun": kvrun, "llama.cpp": llama_cpp}


def prefill(args, name, folder, context):
    """Has a program read the prompt and save its session, unless it did in an earlier call."""
    kept = folder / "prefill.json"
    if kept.exists():
        return json.loads(kept.read_text())
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "store").mkdir(mode=0o700, parents=True)
    draw = random.Random(context)
    ids = [draw.randrange(3, args.vocabulary) for _ in range(context)]
    (folder / "ids.json").write_text(json.dumps(ids))
    figures, _ = PROGRAMS[name](args, folder, folder / "ids.json", 0)
    found = {"limit_mib": args.limit_mib, "first_s": figures["first_s"]}
    found["prefill_resident_bytes"] = figures["resident_bytes"]
    kept.write_text(json.dumps(found))
    return found


def one_round(args, name, folder):
    """Returns the figures of a program that goes on with its session."""
    drop_page_cache()
    # kvrun takes the same prompt a second time for the request that it has answered.
    ids = folder / "last.json"
    ids.write_text(json.dumps([3 + time.time_ns() % (args.vocabulary - 3)]))
    figures, seconds = PROGRAMS[name](args, folder, ids, args.tokens)
    del figures["first_s"]
    return {**figures, "resume_s": seconds - figures["decode_s"]}


def measure(args, folder, context):
    """Returns the figures of every program and round, at one length of context."""
    runs, prompts = [], {}
    for name in PROGRAMS:
        try:
            prompts[name] = prefill(args, name, folder / f"{name}-{context}", context)
            print(json.dumps({"program": name, "context": context, **prompts[name]}), file=sys.stderr, flush=True)
        except MemoryError as error:
            runs.append({"program": name, "context": context, "failed": f"the prompt: {error}"})
    for round_number in range(args.rounds):
        # The order alternates, so that neither program always finds the other's pages in memory.
        for name in sorted(prompts, reverse=round_number % 2 == 1):
            found = {"program": name, "context": context, "round": round_number, **prompts[name]}
            try:
                found |= one_round(args, name, folder / f"{name}-{context}")
            except MemoryError as error:
                found["failed"] = str(error)
            runs.append(found)
            print(json.dumps(found), file=sys.stderr, flush=True)
    return runs


def table(runs):
    """Prints the medians."""
    print(f"{'program':<10} {'context':>8} {'first s':>9} {'tokens/s':>9} {'resident MiB':>13} {'resume s':>9}")
    for name, context in sorted({(run["program"], run["context"]) for run in runs}):
        rows = [run for run in runs if (run["program"], run["context"]) == (name, context)]
        failed = next((row["failed"] for row in rows if "failed" in row), None)
        if failed:
            print(f"{name:<10} {context:>8} {failed}")
            continue
        middle = {key: statistics.median(row[key] for row in rows)
                  for key in ["first_s", "tokens_per_s", "resident_bytes", "resume_s"]}
        print(f"{name:<10} {context:>8} {middle['first_s']:>9.1f} {middle['tokens_per_s']:>9.2f} "
              f"{middle['resident_bytes'] / (1 << 20):>13.0f} {middle['resume_s']:>9.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--device", type=Path, help="directory on the disk of the sessions")
    parser.add_argument("--folder", type=Path, help="directory that keeps the sessions")
    parser.add_argument("--kvrun", default="target/release/kvrun")
    parser.add_argument("--contexts", default="8192,32768,65536")
    parser.add_argument("--vocabulary", type=int, default=30000, help="prompts have random ids below this")
    parser.add_argument("--tokens", type=int, default=32, help="decode steps")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--store-mib", type=int, default=256, help="memory limit of the store")
    parser.add_argument("--limit-mib", type=int, help="memory limit of each process")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="file for all figures, as JSON")
    parser.add_argument("--options", type=shlex.split, default=[],
                        help="more options of kvrun generate, as one argument: --options=...")
    for name in ["--ids", "--state"]:
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ["--peer", "--resume"]:
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        peer(args)
        return
    if args.device is None:
        parser.error("--device is needed")
    args.device.mkdir(mode=0o700, parents=True, exist_ok=True)
    runs = []
    with tempfile.TemporaryDirectory(dir=args.device) as folder:
        kept = args.folder or Path(folder)
        for context in map(int, args.contexts.split(",")):
            runs += measure(args, kept, context)
    if args.out:
        args.out.write_text(json.dumps({"limit_mib": args.limit_mib, "runs": runs}, indent=1) + "\n")
    table(runs)


if __name__ == "__main__":
    main()
