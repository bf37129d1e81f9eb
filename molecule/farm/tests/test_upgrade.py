"""An upgrade in waves: jobs go on, the first wave that is not well is the last, and the next run goes on from there.

What changes is a setting of Nomad's, for which each agent restarts as it does for another version.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.simulator.docker import docker
from tests.simulator.farm import jobs
from tests.simulator.gpu import faults
from tests.testinfra import playbooks
from tests.testinfra.helpers import wait_for
from tests.testinfra.playbooks import words

FARM = os.environ["GPUFARM_FARM"]
SERVER, T4, H100 = (f"{FARM}-{name}" for name in ("server", "t4", "h100"))
# The driver of all nodes after the tests of maintenance.
BRANCH = {"nvidia_driver_branch": "580"}
CHANGE = {"nomad_log_level": "DEBUG", "upgrade_waves": ["1", "100%"], "verify_timeout": 30, **BRANCH}
DROP_IN = "/etc/systemd/system/nomad.service.d"
BEFORE = "/var/lib/gpufarm/upgrade.json"
# Read after the role's own files.
FAULT = "/etc/nomad.d/zz-fault.hcl"
BATCH = """
job "long" {
  type = "batch"
  constraint {
    attribute = "${node.unique.name}"
    value     = "NODE"
  }
  group "gpu" {
    restart {
      attempts = 0
    }
    reschedule {
      attempts  = 0
      unlimited = false
    }
    task "train" {
      driver       = "docker"
      kill_timeout = "1s"
      config {
        image        = "IMAGE"
        network_mode = "none"
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


def allocations() -> list[tuple[str, str]]:
    found: list[dict[str, Any]] = jobs.api(FARM, "/v1/job/long/allocations")
    return [(each["ID"], each["ClientStatus"]) for each in found]


def debugged() -> list[str]:
    """Return the nodes whose agents run with the change."""
    found = []
    for name in ("server", "t4", "h100", "wsl"):
        said = docker("exec", f"{FARM}-{name}", "cat", "/etc/nomad.d/nomad.hcl")
        found += [name] * ('"DEBUG"' in said)
    return found


@pytest.fixture
def job() -> Iterator[tuple[str, str]]:
    """A job that ends for good where its node or its agent loses it."""
    jobs.load_image(FARM, "t4")
    text = BATCH.replace("IMAGE", jobs.job_image()).replace("NODE", "t4")
    jobs.nomad(FARM, "job", "run", "-detach", "-", text=text)
    wait_for("the job runs", lambda: [state for _id, state in allocations()] == ["running"])
    yield allocations()[0]
    jobs.nomad(FARM, "job", "stop", "-purge", "long")


def test_first_bad_wave_is_the_last_and_the_next_run_goes_on(job: tuple[str, str]) -> None:
    # A GPU goes with the first restart of its agent.
    fault = f"mkdir -p {DROP_IN} && printf '[Service]\\nExecStartPre=/bin/rm -f /dev/nvidia3\\n' >{DROP_IN}/fault.conf"
    docker("exec", T4, "sh", "-c", f"{fault} && systemctl daemon-reload")
    code, output = playbooks.run_playbook(FARM, "upgrade.yml", **CHANGE)
    assert code != 0
    told = words(output)
    assert "t4: nvidia-smi lists 3 GPU(s)" in told and "Expected: 4, as gpu_node_gpus says." in told, output
    assert "in waves, each verified before the next:' - t4 - h100, wsl" in told, output
    assert debugged() == ["server", "t4"]
    assert allocations() == [job]
    assert docker("exec", T4, "cat", BEFORE).count("GPU-") == 4

    # Repaired, as the message says.
    docker("exec", T4, "sh", "-c", f"rm -r {DROP_IN} && systemctl daemon-reload")
    faults.show_gpu(T4, 3)
    playbooks.restart_nomad(FARM, "t4")
    # Another node has lost one before, of which its inventory knows nothing.
    gone = "GPU-11111111-1111-1111-1111-111111111111"
    docker("exec", H100, "sh", "-c", f'echo \'{{"gpus": ["{gone}"]}}\' >{BEFORE}')
    code, output = playbooks.run_playbook(FARM, "upgrade.yml", **CHANGE)
    assert code != 0
    told = words(output)
    # What has not come to its end comes first.
    assert "in waves, each verified before the next:' - t4 - h100, wsl" in told, output
    assert f"after the upgrade. Expected also: {gone}, which were here before it." in told, output
    assert "wsl: the upgrade stops after this wave, because h100 failed above." in told, output
    assert debugged() == ["server", "t4", "h100", "wsl"]
    assert "upgrade.json" not in docker("exec", T4, "ls", "/var/lib/gpufarm")

    docker("exec", H100, "rm", BEFORE)
    code, output = playbooks.run_playbook(FARM, "upgrade.yml", **CHANGE)
    assert code == 0, output
    assert "in waves, each verified before the next:' - wsl - t4, h100" in words(output), output
    assert allocations() == [job]
    for name in (T4, H100):
        assert "upgrade.json" not in docker("exec", name, "ls", "/var/lib/gpufarm")
    assert {node["SchedulingEligibility"] for node in jobs.api(FARM, "/v1/nodes")} == {"eligible"}

    # As the inventory says it.
    code, output = playbooks.run_playbook(FARM, "site.yml", **BRANCH)
    assert code == 0, output
    assert debugged() == []
    assert allocations() == [job]


def test_gpu_that_nomad_alone_lacks_ends_the_second_wave() -> None:
    """nvidia-smi lists it; an agent that starts again reads that its plugin is to leave it out."""
    uuid = faults.load(docker("exec", H100, "cat", faults.PROFILE_PATH))["gpus"][7]["uuid"]
    text = f'plugin "nomad-device-nvidia" {{ config {{ ignored_gpu_ids = ["{uuid}"] }} }}'
    docker("exec", H100, "sh", "-c", f"printf '%s\\n' '{text}' >{FAULT}")
    code, output = playbooks.run_playbook(FARM, "upgrade.yml", **{**CHANGE, "upgrade_waves": ["1"]})
    assert code != 0
    told = words(output)
    assert "in waves, each verified before the next:' - t4 - h100 - wsl" in told, output
    assert f"Node h100: found 7 GPUs without it. Expected: GPU {uuid}." in told, output
    assert debugged() == ["server", "t4", "h100"]

    docker("exec", H100, "rm", FAULT)
    playbooks.restart_nomad(FARM, "h100")
    code, output = playbooks.run_playbook(FARM, "upgrade.yml", **BRANCH)
    assert code == 0, output
    assert debugged() == []


def test_server_that_fails_stops_every_node(tmp_path: Path) -> None:
    """Beside one that nobody reaches, so that not all hosts of the servers' play fail in it."""
    gone = tmp_path / "gone.yml"
    host = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
    gone.write_text(json.dumps({"nomad_servers": {"hosts": {"gone": host}}}), encoding="utf-8")
    # No configuration beside it is a valid one, so the change is not written.
    docker("exec", SERVER, "sh", "-c", f"echo '}}' >{FAULT}")
    code, output = playbooks.run_playbook(FARM, "upgrade.yml", "-i", str(gone), **CHANGE)
    docker("exec", SERVER, "rm", FAULT)
    assert code != 0
    assert "t4: nothing is changed here, because gone, server failed above." in words(output), output
    assert debugged() == []
    assert "upgrade.json" not in docker("exec", T4, "ls", "/var/lib/gpufarm")
