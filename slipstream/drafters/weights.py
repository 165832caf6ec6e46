"""Where a drafter's weights lie: at the PATH of its spec, or among those that ship.

A shipped set is a folder `slipstream/shipped/TARGET/METHOD`. Its config carries the fingerprint of
the target that it was trained for, and by that it is found: a name could mean other weights.
"""

from __future__ import annotations

from pathlib import Path

from slipstream.drafters.specs import METHODS, DrafterContext, DrafterSpec
from slipstream.errors import ModelError
from slipstream.models import checkpoint
from slipstream.models.loading import LoadedModel, files_of

SHIPPED = Path(__file__).resolve().parents[1] / "shipped"


def folder(spec: DrafterSpec, context: DrafterContext) -> Path:
    """The folder (or file) of a drafter that has weights. Raises `ModelError` where none ships."""
    if spec.path is not None:
        return Path(spec.path).expanduser()
    return shipped(spec.method, context.target)


def shipped(method: str, target: LoadedModel) -> Path:
    """The folder that ships for a target. Raises `ModelError` where there is none."""
    for config in sorted(SHIPPED.glob(f"*/{method}/config.json")):
        if checkpoint.own_config(config.parent).get("target") == target.fingerprint:
            return config.parent
    raise ModelError(
        f"No {method} drafter ships for {target.name}; give the PATH of one (as in "
        f"{method}:PATH:{METHODS[method].draft_len}) or train it with `slipstream train {method}`."
    )


def fingerprint(spec: DrafterSpec, context: DrafterContext) -> str | None:
    """Digest of a drafter's config and weights, None where it has none.

    Raises `ModelError` where they are missing.
    """
    if not METHODS[spec.method].takes_path:
        return None
    # The embedded model has a name where others have a path.
    source = spec.path if spec.path is not None else shipped(spec.method, context.target)
    return checkpoint.fingerprint(files_of(source))
