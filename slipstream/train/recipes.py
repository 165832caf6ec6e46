"""The recipes there are, by the name of the drafter they train."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

from slipstream.errors import InvalidConfig
from slipstream.models.dense import Model
from slipstream.models.dspark import MARKOV, DSparkConfig
from slipstream.models.mtp import head_config
from slipstream.train import dflash, dflash2, dspark, eagle3, mtp
from slipstream.train.recipe import Network

_TAKES: dict[str, tuple[str, ...]] = {
    "mtp": ("soft",),
    "eagle3": (),
    "dflash": ("layers", "taps", "d_pace", "soft"),
    "dflash2": ("layers", "taps", "d_pace", "soft", "rank"),
    "dspark": ("layers", "taps", "markov", "rank"),
}
"""What of a `Shape` a recipe takes, beside what all take."""
_ALL_TAKE = ("draft_len", "intermediate_size", "draft_vocab", "mask_token_id")

RECIPES = tuple(_TAKES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What may be chosen of a drafter's size and loss; a recipe takes what it knows. `draft_len`:
    tokens it is trained to draft. `d_pace`: D-PACE weights of the block loss. `soft`: learn the
    target's law, not its tokens. `markov`: DSpark's Markov head, of `rank`, which is also the rank
    of DFlash2's selector. `draft_vocab`: how many of the texts' most frequent tokens it may draft,
    None for all. `mask_token_id`: a token that text never holds.
    """

    draft_len: int
    layers: int = 1
    taps: int = 3
    intermediate_size: int | None = None
    d_pace: bool = False
    soft: bool = False
    markov: str = "vanilla"
    rank: int = 64
    draft_vocab: int | None = None
    mask_token_id: int = 0


def make(
    recipe: str, target: Model, shape: Shape, *, seed: int, counts: Tensor | None = None
) -> Network:
    """A network of random weights, ready to be trained. `counts` int64 [vocab]: how often the texts
    hold each token, for `draft_vocab`.

    Raises `InvalidConfig` for an unknown recipe, for sizes that do not fit the target, and for what
    the recipe does not take.
    """
    if recipe not in RECIPES:
        raise InvalidConfig(f"recipe is {recipe!r}; choose one of {', '.join(RECIPES)}.")
    if not 1 <= shape.draft_len <= 32:
        raise InvalidConfig(f"draft_len is {shape.draft_len}; allowed: 1 to 32.")
    for name, default in ((f.name, f.default) for f in fields(Shape) if f.name not in _ALL_TAKE):
        value = getattr(shape, name)
        if name not in _TAKES[recipe] and value != default:
            takers = ", ".join(r for r, taken in _TAKES.items() if name in taken)
            raise InvalidConfig(f"{name} is {value!r}; {recipe} does not take it, {takers} do.")
    if shape.d_pace and shape.soft:
        raise InvalidConfig("d_pace and soft are both set; they exclude each other, choose one.")
    vocab = _frequent(counts, shape.draft_vocab, target.config.vocab_size)
    if recipe == "eagle3":
        own = eagle3.draft_config(
            target.config,
            intermediate_size=shape.intermediate_size,
            draft_vocab=shape.draft_vocab,
        )
        return eagle3.Eagle3Network(own, target, steps=shape.draft_len, seed=seed, vocab=vocab)
    if recipe == "mtp":
        head = head_config(
            target.config,
            intermediate_size=shape.intermediate_size,
            draft_vocab=shape.draft_vocab,
        )
        return mtp.MtpNetwork(
            head, target, steps=shape.draft_len, seed=seed, soft=shape.soft, vocab=vocab
        )
    return _block(recipe, target, shape, seed=seed, vocab=vocab)


def _block(recipe: str, target: Model, shape: Shape, *, seed: int, vocab: Tensor | None) -> Network:
    """DFlash or a descendant."""
    # DSpark drafts from the anchor's row too.
    sizes = dflash.Shape(
        layers=shape.layers,
        intermediate_size=shape.intermediate_size,
        block_size=shape.draft_len + (recipe != "dspark"),
        taps=shape.taps,
    )
    config = dflash.draft_config(
        target.config, sizes, mask_token_id=shape.mask_token_id, draft_vocab=shape.draft_vocab
    )
    if recipe == "dflash":
        return dflash.DFlashNetwork(
            config, target, seed=seed, d_pace=shape.d_pace, soft=shape.soft, vocab=vocab
        )
    if recipe == "dflash2":
        full = dflash2.full_config(config, rank=shape.rank)
        return dflash2.DFlash2Network(
            full, target, seed=seed, d_pace=shape.d_pace, soft=shape.soft, vocab=vocab
        )
    if shape.markov not in MARKOV or shape.rank < 1:
        raise InvalidConfig(
            f"markov is {shape.markov!r} of rank {shape.rank}; choose one of "
            f"{', '.join(MARKOV)}, of rank 1 or more."
        )
    spark = DSparkConfig(config, shape.markov, shape.rank)
    return dspark.DSparkNetwork(spark, target, seed=seed, vocab=vocab)


def _frequent(counts: Tensor | None, size: int | None, vocab: int) -> Tensor | None:
    """The `size` most frequent tokens in ascending order, None for all."""
    if size is None:
        return None
    if counts is None or not 1 <= size <= vocab:
        raise InvalidConfig(f"draft_vocab is {size}; allowed: 1 to {vocab}, and texts to count.")
    return counts.argsort(descending=True, stable=True)[:size].sort().values
