"""GPUs are divided as their layout says, with the least done for it, and again after a reboot."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.simulator.docker import docker
from tests.simulator.farm import jobs
from tests.simulator.gpu import faults
from tests.testinfra.helpers import wait_for
from tests.testinfra.playbooks import Run, changed_tasks, enter, run_in_scenario, words

FARM = "mig"
A100, H100, T4 = "mig-a100", "mig-h100", "mig-t4"
NOTEBOOKS = Counter({"3g.40gb": 1, "1g.10gb": 4})
LAYOUTS = {
    A100: [Counter({"2g.20gb": 3, "1g.10gb": 1}), Counter({"1g.10gb": 7})],
    H100: [NOTEBOOKS, *[Counter()] * 7],
    T4: [Counter()] * 4,
}


def devices(node: str) -> dict[int, dict[str, str]]:
    """Return the MIG devices of each GPU, UUID to profile, as `nvidia-smi -L` lists them."""
    found: dict[int, dict[str, str]] = {}
    for line in docker("exec", node, "nvidia-smi", "-L").splitlines():
        gpu = re.match(r"GPU (\d+):", line)
        device = re.match(r"  MIG (\S+) +Device +\d+: \(UUID: (\S+)\)", line)
        if gpu:
            found[int(gpu[1])] = {}
        elif device:
            found[max(found)][device[2]] = device[1]
    return found


def divided(node: str) -> list[Counter[str]]:
    return [Counter(each.values()) for each in devices(node).values()]


def nomad_devices() -> dict[str, str]:
    """Return the devices that Nomad schedules on the A100s, UUID to name."""
    groups = jobs.api(FARM, f"/v1/node/{node_of(A100)['ID']}")["NodeResources"]["Devices"] or []
    return {each["ID"]: group["Name"] for group in groups for each in group["Instances"] if each["Healthy"]}


def node_of(name: str) -> dict[str, Any]:
    (found,) = (node for node in jobs.api(FARM, "/v1/nodes") if node["Name"] == name)
    return dict(found)


def all_scheduled() -> bool:
    names = {
        uuid: f"NVIDIA A100-SXM4-80GB MIG {profile}" for gpu in devices(A100).values() for uuid, profile in gpu.items()
    }
    return nomad_devices() == names


def mig(node: str, **variables: object) -> Run:
    """Have another layout on one node, by the role alone."""
    given = json.dumps({"nvidia_mig_gpus": [], **variables})
    return run_in_scenario("molecule/mig/layout.yml", "--limit", node, "--extra-vars", given)


def restart(node: str) -> None:
    docker("restart", node)
    wait_for(f"{node} has booted", lambda: "running" in docker(
        "exec", node, "sh", "-c", "systemctl is-system-running --wait || true"))  # fmt: skip


def test_gpus_are_divided_as_their_layouts_say() -> None:
    assert {node: divided(node) for node in LAYOUTS} == LAYOUTS
    assert all_scheduled()


def test_containers_can_have_each_instance() -> None:
    for node in (A100, H100):
        listed = set(re.findall(r"nvidia.com/gpu=(MIG-\S+)", docker("exec", node, "nvidia-ctk", "cdi", "list")))
        assert listed == {uuid for gpu in devices(node).values() for uuid in gpu}


def test_instances_that_fit_stay() -> None:
    """One that a process uses is not touched when others of its kind come or go."""
    first = {"index": 0, "layout": {"2g.20gb": 3, "1g.10gb": 1}}
    before = devices(A100)
    run = mig(A100, nvidia_mig_gpus=[first, {"index": 1, "layout": {"1g.10gb": 3}}])
    assert run.code == 0, run.output
    after = devices(A100)
    assert after[0] == before[0] and len(after[1]) == 3 and after[1].items() <= before[1].items()
    run = mig(A100, nvidia_mig_gpus=[first, {"index": 1, "layout": {"1g.10gb": 7}}])
    assert run.code == 0 and after[1].items() <= devices(A100)[1].items(), run.output


def test_layout_is_back_after_a_reboot() -> None:
    for gpu in range(2):
        # The node has come with a service of its own that divides them, which is not what is tested.
        faults.apply_to_container(
            A100, lambda profile, which=gpu: faults.set_value(profile, which, "mig_at_boot", "N/A")
        )
    for node in (A100, H100):
        restart(node)
        assert divided(node) == LAYOUTS[node]
    run = enter("nvidia_mig/verify", limit="all:!nomad_servers")
    assert run.code == 0, run.output
    wait_for("the agent's plugin has found the instances of this boot", all_scheduled)


def test_verification_says_what_is_to_be_done() -> None:
    docker("exec", H100, "sh", "-c", "nvidia-smi mig -i 0 -dci && nvidia-smi mig -i 0 -dgi")
    run = enter("nvidia_mig/verify", limit=H100)
    assert run.code != 0
    assert (
        f"{H100}: the GPUs are not divided as their layout says. To be done: GPU 0: create 3g.40gb at 4, create "
        "1g.10gb at 0, create" in words(run.output)
    ), run.output
    run = run_in_scenario("molecule/mig/layout.yml", "--limit", H100, "--check")
    assert run.code == 0 and changed_tasks(run.output) == ["Compare the layout with what is there"], run.output
    run = run_in_scenario("molecule/mig/layout.yml", "--limit", H100)
    assert run.code == 0 and divided(H100) == LAYOUTS[H100], run.output


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"nvidia_mig_layout": {"1g.5gb": 7}}, "no MIG profile 1g.5gb. Expected: profiles that it has: 1g.10gb (7, at"),
        ({"nvidia_mig_layout": {"3g.40gb": 3}}, "has no room for 3 of 3g.40gb. Expected: GPU instances that do not"),
        ({"nvidia_mig_layout": "notebook"}, "the option 'layout' is 'notebook'. Expected: disabled, numbers by"),
        ({"nvidia_mig_layout": {"1g.10gb": 0}}, "Expected: numbers above 0 by profile"),
        (
            {"nvidia_mig_gpus": [{"index": 8, "layout": "disabled"}]},
            "an entry of 'gpus' is for {'index': 8}. Expected: one of uuid, index and model, of a GPU of this node: 0",
        ),
    ],
)  # fmt: skip
def test_layouts_that_cannot_be(variables: dict[str, object], told: str) -> None:
    run = mig(H100, **variables)
    assert run.code != 0 and told in words(run.output), run.output
    assert "Next step: " in words(run.output) and divided(H100) == LAYOUTS[H100]


def test_gpu_without_mig() -> None:
    run = mig(T4, nvidia_mig_layout={"1g.10gb": 7})
    assert run.code != 0 and "GPU 0 (Tesla T4, " in words(run.output)
    assert ") has no MIG mode. Expected: a GPU that can be divided: A30, A100, H100" in words(run.output), run.output


def test_processes_in_the_way_are_named() -> None:
    """A whole GPU in use is not divided, and its mode stays."""
    faults.apply_to_container(H100, lambda profile: faults.add_process(profile, 3, 4242, "python", 1024))
    run = mig(H100, nvidia_mig_layout="", nvidia_mig_gpus=[{"index": 3, "layout": {"7g.80gb": 1}}])
    faults.apply_to_container(H100, lambda profile: faults.end_processes(profile, 3))
    assert run.code != 0 and "are processes, 4242 (python). Expected: none on what is to go" in words(run.output)
    assert divided(H100) == LAYOUTS[H100]
    asked = docker("exec", H100, "nvidia-smi", "-i", "3", "--query-gpu=mig.mode.pending", "--format=csv,noheader")
    assert asked.strip() == "Disabled"


def test_layout_where_a_job_runs(tmp_path: Path) -> None:
    """It goes on, until somebody says that the node may be drained; then every device of the layout has one."""
    jobs.load_image(FARM, "a100")
    jobs.start_trainer(FARM, "nvidia/gpu/NVIDIA A100-SXM4-80GB MIG 1g.10gb")
    wait_for("the trainer runs", lambda: bool(jobs.trainers(FARM)))
    before, running = devices(A100), jobs.trainers(FARM)
    (allocation,) = [each["ID"] for each in running]
    layout: dict[str, Any] = {"nvidia_mig_layout": {"1g.10gb": 7}, "nvidia_mig_gpus": []}
    run = run_in_scenario("playbooks/site.yml", "--limit", A100, "--extra-vars", json.dumps(layout))
    assert run.code != 0
    told = words(run.output)
    assert "1 running allocation, which the MIG layout (GPU 0: destroy 2g.20gb" in told, run.output
    assert f" would end: trainer.gpu[0] ({allocation[:8]}" in told and "set policy (node_maintenance_policy" in told
    assert [each["ID"] for each in jobs.trainers(FARM)] == [allocation]
    assert (devices(A100), node_of(A100)["SchedulingEligibility"]) == (before, "eligible")

    layout["node_maintenance_policy"] = "drain"
    run = run_in_scenario("playbooks/site.yml", "--limit", A100, "--extra-vars", json.dumps(layout))
    assert run.code == 0 and divided(A100) == [Counter({"1g.10gb": 7})] * 2, run.output
    assert devices(A100)[1] == before[1], "what fits stays"
    wait_for("the trainer runs anew", lambda: bool(jobs.trainers(FARM)))
    assert allocation not in [each["ID"] for each in jobs.trainers(FARM)]
    assert jobs.api(FARM, f"/v1/allocation/{allocation}")["ClientStatus"] == "complete"
    jobs.nomad(FARM, "job", "stop", "-purge", "trainer")

    report = tmp_path / "told.json"
    asked = {"verify_jobs": True, "verify_jobs_image": jobs.job_image(), "verify_report": str(report)}
    run = run_in_scenario("playbooks/verify.yml", "--extra-vars", json.dumps({**layout, **asked}))
    assert run.code == 0, run.output
    seen = json.loads(report.read_text(encoding="utf-8"))["jobs"]
    assert {gpu["uuid"]: gpu["verdict"] for gpu in seen["gpus"]} == dict.fromkeys(nomad_devices(), "ok")
    assert len(seen["gpus"]) == 14 and seen["problems"] == []


def test_whole_again_and_nothing_left() -> None:
    run = mig(H100, nvidia_mig_layout="disabled")
    assert run.code == 0 and divided(H100) == [Counter()] * 8, run.output
    assert docker("exec", H100, "sh", "-c", "find /etc /usr/local -name 'gpufarm-mig*'") == ""
    restart(H100)
    assert divided(H100) == [Counter()] * 8
