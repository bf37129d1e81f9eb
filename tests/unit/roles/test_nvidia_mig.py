"""What the MIG role works out and writes; its module has tests of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

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
