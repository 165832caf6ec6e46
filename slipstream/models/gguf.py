"""GGUF files: dequantized into Hugging Face names and layout, tokenizer included."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import ModelError

_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_INTERLEAVED = ("llama", "smollm3")
"""Architectures whose q and k rows GGUF stores with rotary pairs side by side."""
_ARCHITECTURES = ("llama", "qwen2", "qwen3", "smollm3")


@dataclass(frozen=True, slots=True)
class Converted:
    """A GGUF file as a Hugging Face model: config dict, bf16 tensors by name, fast tokenizer."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    tokenizer: Any


def convert(path: Path) -> Converted:
    """Read a GGUF file of a dense family. Raises `ModelError` on anything unreadable.

    Weights are dequantized in float32 by the `gguf` package and rounded once to bf16.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        fields = dict(reader.fields)
        config = _config(fields, {t.name for t in reader.tensors}, path)
        tensors = {}
        for item in reader.tensors:
            name = _hf_name(item.name, path)
            values = gguf.quants.dequantize(item.data, item.tensor_type)
            tensors[name] = torch.tensor(_deinterleave(name, values, config)).bfloat16()
    except (ValueError, IndexError, KeyError, TypeError, OSError, NotImplementedError) as error:
        raise ModelError(
            f"{path} is not a readable GGUF file ({error}); it may be truncated: download it again."
        ) from error
    return Converted(config, tensors, _tokenizer(path))


def _config(fields: dict[str, Any], tensors: set[str], path: Path) -> dict[str, Any]:
    architecture = fields["general.architecture"].contents()
    if architecture not in _ARCHITECTURES:
        raise ModelError(
            f"{path} is of the architecture {architecture!r}; supported in GGUF: "
            f"{', '.join(_ARCHITECTURES)}."
        )

    def value(key: str, default: Any = None) -> Any:
        field = fields.get(f"{architecture}.{key}")
        return default if field is None else field.contents()

    if value("rope.scaling.type", "none") != "none" or "rope_freqs.weight" in tensors:
        raise ModelError(f"{path} uses scaled rotary positions, which only HF directories support.")
    heads, hidden = value("attention.head_count"), value("embedding_length")
    special = {k: _special(fields, k) for k in ("bos_token_id", "eos_token_id")}
    return {
        "model_type": architecture,
        "hidden_size": hidden,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": value("attention.key_length", hidden // heads),
        "vocab_size": value("vocab_size") or len(fields["tokenizer.ggml.tokens"].data),
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": _short_float(value("attention.layer_norm_rms_epsilon", 1e-6)),
        "rope_theta": value("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        **{k: v for k, v in special.items() if v is not None},
    }


def _special(fields: dict[str, Any], key: str) -> int | None:
    field = fields.get(f"tokenizer.ggml.{key}")
    return None if field is None else int(field.contents())


def _short_float(value: float) -> float:
    """1e-5 went through float32 as 9.99999975e-06: give back the shortest equal float32."""
    return float(np.format_float_scientific(np.float32(value)))


def _hf_name(name: str, path: Path) -> str:
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _NAMES:
        return f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _TOP_NAMES:
        return f"{_TOP_NAMES[parts[0]]}.{parts[1]}"
    raise ModelError(f"{path} holds the tensor {name}, which no supported family has.")


def _deinterleave(name: str, values: Any, config: dict[str, Any]) -> Any:
    """Rows of q and k from rotary pairs (2i, 2i + 1) to Hugging Face's (i, i + head_dim / 2)."""
    if config["model_type"] not in _INTERLEAVED or not (".q_proj." in name or ".k_proj." in name):
        return values
    half = config["head_dim"] // 2
    pairs = values.reshape(-1, half, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    except Exception as error:  # transformers raises bare Exceptions here
        raise ModelError(f"{path} has no tokenizer that can be read ({error}).") from error
