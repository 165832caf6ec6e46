"""Shapes and switches of the dense families, read from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import ModelError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_UNLESS_GIVEN_THETA = {"smollm3": 2_000_000.0}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One dense decoder: RMSNorm, rotary attention with grouped heads, gated SiLU MLP.

    `windows[i]`: positions layer i may see including the query's own, or None for all of them.
    `rope[i]`: whether layer i rotates queries and keys. `rope_parameters` is the Hugging Face dict
    (`rope_type`, `rope_theta`, ...). `hf` is the whole `config.json`.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    norm_eps: float
    rope_parameters: Mapping[str, Any]
    rope: tuple[bool, ...]
    windows: tuple[int | None, ...]
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    hf: Mapping[str, Any]

    @property
    def group(self) -> int:
        """Query heads a key-value head serves."""
        return self.num_heads // self.num_kv_heads


def from_hf(hf: Mapping[str, Any], *, source: str) -> ModelConfig:
    """Read a `config.json` dict. `source` names the model in errors.

    Raises `ModelError` for families, activations and rotary types this engine does not run, and for
    missing or impossible sizes.
    """
    family = hf.get("model_type")
    if family not in FAMILIES:
        raise ModelError(
            f"{source} is of the family {family!r}; supported families: {', '.join(FAMILIES)}."
        )
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method")
        raise ModelError(
            f"{source} holds quantized weights ({method!r}); use its unquantized or GGUF form."
        )
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(
            f"{source} has the activation {hf['hidden_act']!r}; only silu is supported."
        )
    layers, heads = _size(hf, "num_hidden_layers", source), _size(hf, "num_attention_heads", source)
    hidden = _size(hf, "hidden_size", source)
    kv_heads = hf.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ModelError(f"{source} has {heads} heads, not a multiple of its {kv_heads} KV heads.")
    return ModelConfig(
        family=family,
        vocab_size=_size(hf, "vocab_size", source),
        hidden_size=hidden,
        intermediate_size=_size(hf, "intermediate_size", source),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hf.get("head_dim") or (128 if family == "qwen3" else hidden // heads),
        max_context=_size(hf, "max_position_embeddings", source),
        norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        rope_parameters=_rope_parameters(hf, family, source),
        rope=_rope_layers(hf, family, layers),
        windows=_windows(hf, family, layers),
        tied=bool(hf.get("tie_word_embeddings", family == "smollm3")),
        qkv_bias=family == "qwen2" or (bool(hf.get("attention_bias")) and family != "mistral"),
        out_bias=bool(hf.get("attention_bias")) and family in ("llama", "qwen3", "smollm3"),
        mlp_bias=bool(hf.get("mlp_bias")) and family in ("llama", "smollm3"),
        qk_norm=family == "qwen3",
        eos_token_ids=_as_ids(hf.get("eos_token_id")),
        hf=dict(hf),
    )


def _size(hf: Mapping[str, Any], key: str, source: str) -> int:
    value = hf.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{source} has {key} = {value!r} in its config; it must be 1 or more.")
    return value


def _as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _rope_parameters(hf: Mapping[str, Any], family: str, source: str) -> dict[str, Any]:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling`."""
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    fallback = hf.get("rope_theta") or _UNLESS_GIVEN_THETA.get(family, 10_000.0)
    rope["rope_theta"] = float(rope.get("rope_theta") or fallback)
    if rope["rope_type"] not in _ROPE_TYPES:
        raise ModelError(
            f"{source} has rotary type {rope['rope_type']!r}; supported: {', '.join(_ROPE_TYPES)}."
        )
    if (hf.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError(f"{source} rotates only part of each head, which is not supported.")
    return rope


def _rope_layers(hf: Mapping[str, Any], family: str, layers: int) -> tuple[bool, ...]:
    if family != "smollm3":
        return (True,) * layers
    flags = hf.get("no_rope_layers")
    if flags is None:
        every = hf.get("no_rope_layer_interval", 4)
        flags = [(i + 1) % every != 0 for i in range(layers)]
    return tuple(bool(flags[i]) for i in range(layers))


def _windows(hf: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    window = hf.get("sliding_window", 4096 if family in ("mistral", "qwen2", "qwen3") else None)
    if family == "llama" or window is None:
        return (None,) * layers
    if family == "mistral":
        return (int(window),) * layers
    if not hf.get("use_sliding_window", False):
        return (None,) * layers
    types = hf.get("layer_types") or _sliding_layers(hf, family, layers)
    return tuple(int(window) if types[i] == "sliding_attention" else None for i in range(layers))


def _sliding_layers(hf: Mapping[str, Any], family: str, layers: int) -> list[str]:
    if family == "smollm3":
        sliding = [not roped for roped in _rope_layers(hf, family, layers)]
    else:
        first = hf.get("max_window_layers", 28)
        sliding = [i >= first for i in range(layers)]
    return ["sliding_attention" if s else "full_attention" for s in sliding]
