"""``python -m tests.simulator.preloaded SOURCE``: the path of a library for LD_PRELOAD, built from one file of C."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.simulator.cache import ROOT, built
from tests.simulator.tools import need, run

DRVFS = ROOT / "tests/simulator/windows/drvfs.c"
XSTATE = ROOT / "tests/simulator/guest/xstate.c"
COMPILER = ("gcc", "-O2", "-D_GNU_SOURCE", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")


def preloaded(source: Path) -> Path:
    """Return the library, building it if it is missing."""

    def build(folder: Path) -> None:
        need("gcc", "/usr/include/stdio.h")
        run([*COMPILER, "-o", folder / f"{source.stem}.so", source, "-ldl"])

    return built(source.stem, [source], build) / f"{source.stem}.so"


if __name__ == "__main__":
    sys.stdout.write(f"{preloaded(Path(sys.argv[1]).resolve())}\n")
