from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulator import farm
from tests.simulator.docker import docker
from tests.simulator.farm import jobs
from tests.testinfra import playbooks
from tests.testinfra.playbooks import words

FARM = os.environ["GPUFARM_FARM"]
PLUGIN = "/opt/nomad/plugins/nomad-device-nvidia"
RELEASE = "/releases/nomad-device-nvidia/1.1.0/nomad-device-nvidia_1.1.0"


@pytest.fixture(scope="session", autouse=True)
def images() -> None:
    for node in farm.gpu_nodes():
        jobs.load_image(FARM, node)


@pytest.fixture
def mirror_faults() -> Iterator[Path]:
    path = farm.faults_file(FARM)
    yield path
    path.write_text("{}", encoding="utf-8")


def run_playbook(playbook: str, *options: str, **extra: object) -> tuple[int, str]:
    return playbooks.run_playbook(FARM, playbook, *options, **extra)


def test_nomad_has_all_13_gpus() -> None:
    found = {
        node["Name"]: sum(len(device["Instances"]) for device in node["NodeResources"]["Devices"] or [])
        for node in jobs.api(FARM, "/v1/nodes?resources=true")
    }
    assert found == {"t4": 4, "h100": 8, "wsl": 1}


def test_container_gets_exactly_the_gpus_that_nomad_assigned() -> None:
    seen = jobs.run_gpu_docker(FARM, node="t4", count=2)
    assert len(seen.listed) == 2
    assert seen.node == "t4"


def test_container_on_wsl_gets_its_gpu() -> None:
    assert jobs.run_gpu_docker(FARM, node="wsl", count=1).node == "wsl"


def test_program_without_container_keeps_to_its_gpu_and_its_result_comes_home() -> None:
    result = jobs.run_gpu_python(FARM)
    assert result["uuid"] == result["cuda_visible_devices"]
    assert result["memory_total_mib"] > 4096


def test_too_many_gpus_are_not_placed() -> None:
    with pytest.raises(jobs.JobError, match="no allocation"):
        jobs.run(FARM, "gpu-docker", {"image": jobs.job_image(), "count": 9}, timeout=8)
    jobs.nomad(FARM, "job", "stop", "-purge", "gpu-docker")


def test_deleted_plugin_is_found_and_only_a_verified_one_replaces_it(mirror_faults: Path) -> None:
    docker("exec", f"{FARM}-t4", "rm", PLUGIN)

    code, output = run_playbook("verify.yml")
    assert code != 0
    assert f"t4: {PLUGIN} is missing" in words(output)
    assert "Expected: release 1.1.0" in words(output)
    assert "Next step: run playbooks/site.yml" in words(output)

    mirror_faults.write_text(json.dumps({f"{RELEASE}_linux_amd64.zip": "corrupt"}), encoding="utf-8")
    code, output = run_playbook("site.yml", "--limit", "t4", "--tags", "nomad")
    assert code != 0
    assert "sha256" in output.lower()
    for part in ("t4", "Expected", "Next step", "nomad-device-nvidia_1.1.0_linux_amd64.zip"):
        assert part.lower() in words(output).lower()
    assert "missing" in docker("exec", f"{FARM}-t4", "sh", "-c", f"test -e {PLUGIN} || echo missing")

    mirror_faults.write_text(json.dumps({f"{RELEASE}_SHA256SUMS.sig": "bad-signature"}), encoding="utf-8")
    code, output = run_playbook("site.yml", "--limit", "t4", "--tags", "nomad")
    assert code != 0
    assert "signature" in output.lower()
    for part in ("t4", "Expected", "Next step", "SHA256SUMS"):
        assert part.lower() in words(output).lower()
    assert "missing" in docker("exec", f"{FARM}-t4", "sh", "-c", f"test -e {PLUGIN} || echo missing")

    mirror_faults.write_text("{}", encoding="utf-8")
    code, output = run_playbook("site.yml", "--limit", "t4", "--tags", "nomad")
    assert code == 0, output
    code, output = run_playbook("verify.yml")
    assert code == 0, output


def test_hidden_gpu_is_found() -> None:
    docker("exec", f"{FARM}-t4", "rm", "/dev/nvidia3")
    code, output = run_playbook("verify.yml", verify_timeout=10)
    docker("exec", f"{FARM}-t4", "mknod", "-m", "666", "/dev/nvidia3", "c", "195", "3")
    assert code != 0
    assert "t4: nvidia-smi lists 3 GPU(s)" in words(output)
    assert "Expected: 4" in words(output)
    assert "Next step:" in words(output)
