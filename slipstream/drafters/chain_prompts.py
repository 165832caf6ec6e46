"""What chain drafters take in at the host's word, through the kernels: prompts, and what the lane's
last step saw. Padded like the target's own forwards, so that it is one launch.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from slipstream.models.cuda.chain import ChainKernels
from slipstream.models.cuda.layers import Flat
from slipstream.target.batch import Placement
from slipstream.target.device import arrange, on_device
from slipstream.target.padded import Padded, paying


class ChainPrompts:
    """The layers over ragged rows of up to `rows` rows; padded up to `tokens` tokens.

    `storage`: keys and values at the target's slots, one tensor a layer. `positions`: as far as the
    target's cache goes.
    """

    def __init__(
        self,
        kernels: ChainKernels,
        storage: Sequence[Tensor],
        *,
        rows: int,
        tokens: int,
        positions: int,
        page_size: int,
    ) -> None:
        self._kernels, self._storage, self._page_size = kernels, storage, page_size
        model = kernels.model
        # As far as the lane's passes will want them: tables in a graph must never move.
        model.rope.tables(max(model.config.max_context, positions))
        self._padded = Padded(
            model.config,
            self._body,
            sizes=paying(model, tokens),
            rows=rows,
            positions=positions,
            page_size=page_size,
            device=model.device,
        )
        size = (self._padded.largest, model.config.hidden_size)
        self._states = storage[0].new_zeros(size)
        self._out = storage[0].new_zeros(size)

    def run(self, ids: Sequence[int], rows: Sequence[Placement], states: Tensor) -> Tensor:
        """Outputs [tokens, hidden], good until the next run, for `ids`, the token after each
        position, and the `states` [tokens, hidden] that the first layer reads.
        """
        fit = self._padded.fit(ids, rows)
        if fit is None:
            config, size = self._kernels.model.config, self._page_size
            arranged = arrange(ids, rows, page_size=size, config=config)
            sent, flat = on_device(arranged, config, states.device, page_size=size)
            return self._kernels.run(sent.long(), states, flat, self._storage)[0]
        sized, arranged = fit
        self._states[: len(ids)].copy_(states)
        sized.run(arranged)
        return self._out[: len(ids)]

    def warm_up(self) -> None:
        """Capture every size, before there are requests."""
        self._padded.warm_up()

    def _body(self, ids: Tensor, flat: Flat) -> None:
        states = self._states[: len(ids)]
        out, _ = self._kernels.run(ids.long(), states, flat, self._storage)
        self._out[: len(ids)].copy_(out)
