"""Tiny random models of every family, tokenizer included: for tests and `doctor`, no files
needed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.models import checkpoint
from slipstream.models.config import ModelConfig, from_hf
from slipstream.models.dense import expected_shapes
from slipstream.models.loading import LoadedModel

_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_EOS = 2


def tiny_config(family: str = "llama", **overrides: Any) -> ModelConfig:
    """A config of `family` with a few thousand parameters; `overrides` are config.json keys."""
    hf: dict[str, Any] = {
        "model_type": family,
        "vocab_size": 320,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": family in ("llama", "smollm3"),
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": _EOS,
        "pad_token_id": 0,
    }
    return from_hf(hf | overrides, source=f"tiny {family}")


def tiny_tensors(config: ModelConfig, *, seed: int = 0) -> dict[str, Tensor]:
    """Random float32 weights by Hugging Face name, large enough for peaked next-token laws."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 1 + 0.1 * noise
        elif len(shape) == 1:
            tensors[name] = 0.1 * noise
        elif "embed_tokens" in name:
            tensors[name] = noise * (2.0 / shape[1] ** 0.5)
        else:
            tensors[name] = noise * (1.5 / shape[1] ** 0.5)
    return tensors


def tiny_model(
    family: str = "llama",
    *,
    seed: int = 0,
    vocab: int = 320,
    layers: int = 2,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    **overrides: Any,
) -> LoadedModel:
    """A random model of `family`. `overrides` are config.json keys (see `tiny_config`)."""
    config = tiny_config(family, vocab_size=vocab, num_hidden_layers=layers, **overrides)
    model = checkpoint.build_from_memory(
        tiny_tensors(config, seed=seed),
        config,
        source=f"tiny {family}",
        dtype=dtype,
        device=torch.device(device),
    )
    text = json.dumps(config.hf, sort_keys=True) + f"seed {seed}"
    name = f"tiny-{family}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    return LoadedModel(model, tiny_tokenizer(vocab), name, Path(name), digest)


def save_tiny(
    directory: Path, family: str = "llama", *, seed: int = 0, **overrides: Any
) -> ModelConfig:
    """Write a tiny model as a Hugging Face directory that `load` and transformers read."""
    from safetensors.torch import save_file

    config = tiny_config(family, **overrides)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config.hf)))
    save_file(tiny_tensors(config, seed=seed), directory / "model.safetensors", {"format": "pt"})
    tiny_tokenizer(config.vocab_size).save_pretrained(directory)
    return config


def tiny_tokenizer(vocab: int = 320) -> Any:
    """A fast byte-level tokenizer with `vocab` ids and a ChatML template.

    Ids 0 to 2 are special (2 ends an answer), then single bytes, printable ones first, then spares
    that text never produces. With fewer than 259 ids, bytes without an id become id 0.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (ord(c) > 126, c))
    ids = {token: i for i, token in enumerate([*_SPECIAL, *letters][:vocab])}
    ids |= {f"<spare{i}>": i for i in range(len(ids), vocab)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token=_SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=_SPECIAL[0],
        bos_token=_SPECIAL[1] if vocab > 1 else None,
        eos_token=_SPECIAL[2] if vocab > _EOS else None,
        pad_token=_SPECIAL[0],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
