from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from testinfra.host import Host

from tests.simulator.gpu import faults
from tests.testinfra.helpers import nomad_api

NODE = "health-t4"
testinfra_hosts = [NODE]


def node(host: Host) -> dict[str, Any]:
    """Return what Nomad's servers know of the node."""
    (listed,) = [each for each in nomad_api(host, "/v1/nodes") if each["Name"] == NODE]
    found: dict[str, Any] = nomad_api(host, f"/v1/node/{listed['ID']}")
    return found


def wait_for(host: Host, eligibility: str, seconds: int = 60) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(seconds):
        found = node(host)
        # The servers learn of new meta some seconds after they have closed the node.
        reason = found["Meta"].get("gpufarm_gate_reason")
        if found["SchedulingEligibility"] == eligibility and (reason is None) == (eligibility == "eligible"):
            return found
        time.sleep(1)
    log = host.check_output("journalctl -u gpufarm-health -n 20 --output cat --no-pager")
    raise AssertionError(f"{NODE} is {found['SchedulingEligibility']}, {found['Meta']}, not {eligibility}\n{log}")


def test_gate_runs_by_itself_and_survives_a_reboot(host: Host) -> None:
    timer = host.service("gpufarm-health.timer")
    assert timer.is_running
    assert timer.is_enabled
    status = json.loads(host.file("/run/gpufarm/health.json").content_string)
    assert status["healthy"] is True


def test_secrets_are_for_root_alone(host: Host) -> None:
    config = host.file("/etc/gpufarm/health.json")
    assert (config.user, config.mode) == ("root", 0o600)


def test_inventory_reaches_the_gate(host: Host) -> None:
    config = json.loads(host.file("/etc/gpufarm/health.json").content_string)
    assert config["health"] == {"gpus": 4, "temperature_gpu_max_c": 95}


def test_sick_gpu_closes_the_node_and_a_clean_probe_opens_it(host: Host) -> None:
    assert wait_for(host, "eligible")
    faults.apply_to_container(NODE, lambda profile: faults.ecc_errors(profile, 1))
    closed = wait_for(host, "ineligible")
    assert closed["Meta"]["gpufarm_gate_closed_by"] == "node"
    assert "ecc_uncorrected GPU-" in closed["Meta"]["gpufarm_gate_reason"]
    assert closed["DrainStrategy"] is None

    faults.apply_to_container(NODE, lambda profile: faults.reset_gpu(profile, 1))
    opened = wait_for(host, "eligible")
    assert opened["Meta"]["gpufarm_gate"] == "open"


def test_what_an_operator_has_closed_stays_closed(host: Host) -> None:
    host.check_output("nomad node eligibility -self -disable")
    before = json.loads(host.file("/run/gpufarm/health.json").content_string)["checked_at"]
    for _ in range(60):
        status = json.loads(host.file("/run/gpufarm/health.json").content_string)
        if status["checked_at"] > before and "somebody else" in status["message"]:
            break
        time.sleep(1)
    assert "somebody else" in status["message"]
    assert node(host)["SchedulingEligibility"] == "ineligible"
    host.check_output("nomad node eligibility -self -enable")


def test_role_removes_what_it_brought(host: Host) -> None:
    ansible_playbook = str(Path(sys.executable).with_name("ansible-playbook"))
    playbook = str(Path(__file__).parents[1] / "remove.yml")
    told = ""
    for changed in (True, False):
        removal = subprocess.run(
            [ansible_playbook, "-i", os.environ["MOLECULE_INVENTORY_FILE"], playbook],
            capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        told = removal.stdout + removal.stderr
        assert removal.returncode == 0, told
        assert (" changed=0 " not in told) == changed, told
    for path in ("/usr/local/sbin/gpufarm-health", "/usr/local/lib/gpufarm", "/etc/gpufarm/health.json"):
        assert not host.file(path).exists
    assert host.run("systemctl cat gpufarm-health.timer").rc == 1
    assert node(host)["SchedulingEligibility"] == "eligible"
