"""Molecule as its users type it: no environment activated, nothing exported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulator.cache import cache_dir

MOLECULE = str(Path(sys.executable).with_name("molecule"))


def environment() -> dict[str, str]:
    """Return the environment of somebody who has just run ``make setup``."""
    ours = ("ANSIBLE_", "GPUFARM_", "MOLECULE_", "PYTEST_", "PYTHONPATH", "VIRTUAL_ENV")
    kept = ("GPUFARM_CACHE", "GPUFARM_DOCKER")
    found = {name: value for name, value in os.environ.items() if name in kept or not name.startswith(ours)}
    folders = found["PATH"].split(os.pathsep)
    client = [str(Path(found["GPUFARM_DOCKER"]).parent)] if "GPUFARM_DOCKER" in found else []
    found["PATH"] = os.pathsep.join([*client, *(folder for folder in folders if Path(folder) != Path(MOLECULE).parent)])
    return found


def molecule(folder: Path, name: str, *arguments: str) -> None:
    """Run Molecule in a folder; where it fails, fail with its last lines and its log."""
    log = cache_dir() / "farms" / name / "logs" / f"molecule-{arguments[0]}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        code = subprocess.run(
            [MOLECULE, *arguments], cwd=folder, env=environment(),
            stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False,
        ).returncode  # fmt: skip
    if code:
        last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-80:])
        pytest.fail(f"molecule {' '.join(arguments)} ended with {code}; log: {log}\n{last}", pytrace=False)
