"""Each role's verification fails where what it looks at is missing or another one."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.tests.unit.playbooks import playbook_helper
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import nomad_helper
from ansible_collections.gpufarm.core.tests.unit.roles.role_helper import ROLES

# By role, the test in which its verification fails.
FAILS = {
    "container_toolkit": "molecule/container_toolkit/tests/test_toolkit.py::test_verification_tells_what_is_wrong",
    "cuda": "molecule/cuda/tests/test_cuda.py::test_verification_tells_what_is_wrong",
    "farm": "molecule/farm/tests/test_farm.py::test_gpu_that_does_not_answer_fails_although_nomad_still_has_it",
    "gpu_health": "molecule/gpu_health/tests/test_gate.py::test_verification_tells_of_a_gate_that_cannot_work",
    "kubernetes_device_plugin": "tests/unit/playbooks/test_kubernetes_verify.py"
    "::test_a_device_plugin_that_does_not_run_is_told_with_what_its_pods_wait_for",
    "minikube": "tests/unit/playbooks/test_kubernetes_verify.py"
    "::test_a_gpu_that_kubernetes_has_not_fails_the_verification",
    "node_tuning": "molecule/cuda/tests/test_tuning.py::test_what_somebody_has_changed_is_told_and_set_again",
    "nomad": "tests/unit/roles/test_verification.py::test_an_agent_of_another_version_is_told",
    "nomad_client": "molecule/nomad_client/tests/test_client_verification.py::test_verification_tells_what_is_wrong",
    "nomad_device_nvidia": "tests/unit/roles/test_verification.py::test_a_plugin_that_is_not_the_one_given_is_told",
    "nomad_server": "molecule/nomad_server/tests/test_server_verification.py::test_verification_tells_what_is_wrong",
    "nomad_tenancy": "molecule/secure/tests/test_secure.py"
    "::test_a_team_has_its_namespace_and_is_told_of_when_it_uses_too_much",
    "nvidia_driver": "molecule/nvidia_driver/tests/test_driver.py::test_verification_tells_what_is_wrong",
    "nvidia_mig": "molecule/mig/tests/test_mig.py::test_verification_says_what_is_to_be_done",
    "shared_data": "tests/unit/roles/test_verification.py::test_shared_data_that_are_not_there_are_told",
    "wandb_launch_agent": "molecule/launch/tests/test_launch.py::test_an_agent_that_does_not_poll_says_why",
}


def test_every_verification_is_made_to_fail() -> None:
    assert sorted(FAILS) == sorted(path.parts[-3] for path in ROLES.glob("*/tasks/verify.yml"))
    missing = []
    for shown in FAILS.values():
        path, name = shown.split("::")
        file = ROLES.parent / path
        if not file.is_file() or not re.search(rf"^def {name}\(", file.read_text(encoding="utf-8"), re.MULTILINE):
            missing.append(shown)
    assert missing == [], "Next step: name the tests that show it now"


def verify(folder: Path, role: str, *before: str, **given: Any) -> tuple[int, str]:
    """Return how the verification of a role ended on this machine, and what it said."""
    tasks = [{"ansible.builtin.import_role": {"name": f"gpufarm.core.{name}", "tasks_from": "variables.yml"}}
             for name in before]  # fmt: skip
    tasks.append({"ansible.builtin.import_role": {"name": f"gpufarm.core.{role}", "tasks_from": "verify.yml"}})
    play = [{"hosts": "all", "gather_facts": False, "tasks": tasks}]
    (folder / "play.yml").write_text(json.dumps(play), encoding="utf-8")
    inventory = {"all": {"hosts": {"gpu-7": playbook_helper.LOCAL}}}
    options = ("--extra-vars", json.dumps(given))
    ran = playbook_helper.run_playbook(folder, inventory, str(folder / "play.yml"), *options)
    return ran.returncode, " ".join((ran.stdout + ran.stderr).split())


@pytest.mark.parametrize(("runs", "code"), [("1.11.3", 0), ("1.10.5", 2)])
def test_an_agent_of_another_version_is_told(tmp_path: Path, runs: str, code: int) -> None:
    agent = nomad_helper.agent_of(runs)
    try:
        # What is installed is compared before, in nomad_client and nomad_server alike.
        given = {"__nomad_seen": True, "__nomad_local_url": agent.url, "__nomad_wait_for": "leader"}
        ended, told = verify(tmp_path, "nomad", **given, nomad_version="1.11.3")
    finally:
        agent.close()
    assert ended == code, told
    refused = (
        f"gpu-7: Nomad {runs} runs. Expected: 1.11.3, which is installed. Next step: run playbooks/site.yml, which"
    )
    assert (refused in told) == (code != 0), told


@pytest.mark.parametrize(
    ("there", "found"),
    [
        (b"plugin", ""),
        (b"plugin, changed", f"has the SHA-256 {hashlib.sha256(b'plugin, changed').hexdigest()}"),
        ("a folder", "is no file"),
        (None, "is not there"),
    ],
)
def test_a_plugin_that_is_not_the_one_given_is_told(tmp_path: Path, there: bytes | str | None, found: str) -> None:
    plugin = tmp_path / "nomad-device-nvidia"
    if isinstance(there, bytes):
        plugin.write_bytes(there)
    elif there:
        plugin.mkdir()
    wanted = hashlib.sha256(b"plugin").hexdigest()
    program = {"path": "/srv/own", "checksum": f"sha256:{wanted}"}
    given = {"nomad_plugin_dir": str(tmp_path), "nomad_device_nvidia_program": program}
    ended, told = verify(tmp_path, "nomad_device_nvidia", "nomad", **given)
    refused = (
        f"gpu-7: {plugin} {found}. Expected: {wanted}, the checksum of nomad_device_nvidia_program. Next step: run"
    )
    assert (ended, refused in told) == ((2, True) if found else (0, False)), told


def test_a_released_plugin_that_is_not_there_is_told(tmp_path: Path) -> None:
    ended, told = verify(tmp_path, "nomad_device_nvidia", "nomad", nomad_plugin_dir=str(tmp_path))
    assert ended == 2, told
    assert f"{tmp_path}/nomad-device-nvidia is not as it was installed: the program is not there" in told, told


@pytest.mark.parametrize(
    ("server", "clients", "found"),
    [
        ("gpu-7", ["192.0.2.0/24"], ""),
        ("gpu-7", ["192.0.2.0/24", "198.51.100.0/24"], "the NFS server does not export {path} to 192.0.2.0/24, 198."),
        ("192.0.2.10", [], "nothing is mounted at {path}. Expected: 192.0.2.10:{path} at {path} with ro,hard,noatime,"),
    ],
)
def test_shared_data_that_are_not_there_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str, clients: list[str], found: str
) -> None:
    path, programs = tmp_path / "data", tmp_path / "programs"
    says = {"exportfs": f"{path}  192.0.2.0/24(sync,ro)", "systemd-escape": "data", "systemctl": "inactive"}
    for name, words in says.items():
        programs.mkdir(exist_ok=True)
        (programs / name).write_text(f"#!/bin/sh\necho '{words}'\n", encoding="utf-8")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    given = {"shared_data_path": str(path), "shared_data_server": server, "shared_data_clients": clients}
    ended, told = verify(tmp_path, "shared_data", **given)
    assert (ended, f"gpu-7: {found.format(path=path)}" in told) == ((2, True) if found else (0, False)), told
