"""How long a start takes, from the shell to the first token: with an empty conversion cache, then
with a warm one. Whole processes, so interpreter and imports count.

    python bench/start.py [--rounds 3] [--out FILE.json]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from slipstream import provenance

CODE = """
from slipstream import LLM, SamplingParams
LLM().generate("hi", SamplingParams(max_tokens=1))
"""


def start(cache: str) -> float:
    begin = time.perf_counter()
    environment = os.environ | {"SLIPSTREAM_CACHE": cache}
    subprocess.run([sys.executable, "-c", CODE], check=True, env=environment)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    first, later = [], []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as cache:
            first.append(start(cache))
            later.append(start(cache))
    found = {
        "first start, seconds": statistics.median(first),
        "later start, seconds": statistics.median(later),
    }
    for name, value in found.items():
        print(f"{name}: {value:.1f}")
    if args.out:
        body = {"bench": "start", "machine": provenance.machine(), "values": found}
        args.out.write_text(json.dumps(body | {"versions": provenance.versions()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
