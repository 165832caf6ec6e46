"""`slipstream texts` writes as it goes: an interruption costs a round, and nothing is doubled."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from slipstream import texts_command, texts_maker
from slipstream.cli import app
from slipstream.errors import InvalidConfig
from slipstream.models.tiny import save_tiny
from slipstream.texts_maker import Maker
from slipstream.train.data import text_of
from slipstream.train.shards import read_shards, resumed, write_shard


@pytest.fixture
def ask(tmp_path):
    """Runs the command: exit code and output."""
    save_tiny(tmp_path / "target", max_position_embeddings=1024)

    def run(folder, tokens, *more):
        target = ["--target", str(tmp_path / "target"), "--out", str(tmp_path / folder)]
        sizes = ["--tokens", str(tokens), "--max-tokens", "8", "--users", "2", "--device", "cpu"]
        done = CliRunner().invoke(app, ["texts", *target, *sizes, *more])
        return done.exit_code, done.output

    return run


def shard(folder):
    """Manifest, and the texts as tuples."""
    said = json.loads((folder / "texts-0.json").read_text())
    texts = read_shards(folder, target=said["target"])
    return said, [(t.kind, t.prompt_len, *t.tokens.tolist()) for t in texts]


def made_up(self, turn):
    """A round without a target: two texts that say which round they are of."""
    return [text_of([5, 6], [turn + 10, 7, 8], kind) for kind in ("json", "chat")]


def stops_at(last, real):
    """Rounds as `real` makes them, and Ctrl-C while the `last` is made."""

    def round_(self, turn):
        made = real(self, turn)
        if turn == last:
            raise KeyboardInterrupt
        return made

    return round_


def test_an_interrupted_one_goes_on_as_if_nothing_had_been(ask, tmp_path, monkeypatch):
    monkeypatch.setattr(texts_maker, "self_prompts", lambda *_, **__: [])  # slow, and none
    with monkeypatch.context() as patch:
        patch.setattr(Maker, "round", stops_at(1, Maker.round))
        code, told = ask("cut", 10_000)
        assert code == 130
        assert "interrupted; what was written is kept" in told
        assert "are there already" not in told
    said, first = shard(tmp_path / "cut")
    assert said["rounds"] == 1
    assert len(first) == said["texts"] > 0
    more = said["own_tokens"] + 1
    code, told = ask("cut", more)
    assert code == 0, told
    assert f"{len(first)} texts, {said['own_tokens']:,} tokens are there already" in told
    assert ask("whole", more)[0] == 0
    (whole, expected), (cut, found) = shard(tmp_path / "whole"), shard(tmp_path / "cut")
    assert whole["rounds"] == cut["rounds"] == 2
    assert found == expected
    assert found[: len(first)] == first


def test_a_complete_one_is_left_as_it_is(ask, tmp_path, monkeypatch):
    monkeypatch.setattr(Maker, "round", made_up)
    assert ask("texts", 8)[0] == 0
    before = (tmp_path / "texts" / "texts-0.json").read_bytes()
    monkeypatch.setattr(Maker, "round", None)
    code, told = ask("texts", 8)
    assert code == 0, told
    assert (tmp_path / "texts" / "texts-0.json").read_bytes() == before
    assert {f.name for f in (tmp_path / "texts").iterdir()} == {"texts-0.npz", "texts-0.json"}


def test_time_before_the_interruption_counts(ask, tmp_path, monkeypatch):
    monkeypatch.setattr(Maker, "round", made_up)
    assert ask("texts", 2)[0] == 0
    manifest = tmp_path / "texts" / "texts-0.json"
    said = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**said, "seconds": 61}))
    assert ask("texts", 50, "--minutes", "1")[0] == 0
    assert shard(tmp_path / "texts")[0]["rounds"] == 1
    assert ask("texts", 50, "--minutes", "2")[0] == 0
    assert shard(tmp_path / "texts")[0]["rounds"] == 9  # of 6 tokens


def test_large_shards_are_not_written_after_every_round(ask, tmp_path, monkeypatch):
    monkeypatch.setattr(Maker, "round", made_up)
    seen, real = [], write_shard

    def write(folder, name, texts, **how):
        seen.append(len(texts))
        return real(folder, name, texts, **how)

    monkeypatch.setattr(texts_command, "write_shard", write)
    assert ask("seldom", 24)[0] == 0
    assert seen == [2, 8]  # the first, to see that it can, and the end
    monkeypatch.setattr(texts_command, "_BETWEEN", 0)
    monkeypatch.setattr(texts_command, "_RESERVED", 0)
    seen.clear()
    assert ask("often", 24)[0] == 0
    assert seen == [2, 4, 6, 8]


def test_what_was_made_otherwise_is_not_mixed(ask, tmp_path, monkeypatch):
    monkeypatch.setattr(Maker, "round", made_up)
    assert ask("texts", 2)[0] == 0
    code, told = ask("texts", 50, "--users", "3")
    assert code == 2
    assert "holds texts made with users 2, not 3; take another seed, or delete it" in told
    (tmp_path / "texts" / "texts-0.json").write_text("[]")
    assert "texts-0.json is no manifest of texts" in ask("texts", 50)[1]


def test_a_write_cut_off_between_its_files_is_undone(tmp_path, monkeypatch):
    """The texts are new then, and the manifest old."""
    texts = [text_of([3, 4], [10 + i, 20], kind) for i, kind in enumerate(["own", "own", "chat"])]
    write_shard(tmp_path, "texts-0", texts[:2], target="t", more={"rounds": 1})
    real = Path.replace

    def replace(self, target):
        if target.suffix == ".json":
            raise KeyboardInterrupt
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            write_shard(tmp_path, "texts-0", texts, target="t", more={"rounds": 2})
    with np.load(tmp_path / "texts-0.npz") as held:
        assert len(held["ends"]) == 3
    found, said = resumed(tmp_path, "texts-0", target="t", how={})
    assert said["rounds"] == 1
    assert [t.kind for t in found] == ["own", "own"]
    assert [t.tokens.tolist() for t in found] == [t.tokens.tolist() for t in texts[:2]]
    assert len(read_shards(tmp_path, target="t")) == 2
    write_shard(tmp_path, "texts-0", texts, target="t", more={"rounds": 2})
    assert [t.kind for t in read_shards(tmp_path, target="t")] == ["own", "own", "chat"]
    write_shard(tmp_path, "few", texts[:1], target="t", more={})
    (tmp_path / "few.npz").replace(tmp_path / "texts-0.npz")
    with pytest.raises(InvalidConfig, match="has 1 texts of 3; make it again"):
        resumed(tmp_path, "texts-0", target="t", how={})
