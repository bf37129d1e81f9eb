"""What the MIG role works out and writes; its module has tests of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from ansible.template import trust_as_template
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

ROLE = Path(__file__).resolve().parents[3] / "roles/nvidia_mig"
UNIT = (ROLE / "templates/gpufarm-mig.service.j2").read_text(encoding="ascii")


@pytest.mark.parametrize(
    "service",
    ["nvidia-persistenced", "nvidia-cdi-refresh", "nvidia-dcgm", "docker", "containerd", "crio", "nomad", "kubelet",
     "k3s", "k3s-agent", "rke2-server", "rke2-agent"],
)  # fmt: skip
def test_a_boot_divides_the_gpus_before_anybody_counts_them(service: str) -> None:
    before = [name for line in UNIT.splitlines() if line.startswith("Before=") for name in line[7:].split()]
    assert f"{service}.service" in before


@pytest.mark.parametrize(
    "failing", ["Have them let go", "Have the instances of the layout", "Have a CDI specification of what is there now"]
)
def test_services_that_were_stopped_run_again_whatever_fails(failing: str) -> None:
    tasks = yaml.safe_load((ROLE / "tasks/change.yml").read_text(encoding="utf-8"))
    begun, failed = role_helper.begun(tasks, failing)
    assert failing in begun and failed
    assert begun[-2:] == ["Have the services running again", "Note that none is stopped"]
    # One that does not start is tried again by the next run.
    begun, failed = role_helper.begun(tasks, "Have the services running again")
    assert failed and begun[-1] == "Have the services running again"
    assert begun.index("Note which are stopped") < begun.index("Have them let go")


@pytest.mark.parametrize(
    ("noted", "broken", "asked"),
    [
        ("nvidia-dcgm\nnomad\n", "", "start nvidia-dcgm\nstart nomad\n"),
        # What does not start keeps neither the others nor the layout, which may mend it.
        ("nvidia-dcgm\nnomad\n", "nvidia-dcgm", "start nvidia-dcgm\nstart nomad\n"),
        ("\n", "", ""),
    ],
)
def test_services_run_again_after_a_run_that_was_cut_off(tmp_path: Path, noted: str, broken: str, asked: str) -> None:
    note, told = tmp_path / "stopped", tmp_path / "asked"
    note.write_text(noted, encoding="ascii")
    told.touch()
    program = f'#!/bin/sh\necho "$*" >>{told}\n[ "$2" != "{broken}" ]\n'
    (tmp_path / "systemctl").write_text(program, encoding="ascii")
    (tmp_path / "systemctl").chmod(0o755)
    tasks = role_helper.tasks_of("nvidia_mig/tasks/main.yml")
    resumes = next(number for number, task in enumerate(tasks) if "ansible.builtin.shell" in task)
    compares = next(number for number, task in enumerate(tasks) if "gpufarm.core.nvidia_mig" in task)
    assert resumes < compares
    given = {**role_helper.variables("nvidia_mig"), "__nvidia_mig_stopped": str(note)}
    given["asked"] = trust_as_template(tasks[resumes]["ansible.builtin.shell"]["cmd"])
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    ran = subprocess.run(
        ["sh", "-c", role_helper.value("asked", given)], env=environment, check=False, capture_output=True, text=True
    )
    assert (ran.returncode, told.read_text(encoding="ascii"), note.exists()) == (0, asked, False)
    resumed = {"__nvidia_mig_resumed": {"changed": True, "stdout_lines": ran.stdout.splitlines()}}
    assert role_helper.value("__nvidia_mig_broken", {**given, **resumed}) == broken.split()
    if broken:
        text = trust_as_template(tasks[resumes + 1]["ansible.builtin.debug"]["msg"])
        said = role_helper.value("said", {**given, **resumed, "said": text, "inventory_hostname": "gpu1"})
        assert said.startswith("gpu1: nvidia-dcgm did not start, ") and "`journalctl -u nvidia-dcgm`" in said


def test_a_change_starts_what_did_not_start_before_it() -> None:
    """One that was cut off has stopped it, and only this knows."""
    (changes,) = [task for task in role_helper.tasks_of("nvidia_mig/tasks/change.yml") if "block" in task
                  and "vars" in task]  # fmt: skip
    given = {
        **role_helper.variables("nvidia_mig"), "nvidia_mig_services": ["nvidia-dcgm", "nvsm"],
        "running": trust_as_template(changes["vars"]["__nvidia_mig_running"]),
        "__nvidia_mig_active": {"stdout_lines": ["failed", "inactive", "active"]},
        "__nvidia_mig_resumed": {"changed": False, "stdout_lines": ["skipped, since nvidia-dcgm does not exist"]},
    }  # fmt: skip
    assert role_helper.value("running", given) == ["nomad"]
    resumed = {"__nvidia_mig_resumed": {"changed": True, "stdout_lines": ["nvidia-dcgm"]}}
    assert role_helper.value("running", {**given, **resumed}) == ["nvidia-dcgm", "nomad"]
