"""What the verifier costs a step: medians, and ratios to the usual softmax-sort-cumsum sampler.

    python bench/verify.py [vocab] [threads]

All variants of a shape run interleaved in one process, so that a slow spell hits them alike; read
the ratios. Logits are peaked like a small chat model's: a few likely tokens over a normal floor.
The worst case for a sampled row is a draft that holds to its end, the usual one falls early; both
are measured ("all held" drafts the verifier's own tokens).
"""

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from slipstream.engine.verifier import Verifier
from slipstream.sampling.state import RowSampler
from slipstream.sampling.uniforms import Uniforms
from slipstream.sampling.vocabulary import Vocabulary
from slipstream.types import Dense, Draft, OneHot, SamplingParams

PARAMS = {
    "greedy": SamplingParams(),
    "T 0.2, top_p 0.9": SamplingParams(temperature=0.2, top_p=0.9),
    "T 0.6, top_k 20, top_p 0.95": SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    "T 1": SamplingParams(temperature=1.0),
    "T 1, top_p 0.95": SamplingParams(temperature=1.0, top_p=0.95),
    "T 0.2, top_p 0.9, repetition 1.1": SamplingParams(
        temperature=0.2, top_p=0.9, repetition_penalty=1.1
    ),
}
SHAPES = [(1, 0), (1, 3), (1, 7), (16, 0), (16, 3), (16, 8)]


class BenchRow:
    """A request with 500 tokens of prompt."""

    def __init__(self, params: SamplingParams, seed: int, vocabulary: Vocabulary) -> None:
        self.tokens = [int(t) for t in np.random.default_rng(seed).integers(3, 500, 500)]
        self.prompt_len, self.params = len(self.tokens), params
        self.seed = self.request_id = seed
        self.sampler = RowSampler(params, vocabulary, self.tokens)


def logits_of(count: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(count, vocab, generator=generator) * 2
    peaks = torch.randint(vocab, (count, 20), generator=generator)
    return logits.scatter_(-1, peaks, 9 + 3 * torch.randn(count, 20, generator=generator))


def textbook(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Softmax, full sort, cumulative sum, multinomial: what the usual sampler does."""
    if params.greedy:
        return logits.argmax(-1)
    probs, ids = torch.softmax(logits / params.temperature, -1).sort(-1, descending=True)
    if params.top_k:
        probs[:, params.top_k :] = 0
    probs[probs.cumsum(-1) - probs >= params.top_p] = 0
    return ids.gather(-1, probs.multinomial(1)).squeeze(-1)


def interleaved(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, one call of each per round."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 2):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn >= 2:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def variants(rows: int, draft_len: int, params: SamplingParams, vocab: int) -> dict[str, Callable]:
    vocabulary = Vocabulary(vocab, (2,))
    batch = [BenchRow(params, seed, vocabulary) for seed in range(rows)]
    logits = logits_of(rows * (draft_len + 1), vocab)
    lens = np.full(rows, draft_len)
    verifier, uniforms = Verifier(), Uniforms()

    def verify(draft: Draft) -> Callable[[], object]:
        return lambda: verifier.verify(batch, draft, logits, uniforms)

    wrong = Draft(np.full((rows, draft_len), 7), lens, OneHot())
    held = np.full((rows, draft_len), 7)
    for j in range(draft_len):  # find the verifier's own tokens, position by position
        verdict = verifier.verify(batch, Draft(held, lens, OneHot()), logits, uniforms)
        held[verdict.accepted <= j, j] = verdict.next_tokens[verdict.accepted <= j]
    runs = {"first token falls": verify(wrong)}
    if draft_len:
        runs["all held"] = verify(Draft(held, lens, OneHot()))
    if draft_len and params.temperature == 1:
        law = torch.softmax(logits_of(rows * draft_len, vocab), -1).view(rows, draft_len, vocab)
        runs["dense law"] = verify(Draft(held, lens, Dense(law)))
    runs["textbook"] = lambda: textbook(logits, params)
    return runs


def main() -> None:
    vocab = int(sys.argv[1]) if len(sys.argv) > 1 else 49152
    torch.set_num_threads(int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    print(f"vocabulary {vocab}, {torch.get_num_threads()} thread(s); median microseconds a step")
    print(f"{'rows x positions':17s}{'sampling':34s}{'draft':19s}{'us':>9s}{'us/row':>9s}  speedup")
    for rows, draft_len in SHAPES:
        for name, params in PARAMS.items():
            runs = variants(rows, draft_len, params, vocab)
            if rows * draft_len > 64:
                del runs["textbook"]  # a second a call
            found = interleaved(runs, 15 if rows == 1 else 3)
            slow = found.get("textbook")
            for draft, seconds in found.items():
                ratio = f"{slow / seconds:7.1f}x" if slow and draft != "textbook" else ""
                shape = f"{rows} x {draft_len + 1}"
                each = 1e6 * seconds / rows
                print(f"{shape:17s}{name:34s}{draft:19s}{1e6 * seconds:9.0f}{each:9.0f}{ratio}")


if __name__ == "__main__":
    main()
