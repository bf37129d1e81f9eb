"""An upgrade in waves: jobs go on, the first wave that is not well is the last, and the next run goes on from there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.simulator.docker import docker
from tests.simulator.farm import jobs
from tests.simulator.gpu import faults
from tests.simulator.mirror import build
from tests.testinfra.helpers import wait_for
from tests.testinfra.playbooks import Run, run_in_scenario, words

FARM = "upgrade"
SERVERS = ["upgrade-server", "upgrade-server2", "upgrade-server3"]
T4, H200, H100 = "upgrade-t4", "upgrade-h200", "upgrade-h100"
OLD, NEW = (product.version for product in build.NOMADS)
WAVES = ("--extra-vars", json.dumps({"upgrade_waves": [1], "verify_timeout": 30}))
DROP_IN = "/etc/systemd/system/nomad.service.d"
BEFORE = "/var/lib/gpufarm/upgrade.json"
# Read after the role's own files.
FAULT = "/etc/nomad.d/zz-fault.hcl"
# Where Nomad starts a task anew or elsewhere, it is another allocation or an event of it.
JOB = """
job "NAME" {
  type = "TYPE"
  constraint {
    attribute = "${node.unique.name}"
    value     = "NODE"
  }
  group "gpu" {
    restart {
      attempts = 0
      mode     = "fail"
    }
    reschedule {
      attempts  = 0
      unlimited = false
    }
    task "train" {
      driver       = "DRIVER"
      kill_timeout = "1s"
      config {
        CONFIG
        command      = "sleep"
        args         = ["86400"]
      }
      resources {
        cpu    = 50
        memory = 64
        device "nvidia/gpu" {}
      }
    }
  }
}
"""


def api(path: str) -> Any:
    return jobs.api(FARM, path)


def allocations() -> dict[str, list[tuple[str, str, list[str]]]]:
    """Return the allocations of each job, with their states and what happened to their tasks."""
    return {
        job["ID"]: [
            (each["ID"], each["ClientStatus"], [event["Type"] for event in each["TaskStates"]["train"]["Events"]])
            for each in api(f"/v1/job/{job['ID']}/allocations")
        ]
        for job in api("/v1/jobs")
    }


def running() -> dict[str, list[str]]:
    """Return the agents by the version that runs, as Nomad knows it."""
    found = [(member["Name"].removesuffix(".global"), member["Tags"]["build"])
             for member in api("/v1/agent/members")["Members"]]  # fmt: skip
    found += [(node["Name"], node["Version"]) for node in api("/v1/nodes")]
    return {version: sorted(name for name, its in found if its == version) for version in {each for _, each in found}}


def upgrade(*options: str) -> tuple[Run, str]:
    run = run_in_scenario("playbooks/upgrade.yml", *options)
    return run, words(run.output)


@pytest.fixture(scope="module", autouse=True)
def at_work() -> Iterator[dict[str, list[tuple[str, str, list[str]]]]]:
    """A long job on a GPU in a container, and one that is a process, which end for good where an agent loses them."""
    jobs.load_image(FARM, "t4")
    image = f'image = "{jobs.job_image()}"\n        network_mode = "none"'
    for name, kind, node, driver, config in (
        ("long", "batch", T4, "docker", image), ("serving", "service", H200, "raw_exec", "")
    ):  # fmt: skip
        text = JOB.replace("NAME", name).replace("TYPE", kind).replace("NODE", node)
        text = text.replace("DRIVER", driver).replace("CONFIG", config)
        jobs.nomad(FARM, "job", "run", "-detach", "-", text=text)
    wait_for("the jobs run", lambda: [each[0][1:2] for each in allocations().values() if each] == [("running",)] * 2)
    yield allocations()


def test_farm_begins_with_the_older_version() -> None:
    assert running() == {OLD: sorted([*SERVERS, T4, H200, H100])}


def test_server_that_fails_stops_every_node(tmp_path: Path) -> None:
    """Beside one that nobody reaches, so that not all hosts of the servers' play fail in it."""
    gone = tmp_path / "gone.yml"
    host = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
    gone.write_text(json.dumps({"nomad_servers": {"hosts": {"gone": host}}}), encoding="utf-8")
    # No configuration beside it is a valid one, so none is written.
    for server in SERVERS:
        docker("exec", server, "sh", "-c", f"echo '}}' >{FAULT}")
    run, told = upgrade("-i", str(gone), *WAVES)
    for server in SERVERS:
        docker("exec", server, "rm", FAULT)
    assert run.code != 0
    assert f"{T4.removeprefix('upgrade-')}: nothing is changed here, because gone, " in told.replace("upgrade-", "")
    assert running() == {OLD: sorted([*SERVERS, T4, H200, H100])}
    assert "upgrade.json" not in docker("exec", T4, "ls", "/var/lib/gpufarm")


def test_first_bad_wave_is_the_last(at_work: dict[str, Any]) -> None:
    # A GPU goes with the first restart of its agent.
    fault = f"mkdir -p {DROP_IN} && printf '[Service]\\nExecStartPre=/bin/rm -f /dev/nvidia3\\n' >{DROP_IN}/fault.conf"
    docker("exec", T4, "sh", "-c", f"{fault} && systemctl daemon-reload")
    run, told = upgrade(*WAVES)
    assert run.code != 0
    assert f"in waves, each verified before the next:' - {T4} - {H200} - {H100}" in told, run.output
    gone = faults.load(docker("exec", T4, "cat", faults.PROFILE_PATH))["gpus"][3]["uuid"]
    assert f"after the upgrade. Expected also: {gone}, which were here before it." in told, run.output
    assert running() == {NEW: sorted([*SERVERS, T4]), OLD: sorted([H200, H100])}
    assert allocations() == at_work
    assert docker("exec", T4, "cat", BEFORE).count("GPU-") == 4

    # Repaired, as the message says.
    docker("exec", T4, "sh", "-c", f"rm -r {DROP_IN} && systemctl daemon-reload")
    faults.show_gpu(T4, 3)
    docker("exec", T4, "systemctl", "restart", "nomad")


def test_gpu_that_nomad_alone_lacks_ends_the_second_wave(at_work: dict[str, Any]) -> None:
    """nvidia-smi lists it; an agent that starts again reads that its plugin is to leave it out."""
    uuid = faults.load(docker("exec", H200, "cat", faults.PROFILE_PATH))["gpus"][1]["uuid"]
    text = f'plugin "nomad-device-nvidia" {{ config {{ ignored_gpu_ids = ["{uuid}"] }} }}'
    docker("exec", H200, "sh", "-c", f"printf '%s\\n' '{text}' >{FAULT}")
    run, told = upgrade(*WAVES)
    assert run.code != 0
    # What has not come to its end comes first.
    assert f"in waves, each verified before the next:' - {T4} - {H200} - {H100}" in told, run.output
    assert f"Node {H200}: found 1 GPUs without it. Expected: GPU {uuid}." in told, run.output
    assert running() == {NEW: sorted([*SERVERS, T4, H200]), OLD: [H100]}
    assert "upgrade.json" not in docker("exec", T4, "ls", "/var/lib/gpufarm")
    assert allocations() == at_work

    docker("exec", H200, "rm", FAULT)
    docker("exec", H200, "systemctl", "restart", "nomad")


def test_next_run_goes_on_to_the_end(at_work: dict[str, Any]) -> None:
    run, told = upgrade()
    assert run.code == 0, run.output
    assert f"in waves, each verified before the next:' - {H200} - {T4}, {H100}" in told, run.output
    assert running() == {NEW: sorted([*SERVERS, T4, H200, H100])}
    assert allocations() == at_work
    for name in (T4, H200, H100):
        assert "upgrade.json" not in docker("exec", name, "ls", "/var/lib/gpufarm")
    assert {node["SchedulingEligibility"] for node in api("/v1/nodes")} == {"eligible"}


def test_older_version_is_refused() -> None:
    run, told = upgrade("--extra-vars", f"nomad_version={OLD}")
    assert run.code != 0
    assert f"Nomad {NEW} runs, and nomad_version is {OLD}." in told, run.output
    assert running() == {NEW: sorted([*SERVERS, T4, H200, H100])}
