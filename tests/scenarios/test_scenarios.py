"""Runs every Molecule scenario whole, as its users do, and the example of a role that is not of this collection."""

from __future__ import annotations

import os
import pty
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.scenarios import plain
from tests.simulator import farm
from tests.simulator.cache import ROOT, cache_dir
from tests.testinfra import printed

SCENARIOS = sorted(path.parent.name for path in (ROOT / "molecule").glob("*/molecule.yml"))

# Whose other steps README and docs print.
STEPWISE = "common"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(scenario: str) -> None:
    name = f"gpufarm-{scenario}"
    plain.molecule(ROOT, name, "test", "-s", scenario)
    if scenario == STEPWISE:
        for step in ("converge", "verify", "destroy"):
            plain.molecule(ROOT, name, step, "-s", scenario)


def on_a_terminal(script: str, prompt: bytes, typed: bytes, **environment: str) -> str:
    """Run a script on a terminal, type when a prompt is there, and return what was seen; a failure fails the test."""
    ours, terminal = pty.openpty()
    with subprocess.Popen(
        ["sh", "-eu", "-c", script], cwd=ROOT, env={**plain.environment(), "TERM": "xterm", **environment},
        stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
    ) as process:  # fmt: skip
        os.close(terminal)
        seen = b""
        with suppress(OSError):  # so a terminal says that its last user has gone
            while part := os.read(ours, 65536):
                seen += part
                if typed and prompt in seen:
                    os.write(ours, typed)
                    typed = b""
    os.close(ours)
    text = seen.decode(errors="replace")
    assert process.returncode == 0, text[-8000:]
    return text


def test_a_role_that_is_not_of_this_collection_has_a_node_with_two_t4(tmp_path: Path) -> None:
    script = printed.block(ROOT / "docs/molecule.md", "export GPUFARM_CORE")
    try:
        seen = on_a_terminal(
            script, b"root@two-t4", b"nvidia-smi --query-gpu=index,name --format=csv,noheader; exit\n",
            HOME=str(tmp_path), GPUFARM_CACHE=str(cache_dir()),
        )  # fmt: skip
    finally:
        farm.remove("gpu_motd-default")
    assert "0, Tesla T4" in seen
    assert "1, Tesla T4" in seen
    assert "2, Tesla T4" not in seen
