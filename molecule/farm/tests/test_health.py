"""Every fault is found, named, and keeps work away within one run; after the repair the node is back after one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils.gate import plugin_age_s

from tests.simulator.docker import docker
from tests.simulator.farm import jobs
from tests.simulator.gpu import faults
from tests.testinfra import playbooks
from tests.testinfra.helpers import wait_for
from tests.testinfra.playbooks import words

FARM = os.environ["GPUFARM_FARM"]


def change(node: str, fault: Callable[[faults.Profile], None]) -> None:
    faults.apply_to_container(f"{FARM}-{node}", fault)


def inside(node: str, *command: str) -> str:
    return docker("exec", f"{FARM}-{node}", *command)


def restart_nomad(node: str) -> None:
    playbooks.restart_nomad(FARM, node)


def node_id(node: str) -> str:
    return next(listed["ID"] for listed in jobs.api(FARM, "/v1/nodes") if listed["Name"] == node)


def nodes() -> dict[str, tuple[str, str | None]]:
    """Return eligibility and the gate's reason of every node, as Nomad's servers have them."""
    found: dict[str, tuple[str, str | None]] = {}
    for listed in jobs.api(FARM, "/v1/nodes"):
        node = jobs.api(FARM, f"/v1/node/{listed['ID']}")
        # The meta of the last drain stays when the node is open again.
        drained = {} if node["SchedulingEligibility"] == "eligible" else (node.get("LastDrain") or {}).get("Meta") or {}
        meta = {**drained, **gate_meta(node)}
        found[node["Name"]] = (node["SchedulingEligibility"], meta.get("gpufarm_gate_reason"))
    return found


def gate_meta(node: dict[str, Any]) -> dict[str, str]:
    """Return the node's meta; a ready client has it some seconds before its servers."""
    answer = jobs.nomad(FARM, "operator", "api", f"/v1/client/metadata?node_id={node['ID']}")
    known = json.loads(answer) if answer.startswith("{") else node
    return known["Meta"] or {}


def health(*options: str, **extra: object) -> tuple[int, str]:
    # These tests make all three nodes sick at once, for causes of their own.
    given = {"health_nomad_timeout": 10, "gate_max_closed": "100%", **extra}
    code, output = playbooks.run_playbook(FARM, "health.yml", *options, **given)
    return code, words(output)


@pytest.fixture(scope="module", autouse=True)
def all_nodes_are_open() -> None:
    # Each test ends with it, too.
    opened()


def closed(**reasons: str) -> None:
    """Run the gate and require that exactly these nodes are closed, for these reasons."""
    code, output = health()
    assert code != 0
    found = nodes()
    assert {name for name, (eligibility, _reason) in found.items() if eligibility == "ineligible"} == set(reasons)
    for name, reason in reasons.items():
        assert reason in (found[name][1] or ""), found
        assert f"Node {name}: found " in output
        assert "Next step:" in output


def opened() -> None:
    """Run the gate and require that every node is open."""
    code, output = health()
    assert code == 0, output
    assert {eligibility for eligibility, _reason in nodes().values()} == {"eligible"}


def test_lost_gpu_ecc_error_and_stopped_agent() -> None:
    change("t4", lambda profile: faults.lose_gpu(profile, 2))
    change("h100", lambda profile: faults.ecc_errors(profile, 5))
    inside("wsl", "systemctl", "stop", "nomad")
    code, output = health("--check", health_nomad_timeout=0)
    assert "gpu_lost" in output and code != 0
    assert {eligibility for eligibility, _reason in nodes().values()} == {"eligible"}, "check mode has closed a node"
    uuids = [faults.load(inside(node, "cat", faults.PROFILE_PATH))["gpus"] for node in ("t4", "h100")]
    closed(
        t4=f"gpu_lost {uuids[0][2]['uuid'][:12]}",
        h100=f"ecc_uncorrected {uuids[1][5]['uuid'][:12]}",
        wsl="agent_stopped",
    )
    with pytest.raises(jobs.JobError, match="no allocation"):
        jobs.run(FARM, "gpu-docker", {"image": jobs.job_image(), "count": 1}, timeout=8)
    jobs.nomad(FARM, "job", "stop", "-purge", "gpu-docker")

    change("t4", lambda profile: faults.recover_gpu(profile, 2))
    restart_nomad("t4")
    change("h100", lambda profile: faults.reset_gpu(profile, 5))
    inside("wsl", "systemctl", "start", "nomad")
    opened()


def test_one_cause_for_all_closes_none_and_an_unreachable_node_stays_as_it_is(tmp_path: Path) -> None:
    """The same run: two sick nodes of three are more than the brake allows, and nobody reaches the third."""
    change("t4", lambda profile: faults.ecc_errors(profile, 1))
    change("h100", lambda profile: faults.ecc_errors(profile, 2))
    away = tmp_path / "away.yml"
    away.write_text(
        "all: {hosts: {wsl: {ansible_connection: ssh, ansible_host: 127.0.0.1, ansible_port: 1}}}\n", encoding="utf-8"
    )
    code, output = health("-i", str(away), gate_max_closed="20%")
    assert code != 0
    assert (
        "found 2 to close beside 0 that the gate has closed, of 3 nodes; none is closed. Expected: at most 1" in output
    )
    assert "wsl: cannot be reached (" in output
    assert "Its node stays as it is in Nomad." in output
    for node in ("t4", "h100"):
        assert f"Node {node}: found " in output
    assert {eligibility for eligibility, _reason in nodes().values()} == {"eligible"}

    change("t4", lambda profile: faults.reset_gpu(profile, 1))
    code, output = health("-i", str(away), gate_max_closed="20%")
    assert code != 0
    assert nodes()["h100"][0] == "ineligible", "one node may always be closed"
    change("h100", lambda profile: faults.reset_gpu(profile, 2))
    code, output = health("-i", str(away))
    assert code != 0
    assert "wsl: cannot be reached (" in output
    assert {eligibility for eligibility, _reason in nodes().values()} == {"eligible"}
    opened()


def test_driver_mismatch_and_stopped_plugin() -> None:
    change("h100", lambda profile: faults.mismatch_driver(profile, "570.1.2"))
    # One that hangs. Of one that is killed Nomad forgets the devices at times, as it comes to know of its end.
    inside("t4", "pkill", "-STOP", "-f", "^/opt/nomad/plugins/nomad-device-nvidia")
    t4 = node_id("t4")
    wait_for(
        "statistics that are old", lambda: (plugin_age_s(jobs.api(FARM, f"/v1/client/stats?node_id={t4}")) or 0) > 2
    )
    code, output = health(health_nomad_timeout=0, gpu_health_plugin_age_max=2)
    assert code != 0
    assert "plugin_stopped" in output
    found = nodes()
    assert found["t4"] == ("ineligible", "nomad plugin_stopped")
    assert found["h100"][0] == "ineligible"
    assert "library_mismatch" in (found["h100"][1] or "")
    assert found["wsl"] == ("eligible", None)

    change("h100", faults.restore_driver)
    # The file is the right one, and nvidia-smi and Nomad agree.
    code, output = playbooks.run_playbook(FARM, "verify.yml", "--limit", "t4", gpu_health_plugin_age_max=2)
    assert code != 0
    assert "t4: the device plugin gives no statistics any more" in words(output)
    for node in ("t4", "h100"):
        restart_nomad(node)
    opened()


def test_clone_with_the_same_uuid() -> None:
    profile = faults.load(inside("t4", "cat", faults.PROFILE_PATH))
    own = profile["gpus"][0]["uuid"]
    other = faults.load(inside("h100", "cat", faults.PROFILE_PATH))["gpus"][0]["uuid"]
    change("t4", lambda changed: changed["gpus"][0].update(uuid=other))
    restart_nomad("t4")
    closed(t4="duplicate_uuid", h100="duplicate_uuid")

    change("t4", lambda changed: changed["gpus"][0].update(uuid=own))
    restart_nomad("t4")
    opened()


def test_xid_in_the_kernel_log_closes_until_it_is_acknowledged() -> None:
    faults.xid(f"{FARM}-h100", 3, 79)
    closed(h100="xid_79")
    inside("h100", "sh", "-c", "mkdir -p /var/lib/gpufarm && sleep 1 && touch /var/lib/gpufarm/health-acknowledged")
    opened()


def test_what_an_operator_has_closed_stays_closed() -> None:
    jobs.nomad(FARM, "node", "eligibility", "-disable", node_id("wsl"))
    code, output = health()
    assert code == 0
    assert "somebody else" in output
    assert nodes()["wsl"][0] == "ineligible"
    jobs.nomad(FARM, "node", "eligibility", "-enable", next(
        listed["ID"] for listed in jobs.api(FARM, "/v1/nodes") if listed["Name"] == "wsl"
    ))  # fmt: skip
