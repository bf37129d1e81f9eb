"""A folder that is a drive of Windows for whom LD_PRELOAD has the library (drvfs.c) and DRVFS the folder."""

from __future__ import annotations

from pathlib import Path

from tests.simulator.cache import built
from tests.simulator.tools import need, run

SOURCE = Path(__file__).with_name("drvfs.c")
COMPILER = ("gcc", "-O2", "-D_GNU_SOURCE", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")


def preloaded() -> Path:
    """Return the library, building it if it is missing."""

    def build(folder: Path) -> None:
        need("gcc", "/usr/include/stdio.h")
        run([*COMPILER, "-o", folder / "drvfs.so", SOURCE, "-ldl"])

    return built("drvfs", [SOURCE], build) / "drvfs.so"
