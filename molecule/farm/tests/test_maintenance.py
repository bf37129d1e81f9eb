"""What would end a running job is refused, or moves it away first; and a node that was taken out comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
from tests.testinfra.helpers import boot_id, wait_for
from tests.testinfra.playbooks import words

FARM = os.environ["GPUFARM_FARM"]
T4 = f"{FARM}-t4"
# As an inventory says it from now on.
CHANGE = {"nvidia_driver_branch": "580", "nvidia_driver_reboot": True, "node_maintenance_deadline": 60}
PREFERS_T4 = """
  affinity {
    attribute = "${node.unique.name}"
    value     = "t4"
    weight    = 100
  }
"""


def node() -> dict[str, Any]:
    (listed,) = [each for each in jobs.api(FARM, "/v1/nodes") if each["Name"] == "t4"]
    found: dict[str, Any] = jobs.api(FARM, f"/v1/node/{listed['ID']}")
    return found


def open_again() -> bool:
    """Tell whether the node may have work and has no mark, which its servers learn of some seconds after it."""
    found = node()
    meta = jobs.api(FARM, f"/v1/client/metadata?node_id={found['ID']}")["Meta"]
    return found["SchedulingEligibility"] == "eligible" and "gpufarm_maintenance" not in meta


def driver() -> set[str]:
    said = docker("exec", T4, "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {version.split(".")[0] for version in said.splitlines()}


def pins() -> list[str]:
    return docker("exec", T4, "ls", "/etc/apt/preferences.d").split()


def take_out(change: str) -> None:
    module = ["-m", "gpufarm.core.nomad_node_maintenance", "-a", json.dumps({"state": "out", "change": change})]
    subprocess.run(
        [str(Path(sys.executable).with_name("ansible")), "t4", "-i", str(farm.INVENTORY), *module],
        cwd=ROOT, env=playbooks.environment(FARM), check=True, capture_output=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.fixture
def trainer() -> Iterator[dict[str, Any]]:
    for each in ("t4", "h100", "wsl"):
        jobs.load_image(FARM, each)
    jobs.start_trainer(FARM, preference=PREFERS_T4)
    wait_for("the trainer runs", lambda: bool(jobs.trainers(FARM)))
    (allocation,) = jobs.trainers(FARM)
    assert allocation["NodeName"] == "t4"
    yield allocation
    jobs.nomad(FARM, "job", "stop", "-purge", "trainer")


def test_driver_change_where_a_job_runs(trainer: dict[str, Any]) -> None:
    boot, pinned = boot_id(T4), pins()
    code, output = playbooks.run_playbook(FARM, "site.yml", "--limit", "t4", **CHANGE)
    assert code != 0
    told = words(output)
    for part in (
        "1 running allocation, which the driver of branch 580 would end: trainer.gpu[0] (" + trainer["ID"][:8],
        "Expected: a node on which none runs; they go on.",
        "Next step: wait for their end, or set policy (node_maintenance_policy of the roles) to drain",
    ):
        assert part in told, output
    assert [each["ID"] for each in jobs.trainers(FARM)] == [trainer["ID"]]
    assert (driver(), boot_id(T4), pins()) == ({"570"}, boot, pinned)
    assert node()["SchedulingEligibility"] == "eligible"

    code, output = playbooks.run_playbook(FARM, "site.yml", "--limit", "t4", **CHANGE, node_maintenance_policy="drain")
    # verify.yml is a part of it.
    assert code == 0, output
    assert driver() == {"580"} and boot_id(T4) != boot
    assert open_again()
    wait_for("the trainer runs elsewhere", lambda: bool(jobs.trainers(FARM)))
    (moved,) = jobs.trainers(FARM)
    assert moved["NodeName"] in ("h100", "wsl")
    assert jobs.api(FARM, f"/v1/allocation/{trainer['ID']}")["ClientStatus"] == "complete"


def test_driver_that_came_after_nomad_and_a_node_that_an_earlier_run_left_out() -> None:
    faults.apply_to_container(T4, faults.unload_driver)
    docker("exec", T4, "systemctl", "stop", "nomad")
    docker("exec", T4, "systemctl", "start", "nomad")
    wait_for("the agent has looked for GPUs in vain", lambda: not node()["NodeResources"]["Devices"])
    faults.apply_to_container(T4, faults.restore_driver)
    code, output = playbooks.run_playbook(FARM, "verify.yml", "--limit", "t4", **CHANGE, verify_timeout=0)
    assert code != 0
    assert "Node t4: found no GPU device at all. Expected: 4 GPUs. Next step: " in words(output), output
    take_out("a run that was killed")
    assert node()["SchedulingEligibility"] == "ineligible"
    code, output = playbooks.run_playbook(FARM, "health.yml", "--limit", "t4", health_nomad_timeout=0)
    assert "in maintenance (a run that was killed)" in words(output)
    assert code != 0 and node()["SchedulingEligibility"] == "ineligible"

    code, output = playbooks.run_playbook(FARM, "site.yml", "--limit", "t4", "--tags", "nomad", **CHANGE)
    assert code == 0, output
    assert open_again()
    (group,) = node()["NodeResources"]["Devices"]
    assert len(group["Instances"]) == 4
