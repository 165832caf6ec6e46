"""Cards of drafters that ship: what the records say, and never about other weights than these."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from slipstream.drafters import weights
from slipstream.errors import InvalidConfig
from slipstream.lab import cards
from slipstream.models.loading import load
from slipstream.models.stored import write_compact
from slipstream.models.tiny import save_tiny
from slipstream.train.recipes import Shape, make

ROOT = Path(__file__).resolve().parents[2]
TRAINING = {
    "data": "answers of the target to 9 prompts",
    "tokens": 1234567,
    "recipe": {"steps": 10, "minutes": None, "lr": 0.001},
    "command": "slipstream train mtp --steps 10",
    "seed": 3,
    "hardware": "one of the machines",
}
CLASS = {
    "answers": 24,
    "looping": 5,
    "tokens_per_step": 2.345,
    "acceptance_rate": 0.5,
    "by_position": [0.75, 0.5, None],
}
ACCEPTANCE = {
    "drafter": "mtp:3",
    "weights": "abc",
    "command": "python bench/drafter_cards.py mtp:3",
    "time": "2026-11-30T00:00:00Z",
    "device": "a machine",
    "dtype": "bfloat16",
    "users": 8,
    "max_tokens": 96,
    "classes": {"chat": CLASS, "edit": {**CLASS, "by_position": [0.9], "tokens_per_step": None}},
}


def described(acceptance=ACCEPTANCE):
    return cards.Shipped(
        method="mtp",
        target="smollm2-135m",
        parameters=4205376,
        size=4221992,
        digest="abc",
        training=TRAINING,
        acceptance=acceptance,
    )


def test_a_card_says_all_that_the_records_say():
    text = cards.card(described())
    said = [
        "mtp drafter for smollm2-135m",
        "`--drafter mtp:3`",
        "4,205,376 parameters of its own, 4.2 MB",
        "answers of the target to 9 prompts; 1,234,567 tokens",
        "steps 10, lr 0.001",
        "`slipstream train mtp --steps 10`, seed 3",
        "one of the machines",
        "| chat | 2.35 | 0.50 | 0.75 | 0.50 | - | 5 of 24 |",
        "| edit | - | 0.50 | 0.90 | - | - | 5 of 24 |",
    ]
    assert [s for s in said if s not in text] == []


def test_what_was_not_measured_is_not_claimed():
    text = cards.card(described(None))
    assert text.endswith("Not measured yet.\n")
    assert "`--drafter mtp`" in text
    rows = cards.table([described(), described(None)]).splitlines()[2:]
    assert rows == [
        "| `mtp:3` | 4.2 M | 4.2 MB | 2.35 | - | - | - |",
        "| `mtp` | 4.2 M | 4.2 MB | - | - | - | - |",
    ]
    assert cards.table([]) == "No drafter ships in this version.\n"


def test_a_record_lacks_nothing_and_is_a_table(tmp_path):
    path = tmp_path / "training.json"
    assert cards.read_record(path, cards.NEEDED) is None
    for text, complaint in [
        (json.dumps({**TRAINING} | {"x": 1}), None),
        (
            json.dumps({k: v for k, v in TRAINING.items() if k not in ("seed", "data")}),
            "data, seed",
        ),
        ("[]", "a table"),
        ("{", "is not JSON"),
    ]:
        path.write_text(text)
        if complaint is None:
            assert cards.read_record(path, cards.NEEDED)["tokens"] == 1234567
        else:
            with pytest.raises(InvalidConfig, match=complaint):
                cards.read_record(path, cards.NEEDED)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """The bench, whose shipped set and page lie in a folder of the test's own."""
    place = importlib.util.spec_from_file_location("cards_bench", ROOT / "bench/drafter_cards.py")
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    monkeypatch.setattr(weights, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(module, "PAGE", tmp_path / "drafters.md")
    return module


def test_the_bench_measures_in_the_engine_and_sees_what_is_stale(bench, tmp_path, capsys):
    save_tiny(tmp_path / "model", max_position_embeddings=16384)
    target = load(tmp_path / "model", dtype=torch.float32)
    folder = tmp_path / "shipped/tiny/mtp"

    def ship(seed):
        network = make("mtp", target.model, Shape(draft_len=3, mask_token_id=319), seed=seed)
        network.save(tmp_path / f"plain{seed}", network.tensors)
        write_compact(tmp_path / f"plain{seed}", folder, method="mtp", target=target)

    ship(1)
    model = ["--model", str(tmp_path / "model")]
    assert bench.main(["mtp:2", "--prompts", "2", "--tokens", "4", *model]) == 2
    assert "has no training.json" in capsys.readouterr().err
    (folder / "training.json").write_text(json.dumps(TRAINING))
    assert bench.main(["--check"]) == 1
    assert bench.main([]) == 0
    assert bench.main(["--check"]) == 0
    found = json.loads((folder / "acceptance.json").read_text())
    assert list(found["classes"]) == ["chat", "code", "doc", "edit"]
    for values in found["classes"].values():
        assert values["answers"] == 2
        # A prompt's step commits the first of four tokens, decode steps the other three.
        assert values["committed"] <= 2 * 3
        assert values["tokens_per_step"] == values["committed"] / values["row_steps"]
        assert 0 < len(values["by_position"]) <= 2
        assert values["accepted"] <= values["drafted"] > 0
    assert "`mtp:2`" in (tmp_path / "drafters.md").read_text()
    card = (folder / "README.md").read_text()
    assert f"{found['classes']['doc']['tokens_per_step']:.2f}" in card
    (folder / "README.md").write_text(card + "more")
    assert bench.main(["--check"]) == 1
    ship(2)
    capsys.readouterr()
    assert bench.main(["--check"]) == 2
    assert "was measured with other weights" in capsys.readouterr().err
    assert bench.main(["ngram:3"]) == 2
    assert "no weights of its own" in capsys.readouterr().err
