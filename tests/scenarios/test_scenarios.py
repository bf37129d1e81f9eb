"""Runs every Molecule scenario whole, as its users do: Molecule alone, with nothing set for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulator.cache import ROOT, cache_dir

# The longest first, so that the others run beside it.
SCENARIOS = sorted(
    (path.parent.name for path in (ROOT / "molecule").glob("*/molecule.yml")), key=lambda name: (name != "farm", name)
)


def plain_environment() -> dict[str, str]:
    """Return the environment of somebody who has just run ``make setup``: nothing activated, nothing exported."""
    ours = ("ANSIBLE_", "GPUFARM_", "MOLECULE_", "PYTEST_", "PYTHONPATH", "VIRTUAL_ENV")
    kept = ("GPUFARM_CACHE", "GPUFARM_DOCKER")
    environment = {name: value for name, value in os.environ.items() if name in kept or not name.startswith(ours)}
    folders = environment["PATH"].split(os.pathsep)
    environment["PATH"] = os.pathsep.join(folder for folder in folders if Path(folder) != Path(sys.executable).parent)
    return environment


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(scenario: str) -> None:
    log = cache_dir() / "farms" / f"gpufarm-{scenario}" / "logs" / "molecule.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    molecule = str(Path(sys.executable).with_name("molecule"))
    with log.open("wb") as output:
        code = subprocess.run(
            [molecule, "test", "--scenario-name", scenario], cwd=ROOT,
            env=plain_environment(), stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False,
        ).returncode  # fmt: skip
    if code:
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-80:]
        pytest.fail(f"molecule test -s {scenario} ended with {code}; log: {log}\n" + "\n".join(last), pytrace=False)
