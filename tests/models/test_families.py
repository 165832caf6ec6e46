"""Every family's logits equal the Hugging Face model's on tiny random configurations."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.cache.pages import PageTable
from slipstream.models.checkpoint import build_from_memory
from slipstream.models.loading import EMBEDDED, LoadedModel, load
from slipstream.models.tiny import tiny_config, tiny_model, tiny_tensors
from slipstream.target.target import ForwardRow, Target

torch.set_num_threads(1)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 7}

CASES = {
    "llama": ("llama", {}),
    "llama untied, all biases": (
        "llama",
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    ),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama no grouping": ("llama", {"num_key_value_heads": 6}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama3 rope, old spelling": (
        "llama",
        {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}},
    ),
    "linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0}},
    ),
    "yarn rope": ("qwen3", {"rope_parameters": YARN}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "smollm3 given nope layers, window, biases": (
        "smollm3",
        {"no_rope_layers": [0, 1], "attention_bias": True, "mlp_bias": True, **SLIDING},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2 sliding later layers": ("qwen2", {"max_window_layers": 1, **SLIDING}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3 wide heads": ("qwen3", {"head_dim": 24, "attention_bias": True}),
    "qwen3 layer types": (
        "qwen3",
        {"layer_types": ["sliding_attention", "full_attention"], **SLIDING},
    ),
    "mistral": ("mistral", {}),
    "mistral window": ("mistral", {"sliding_window": 5}),
    "mistral other head_dim": ("mistral", {"head_dim": 12, "num_key_value_heads": 3}),
}


def run(loaded: LoadedModel, ids: list[int], **options: object) -> torch.Tensor:
    target = Target(loaded, num_pages=64, page_size=4)
    table = PageTable(target.pool, expected_tokens=len(ids))
    assert table.reserve(len(ids))
    return target.forward([ForwardRow(ids, 0, table.pages, len(ids))]).logits


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_hugging_face(case: str) -> None:
    family, overrides = CASES[case]
    config = tiny_config(family, **overrides)
    tensors = tiny_tensors(config, seed=1)
    ours = build_from_memory(
        tensors, config, source=case, dtype=torch.float32, device=torch.device("cpu")
    )
    hf_config = AutoConfig.for_model(**config.hf, attn_implementation="eager")
    oracle = AutoModelForCausalLM.from_config(hf_config).eval()
    state = tensors | (
        {"lm_head.weight": tensors["model.embed_tokens.weight"]} if config.tied else {}
    )
    oracle.load_state_dict(state)
    ids = torch.randint(0, config.vocab_size, (50,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = oracle(ids[None]).logits[0]
    loaded = LoadedModel(ours, None, case, None, "")  # type: ignore[arg-type]
    for length in (50, 20):  # a chunk of a prompt, and a length that is folded like a verify row
        actual = run(loaded, ids[:length].tolist())
        torch.testing.assert_close(actual, expected[:length], atol=1e-4, rtol=1e-4)


def test_bf16_stays_near_fp32() -> None:
    ids = list(range(30))
    exact = run(tiny_model("qwen3", seed=3), ids)
    rounded = run(tiny_model("qwen3", seed=3, dtype=torch.bfloat16), ids)
    assert rounded.dtype == torch.bfloat16
    error = (rounded.float() - exact).abs().max() / exact.abs().max()
    assert error < 0.05


@pytest.fixture(scope="module")
def embedded() -> LoadedModel:
    return load(EMBEDDED, dtype=torch.float32)


def test_embedded_model_equals_hugging_face(embedded: LoadedModel) -> None:
    ids = embedded.tokenizer("The capital of France is Paris. def f(x):\n    return")["input_ids"]
    actual = run(embedded, ids)
    hf_config = AutoConfig.for_model(**embedded.config.hf)
    with torch.device("meta"):
        oracle = AutoModelForCausalLM.from_config(hf_config).eval()
    oracle.load_state_dict(hugging_face_state(embedded), assign=True)
    oracle.model.rotary_emb = type(oracle.model.rotary_emb)(hf_config)  # its buffers were on meta
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_embedded_model_speaks_english(embedded: LoadedModel) -> None:
    # Guards the undoing of GGUF's row order: scrambled q and k rows would agree with the oracle
    # too.
    ids = embedded.tokenizer("one two three four five six seven eight nine")["input_ids"]
    best = run(embedded, ids).argmax(-1).tolist()
    assert embedded.tokenizer.decode(best[-3:]) == " eight nine ten"


def hugging_face_state(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    """The tensors of the cached conversion, float32, read the way any other program would."""
    from safetensors.torch import load_file

    from slipstream.models import loading

    file = loaded.path
    entry = loading._cache_root(None) / f"{loaded.name}-{loading._cache_key(file)}"
    state = {n: t.float() for n, t in load_file(entry / "model.safetensors").items()}
    return state | {"lm_head.weight": state["model.embed_tokens.weight"]}
