"""One of the processes of `test_parallel`: trains as its rank says and leaves what it saw."""

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from typer.testing import CliRunner

from slipstream import train_command
from slipstream.cli import app
from slipstream.errors import InvalidConfig
from slipstream.models.loading import load
from slipstream.train.parallel import world_of
from slipstream.train.recipes import Shape, make
from slipstream.train.shards import read_shards
from slipstream.train.trainer import Plan, Trainer

PLAN = Plan(steps=4, batch=2, anchors=8, held_out=0.1, reports=2, lr=1e-3)


def network(loaded, seed):
    return make("dflash", loaded.model, Shape(draft_len=3, taps=2, mask_token_id=319), seed=seed)


class Process:
    """What a rank does, in the order that all do it."""

    def __init__(self, folder, world):
        self.folder, self.world = folder, world
        self.loaded = load(folder / "target", dtype=torch.float32)
        self.texts = read_shards(folder / "texts", target=self.loaded.fingerprint)
        self.seen = {"rank": world.rank, "size": world.size}

    def trainer(self, out, plan=PLAN):
        """Every rank begins with other weights: the first one's have to win."""
        net = network(self.loaded, seed=self.world.rank)
        said = self.seen.setdefault(f"said {out}", [])
        return Trainer(
            self.loaded,
            net,
            self.texts,
            plan,
            out=self.folder / out,
            say=said.append,
            world=self.world,
        )

    def whole_and_resumed(self):
        trainer = self.trainer("whole")
        trainer.run()
        self.keep("whole", trainer)
        cut = self.trainer("cut")
        step = cut._train
        cut._train = lambda: step() if cut.step < 3 else 1 / 0
        try:
            cut.run()
        except ZeroDivisionError:
            self.seen["cut at"] = cut.step
        again = self.trainer("cut")
        self.seen["resumed at"] = again.step
        again.run()
        self.keep("cut", again)

    def keep(self, name, trainer):
        tensors = {n: t.detach() for n, t in trainer.network.tensors.items()}
        torch.save(tensors, self.folder / f"{name}-{self.world.rank}.pt")

    def by_the_clock(self):
        """The others' clocks say something else."""
        minutes = 0.01 if self.world.is_first else 0.0001
        plan = Plan(minutes=minutes, batch=2, anchors=8, reports=1)
        trainer = self.trainer("clock", plan)
        trainer.run()
        self.seen["clock steps"] = trainer.step

    def without_a_common_folder(self):
        out = "whole" if self.world.is_first else "elsewhere"
        try:
            self.trainer(out)
        except InvalidConfig as error:
            self.seen["apart"] = str(error)

    def command(self, device):
        @contextmanager
        def same(wanted):
            yield self.world, wanted

        train_command.world_of = same
        given = ["train", "mtp", "--target", str(self.folder / "target"), "--device", device]
        given += ["--draft-len", "2", "--steps", "2", "--batch", "1", "--anchors", "4"]
        given += ["--out", str(self.folder / "command")]
        done = CliRunner().invoke(app, [*given, "--texts", str(self.folder / "texts")])
        self.seen["command"] = [done.exit_code, done.output]
        done = CliRunner().invoke(app, given)
        self.seen["no texts"] = [done.exit_code, done.output]


def main(folder):
    with world_of("cpu") as (world, device):
        process = Process(folder, world)
        process.whole_and_resumed()
        process.by_the_clock()
        process.without_a_common_folder()
        process.command(device)
    (folder / f"seen-{world.rank}.json").write_text(json.dumps(process.seen))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
