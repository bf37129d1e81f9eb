"""What the MIG role works out and writes; its module has tests of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
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
    assert begun[-1] == "Have the services running again"
