"""Where a number came from: machine, versions, commit. Nothing here imports torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slipstream.version import __version__

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "scipy", "llguidance")


def collect(*, dtype: str, threads: int | None, fingerprint: str) -> dict[str, Any]:
    """Everything a reader needs to judge or repeat a run; values that cannot be read are None.

    `fingerprint` identifies the model's weights, `threads` is None where the library chose.
    """
    return {
        "time": now(),
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "dtype": dtype,
        "threads": threads,
        "model": fingerprint,
    }


def now() -> str:
    """UTC time to the second, ISO 8601."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def machine() -> dict[str, Any]:
    """CPU model, cores this process may use, memory in GiB, operating system, and NVIDIA GPUs."""
    return {
        "gpu": _gpus(),
        "cpu": _cpu_model(),
        "cores": _cores(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def machine_key(found: dict[str, Any]) -> str:
    """What must agree before two sessions may write into one run."""
    gpu = f"{found['gpu']} / " if found.get("gpu") else ""
    return f"{gpu}{found['cpu']} / {found['cores']} cores / {found['system']}"


def versions() -> dict[str, str | None]:
    """Python, Slipstream and the packages numbers depend on; None where not installed."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "slipstream": __version__,
    }
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def commit() -> str | None:
    """Git commit of the package's checkout, `+changes` where files differ; None outside of one."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return None
    return f"{head}+changes" if _git("status", "--porcelain", "-uno") else head


def _git(*args: str) -> str | None:
    try:
        done = subprocess.run(
            ("git", *args),
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):  # no git here: provenance says None
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _gpus() -> str | None:
    """Names of the GPUs, None without any."""
    try:
        done = subprocess.run(
            ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"),
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ", ".join(line.strip() for line in done.stdout.splitlines() if line.strip()) or None


def _cpu_model() -> str:
    fallback = platform.processor() or platform.machine()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return fallback
    names = [line.split(":", 1)[1] for line in text.splitlines() if line.startswith("model name")]
    return names[0].strip() if names else fallback


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (OSError, ValueError):  # a system that does not say
        return None
