"""Checkpoints of the speculators library (vLLM project): their config in the keys others use.

Sizes of the draft layers are nested in `transformer_layer_config`, layer ids are boundaries, and
tensors have the names that EAGLE-3, DFlash and DSpark have elsewhere. Source: the library's
configs and vLLM's reading of them (`transformers_utils/configs/speculators/algos.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.errors import ModelError

KINDS = ("eagle3", "dflash", "dspark")
_ARCHITECTURES = {
    "eagle3": "Eagle3Speculator",
    "dflash": "DFlashDraftModel",
    "dspark": "DSparkDraftModel",
}
# Kept out, so that what is saved again is not taken for a checkpoint of theirs.
_THEIRS = (
    "transformer_layer_config",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
    "auto_map",
)


def flattened(hf: Mapping[str, Any], kind: str, *, source: str) -> dict[str, Any]:
    """`hf` itself, or if it is a speculators config, what the same drafter's would be elsewhere.

    `kind`: the method it is to be read as, one of `KINDS`. Raises `ModelError` where it holds
    another one or lacks what is needed.
    """
    own = hf.get("speculators_config") or {}
    found = hf.get("speculators_model_type") or own.get("algorithm")
    if found is None:
        return dict(hf)
    if found != kind:
        known = f"write {found}:PATH" if found in KINDS else f"only {', '.join(KINDS)} are read"
        raise ModelError(f"{source} is a speculators checkpoint of {found!r}, not {kind}; {known}.")
    layers = hf.get("transformer_layer_config")
    if not isinstance(layers, dict):
        raise ModelError(f"{source} has no transformer_layer_config in its config; it is needed.")
    flat = {**layers, **{k: v for k, v in hf.items() if k not in _THEIRS}}
    flat["architectures"] = [_ARCHITECTURES[kind]]
    if kind == "eagle3":
        # The name that never means anything but boundaries (see `models.layer_ids`).
        flat["aux_hidden_state_layer_ids"] = flat.pop("eagle_aux_hidden_state_layer_ids", None)
        flat.setdefault("norm_before_residual", True)  # as vLLM serves early ones that are silent
        return flat
    return _block(flat, kind, source)


def _block(flat: dict[str, Any], kind: str, source: str) -> dict[str, Any]:
    """DFlash and DSpark. Their layers are Qwen3's, whatever the target's family."""
    ids = flat.get("aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ModelError(
            f"{source} has aux_hidden_state_layer_ids = {ids!r} in its config; a list of ids is "
            "needed."
        )
    anchored = bool(flat.get("sample_from_anchor"))
    domino = flat.get("projector_type", "dflash") != "dflash" or flat.get("shift_label")
    if kind == "dflash" and (anchored or domino):
        raise ModelError(
            f"{source} is a DFlash drafter whose rows are shifted (sample_from_anchor or "
            "projector_type 'domino'); only the plain one is read."
        )
    types = flat.get("layer_types") or []
    sliding = "sliding_attention" in types
    if sliding and not flat.get("sliding_window"):
        raise ModelError(f"{source} has sliding layers and no sliding_window in its config.")
    flat["model_type"] = "qwen3"
    flat["use_sliding_window"] = sliding
    if sliding and flat.get("sliding_window_non_causal"):
        flat["is_causal"] = False
    flat["dflash_config"] = {
        "mask_token_id": flat.get("mask_token_id"),
        "target_layer_ids": [i - 1 for i in ids],
    }
    if kind == "dspark":
        flat["dspark_bonus_anchor"] = not anchored
        for key in ("enable_confidence_head", "confidence_head_with_markov"):
            flat.setdefault(key, False)
    return flat
