"""Plain decoding against transformers: `LLM.generate` with `none` and `model.generate`, same model,
dtype, threads and prompts, in one process, alternating. Prints medians and the ratio of tok/s.

    python bench/generate.py [--rounds 5] [--tokens 48] [--out FILE.json]
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from slipstream import LLM, SamplingParams, provenance

PROMPT = "Write a Python function that sorts a list of cats by age, then explain it in detail."


def ours(llm: LLM, prompts: list[list[int]], tokens: int) -> float:
    params = SamplingParams(max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    done = llm.generate(prompts, params)
    spent = time.perf_counter() - start
    assert all(len(c.token_ids) == tokens for c in done)
    llm.engine.reset()
    return len(prompts) * tokens / spent


@torch.inference_mode()
def theirs(model: torch.nn.Module, prompts: list[list[int]], tokens: int) -> float:
    ids = torch.tensor(prompts)
    start = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=2,
    )
    spent = time.perf_counter() - start
    assert out.shape == (len(prompts), len(prompts[0]) + tokens)
    return len(prompts) * tokens / spent


def hf_model(llm: LLM) -> torch.nn.Module:
    """The same weights in transformers' own modules, from the cached conversion."""
    root = Path(os.environ.get("SLIPSTREAM_CACHE", Path.home() / ".cache" / "slipstream"))
    folder = max(root.glob(f"{llm.loaded.name}-*"), key=lambda p: p.stat().st_mtime)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    llm = LLM(max_users=16, kv_tokens=16 * 512)
    model = hf_model(llm)
    prompt = llm.encode([{"role": "user", "content": PROMPT}])
    found = {}
    for users in (1, 16):
        # Same length, different first tokens: one batch for transformers, no shared prefix for us.
        prompts = [[100 + i, *prompt[1:]] for i in range(users)]
        ours(llm, prompts, 8)
        theirs(model, prompts, 8)
        rounds = []
        for i in range(args.rounds):
            first = theirs(model, prompts, args.tokens) if i % 2 else None
            mine = ours(llm, prompts, args.tokens)
            rounds.append((mine, first or theirs(model, prompts, args.tokens)))
        ratio = statistics.median(a / b for a, b in rounds)
        mine, hf = (statistics.median(r[k] for r in rounds) for k in (0, 1))
        print(
            f"{users:2d} users: slipstream {mine:.1f} tok/s, transformers {hf:.1f} tok/s, "
            f"ratio {ratio:.2f} (rounds {', '.join(f'{a / b:.2f}' for a, b in rounds)})"
        )
        found[str(users)] = {"ours_tok_s": mine, "transformers_tok_s": hf, "ratio": ratio}
    if args.out:
        body = {"bench": "generate", "machine": provenance.machine(), "users": found}
        args.out.write_text(json.dumps(body | {"versions": provenance.versions()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
