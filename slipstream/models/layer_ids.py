"""Which hidden states the layer ids of an EAGLE-3 checkpoint mean.

Two conventions share one key. A *boundary* i is `hs[i]`, the residual stream that enters layer i
(vLLM, the speculators library); an *output* i is what layer i puts out, `hs[i + 1]` (SGLang,
SpecForge, ModelOpt, TensorRT-LLM). Read the wrong way a checkpoint still loads and drafts, badly:
so it is decided by what can be seen, and always said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import ModelError

READINGS = ("auto", "boundaries", "outputs")
MARK = "layer_ids"
"""Key beside the ids in checkpoints of our own: which of the two they are."""

_KEY = "eagle_aux_hidden_state_layer_ids"
_CAPTURE = "eagle3_layers_to_capture"
_SPECULATORS = "aux_hidden_state_layer_ids"
# Keys that only ModelOpt's exporter writes into `eagle_config`.
_MODELOPT = ("next_layer_regular", "use_mtp_layernorm", "use_input_layernorm_in_first_layer")


@dataclass(frozen=True, slots=True)
class LayersRead:
    """`taps`: `hs[i]` indices. `why`: what decided between the conventions, half a sentence.
    `instead`: where nothing in the checkpoint proves it, what else to try.
    """

    taps: tuple[int, ...]
    why: str
    instead: str = ""

    def sentence(self, source: str) -> str:
        """One line for the user: which layers' outputs are read, and why."""
        names = ", ".join("embeddings" if t == 0 else str(t - 1) for t in self.taps)
        hint = f"; if few drafts are accepted, {self.instead}" if self.instead else ""
        return f"{source} reads the outputs of target layers {names} (from 0): {self.why}{hint}."


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The boundaries most checkpoints read: (2, n // 2, n - 3), as far as there are layers."""
    return tuple(sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)}))


def layers_read(hf: Mapping[str, Any], num_layers: int, *, reading: str, source: str) -> LayersRead:
    """Decide what the ids of a `config.json` mean for a target of `num_layers` layers.

    `reading`: one of `READINGS`. Raises `ModelError` for ids that are no list of whole numbers or
    lie outside the target under the reading chosen.
    """
    own = hf.get("eagle_config") or {}
    key, nested, ids = _found(hf, own)
    if ids is None:
        return _usual(num_layers, reading, source)
    if not isinstance(ids, list | tuple) or not all(type(i) is int for i in ids) or not ids:
        raise ModelError(f"{source} has {key} = {ids!r} in its config; a list of ids is needed.")
    if reading == "auto":
        kind, why, sure = _decide(own, key=key, nested=nested, ids=ids, count=num_layers)
    else:
        kind, why, sure = reading, f"its ids {list(ids)} are {reading}, as was asked", True
    taps = tuple(i + (kind == "outputs") for i in ids)
    if not all(0 <= tap <= num_layers for tap in taps):
        raise ModelError(
            f"{source} reads hidden states {list(taps)} ({why}); this target has 0 to {num_layers}."
        )
    other = next(r for r in READINGS[1:] if r != kind)
    return LayersRead(taps, why, "" if sure else f"try layer_ids={other}")


def _usual(num_layers: int, reading: str, source: str) -> LayersRead:
    if reading != "auto":
        raise ModelError(
            f"layer_ids is {reading}, but {source} names no {_KEY}; leave layer_ids=auto or add "
            "them to its eagle_config."
        )
    return LayersRead(
        default_taps(num_layers),
        "it names none, so the usual ones are taken",
        f"add {_KEY} to its eagle_config",
    )


def _found(hf: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[str, bool, Any]:
    """Key, whether it stood in `eagle_config`, and the ids."""
    for key in (_CAPTURE, _KEY, _SPECULATORS):
        for nested, place in ((True, own), (False, hf)):
            if place.get(key) is not None:
                return key, nested, place[key]
    return _KEY, False, None


def _decide(
    own: Mapping[str, Any],
    *,
    key: str,
    nested: bool,
    ids: Sequence[int],
    count: int,
) -> tuple[str, str, bool]:
    """Kind, why, and whether that is certain; the strongest evidence first."""
    said = f"its ids {list(ids)} are"
    if own.get(MARK) in READINGS[1:]:
        return own[MARK], f"{said} {own[MARK]}, as its config says", True
    if key == _CAPTURE:
        return "outputs", f"{said} outputs, as {_CAPTURE} always are", True
    if key == _SPECULATORS:
        return "boundaries", f"{said} boundaries, as in every speculators checkpoint", True
    if count in ids:
        return "boundaries", f"{said} boundaries, for there is no layer {count}", True
    if tuple(ids) == (1, count // 2 - 1, count - 4):
        return "outputs", f"{said} outputs, the usual ones of ModelOpt and SpecForge", False
    if tuple(ids) == default_taps(count):
        return "boundaries", f"{said} boundaries, the usual ones of vLLM and SGLang", False
    if any(name in own for name in _MODELOPT):
        return "outputs", f"{said} outputs, as ModelOpt writes them", True
    if nested:
        return "outputs", f"{said} taken for outputs, as SGLang and SpecForge read them", False
    return "boundaries", f"{said} taken for boundaries, as vLLM reads them", False
