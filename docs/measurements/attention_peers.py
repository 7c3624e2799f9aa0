#!/usr/bin/env python3
"""Compares attention of one decode step: the engine, candle, PyTorch and ggml, on one core and in one run.

Needs the packages torch, numpy and llama-cpp-python (`pip install torch numpy llama-cpp-python`), whose library has
ggml. A package that is missing is left out. The engine and candle are in a program of their own:

    cargo bench -p stratakv-llama --bench attention_beside_candle --no-run
    python3 docs/measurements/attention_peers.py --program target/release/deps/attention_beside_candle-*[0-9a-f]

The shape is that of LLaMA-3-8B: 8 KV heads, 32 query heads, head dimension 128. All programs attend to keys and
values of the same size, larger than the caches. The engine attends to groups of 8 tokens where they are, scattered or
in order. The others get contiguous keys and values, whose gathering is not measured. Every round runs all ways once.

- `torch, sdpa`: `scaled_dot_product_attention` with `enable_gqa`
- `torch, sdpa, 4 rows`: the same with the four query heads of a KV head as four query tokens
- `torch, matmul`: two batched matrix products and a softmax
- `ggml, flash_attn_ext`: the operator of llama.cpp, through ctypes
"""

import argparse
import ctypes
import glob
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

KV_HEADS, Q_HEADS, DIM = 8, 32, 128
BYTES = {"f16": 2, "bf16": 2, "f32": 4}
GGML_TYPES = {"f32": 0, "f16": 1, "bf16": 30}


def torch_ways(dtype, tokens):
    """Returns the ways of PyTorch by name, and checks that they agree."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    kind = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}[dtype]
    torch.manual_seed(1)
    keys, values = (torch.randn(1, KV_HEADS, tokens, DIM).to(kind) for _ in range(2))
    query = torch.randn(1, Q_HEADS, 1, DIM).to(kind)
    rows = query.reshape(1, KV_HEADS, Q_HEADS // KV_HEADS, DIM)

    def matmul():
        scores = torch.matmul(rows, keys.transpose(2, 3)).float() / DIM**0.5
        return torch.matmul(torch.softmax(scores, dim=-1).to(kind), values)

    ways = {
        "torch, sdpa": lambda: sdpa(query, keys, values, enable_gqa=True),
        "torch, sdpa, 4 rows": lambda: sdpa(rows, keys, values),
        "torch, matmul": matmul,
    }
    expected = sdpa(rows.float(), keys.float(), values.float()).flatten()
    for name, way in ways.items():
        off = (way().float().flatten() - expected).abs().max().item()
        assert off < 0.01, f"{name}, {dtype}: off by {off}"
    return ways


class GgmlParams(ctypes.Structure):
    """`struct ggml_init_params`."""

    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def ggml_ways(dtype, tokens):
    """Returns the way of ggml by name."""
    import llama_cpp
    import numpy

    folder = Path(llama_cpp.__file__).parent / "lib"
    base, cpu = (ctypes.CDLL(str(folder / f"libggml{part}.so"), ctypes.RTLD_GLOBAL) for part in ["-base", "-cpu"])
    for library, name in [(base, "ggml_init"), (base, "ggml_new_tensor_4d"), (base, "ggml_flash_attn_ext"),
                          (base, "ggml_new_graph"), (base, "ggml_get_data")]:
        getattr(library, name).restype = ctypes.c_void_p
    cpu.ggml_cpu_init()
    size = 2 * KV_HEADS * tokens * DIM * BYTES[dtype] + (64 << 20)
    context = ctypes.c_void_p(base.ggml_init(GgmlParams(size, None, False)))

    def tensor(kind, *shape):
        found = ctypes.c_void_p(base.ggml_new_tensor_4d(context, kind, *map(ctypes.c_int64, (*shape, 1))))
        count = shape[0] * shape[1] * shape[2]
        numbers = numpy.random.default_rng(1).standard_normal(count, dtype=numpy.float32)
        if kind == GGML_TYPES["f16"]:
            numbers = numbers.astype(numpy.float16)
        if kind == GGML_TYPES["bf16"]:
            numbers = (numbers.view(numpy.uint32) >> 16).astype(numpy.uint16)
        ctypes.memmove(base.ggml_get_data(found), numbers.ctypes.data, numbers.nbytes)
        return found

    query = tensor(GGML_TYPES["f32"], DIM, 1, Q_HEADS)
    keys, values = (tensor(GGML_TYPES[dtype], DIM, tokens, KV_HEADS) for _ in range(2))
    no_float = ctypes.c_float(0)
    out = ctypes.c_void_p(base.ggml_flash_attn_ext(
        context, query, keys, values, None, ctypes.c_float(DIM**-0.5), no_float, no_float))
    graph = ctypes.c_void_p(base.ggml_new_graph(context))
    base.ggml_build_forward_expand(graph, out)

    def attend():
        status = cpu.ggml_graph_compute_with_ctx(context, graph, 1)
        assert status == 0, f"ggml: status {status}"

    return {"ggml, flash_attn_ext": attend}


def measure(args, dtype):
    """Returns the bandwidths of every way in one dtype, in GB/s."""
    size = args.mib << 20
    tokens = size // (2 * KV_HEADS * DIM * BYTES[dtype])
    ways, found = {}, {}
    for source in [torch_ways, ggml_ways]:
        try:
            ways |= source(dtype, tokens)
        except ImportError as error:
            print(f"left out: {error}", file=sys.stderr)
    program = [args.program, str(args.mib), "1", f"--dtype={dtype}"]
    for _ in range(args.rounds):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            found.setdefault(name, []).append(size / 1e9 / (time.perf_counter() - begin))
        for line in subprocess.run(program, capture_output=True, text=True, check=True).stdout.splitlines():
            run = json.loads(line)
            found.setdefault(run["way"], []).append(run.get("gb_per_s", 0))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, help="the built benchmark attention_beside_candle")
    parser.add_argument("--mib", type=int, default=128, help="MiB of keys and values")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="file for all figures, as JSON")
    args = parser.parse_args()
    args.program = sorted(glob.glob(args.program), key=os.path.getmtime)[-1]
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ |= {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    runs = {dtype: measure(args, dtype) for dtype in BYTES}
    if args.out:
        args.out.write_text(json.dumps({"mib": args.mib, "gb_per_s": runs}, indent=1) + "\n")
    print(f"{'GB/s, medians of ' + str(args.rounds):<28}" + "".join(f"{dtype:>8}" for dtype in BYTES))
    for name in runs["f16"]:
        print(f"{name:<28}" + "".join(f"{statistics.median(runs[dtype][name]):>8.2f}" for dtype in BYTES))


if __name__ == "__main__":
    main()
