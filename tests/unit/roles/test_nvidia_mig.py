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
    ("noted", "works", "asked", "left"),
    [("nvidia-dcgm\nnomad\n", True, "start nvidia-dcgm nomad\n", False),
     ("nvidia-dcgm\nnomad\n", False, "start nvidia-dcgm nomad\n", True), ("\n", True, "", False)],
)  # fmt: skip
def test_services_run_again_after_a_run_that_was_cut_off(
    tmp_path: Path, noted: str, works: bool, asked: str, left: bool
) -> None:
    note, told = tmp_path / "stopped", tmp_path / "asked"
    note.write_text(noted, encoding="ascii")
    told.touch()
    program = f'#!/bin/sh\necho "$*" >>{told}\nexit {int(not works)}\n'
    (tmp_path / "systemctl").write_text(program, encoding="ascii")
    (tmp_path / "systemctl").chmod(0o755)
    tasks = role_helper.tasks_of("nvidia_mig/tasks/main.yml")
    resumes = next(number for number, task in enumerate(tasks) if "ansible.builtin.shell" in task)
    compares = next(number for number, task in enumerate(tasks) if "gpufarm.core.nvidia_mig" in task)
    assert resumes < compares
    given = {**role_helper.variables("nvidia_mig"), "__nvidia_mig_stopped": str(note)}
    given["asked"] = trust_as_template(tasks[resumes]["ansible.builtin.shell"]["cmd"])
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    ran = subprocess.run(["sh", "-c", role_helper.value("asked", given)], env=environment, check=False)
    assert (ran.returncode == 0, told.read_text(encoding="ascii"), note.exists()) == (works, asked, left)
