"""`slipstream train`: texts from the target, training, checkpoint, plot and card."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream import provenance
from slipstream.engine import LLM
from slipstream.engine.llm import Prompt
from slipstream.errors import InvalidConfig
from slipstream.lab.cards import TRAINING
from slipstream.lab.prompts import from_file
from slipstream.train.begin import go_on_from
from slipstream.train.data import Text, own_answers, self_prompts
from slipstream.train.parallel import World, world_of
from slipstream.train.recipes import RECIPES, Shape, make
from slipstream.train.shards import own_tokens, read_shards
from slipstream.train.trainer import HISTORY, Plan, Trainer, silent
from slipstream.types import SamplingParams

Say = Callable[[str], None]

_LITTLE = 4096
"""Tokens of the cache of an engine that only brings its target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the command line asked for. `texts`: a folder of `slipstream texts`; else `prompts`: a
    JSONL file, or None to have the target make up `count` prompts of its own. `begin`: a checkpoint
    to train on, None for random weights.
    """

    recipe: str
    target: str
    out: Path
    texts: Path | None
    prompts: Path | None
    count: int
    max_tokens: int
    temperature: float
    device: str | None
    begin: Path | None = None


def run_train(order: Order, shape: Shape, plan: Plan, *, say: Say) -> None:
    """Train, export to `order.out`, and write `loss.svg`, the card `README.md` and what it says for
    machines (`training.json`, see `lab.cards`) beside it. Several processes of torchrun train
    together.

    Raises `InvalidConfig` for unknown recipes and values that make no sense.
    """
    _check(order, plan)
    with world_of(order.device) as (world, device):
        if world.size > 1 and order.texts is None:
            raise InvalidConfig(
                f"texts is not given and {world.size} processes train; make texts first with "
                "`slipstream texts` and give their folder."
            )
        trainer, texts = _trainer(order, shape, plan, world, device, say=say)
        trainer.run()
        if world.is_first:
            draw_loss(order.out)
            record = _record(order, plan, trainer, texts)
            written = json.dumps(record, indent=1) + "\n"
            (order.out / TRAINING).write_text(written, encoding="utf-8")
            (order.out / "README.md").write_text(_card(order, trainer, record), encoding="utf-8")
            use = f"--drafter {order.recipe}:{order.out}"
            say(f"Checkpoint, plot and card: {order.out}. Use it: {use}")


def _check(order: Order, plan: Plan) -> None:
    if order.recipe not in RECIPES:
        raise InvalidConfig(f"recipe is {order.recipe!r}; choose one of {', '.join(RECIPES)}.")
    for name, value in (
        ("count", order.count),
        ("steps", plan.steps),
        ("batch", plan.batch),
        ("anchors", plan.anchors),
    ):
        if value < 1:
            raise InvalidConfig(f"{name} is {value}; allowed: 1 or more.")
    if plan.minutes is not None and plan.minutes <= 0:
        raise InvalidConfig(f"minutes is {plan.minutes}; allowed: above 0.")


def _trainer(
    order: Order, shape: Shape, plan: Plan, world: World, device: str, *, say: Say
) -> tuple[Trainer, list[Text]]:
    """Ready to run, and the texts it learns from and is measured on."""
    say = say if world.is_first else silent
    dtype = "bfloat16" if device.startswith("cuda") else "float32"
    kv_tokens = _LITTLE if order.texts else None  # nothing is asked then
    llm = LLM(order.target, drafter="ngram:3", dtype=dtype, device=device, kv_tokens=kv_tokens)
    texts = _texts(llm, order, seed=plan.seed, say=say)
    network = make(
        order.recipe,
        llm.loaded.model,
        replace(shape, mask_token_id=mask_token(llm)),
        seed=plan.seed,
        counts=_counts(texts, llm.loaded.config.vocab_size),
    )
    if order.begin is not None:
        go_on_from(network, order.begin, llm.loaded.model)
    trainer = Trainer(llm.loaded, network, texts, plan, out=order.out, say=say, world=world)
    return trainer, texts


def mix_of(text: str) -> dict[str, float]:
    """Weights by kind of `code=2,chat=0.5`. Raises `InvalidConfig` for what does not read so."""
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        kind, _, weight = part.partition("=")
        try:
            found[kind.strip()] = float(weight)
        except ValueError as error:
            raise InvalidConfig(
                f"mix has the part {part!r}; write KIND=WEIGHT, as in code=2,chat=0.5."
            ) from error
    return found


def mask_token(llm: LLM) -> int:
    """A token that text never holds: the last special one that means nothing, else the last id."""
    config = llm.loaded.config
    added = getattr(llm.tokenizer, "added_tokens_decoder", {})
    taken = {*config.eos_token_ids, llm.tokenizer.bos_token_id, llm.tokenizer.pad_token_id}
    free = [i for i, token in added.items() if token.special and i not in taken]
    return max((i for i in free if i < config.vocab_size), default=config.vocab_size - 1)


def draw_loss(out: Path) -> None:
    """`loss.svg` of the history in a training's folder: loss and held-out tokens per step."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    lines = [json.loads(line) for line in (out / HISTORY).read_text().splitlines()]
    steps = [line["step"] for line in lines]
    figure = Figure(figsize=(5.0, 3.0), layout="constrained")
    FigureCanvasSVG(figure)
    left = figure.add_subplot()
    left.plot(steps, [line["loss"] for line in lines], color="#2f86c8")
    left.set_xlabel("step")
    left.set_ylabel("loss", color="#2f86c8")
    right = left.twinx()
    right.plot(steps, [1 + sum(line["acceptance"]) for line in lines], color="#d9822b")
    right.set_ylabel("tokens per step, teacher-forced", color="#d9822b")
    figure.savefig(out / "loss.svg", metadata={"Date": None})


def _counts(texts: list[Text], vocab: int) -> Tensor:
    """How often the target says each token."""
    own = np.concatenate([t.tokens[t.prompt_len :] for t in texts])
    return torch.from_numpy(np.bincount(own, minlength=vocab))


def _texts(llm: LLM, order: Order, *, seed: int, say: Say) -> list[Text]:
    if order.texts is not None:
        texts = read_shards(order.texts, target=llm.loaded.fingerprint)
        say(f"{len(texts)} texts, {own_tokens(texts):,} tokens of the target's own.")
        return [texts[i] for i in np.random.default_rng(seed).permutation(len(texts))]
    if order.prompts is not None:
        given = from_file(order.prompts)
        prompts: list[Prompt] = [list(p.messages) if p.messages else p.content() for p in given]
    else:
        say(f"The target makes up {order.count} prompts.")
        prompts = self_prompts(llm, order.count, seed=seed)
        if not prompts:
            raise InvalidConfig(f"{llm.loaded.name} made up no prompt; give a file of prompts.")
    say(f"The target answers {len(prompts)} prompts.")
    params = SamplingParams(
        max_tokens=order.max_tokens, temperature=order.temperature, top_p=0.95, seed=seed
    )
    texts = own_answers(llm, prompts, params)
    say(f"{len(texts)} texts, {own_tokens(texts):,} tokens of the target's own.")
    return texts


def _record(order: Order, plan: Plan, trainer: Trainer, texts: list[Text]) -> dict[str, Any]:
    """What the drafter was made of and how good it is, teacher-forced, on `held_out` texts."""
    found = trainer.acceptance()
    source = order.prompts.name if order.prompts else f"{order.count} of the target's own"
    heat = f", temperature {order.temperature}"
    if order.texts is not None:
        kinds = Counter(t.kind for t in texts)
        source, heat = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())), ""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    settings = {key: value for key, value in asdict(plan).items() if value is not None}
    if plan.minutes is not None:
        del settings["steps"]  # not what ended it
    del settings["mix"]
    if plan.mix:
        settings["mix"] = " ".join(f"{kind}={weight:g}" for kind, weight in plan.mix.items())
    if trainer.world.size > 1:
        settings["processes"] = trainer.world.size  # each had its own batch
    return {
        "data": f"prompts {source}; {len(texts)} answers of the target{heat}",
        "tokens": own_tokens(texts),
        "recipe": {"name": order.recipe, **settings, "steps done": trainer.step},
        "command": shlex.join(["slipstream", *sys.argv[1:]]),
        "seed": plan.seed,
        "hardware": gpu or provenance.machine()["cpu"],
        "time": provenance.now(),
        "slipstream": provenance.versions()["slipstream"],
        "commit": provenance.commit(),
        "held_out": bool(trainer.held),
        "tokens_per_step": found.tokens_per_step,
        "by_position": found.by_position,
    }


def _card(order: Order, trainer: Trainer, record: dict[str, Any]) -> str:
    size = sum(t.numel() for t in trainer.network.tensors.values())
    what = "held-out" if record["held_out"] else "trained-on"
    settings = ", ".join(f"{key}={value}" for key, value in record["recipe"].items())
    positions = " | ".join(str(i + 1) for i in range(len(record["by_position"])))
    shares = " | ".join(f"{share:.3f}" for share in record["by_position"])
    return f"""# {order.recipe} drafter for {order.target}

- {size:,} parameters of its own, drafts up to {trainer.network.draft_len} tokens, reads the
  target's hidden states {list(trainer.network.needs)} (0: embeddings, i + 1: after layer i)
- data: {record["data"]}, {record["tokens"]:,} tokens
- recipe: {settings}
- made {record["time"]} on {record["hardware"]}, slipstream {record["slipstream"]}

Acceptance by position, teacher-forced, greedy, {what} texts
({record["tokens_per_step"]:.2f} tokens per step):

| {positions} |
|{"---|" * len(record["by_position"])}
| {shares} |
"""
