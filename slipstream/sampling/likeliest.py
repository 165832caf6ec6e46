"""The likeliest token of every draft position, written where a step looks for its drafts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.sampling.fused import PART, best_of, peaks_kernel


@triton.jit
def _draft_kernel(
    peaks,
    ids,
    drafts,
    counts,
    parts,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    PARTS: tl.constexpr,
):
    row, place = tl.program_id(0), tl.arange(0, WIDTH_PADDED)
    mine = (place > 0) & (place < WIDTH)
    choice, _ = best_of(peaks, ids, row * WIDTH + place, mine, parts, PARTS)
    tl.store(drafts + row * (WIDTH - 1) + place - 1, choice, mask=mine)
    tl.store(counts + row, WIDTH - 1)


class Likeliest:
    """Buffers and launches for `rows` rows of `width` positions (1 + draft tokens)."""

    def __init__(self, rows: int, width: int, *, vocab: int, device: torch.device) -> None:
        self._rows, self._width, self._vocab = rows, width, vocab
        self._parts = triton.cdiv(vocab, PART)
        shape = (rows * width, self._parts)
        self._peaks = torch.empty(shape, dtype=torch.float32, device=device)
        self._ids = torch.empty(shape, dtype=torch.int32, device=device)

    def draft(self, logits: Tensor, *, drafts: Tensor, counts: Tensor) -> None:
        """The likeliest token of every position but a row's first, into `drafts` int32 [rows, width
        - 1], and how many these are into `counts` int32 [rows]. `logits` [rows * width, vocab].
        """
        peaks_kernel[(self._rows * self._width, self._parts)](
            logits, self._peaks, self._ids, self._vocab, self._parts, PART=PART
        )
        _draft_kernel[(self._rows,)](
            self._peaks,
            self._ids,
            drafts,
            counts,
            self._parts,
            WIDTH=self._width,
            WIDTH_PADDED=triton.next_power_of_2(self._width),
            PARTS=triton.next_power_of_2(self._parts),
        )
