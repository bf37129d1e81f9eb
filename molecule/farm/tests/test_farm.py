from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.simulator import farm
from tests.simulator.cache import ROOT
from tests.simulator.docker import docker
from tests.simulator.farm import jobs
from tests.simulator.gpu import faults
from tests.testinfra import playbooks
from tests.testinfra.helpers import wait_for
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
    nodes = {
        node["Name"]: node["NodeResources"]["Devices"] or [] for node in jobs.api(FARM, "/v1/nodes?resources=true")
    }
    found = {name: sum(len(device["Instances"]) for device in devices) for name, devices in nodes.items()}
    assert found == {"t4": 4, "h100": 8, "wsl": 1}
    named = [f"{each['Vendor']}/{each['Type']}/{each['Name']}" for devices in nodes.values() for each in devices]
    models = ("NVIDIA GeForce RTX 4090", "NVIDIA H100 80GB HBM3", "Tesla T4")
    assert sorted(named) == [f"nvidia/gpu/{model}" for model in models]
    uuids = [instance["ID"] for devices in nodes.values() for each in devices for instance in each["Instances"]]
    assert len({uuid for uuid in uuids if uuid.startswith("GPU-")}) == 13


def test_meta_of_nodes_tells_jobs_of_their_gpus() -> None:
    names = ("gpu_model", "gpu_count", "gpu_memory_mib", "gpu_mig", "gpu_numa_nodes", "gpu_driver_branch", "wsl")
    expected = {
        "t4": ("Tesla T4", "4", "15360", "false", "", "570", "false"),
        "h100": ("NVIDIA H100 80GB HBM3", "8", "81559", "false", "", "580", "false"),
        "wsl": ("NVIDIA GeForce RTX 4090", "1", "24564", "false", "", "581", "true"),
    }

    def told() -> dict[str, tuple[str | None, ...]]:
        meta = {each["Name"]: jobs.api(FARM, f"/v1/node/{each['ID']}")["Meta"] for each in jobs.api(FARM, "/v1/nodes")}
        return {node: tuple(found.get(name) for name in names) for node, found in meta.items()}

    # Servers know of it some seconds later.
    wait_for("the servers have all of it", lambda: told() == expected)


def test_container_gets_exactly_the_gpus_that_nomad_assigned() -> None:
    seen = jobs.run_gpu_docker(FARM, node="t4", count=2)
    assert len(seen.listed) == 2
    assert seen.node == "t4"


def test_container_on_wsl_gets_its_gpu() -> None:
    assert jobs.run_gpu_docker(FARM, node="wsl", count=1).node == "wsl"


def test_job_image_stays() -> None:
    for node in farm.gpu_nodes():
        program = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:4646/v1/agent/self').read().decode())"
        agent = json.loads(docker("exec", f"{FARM}-{node}", "python3", "-c", program))
        (plugin,) = [each for each in agent["config"]["Plugins"] if each["Name"] == "docker"]
        assert plugin["Config"]["gc"] == [{"image": False}]


def test_job_image_goes_where_nomad_collects_images() -> None:
    """That is what the setting is for; without this the test above would hold for a key that Nomad does not know."""
    config, image = "/etc/nomad.d/client.hcl", jobs.job_image()
    collects = r's/^      image = false$/      image = true\n      image_delay = "1s"/'
    docker("exec", f"{FARM}-wsl", "sh", "-c", f"cp -p {config} /root/ && sed -i '{collects}' {config}")
    try:
        playbooks.restart_nomad(FARM, "wsl")
        jobs.run_gpu_docker(FARM, node="wsl", count=1)
        deadline = time.monotonic() + 300
        while docker("exec", f"{FARM}-wsl", "docker", "image", "ls", "--quiet", image) and time.monotonic() < deadline:
            time.sleep(1)
        assert docker("exec", f"{FARM}-wsl", "docker", "image", "ls", "--quiet", image) == ""
    finally:
        docker("exec", f"{FARM}-wsl", "mv", "/root/client.hcl", config)
        playbooks.restart_nomad(FARM, "wsl")
        jobs.load_image(FARM, "wsl")
    assert jobs.run_gpu_docker(FARM, node="wsl", count=1).node == "wsl"


def test_program_without_container_keeps_to_its_gpu_and_its_result_comes_home() -> None:
    result = jobs.run_gpu_python(FARM)
    assert result["uuid"] == result["cuda_visible_devices"]
    assert result["memory_total_mib"] > 4096


@pytest.mark.parametrize("path", sorted((ROOT / "examples/jobs").glob("*.nomad.hcl")), ids=lambda path: path.name)
def test_every_job_of_the_examples_would_be_placed(path: Path) -> None:
    needed: dict[str, dict[str, Any]] = {
        "gpu-burn": {"gpus": 4}, "torchrun": {"memory": 2048}, "triton": {"models": "https://example.com/models.tar.gz"},
        # Of the farm's host volumes.
        "shared-data": {"volume": "results"},
    }  # fmt: skip
    job = path.name.removesuffix(".nomad.hcl")
    assert "All tasks successfully allocated." in jobs.plan(FARM, job, needed.get(job, {}))


def test_job_takes_whole_nodes_of_so_many_gpus() -> None:
    command = ["sh", "-c", "nvidia-smi -L && sleep 2"]
    allocation = jobs.run(FARM, "gpu-burn", {"gpus": 4, "image": jobs.job_image(), "command": command})
    assert allocation["NodeName"] == "t4"
    assert len(jobs.assigned(allocation, "burn")) == 4
    assert len(jobs.api(FARM, "/v1/job/gpu-burn/allocations")) == 1
    jobs.nomad(FARM, "job", "stop", "-purge", "gpu-burn")


def test_too_many_gpus_are_not_placed() -> None:
    with pytest.raises(jobs.JobError, match="no allocation"):
        jobs.run(FARM, "gpu-docker", {"image": jobs.job_image(), "count": 9}, timeout=8)
    jobs.nomad(FARM, "job", "stop", "-purge", "gpu-docker")


def test_job_on_every_gpu_sees_the_one_that_it_was_given(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    code, output = run_playbook(
        "verify.yml", verify_jobs=True, verify_jobs_driver="docker", verify_jobs_image=jobs.job_image(),
        verify_report=str(told),
    )  # fmt: skip
    assert code == 0, output
    seen = json.loads(told.read_text(encoding="utf-8"))["jobs"]
    assert seen["problems"] == []
    assert len({gpu["uuid"] for gpu in seen["gpus"]}) == 13
    assert {gpu["verdict"] for gpu in seen["gpus"]} == {"ok"}


def test_job_tells_a_gpu_that_computes_wrongly_from_its_siblings(tmp_path: Path) -> None:
    """Nothing else notices: nvidia-smi, Nomad and a job that only lists have all four."""
    told, sick, image = tmp_path / "told.json", 1, jobs.python_image()
    jobs.load_image(FARM, "t4", image)

    def fault(profile: faults.Profile) -> None:
        for gpu in range(4):
            faults.fill_memory(profile, gpu, 628)
        faults.compute_wrongly(profile, sick)

    def mend(profile: faults.Profile) -> None:
        faults.recover_cuda(profile, sick)
        for gpu in range(4):
            faults.find_gpu(profile, gpu).pop("fb_memory_usage")

    uuid = faults.find_gpu(faults.apply_to_container(f"{FARM}-t4", fault), sick)["uuid"]
    try:
        code, output = run_playbook(
            "verify.yml", "--limit", "t4", verify_jobs=True, verify_jobs_level="quick", verify_jobs_image=image,
            verify_report=str(told),
        )  # fmt: skip
    finally:
        faults.apply_to_container(f"{FARM}-t4", mend)
    assert code != 0
    assert re.search(
        rf"Node t4, GPU {uuid}: found \d+ wrong results of fp32.* Expected: .* Next step: ", words(output)
    ), output
    seen = json.loads(told.read_text(encoding="utf-8"))["jobs"]["gpus"]
    assert {gpu["uuid"]: gpu["code"] for gpu in seen if gpu["verdict"] != "ok"} == {uuid: "wrong_results"}
    assert len(seen) == 4
    for gpu in seen:
        assert gpu["isolated"] and gpu["benchmark"]["name"] == "Tesla T4" and gpu["benchmark"]["percent"]["fp32"] > 90


def test_job_that_gets_no_gpu_fails_the_verification() -> None:
    """Nothing else notices: Docker names the runtime, and Nomad has the GPUs."""
    runtime = "/usr/bin/nvidia-container-runtime"
    docker("exec", f"{FARM}-t4", "mv", runtime, "/root/")
    code, output = run_playbook(
        "verify.yml", "--limit", "t4", verify_jobs=True, verify_jobs_image=jobs.job_image(), verify_jobs_sample=1
    )
    docker("exec", f"{FARM}-t4", "mv", "/root/nvidia-container-runtime", runtime)
    assert code != 0
    told = words(output)
    assert re.search(r"Node t4, GPU GPU-\S+: found .*nvidia-container-runtime.* Expected: .* Next step: ", told), output


def test_report_shows_every_gpu(tmp_path: Path) -> None:
    page = tmp_path / "new" / "farm.html"
    models = {"Tesla T4": {"relative_throughput": 0.2, "price_per_hour": 0.4}}
    for _ in range(2):
        code, output = run_playbook("report.yml", report_path=str(page), report_gpu_models=models)
        assert code == 0, output
        assert "WARNING" not in output
    data = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
    assert sum(len(node["gpus"]) for node in data["nodes"]) == 13
    assert len(page.with_name("farm-history.jsonl").read_text(encoding="utf-8").splitlines()) == 2
    text = page.read_text(encoding="utf-8")
    for expected in ("Tesla T4", "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090", "580.159.04", "581.57"):
        assert expected in text
    assert not re.search(r"(src|href)=.?(https?:|//)|url\(|@import", text), "the page needs something from elsewhere"


def test_deleted_plugin_is_found_and_only_a_verified_one_replaces_it(mirror_faults: Path) -> None:
    docker("exec", f"{FARM}-t4", "rm", PLUGIN)

    code, output = run_playbook("verify.yml", "--limit", "t4")
    assert code != 0
    assert f"t4: {PLUGIN} is not as it was installed: the program is not there" in words(output)
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
    code, output = run_playbook("verify.yml", "--limit", "t4")
    assert code == 0, output


def test_gpu_that_does_not_answer_fails_although_nomad_still_has_it(tmp_path: Path) -> None:
    """Beside a node that nobody reaches; the others are compared all the same."""
    gone = tmp_path / "gone.yml"
    host = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
    gone.write_text(json.dumps({"gpu_nodes": {"hosts": {"gone": host}}}), encoding="utf-8")
    told = tmp_path / "told.json"
    faults.apply_to_container(f"{FARM}-t4", lambda profile: faults.lose_gpu(profile, 2))
    code, output = run_playbook("verify.yml", "-i", str(gone), verify_timeout=0, verify_report=str(told))
    faults.apply_to_container(f"{FARM}-t4", lambda profile: faults.recover_gpu(profile, 2))
    playbooks.restart_nomad(FARM, "t4")
    assert code != 0
    assert "t4: found GPUs that do not answer:" in words(output)
    assert "Next step: run playbooks/health.yml" in words(output)
    assert re.search(r"gone +: ok=\d+ +changed=0 +unreachable=1 ", output), output
    nodes = json.loads(told.read_text(encoding="utf-8"))["nodes"]
    assert {node["name"]: node["verdict"] for node in nodes} == {"h100": "ok", "wsl": "ok"}


def test_servers_alone_are_no_proof_of_gpus() -> None:
    code, output = run_playbook("site.yml", "--limit", "server")
    assert code == 0, output
    assert "Nothing was compared with Nomad: this run has no GPU node" in words(output)
    code, output = run_playbook("verify.yml", "--limit", "server")
    assert code != 0
    assert "Expected: at least one host of gpu_nodes" in words(output)


def test_site_brings_cuda_and_the_gate_where_a_node_asks_for_them() -> None:
    code, output = run_playbook(
        "site.yml", "--limit", "wsl", "--tags", "cuda,health", gpu_node_cuda=True, gpu_node_health=True,
        # The gate of the node would take part in the tests of health.yml.
        gpu_health_interval="1w",
    )  # fmt: skip
    assert code == 0, output
    wsl = f"{FARM}-wsl"
    assert "cuda" in json.loads(docker("exec", wsl, "sh", "-c", "cat /usr/local/cuda-*/version.json"))
    assert docker("exec", wsl, "systemctl", "is-enabled", "gpufarm-health.timer").strip() == "enabled"
    assert json.loads(docker("exec", wsl, "cat", "/run/gpufarm/health.json"))["healthy"] is True
    code, output = run_playbook(
        "site.yml", "--limit", "wsl", "--tags", "health", gpu_node_health=True, gpu_health_state="absent"
    )
    assert code == 0, output


def test_hidden_gpu_is_found() -> None:
    docker("exec", f"{FARM}-t4", "rm", "/dev/nvidia3")
    code, output = run_playbook("verify.yml", "--limit", "t4", verify_timeout=10)
    docker("exec", f"{FARM}-t4", "mknod", "-m", "666", "/dev/nvidia3", "c", "195", "3")
    # The plugin may have looked meanwhile.
    playbooks.restart_nomad(FARM, "t4")
    assert code != 0
    assert "t4: nvidia-smi lists 3 GPU(s)" in words(output)
    assert "Expected: 4" in words(output)
    assert "Next step:" in words(output)
