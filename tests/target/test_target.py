"""A forward over ragged rows sees what one-by-one decoding would have seen, and caches the same."""

import random

import pytest
import torch

from slipstream.cache.pages import PageTable
from slipstream.errors import InvalidConfig, ModelError
from slipstream.models import dense, linear
from slipstream.models.linear import Linear
from slipstream.models.loading import LoadedModel
from slipstream.models.tiny import tiny_model
from slipstream.target.batch import arrange, place
from slipstream.target.target import ForwardRow, Target, require_kernel_shape

torch.set_num_threads(1)

MODELS = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 6},
    "smollm3": {"use_sliding_window": True, "sliding_window": 9, "no_rope_layers": [1, 0]},
}
VOCAB = 320


@pytest.fixture(scope="module", params=MODELS)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return tiny_model(request.param, seed=5, **MODELS[request.param])


class Rows:
    """Requests over one target, run step by step and compare with a fresh prefill."""

    def __init__(self, target: Target, texts: list[list[int]], *, expected: int = 100) -> None:
        self.target, self.texts = target, texts
        self.tables = [PageTable(target.pool, expected_tokens=expected) for _ in texts]
        self.done = [0] * len(texts)

    def step(
        self, lengths: list[int], *, drafts: list[list[int]] | None = None
    ) -> list[torch.Tensor]:
        """Run the next `lengths[i]` tokens of each row (0: sits out), wrong drafts behind them."""
        rows, owners = [], []
        for i, length in enumerate(lengths):
            tokens = self.texts[i][self.done[i] : self.done[i] + length]
            if not tokens:
                continue
            tokens = tokens + (drafts[i] if drafts else [])
            assert self.tables[i].reserve(self.done[i] + len(tokens))
            rows.append(ForwardRow(tokens, self.done[i], self.tables[i].pages, len(tokens)))
            owners.append((i, length))
        logits = self.target.forward(rows).logits.split([len(r.tokens) for r in rows])
        out = [torch.empty(0)] * len(lengths)
        for (i, length), own in zip(owners, logits):
            out[i] = own[:length]
            self.done[i] += length
        return out


def fresh(loaded: LoadedModel, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    target = Target(loaded, num_pages=-(-len(tokens) // 4), page_size=4)
    table = PageTable(target.pool, expected_tokens=len(tokens))
    assert table.reserve(len(tokens))
    logits = target.forward([ForwardRow(tokens, 0, table.pages, len(tokens))]).logits
    return logits, target.read_cache(table.pages, len(tokens))


def check_against_fresh(rows: Rows, loaded: LoadedModel, logits: list[list[torch.Tensor]]) -> None:
    for i, text in enumerate(rows.texts):
        expected, cache = fresh(loaded, text[: rows.done[i]])
        own = torch.cat([step[i] for step in logits if len(step[i])])
        torch.testing.assert_close(own, expected, atol=2e-4, rtol=1e-4)
        actual = rows.target.read_cache(rows.tables[i].pages, rows.done[i])
        torch.testing.assert_close(actual, cache, atol=2e-5, rtol=1e-4)


def texts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for _ in range(count)]


def test_chunks_and_ragged_verify_rows_equal_a_fresh_prefill(loaded: LoadedModel) -> None:
    rng = random.Random(7)
    rows = Rows(Target(loaded, num_pages=512, page_size=4), texts(6, 90))
    logits = [rows.step([40, 3, 17, 1, 36, 9])]
    while min(rows.done) < 70:
        # Rejected drafts write past the committed length; the next step must overwrite them.
        drafts = [[rng.randrange(VOCAB)] * rng.choice([0, 0, 2, 5]) for _ in range(6)]
        lengths = [min(rng.choice([0, 1, 1, 2, 4, 9, 34]), 90 - d) for d in rows.done]
        if any(lengths):
            logits.append(rows.step(lengths, drafts=drafts))
    check_against_fresh(rows, loaded, logits)


def test_sixteen_rows_at_equal_strides(loaded: LoadedModel) -> None:
    rows = Rows(Target(loaded, num_pages=16 * 32, page_size=4), texts(16, 40))
    logits = [rows.step([5 + i for i in range(16)])]
    for step in range(6):
        lengths = [1 if step % 2 else 1 + (i * 7 + step) % 4 for i in range(16)]
        if step == 3:
            lengths[4] = lengths[9] = 0  # holes in the lattice
        logits.append(rows.step(lengths))
    check_against_fresh(rows, loaded, logits)


@pytest.mark.parametrize("draft", [0, 1, 3])
def test_rows_that_only_fill_up_products_change_nothing(
    loaded: LoadedModel, draft: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """17 to 32 rows are run as 33 where oneDNN is faster so; here every forward is."""
    monkeypatch.setattr(dense, "cheaper_rows", lambda rows, weight: max(33, rows))
    rows = Rows(Target(loaded, num_pages=16 * 32, page_size=4, taps=(0, 2)), texts(16, 40))
    logits = [rows.step([3 + i % 5 for i in range(16)])]
    for _ in range(3):
        logits.append(rows.step([1] * 16, drafts=[[7] * (draft * (i % 3)) for i in range(16)]))
    check_against_fresh(rows, loaded, logits)
    out = rows.target.forward([ForwardRow([5, 6], 0, rows.tables[0].pages, 1)])
    assert out.features is not None
    assert out.features.shape[:2] == (2, 2)
    assert out.logits.shape[0] == 1


def test_the_rows_that_are_cheaper_on_tile_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = Linear(torch.empty(0), None, packed=True)
    monkeypatch.setattr(linear, "_has_tiles", lambda: True)
    found = [linear.cheaper_rows(rows, packed) for rows in (1, 16, 17, 32, 33, 34, 512)]
    assert found == [1, 16, 33, 33, 33, 34, 512]
    assert linear.cheaper_rows(20, Linear(torch.empty(0), None, packed=False)) == 20
    monkeypatch.setattr(linear, "_has_tiles", lambda: False)
    assert linear.cheaper_rows(20, packed) == 20


def test_scattered_pages_are_gathered(loaded: LoadedModel) -> None:
    shared = texts(1, 24)[0]
    target = Target(loaded, num_pages=128, page_size=4)
    first = Rows(target, [shared + texts(1, 30, 1)[0]])
    first.step([40])
    first.tables[0].publish(first.texts[0], 40)
    later = Rows(target, [shared + t for t in texts(3, 50, 2)])
    for i, table in enumerate(later.tables):
        later.done[i] = table.match(later.texts[i])
        assert later.done[i] == 24
    start = list(later.done)
    logits = [later.step([3, 9, 40]), later.step([1, 1, 1]), later.step([4, 1, 2])]
    assert any(t.pages != list(range(t.pages[0], t.pages[0] + len(t.pages))) for t in later.tables)
    for i, text in enumerate(later.texts):
        expected, cache = fresh(loaded, text[: later.done[i]])
        own = torch.cat([step[i] for step in logits])
        torch.testing.assert_close(own, expected[start[i] :], atol=2e-4, rtol=1e-4)
        actual = target.read_cache(later.tables[i].pages, later.done[i])
        torch.testing.assert_close(actual, cache, atol=2e-5, rtol=1e-4)


def test_rows_do_not_see_each_other() -> None:
    loaded = tiny_model(seed=5)
    alone = Rows(Target(loaded, num_pages=64, page_size=4), texts(1, 30))
    expected = [alone.step([12]), alone.step([1]), alone.step([3])]
    rows = Rows(Target(loaded, num_pages=512, page_size=4), [alone.texts[0], *texts(7, 30, seed=9)])
    actual = [rows.step([12, 5, 30, 1, 2, 8, 9, 20]), rows.step([1] * 8), rows.step([3, 1] * 4)]
    for a, b in zip(actual, expected):
        torch.testing.assert_close(a[0], b[0], atol=1e-4, rtol=1e-4)


def test_only_wanted_positions_get_logits_in_the_callers_order() -> None:
    loaded = tiny_model(seed=5)
    target = Target(loaded, num_pages=64, page_size=4)
    rows, expected = [], []
    for text, wanted in zip(texts(4, 12), (0, 12, 1, 3)):
        table = PageTable(target.pool, expected_tokens=12)
        table.reserve(12)
        own = text[: 12 if wanted else 5]
        rows.append(ForwardRow(own, 0, table.pages, wanted))
        expected.append(fresh(loaded, own)[0][len(own) - wanted :])
    logits = target.forward(rows).logits
    assert logits.shape == (16, VOCAB)
    torch.testing.assert_close(logits, torch.cat(expected), atol=1e-4, rtol=1e-4)
    none = [ForwardRow(r.tokens, 0, r.pages, 0) for r in rows]
    assert target.forward(none).logits.shape == (0, VOCAB)
    assert target.forwards == 2


def test_features_are_the_hidden_states_of_hugging_face() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from slipstream.models.tiny import tiny_tensors

    loaded = tiny_model("qwen2", seed=5, layers=3)
    oracle = AutoModelForCausalLM.from_config(AutoConfig.for_model(**loaded.config.hf)).eval()
    oracle.load_state_dict(tiny_tensors(loaded.config, seed=5))
    target = Target(loaded, num_pages=64, page_size=4, taps=(2, 0))
    own = texts(2, 20)
    tables = [PageTable(target.pool, expected_tokens=20) for _ in own]
    for table in tables:
        table.reserve(20)
    # The long row comes first and is moved behind the short one inside: features must move back.
    output = target.forward(
        [
            ForwardRow(own[0] * 2, 0, table_of(target, 40), 1),
            ForwardRow(own[1], 0, tables[1].pages, 1),
        ]
    )
    assert output.features is not None
    assert output.features.shape == (60, 2, loaded.config.hidden_size)
    with torch.inference_mode():
        states = [
            oracle(torch.tensor([t]), output_hidden_states=True).hidden_states
            for t in (own[0] * 2, own[1])
        ]
    for k, tap in enumerate((2, 0)):
        expected = torch.cat([s[tap][0] for s in states])
        torch.testing.assert_close(output.features[:, k], expected, atol=1e-4, rtol=1e-4)
    assert Target(loaded, num_pages=4).forward([ForwardRow([1], 0, [0], 1)]).features is None
    with pytest.raises(InvalidConfig, match="taps 0 to 3"):
        Target(loaded, num_pages=4, taps=(4,))


def table_of(target: Target, tokens: int) -> list[int]:
    table = PageTable(target.pool, expected_tokens=tokens)
    assert table.reserve(tokens)
    return table.pages


def test_a_broken_row_poisons_nobody_later() -> None:
    loaded = tiny_model(seed=5, tie_word_embeddings=False)
    loaded.model.embedding[7] = float("nan")  # token 7 breaks whichever row holds it
    target = Target(loaded, num_pages=64, page_size=4)
    own = [[t if t != 7 else 8 for t in text] for text in texts(2, 12)]
    broken = Rows(target, [[*own[0][:2], 7, *own[0][3:]], own[1]], expected=32)
    first = broken.step([12, 8])
    assert first[0][2:].isnan().all()
    assert first[1].isfinite().all()
    home = broken.tables[0].pages[0]
    broken.tables[0].release()
    after = Rows(target, [own[0]], expected=32)
    after.step([2])
    assert after.tables[0].pages[0] == home
    # The short row is viewed as far as the long one: it looks (masked) at what the broken one left.
    both = target.forward(
        [
            ForwardRow(own[0][2:3], 2, after.tables[0].pages, 1),
            ForwardRow(own[1][8:9], 8, table_row(broken, 1, 9), 1),
        ]
    ).logits
    assert both.isfinite().all()


def table_row(rows: Rows, index: int, tokens: int) -> list[int]:
    assert rows.tables[index].reserve(tokens)
    return rows.tables[index].pages


def test_targets_share_weights_but_not_caches() -> None:
    loaded = tiny_model(seed=5)
    a, b = (Target(loaded, num_pages=8, page_size=4) for _ in range(2))
    pages = table_of(a, 8)
    a.forward([ForwardRow(list(range(8)), 0, pages, 1)])
    assert a.read_cache(pages, 8).abs().sum() > 0
    assert b.read_cache(pages, 8).abs().sum() == 0
    assert (a.forwards, b.forwards) == (1, 0)


def test_a_large_pool_costs_nothing_until_used() -> None:
    Target(tiny_model(), num_pages=4_000_000)  # 16 GB of zero pages


def test_pages_must_cover_the_row() -> None:
    target = Target(tiny_model(), num_pages=8, page_size=4)
    with pytest.raises(ValueError, match="need 2 pages"):
        target.forward([ForwardRow([1, 2, 3], 2, [0], 1)])
    with pytest.raises(ValueError, match="at least one row"):
        target.forward([])


def test_rows_of_like_length_share_a_kernel_call() -> None:
    rows = [place(i, 1, 10 + i, range(8 * i, 8 * i + 8), 4) for i in range(16)]
    assert [len(run.rows) for run in arrange(rows)] == [16]
    without = [r for r in rows if r.order not in (3, 8)]
    (run,) = arrange(without)
    assert run.at == [r.order for r in without]
    lone = place(16, 1, 300, range(200, 300), 4)
    assert sorted(len(run.rows) for run in arrange([*rows, lone])) == [1, 16]


def test_bf16_batches_agree_with_single_rows() -> None:
    loaded = tiny_model(seed=5, dtype=torch.bfloat16)
    single = [Rows(Target(loaded, num_pages=64, page_size=4), [t]) for t in texts(5, 30)]
    together = Rows(Target(loaded, num_pages=512, page_size=4), texts(5, 30))
    for lengths in ([20, 4, 9, 2, 17], [1] * 5, [4, 2, 1, 3, 1]):
        batch = together.step(list(lengths))
        for i, rows in enumerate(single):
            alone = rows.step([lengths[i]])[0].float()
            assert (batch[i].float() - alone).abs().max() < 0.06 * alone.abs().max()


def test_a_broken_row_does_not_harm_the_rows_it_runs_with() -> None:
    loaded = tiny_model(seed=5, tie_word_embeddings=False)
    loaded.model.embedding[7] = float("nan")
    own = [[t if t != 7 else 8 for t in text] for text in texts(4, 30)]
    texts_with_one_broken = [own[0], [7] * 30, own[2], own[3]]
    rows = Rows(Target(loaded, num_pages=64, page_size=4), texts_with_one_broken, expected=8)
    alone = [Rows(Target(loaded, num_pages=64, page_size=4), [t]) for t in texts_with_one_broken]
    for lengths in ([2, 2, 2, 7], [1, 1, 1, 8], [1, 1, 1, 1]):
        together = rows.step(list(lengths))
        for i, length in enumerate(lengths):
            expected = alone[i].step([length])[0]
            torch.testing.assert_close(together[i], expected, atol=1e-4, rtol=1e-4, equal_nan=True)
            assert expected.isnan().any() == (i == 1)


@pytest.mark.parametrize(("dim", "fits"), [(8, False), (16, True), (96, False), (128, True)])
def test_head_sizes_the_kernels_cannot_tile_are_one_sentence(dim, fits):
    config = tiny_model(head_dim=dim).config
    if fits:
        require_kernel_shape(config)
    else:
        with pytest.raises(ModelError, match=f"head_dim is {dim}"):
            require_kernel_shape(config)
