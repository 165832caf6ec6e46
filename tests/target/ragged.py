"""Requests of random lengths over scattered pages, for two targets that must agree."""

import random

import torch

from slipstream.target.target import ForwardRow, Target

PAGE = 4


class Ragged:
    """The same steps through `targets` of the same weights: logits, features and whole caches.

    `longest` positions a request at most.
    """

    def __init__(self, targets, *, users, longest, seed=0):
        self.targets = targets
        rng = self.rng = random.Random(seed)
        pages = list(range(targets[0].pool.num_pages))
        rng.shuffle(pages)
        each = -(-longest // PAGE)
        self.pages = [pages[i * each : (i + 1) * each] for i in range(users)]
        vocab = targets[0].config.vocab_size
        self.texts = [[rng.randrange(3, vocab) for _ in range(longest)] for _ in range(users)]
        self.done = [0] * users
        noise = torch.Generator().manual_seed(seed)
        for layers in zip(*(t.storage for t in targets), strict=True):
            values = torch.randn(layers[0].shape, generator=noise)
            for storage in layers:
                storage.copy_(values)  # what is not written must stay

    def lengths(self, total, rows):
        """`total` tokens for `rows` rows at random, at least one each."""
        cuts = sorted(self.rng.sample(range(1, total), rows - 1))
        return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]

    def rows(self, lengths):
        """The next `lengths[i]` tokens of each request; some want logits, one of them all."""
        found = []
        for i, length in enumerate(lengths):
            if length:
                at = self.done[i]
                tokens = self.texts[i][at : at + length]
                assert len(tokens) == length, "the text is too short for the test"
                wanted = (length, 1, 0)[len(found) % 3]
                found.append(ForwardRow(tokens, at, self.pages[i], wanted))
                self.done[i] += length
        return found

    def step(self, lengths):
        """One forward of each target; all that can be seen of them is the same."""
        rows = self.rows(lengths)
        first, *others = [target.forward(rows) for target in self.targets]
        for other, target in zip(others, self.targets[1:], strict=True):
            same(other.logits, first.logits)
            assert (other.features is None) == (first.features is None)
            if first.features is not None:
                same(other.features, first.features)
            for mine, theirs in zip(target.storage, self.targets[0].storage, strict=True):
                same(mine, theirs)
        return others[0]


def same(found, expected):
    """The same numbers but for rounding, which in bfloat16 is that of other products' order."""
    found, expected = found.cpu(), expected.cpu()
    assert found.shape == expected.shape
    if found.dtype == torch.bfloat16:
        apart = (found.float() - expected.float()).norm()
        assert apart <= 0.03 * expected.float().norm()
    else:
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def targets(loaded, *, rows, tokens, pages=512, other=None, **kwargs):
    """One that runs unpadded (of `other`'s weights, if given), and one that pads."""
    plain = Target(other or loaded, num_pages=pages, page_size=PAGE, **kwargs)
    padded = Target(loaded, num_pages=pages, page_size=PAGE, **kwargs)
    padded.kernels = True
    padded.pad(rows=rows, tokens=tokens)
    return plain, padded


def noted(target):
    """Sizes that forwards of `target` are padded to from now on; None where one is not."""
    padded, seen = target._padded, []
    run = padded.run

    def noting(ids, rows):
        found = run(ids, rows)
        sizes = [size for size in padded.padded.sizes if size >= len(ids)]
        seen.append(sizes[0] if found is not None else None)
        return found

    padded.run = noting
    return seen
