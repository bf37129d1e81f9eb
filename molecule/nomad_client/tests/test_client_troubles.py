"""A disk that is full and a mirror that breaks off end a run, and the client goes on as it was."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.simulator import farm
from tests.simulator.docker import docker
from tests.testinfra.helpers import full
from tests.testinfra.playbooks import Run, run_in_scenario, words

NODE = "client-node"
SCENARIO = Path(os.environ["MOLECULE_SCENARIO_DIRECTORY"])


def on_client(script: str) -> str:
    return docker("exec", NODE, "sh", "-euc", script)


def state() -> list[str]:
    """Return what runs, and every file of Nomad that is no data."""
    files = "find /usr/local/bin /etc/nomad.d /opt/nomad/plugins /etc/systemd/system -type f ! -name .filler"
    return on_client(f"systemctl show nomad --property=MainPID --value; {files} | sort | xargs sha256sum").splitlines()


def converge(**variables: object) -> Run:
    return run_in_scenario(SCENARIO / "converge.yml", "--extra-vars", json.dumps(variables))


def converge_other_release() -> Run:
    """Have another release than the servers', which a client would be refused."""
    return converge(nomad_version="1.10.5", __nomad_exchange_refusal="")


def test_a_disk_that_is_full_leaves_the_release_as_it_was() -> None:
    before = state()
    with full(NODE, "/usr/local/bin"):
        run = converge_other_release()
        assert state() == before
    assert run.code != 0
    assert "No space left on device" in words(run.output), run.output
    assert "Next step: " in words(run.output), run.output
    assert state() == before


def test_a_disk_that_is_full_leaves_the_configuration_as_it_was() -> None:
    before = state()
    with full(NODE, "/etc/nomad.d"):
        run = converge(nomad_client_meta={"rack": "r1" * 4096})
        assert state() == before
    assert run.code != 0
    assert "No space left on device" in words(run.output), run.output
    assert state() == before


@pytest.mark.parametrize("part", ["nomad_1.10.5_linux_*.zip", "nomad_1.10.5_SHA256SUMS"])
def test_a_mirror_that_breaks_off_leaves_the_release_as_it_was(part: str) -> None:
    before = state()
    faults = farm.faults_file(os.environ["GPUFARM_FARM"])
    faults.write_text(json.dumps({f"/releases/nomad/*/{part}": "truncate"}), encoding="utf-8")
    try:
        run = converge_other_release()
    finally:
        faults.unlink()
    assert run.code != 0
    assert f"{NODE}: " in words(run.output) and "Next step: " in words(run.output), run.output
    assert "nomad_1.10.5" in words(run.output), run.output
    assert state() == before
    assert converge().code == 0
    assert state() == before
