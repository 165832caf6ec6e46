"""Two processes of torchrun train one drafter: as one would whose batch is both of theirs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.errors import InvalidConfig
from slipstream.models.loading import load
from slipstream.models.tiny import save_tiny, tiny_model
from slipstream.train import parallel
from slipstream.train.data import Features, text_of
from slipstream.train.optimizer import Optimizer
from slipstream.train.parallel import World, world_of
from slipstream.train.recipes import RECIPES, Shape, make
from slipstream.train.shards import write_shard
from slipstream.train.trainer import Plan, Trainer

sys.path.insert(0, str(Path(__file__).parent))
from parallel_worker import PLAN, network

torch.set_num_threads(1)
LOADED = tiny_model("llama")
LONG_ENOUGH = 240  # seconds, for a machine that does other things too


def some_texts(count=12):
    rng = np.random.default_rng(3)
    return [text_of(rng.integers(3, 300, 20 + 3 * i).tolist(), [5] * 12) for i in range(count)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder that two processes trained in, and what each saw."""
    folder = tmp_path_factory.mktemp("parallel")
    save_tiny(folder / "target")
    target = load(folder / "target", dtype=torch.float32).fingerprint
    write_shard(folder / "texts", "texts-0", some_texts(), target=target, more={})
    worker = Path(__file__).with_name("parallel_worker.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with subprocess.Popen(
        [*torchrun, "--nproc-per-node", "2", str(worker), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        try:
            told, _ = running.communicate(timeout=LONG_ENOUGH)
        except subprocess.TimeoutExpired:
            running.terminate()  # torchrun ends its processes then
            raise
    assert running.returncode == 0, told[-3000:]
    return folder, [json.loads((folder / f"seen-{r}.json").read_text()) for r in range(2)]


def expected(folder, monkeypatch):
    """Weights after the plan's steps with the mean of both ranks' gradients, in one process."""
    with monkeypatch.context() as patch:
        patch.setattr(World, "joined", lambda self, network: network.loss)
        patch.setattr(World, "of_first", lambda self, value: value)
        net = network(LOADED, seed=0)
        texts = some_texts()
        ranks = [
            Trainer(LOADED, net, texts, PLAN, out=folder / f"one-{r}", world=World(r, 2))
            for r in range(2)
        ]
    optimizer = Optimizer(net.tensors, kind=PLAN.optimizer, lr=PLAN.lr)
    for step in range(PLAN.steps):
        for rank in ranks:
            rank.step, rank._share = step, step / PLAN.steps
            batch = rank._features.batch(*rank._picked())
            (net.loss(batch) / 2).backward()
        torch.nn.utils.clip_grad_norm_(list(net.tensors.values()), PLAN.clip)
        optimizer.step(ranks[0]._rate())
    return net.tensors


def test_both_ranks_learn_from_both_and_resume(trained, tmp_path, monkeypatch):
    folder, seen = trained
    wanted = expected(tmp_path, monkeypatch)
    start = network(LOADED, seed=0).tensors
    for name in ("whole", "cut"):
        first, second = (torch.load(folder / f"{name}-{rank}.pt") for rank in range(2))
        for key, tensor in wanted.items():
            assert torch.equal(first[key], second[key])
            torch.testing.assert_close(first[key], tensor.detach(), atol=1e-5, rtol=1e-4)
    assert any(not torch.allclose(start[n], t, atol=1e-4) for n, t in wanted.items())
    assert [s["cut at"] for s in seen] == [3, 3]
    assert [s["resumed at"] for s in seen] == [2, 2]


def test_only_the_first_speaks_and_writes(trained):
    folder, (first, second) = trained
    assert (first["size"], second["rank"]) == (2, 1)
    said = [line.split()[1] for line in first["said whole"] if line.startswith("step")]
    assert said == ["2/4", "4/4"]
    assert second["said whole"] == second["said cut"] == []
    assert first["command"][0] == second["command"][0] == 0
    assert "Checkpoint, plot and card" in first["command"][1]
    assert second["command"][1] == ""
    record = json.loads((folder / "command" / "training.json").read_text())
    assert record["recipe"]["processes"] == 2
    assert not list((folder / "elsewhere").iterdir())
    assert len((folder / "whole" / "history.jsonl").read_text().splitlines()) == 2


def test_the_first_ones_clock_ends_it_for_all(trained):
    _, (first, second) = trained
    assert first["clock steps"] == second["clock steps"] > 1


def test_what_several_cannot_do_is_said(trained):
    _, seen = trained
    assert "holds the checkpoint for some of the processes only" in seen[1]["apart"]
    for one in seen:
        assert one["no texts"][0] == 2
        assert "texts is not given and 2 processes train; make texts first" in one["no texts"][1]


def test_together_they_pick_what_one_would(tmp_path, monkeypatch):
    monkeypatch.setattr(World, "joined", lambda self, network: network.loss)
    monkeypatch.setattr(World, "of_first", lambda self, value: value)

    def picked(batch, world):
        plan = Plan(steps=3, batch=batch, anchors=4)
        out = tmp_path / f"{batch}-{world.rank}-{world.size}"
        net = network(LOADED, seed=0)
        trainer = Trainer(LOADED, net, some_texts(), plan, out=out, world=world)
        texts, where = trainer._picked()
        return {tuple(t.tokens): tuple(a) for t, a in zip(texts, where)}

    alone = picked(6, World())
    parts = [picked(2, World(rank, 3)) for rank in range(3)]
    assert [len(p) for p in parts] == [2, 2, 2]
    assert {k: v for p in parts for k, v in p.items()} == alone
    with pytest.raises(InvalidConfig, match="9 texts are too few for 10 processes"):
        Trainer(
            LOADED, network(LOADED, 0), some_texts(10), Plan(), out=tmp_path, world=World(0, 10)
        )


@pytest.mark.parametrize("draft_vocab", [None, 40])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_weight_gets_a_gradient_in_every_step(recipe, draft_vocab):
    """What torch's wrapper waits for; else it would have to look for those that get none."""
    takes = {} if recipe in ("mtp", "eagle3") else {"taps": 2}
    loaded = tiny_model("llama", layers=4)
    shape = Shape(draft_len=3, mask_token_id=319, draft_vocab=draft_vocab, **takes)
    net = make(recipe, loaded.model, shape, seed=0, counts=torch.arange(320))
    texts = some_texts(2)
    batch = Features(loaded, net.needs, longest=300).batch(texts, np.array([[3, 9], [4, 20]]))
    net.loss(batch).backward()
    assert [n for n, t in net.tensors.items() if t.grad is None] == []


def test_devices_of_several_processes(monkeypatch):
    with world_of("cpu") as (world, device):
        assert (world.size, device) == (1, "cpu")
    monkeypatch.setattr(parallel.distributed, "is_torchelastic_launched", lambda: True)
    for name, value in (("WORLD_SIZE", "4"), ("LOCAL_RANK", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device, says in (
        ("cuda", "asks for 3 processes or more, but this machine has 2 GPUs"),
        ("cuda:1", "device is 'cuda:1', but each of 4 processes takes its own"),
    ):
        with pytest.raises(InvalidConfig, match=says), world_of(device):
            raise AssertionError("not reached")
