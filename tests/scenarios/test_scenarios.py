"""Runs every Molecule scenario whole: check, converge, idempotence, verify."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulator import farm
from tests.simulator.cache import ROOT, cache_dir

# The longest first, so that the others run beside it.
SCENARIOS = sorted(
    (path.parent.name for path in (ROOT / "molecule").glob("*/molecule.yml")), key=lambda name: (name != "farm", name)
)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(scenario: str) -> None:
    log = cache_dir() / "farms" / "gpufarm-test" / "logs" / f"{scenario}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    molecule = str(Path(sys.executable).with_name("molecule"))
    with log.open("wb") as output:
        code = subprocess.run(
            [molecule, "test", "--scenario-name", scenario], cwd=ROOT,
            env=farm.environment("gpufarm-farm" if scenario == "farm" else "gpufarm-test"),
            stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False,
        ).returncode  # fmt: skip
    if code:
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-80:]
        pytest.fail(f"molecule test -s {scenario} ended with {code}; log: {log}\n" + "\n".join(last), pytrace=False)
