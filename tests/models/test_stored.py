"""Drafters stored small: the loss is bounded, every method reads them, exports are whole."""

import json
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from slipstream.engine import LLM
from slipstream.errors import ModelError
from slipstream.models.checkpoint import opened
from slipstream.models.dense import head_rows
from slipstream.models.eagle3 import Eagle3Config, load_eagle3, save_eagle3
from slipstream.models.int8_rows import compacted, quantized
from slipstream.models.loading import load
from slipstream.models.stored import write_compact, write_published
from slipstream.models.tiny import save_tiny, tiny_config, tiny_model, tiny_tensors
from slipstream.train.eagle3 import draft_config
from slipstream.train.recipes import RECIPES, Shape, make
from slipstream.types import SamplingParams

TRAINABLE = tiny_model("qwen3", layers=4)
LOADED = tiny_model("qwen3", layers=4, dtype=torch.bfloat16)
PROMPTS = [[5, 6, 7, 8] * 3, [9, 9, 9]]
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)


def drafter(method, folder, target=TRAINABLE):
    network = make(method, target.model, Shape(draft_len=7, mask_token_id=319), seed=1)
    network.save(folder, network.tensors)
    return folder


def read(folder):
    with opened(folder) as handles:
        return {name: handle.get_tensor(name) for name, handle in handles.items()}


def size(folder):
    return (folder / "model.safetensors").stat().st_size


@given(st.integers(1, 9), st.integers(1, 40), st.integers(-8, 4), st.integers(0, 2**31))
def test_an_entry_is_off_by_half_a_scale_at_most(rows, columns, power, seed):
    generator = torch.Generator().manual_seed(seed)
    spread = 10.0 ** torch.randint(-3, 4, (rows, 1), generator=generator)
    weight = torch.randn(rows, columns, generator=generator) * spread * 2.0**power
    weight[0] = 0
    found, scale = quantized(weight)
    assert found.dtype == torch.int8
    assert scale.dtype == torch.bfloat16
    off = (found.float() * scale.float()[:, None] - weight).abs()
    assert bool((off <= scale.float()[:, None] * (0.5 + 1e-4)).all())
    assert not off[0].any()


@pytest.mark.parametrize("method", RECIPES)
def test_every_method_reads_a_small_folder_and_its_export_is_the_same_drafter(method, tmp_path):
    plain, small, full = tmp_path / "plain", tmp_path / "small", tmp_path / "full"
    drafter(method, plain)
    write_compact(plain, small, method=method, target=LOADED)
    write_published(small, full, method=method, target=LOADED.model)
    assert size(small) < 0.65 * size(full) < 0.65 * 0.55 * size(plain)
    original, kept, exported = read(plain), read(small), read(full)
    assert original.keys() == kept.keys() == exported.keys()
    for name, tensor in exported.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(kept[name].bfloat16(), tensor)
        largest = original[name].abs().amax()
        assert bool(((kept[name] - original[name]).abs() <= largest / 200).all())
    configs = [json.loads((f / "config.json").read_text()) for f in (plain, small, full)]
    own = configs[1].pop("slipstream")
    assert own["target"] == LOADED.fingerprint
    assert own["method"] == method
    assert configs[0] == configs[1]
    assert configs[2] == configs[0] | {"torch_dtype": "bfloat16"}
    exact, bf16 = LLM(TRAINABLE), LLM(LOADED)
    done = exact.fork(f"{method}:{small}:4").generate(PROMPTS, GREEDY)
    expected = [c.token_ids for c in exact.generate(PROMPTS, GREEDY)]
    assert [c.token_ids for c in done] == expected
    assert sum(r.drafted for c in done for r in c.records) > 0
    found = [bf16.fork(f"{method}:{f}:4").generate(PROMPTS, GREEDY) for f in (small, full)]
    assert steps(found[0]) == steps(found[1])


def steps(done):
    """Tokens and, step by step, what was drafted and kept: equal where the drafters are."""
    return [(c.token_ids, [(r.drafted, r.accepted) for r in c.records]) for c in done]


def reduced(folder, target, *, own_head=False):
    """An EAGLE-3 folder of 64 draft tokens, its head the target's rows unless `own_head`."""
    base = draft_config(target.config)
    config = Eagle3Config(base.model, base.taps, draft_vocab=64)
    generator = torch.Generator().manual_seed(3)
    tensors = {n: torch.rand(s, generator=generator) for n, s in config.shapes.items()}
    tensors["d2t"] = torch.arange(64) * 2  # draft token i stands for target token 3 * i
    if not own_head:
        tensors["lm_head.weight"] = head_rows(target.model, torch.arange(64) * 3)
    save_eagle3(folder, config, tensors)
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_a_reduced_head_that_is_the_targets_is_not_stored(tied, dtype, tmp_path):
    target = tiny_model("llama", layers=4, tie_word_embeddings=tied, dtype=dtype)
    written = reduced(tmp_path / "plain", target)
    write_compact(tmp_path / "plain", tmp_path / "small", method="eagle3", target=target)
    kept = load_file(tmp_path / "small" / "model.safetensors")
    assert not {"lm_head.weight", "lm_head.weight_scale", "t2d"} & kept.keys()
    assert kept["d2t"].dtype == torch.int32
    states = torch.randn(3, 48, generator=torch.Generator().manual_seed(4)).to(dtype)
    plain = load_eagle3(tmp_path / "plain", target.model)
    small = load_eagle3(tmp_path / "small", target.model)
    assert torch.equal(small.ids, torch.arange(64) * 3)
    assert torch.equal(small.ids, plain.ids)
    finite = torch.isfinite(small.logits(states, 320))
    assert finite[0].nonzero().flatten().tolist() == list(range(0, 192, 3))
    exported = tmp_path / "full"
    write_published(tmp_path / "small", exported, method="eagle3", target=target.model)
    full = load_file(exported / "model.safetensors")
    assert torch.equal(full["lm_head.weight"], written["lm_head.weight"].bfloat16())
    assert full["d2t"].dtype == torch.int64
    assert torch.equal(full["d2t"], written["d2t"])
    assert full["t2d"].nonzero().flatten().tolist() == list(range(0, 192, 3))
    assert "slipstream" not in json.loads((exported / "config.json").read_text())


def test_rows_of_a_packed_untied_head_are_exact():
    target = tiny_model("llama", tie_word_embeddings=False, dtype=torch.bfloat16)
    ids = torch.tensor([0, 7, 319, 7])
    rows = head_rows(target.model, ids)
    states = torch.eye(48, dtype=torch.bfloat16)
    assert rows.shape == (4, 48)
    plain = {"vocab_size": 320, "num_hidden_layers": 2, "tie_word_embeddings": False}
    weights = tiny_tensors(tiny_config("llama", **plain))["lm_head.weight"].bfloat16()
    assert torch.equal(rows, weights[ids])
    assert torch.equal(states @ rows.t(), rows.t())


def test_a_reduced_head_of_its_own_is_stored(tmp_path):
    target = tiny_model("llama", layers=4)
    written = reduced(tmp_path / "plain", target, own_head=True)
    write_compact(tmp_path / "plain", tmp_path / "small", method="eagle3", target=target)
    assert "head" not in json.loads((tmp_path / "small/config.json").read_text())["slipstream"]
    kept = read(tmp_path / "small")["lm_head.weight"]
    assert bool(((kept - written["lm_head.weight"]).abs() <= 1 / 200).all())


def test_a_head_that_the_config_does_not_leave_out_must_be_there(tmp_path):
    target = tiny_model("llama", layers=4)
    tensors = reduced(tmp_path, target)
    tensors.pop("lm_head.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks the tensor lm_head\.weight"):
        load_eagle3(tmp_path, target.model)


def test_an_embedding_is_left_out_only_where_it_is_the_targets(tmp_path):
    target = tiny_model("llama", layers=4)
    plain, small = tmp_path / "plain", tmp_path / "small"
    tensors = reduced(plain, target) | load_file(plain / "model.safetensors")
    for embedding, kept in [(target.model.embedding, False), (-target.model.embedding, True)]:
        names = tensors | {"embed_tokens.weight": embedding.contiguous()}
        save_file(names, plain / "model.safetensors")
        write_compact(plain, small, method="eagle3", target=target)
        assert ("embed_tokens.weight" in read(small)) is kept


def test_draft_tokens_the_target_lacks_are_named(tmp_path):
    target = tiny_model("llama", layers=4)
    tensors = reduced(tmp_path / "plain", target)
    write_compact(tmp_path / "plain", tmp_path / "small", method="eagle3", target=target)
    stored = load_file(tmp_path / "small" / "model.safetensors")
    stored["d2t"] = (tensors["d2t"] + 150).int()
    save_file(stored, tmp_path / "small" / "model.safetensors")
    with pytest.raises(ModelError, match=r"small maps draft token 57 to 321 \(d2t\); .* 0 to 319"):
        load_eagle3(tmp_path / "small", target.model)


def test_an_mtp_head_in_its_targets_checkpoint_is_exported_alone(tmp_path):
    path = tmp_path / "target"
    save_tiny(path)
    target = load(path, dtype=torch.float32)
    head = read(drafter("mtp", tmp_path / "head", target))
    whole = load_file(path / "model.safetensors") | head
    save_file(whole, path / "model.safetensors", {"format": "pt"})
    target = load(path, dtype=torch.float32)
    write_published(path, tmp_path / "out", method="mtp", target=target.model)
    assert read(tmp_path / "out").keys() == head.keys()
    assert LLM(target, drafter=f"mtp:{tmp_path / 'out'}:2").drafter.max_draft_len == 2


def test_broken_small_folders_are_named(tmp_path):
    small = tmp_path / "small"
    write_compact(drafter("mtp", tmp_path / "plain"), small, method="mtp", target=LOADED)
    config = json.loads((small / "config.json").read_text())

    def attempt(complaint, **own):
        changed = config | {"slipstream": config["slipstream"] | own}
        (small / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ModelError, match=complaint):
            LLM(LOADED, drafter=f"mtp:{small}:2")

    attempt("stored as 'int3', which this version does not read", storage="int3")
    tensors = load_file(small / "model.safetensors")
    scale = next(n for n in tensors if n.endswith("_scale"))
    save_file(tensors | {scale: tensors[scale][:-1].clone()}, small / "model.safetensors")
    attempt("as int8 without a .*_scale of 48 scales")
    tensors.pop(scale)
    save_file(tensors, small / "model.safetensors")
    attempt("as int8 without a .*_scale of 48 scales")
    (small / "config.json").write_text(json.dumps(config | {"slipstream": 3}))
    with pytest.raises(ModelError, match="slipstream = 3"):
        LLM(LOADED, drafter=f"mtp:{small}:2")


def test_weights_that_are_not_finite_are_not_stored():
    with pytest.raises(ModelError, match=r"somewhere has a\.weight with values that are not"):
        compacted({"a.weight": torch.tensor([[1.0, float("nan")]])}, source="somewhere")


def test_nothing_is_written_over_what_is_read_or_belongs_to_others(tmp_path):
    plain, out = drafter("mtp", tmp_path / "plain"), tmp_path / "out"
    before = (plain / "model.safetensors").read_bytes()
    with pytest.raises(ModelError, match="is the folder that is exported"):
        write_published(plain, plain / ".", method="mtp", target=LOADED.model)
    assert (plain / "model.safetensors").read_bytes() == before
    shutil.copytree(plain, out)
    (out / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="something else"):
        write_compact(plain, out, method="mtp", target=LOADED)
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="something else"):
        write_compact(plain, tmp_path / "file", method="mtp", target=LOADED)
