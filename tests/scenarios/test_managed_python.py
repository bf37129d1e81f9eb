"""The modules' own tests with the oldest Python of managed nodes: 3.9 of RHEL 9, or 3.10 of Ubuntu 22.04."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import ansible
import pytest

from tests.simulator.cache import ROOT, built

PYTHONS = ("3.9", "3.10")


def interpreter() -> str | None:
    """Return the oldest interpreter of these that this machine has."""
    for version in PYTHONS:
        for candidate in (
            shutil.which(f"python{version}"),
            *Path.home().glob(f".pyenv/versions/{version}.*/bin/python"),
        ):
            asks = [str(candidate), "-c", "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"]
            if (
                candidate
                and subprocess.run(asks, capture_output=True, text=True, check=False).stdout.strip() == version
            ):
                return str(candidate)
    return None


def test_modules_run_on_the_oldest_python() -> None:
    python = interpreter()
    if python is None:
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
    result = subprocess.run(
        [folder / "venv/bin/python", "-m", "pytest", "--quiet", "-n", "2", "-m", "not controller",
         "tests/unit/plugins/module_utils", "tests/unit/plugins/modules"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(folder)}, text=True, check=False, capture_output=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
