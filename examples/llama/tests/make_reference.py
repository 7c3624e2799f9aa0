#!/usr/bin/env python3
"""Makes tests/fixtures/tiny-arch: tiny random models of each supported architecture, and what `transformers` computes.

It was run once by hand. Its output is committed, and the Rust tests need no Python:

    python3 -m venv venv && venv/bin/pip install torch transformers safetensors
    venv/bin/python examples/llama/tests/make_reference.py

Each model directory gets `reference.safetensors`:

- `prompt` [48] and `continuation` [8]: token ids, I64. The continuation is greedy.
- `logits` [48, vocab]: the logits at every prompt position, f32.
- `steps` [8, vocab]: the logits that each continuation token was taken from, f32.

Norm weights and biases are random too. With their initial values (ones and zeros) a runtime that forgets them would pass.
"""

import json
import pathlib
import sys

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

COMMON = dict(
    vocab_size=128,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    attn_implementation="eager",
)

MODELS = {
    # Llama 3: scaled RoPE, heads * head_dim != hidden. With the original length 16, low, middle and high frequencies occur.
    "llama3": LlamaConfig(
        **COMMON,
        head_dim=16,
        rope_parameters=dict(
            rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
        tie_word_embeddings=False,
    ),
    # Llama 2: multi-head attention, tied head.
    "llama2-tied": LlamaConfig(**{**COMMON, "num_key_value_heads": 4}, tie_word_embeddings=True),
    # Linear RoPE scaling and biases everywhere.
    "llama-linear-bias": LlamaConfig(
        **COMMON, rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0), attention_bias=True, mlp_bias=True,
        tie_word_embeddings=False,
    ),
    "mistral-window": MistralConfig(**COMMON, head_dim=12, sliding_window=13, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**COMMON, tie_word_embeddings=True),
    # Only the upper layer has the window.
    "qwen2-window": Qwen2Config(
        **COMMON, use_sliding_window=True, sliding_window=9, max_window_layers=1, tie_word_embeddings=False
    ),
    "qwen3": Qwen3Config(**COMMON, head_dim=20, tie_word_embeddings=False),
}
SHARDED = {"llama3"}
BF16 = {"qwen3", "mistral-window"}


def make(name, config, out):
    torch.manual_seed(sum(name.encode()))
    dtype = torch.bfloat16 if name in BF16 else torch.float32
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "norm" in key:
                p.copy_(1 + 0.3 * torch.randn_like(p))
            elif key.endswith("bias"):
                p.copy_(0.3 * torch.randn_like(p))
            else:
                p.copy_(torch.randn_like(p) * (1.5 / p.shape[-1] ** 0.5))
    model = model.to(dtype)
    model.save_pretrained(out, max_shard_size="40KB" if name in SHARDED else "1GB")
    (out / "generation_config.json").unlink(missing_ok=True)

    # The arithmetic is in f32, on the weights as saved.
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    prompt = torch.randint(3, config.vocab_size, (48,))
    with torch.no_grad():
        logits = model(prompt[None]).logits[0]
        ids, steps, continuation = prompt, [], []
        for _ in range(8):
            last = model(ids[None], use_cache=False).logits[0, -1]
            steps.append(last)
            continuation.append(int(last.argmax()))
            ids = torch.cat([ids, last.argmax()[None]])
    save_file(
        dict(
            prompt=prompt,
            logits=logits.contiguous(),
            continuation=torch.tensor(continuation),
            steps=torch.stack(steps),
        ),
        out / "reference.safetensors",
    )
    size = sum(f.stat().st_size for f in out.iterdir())
    print(f"{name}: {size} bytes, files {sorted(f.name for f in out.iterdir())}")


def main():
    root = pathlib.Path(__file__).resolve().parents[3] / "tests" / "fixtures" / "tiny-arch"
    names = sys.argv[1:] or list(MODELS)
    for name in names:
        out = root / name
        out.mkdir(parents=True, exist_ok=True)
        make(name, MODELS[name], out)
    versions = dict(torch=torch.__version__.split("+")[0], transformers=transformers.__version__)
    (root / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
