"""The modules' own tests with the oldest Python of managed nodes: 3.9 of RHEL 9, or 3.10 of Ubuntu 22.04."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import ansible
import pytest

from tests.conftest import MODULES, oldest_python
from tests.simulator.cache import ROOT, built


def test_modules_run_on_the_oldest_python() -> None:
    python = oldest_python()
    if not python:
        pytest.skip("no Python 3.9 or 3.10 here: what modules need of managed nodes is compiled for them, not run")

    def environment(folder: Path) -> None:
        subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
        pip = [str(folder / "venv/bin/python"), "-m", "pip", "install", "--quiet", "--no-compile"]
        subprocess.run([*pip, "--upgrade", "pip>=25.1"], check=True)
        subprocess.run([*pip, "--group", f"{ROOT / 'pyproject.toml'}:managed"], check=True)
        # No ansible-core for control nodes runs there; of this one modules bring along what is for managed nodes.
        (folder / "ansible").symlink_to(Path(ansible.__file__).parent)

    folder = built(
        "managed-python", [python, ansible.__file__, ansible.__version__, ROOT / "pyproject.toml"], environment
    )
    # All of them, whichever `make test` leaves to the other generation or to this test.
    environment_of_all = {name: value for name, value in os.environ.items() if name != "GPUFARM_GENERATION"}
    result = subprocess.run(
        [folder / "venv/bin/python", "-m", "pytest", "--quiet", "-n", "2", "-m", "not controller", *MODULES],
        cwd=ROOT, env={**environment_of_all, "PYTHONPATH": str(folder)}, text=True, check=False, capture_output=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
