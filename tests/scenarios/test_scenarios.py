"""Runs every Molecule scenario whole, as its users do, and the example of a role that is not of this collection."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.scenarios import plain
from tests.simulator.cache import ROOT

# The longest first, so that the others run beside it.
SCENARIOS = sorted(
    (path.parent.name for path in (ROOT / "molecule").glob("*/molecule.yml")), key=lambda name: (name != "farm", name)
)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(scenario: str) -> None:
    plain.molecule(ROOT, f"gpufarm-{scenario}", "test", "-s", scenario)


def logged_in(folder: Path, command: str, *arguments: str, **exported: str) -> str:
    """Return what a command says in the shell that ``molecule login`` opens on a terminal."""
    ours, terminal = pty.openpty()
    with subprocess.Popen(
        [plain.MOLECULE, "login", *arguments], cwd=folder, env={**plain.environment(), "TERM": "xterm", **exported},
        stdin=terminal, stdout=terminal, stderr=terminal,
    ) as login:  # fmt: skip
        os.close(terminal)
        os.write(ours, f"{command}; exit\n".encode())
        said = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the terminal's last user has gone
                break
            if not part:
                break
            said += part
    os.close(ours)
    assert login.returncode == 0, said.decode(errors="replace")
    return said.decode(errors="replace")


def test_a_role_that_is_not_of_this_collection_has_a_node_with_two_t4(tmp_path: Path) -> None:
    role = tmp_path / "gpu_motd"
    shutil.copytree(ROOT / "examples/molecule/gpu_motd", role)
    core = {"GPUFARM_CORE": str(ROOT)}
    name = "gpu_motd-default"
    try:
        plain.molecule(role, name, "test", "--destroy=never", **core)
        said = logged_in(role, "nvidia-smi --query-gpu=index,name --format=csv,noheader", **core)
        assert "0, Tesla T4" in said
        assert "1, Tesla T4" in said
        assert "2, Tesla T4" not in said
        plain.molecule(role, name, "verify", **core)
    finally:
        plain.molecule(role, name, "destroy", **core)
