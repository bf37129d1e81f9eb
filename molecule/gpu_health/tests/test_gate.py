from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from testinfra.host import Host

from tests.simulator.docker import docker
from tests.simulator.gpu import faults
from tests.testinfra.helpers import nomad_api
from tests.testinfra.playbooks import enter, words

NODE, SERVER = "health-t4", "health-server"
PROGRAM, CONFIG, STATUS = "/usr/local/sbin/gpufarm-health", "/etc/gpufarm/health.json", "/run/gpufarm/health.json"
METRICS = "/var/lib/prometheus/node-exporter/gpufarm.prom"
PATIENCE_S = 300
testinfra_hosts = [NODE]

JOB = """
job "sleeper" {
  type = "batch"
  group "one" {
    restart {
      attempts = 0
    }
    task "sleep" {
      driver = "raw_exec"
      config {
        command = "sleep"
        args    = ["3600"]
      }
      resources {
        cpu    = 50
        memory = 32
      }
    }
  }
}
"""

TWIN = """
name       = "health-t4"
data_dir   = "/root/twin"
bind_addr  = "127.0.0.1"
advertise {
  http = "127.0.0.1:5646"
  rpc  = "127.0.0.1:5647"
  serf = "127.0.0.1:5648"
}
ports {
  http = 5646
  rpc  = 5647
  serf = 5648
}
client {
  enabled = true
  servers = ["127.0.0.1:4647"]
}
"""


def node_id(host: Host) -> str:
    return str(nomad_api(host, "/v1/agent/self")["stats"]["client"]["node_id"])


def node(host: Host) -> dict[str, Any]:
    """Return what Nomad's servers know of the node."""
    found: dict[str, Any] = nomad_api(host, f"/v1/node/{node_id(host)}")
    return found


def until(state: Callable[[], Any], what: str, host: Host) -> Any:
    """Wait for a state, and show the journal of the gate where it does not come."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        found = state()
        if found:
            return found
        time.sleep(1)
    log = host.check_output("journalctl -u gpufarm-health -n 30 --output cat --no-pager")
    raise AssertionError(f"{what} did not come within {PATIENCE_S} s\n{node(host)}\n{log}")


def wait_for(host: Host, eligibility: str) -> dict[str, Any]:
    def reached() -> dict[str, Any] | None:
        found = node(host)
        # The servers learn of new meta some seconds after they have closed the node.
        reason = found["Meta"].get("gpufarm_gate_reason")
        if found["SchedulingEligibility"] == eligibility and (reason is None) == (eligibility == "eligible"):
            return found
        return None

    found: dict[str, Any] = until(reached, eligibility, host)
    return found


def run(host: Host, code: int, **changes: Any) -> dict[str, Any]:
    """Run the gate once with another configuration, and return its status."""
    config = {**json.loads(host.file(CONFIG).content_string), **changes}
    host.check_output("install -m 0600 /dev/null /root/health.json && echo %s > /root/health.json", json.dumps(config))
    ended = host.run(f"{PROGRAM} /root/health.json /root/status.json")
    status: dict[str, Any] = json.loads(host.file("/root/status.json").content_string)
    assert ended.rc == code, f"{ended.stdout}{ended.stderr}{status}"
    return status


def reopen(host: Host, **changes: Any) -> None:
    """Let the gate open the node; a probe counts only once Nomad's servers know of the last one."""
    until(lambda: run(host, 0, open_after=1, closed_min=0, **changes)["message"] == "healthy and open", "open", host)


@pytest.fixture
def by_hand(host: Host) -> Iterator[None]:
    """The timer does not come between."""
    host.check_output("systemctl stop gpufarm-health.timer")
    until(
        lambda: host.run("systemctl is-active gpufarm-health.service").stdout.strip() in ("inactive", "failed"),
        "end",
        host,
    )
    reopen(host)
    yield
    host.check_output("systemctl start gpufarm-health.timer")


def test_gate_runs_by_itself_and_survives_a_reboot(host: Host) -> None:
    timer = host.service("gpufarm-health.timer")
    assert timer.is_running
    assert timer.is_enabled
    status = json.loads(host.file(STATUS).content_string)
    assert status["healthy"] is True


def test_secrets_are_for_root_alone(host: Host) -> None:
    config = host.file(CONFIG)
    assert (config.user, config.mode) == ("root", 0o600)


def test_inventory_reaches_the_gate(host: Host) -> None:
    config = json.loads(host.file(CONFIG).content_string)
    assert config["health"] == {"gpus": 4, "temperature_gpu_max_c": 95}
    assert (config["open_after"], config["closed_min"]) == (2, 5)


def test_sick_gpu_closes_the_node_and_clean_probes_open_it(host: Host) -> None:
    assert wait_for(host, "eligible")
    faults.apply_to_container(NODE, lambda profile: faults.ecc_errors(profile, 1))
    closed = wait_for(host, "ineligible")
    assert closed["Meta"]["gpufarm_gate_closed_by"] == "node"
    assert "ecc_uncorrected GPU-" in closed["Meta"]["gpufarm_gate_reason"]
    assert closed["DrainStrategy"] is None

    faults.apply_to_container(NODE, lambda profile: faults.reset_gpu(profile, 1))
    opened = wait_for(host, "eligible")
    assert opened["Meta"]["gpufarm_gate"] == "open"
    log = host.check_output("journalctl -u gpufarm-health --output cat --no-pager")
    assert ": healthy, and stays closed until 2 probes in a row are clean, this was number 1" in log


def test_metrics_are_of_the_last_run(host: Host) -> None:
    def told() -> str:
        return str(host.file(METRICS).content_string)

    listed = re.findall(r"GPU-[0-9a-f-]{36}", host.check_output("nvidia-smi -L"))
    assert re.findall(r'gpufarm_gpu_info\{uuid="([^"]+)"', told()) == listed
    assert "gpufarm_node_gpus_found 4\n" in told()
    first = re.findall(r"gpufarm_gate_run_timestamp_seconds (\d+)", told())
    until(lambda: re.findall(r"gpufarm_gate_run_timestamp_seconds (\d+)", told()) > first, "the next run", host)
    assert host.file(METRICS).mode == 0o644


def test_what_an_operator_has_closed_stays_closed(host: Host) -> None:
    host.check_output("nomad node eligibility -self -disable")

    def left_alone() -> bool:
        return "somebody else" in json.loads(host.file(STATUS).content_string)["message"]

    until(left_alone, "somebody else", host)
    assert node(host)["SchedulingEligibility"] == "ineligible"
    host.check_output("nomad node eligibility -self -enable")


@pytest.mark.usefixtures("by_hand")
def test_drain_moves_what_runs_and_its_end_is_the_gates(host: Host) -> None:
    """A real drain: the task gets its signal, and Nomad keeps the reason."""
    host.check_output("echo %s > /root/sleeper.hcl && nomad job run -detach /root/sleeper.hcl", JOB)

    def allocation() -> dict[str, Any] | None:
        found = nomad_api(host, "/v1/job/sleeper/allocations")
        return found[0] if found and found[0]["NodeID"] == node_id(host) else None

    until(lambda: (allocation() or {}).get("ClientStatus") == "running", "running", host)
    lost = {"gpus": 5}
    status = run(host, 3, health=lost)
    assert status["action"] == "close"
    assert (allocation() or {})["DesiredStatus"] == "run", "closed without a drain, it may end where it runs"
    status = run(host, 3, health=lost, drain=True, drain_deadline=1)
    assert (status["action"], "now drained" in status["message"]) == ("update", True)
    until(lambda: (allocation() or {}).get("ClientStatus") == "complete", "drained", host)
    until(lambda: node(host)["DrainStrategy"] is None, "the end of the drain", host)
    drained = node(host)["LastDrain"]
    assert (drained["Status"], drained["Meta"]["gpufarm_gate"]) == ("complete", "closed")
    assert drained["Meta"]["gpufarm_gate_reason"] == status["reason"]
    reopen(host, drain=True)
    assert node(host)["SchedulingEligibility"] == "eligible"
    host.check_output("nomad job stop -purge -detach sleeper")


@pytest.mark.usefixtures("by_hand")
def test_drain_of_somebody_else_is_left_alone(host: Host) -> None:
    run(host, 3, health={"gpus": 5})
    host.check_output("nomad node drain -self -enable -yes -m 'new riser'")
    until(lambda: node(host)["DrainStrategy"] is None, "the end of the drain", host)
    until(lambda: "drained by somebody else" in run(host, 0, open_after=1, closed_min=0)["message"], "left alone", host)
    assert node(host)["SchedulingEligibility"] == "ineligible"
    host.check_output("nomad node eligibility -self -enable")
    reopen(host)


@pytest.mark.usefixtures("by_hand")
def test_configuration_closes_or_does_not(host: Host) -> None:
    """One behaviour a key; what needs no Nomad is in the unit tests of the program."""
    warm = {"temperature_gpu_max_c": 10, "severities": {"temperature": "warning"}}
    status = run(host, 0, health=warm)
    assert (status["verdict"], status["healthy"], status["reason"]) == ("warning", True, None)
    status = run(host, 3, health=warm, close_on="warning")
    assert "temperature GPU-" in status["reason"]
    reopen(host)
    assert run(host, 3, plugin_age_max=-1)["reason"] == "nomad plugin_stopped"
    reopen(host)
    (uuid, *_others) = re.findall(r"GPU-[0-9a-f-]{36}", host.check_output("nvidia-smi -L"))
    assert run(host, 3, ignored=[uuid])["reason"] == "nomad gpu_unexpected"
    reopen(host)
    status = run(host, 2, health={"dcgm_diag_level": 3})
    assert (status["healthy"], "dcgm_diag_level is 3" in status["message"]) == (None, True)


@pytest.mark.usefixtures("by_hand")
def test_gpu_that_requires_a_reset_closes_the_node(host: Host) -> None:
    """It is still listed, and nvidia-smi ends with 0."""
    faults.apply_to_container(NODE, lambda profile: faults.require_reset(profile, 2))
    assert "reset_required GPU-" in run(host, 3)["reason"]
    assert node(host)["SchedulingEligibility"] == "ineligible"
    faults.apply_to_container(NODE, lambda profile: faults.reset_gpu(profile, 2))
    reopen(host)


@pytest.mark.usefixtures("by_hand")
def test_gpu_that_computes_wrongly_closes_the_node(host: Host) -> None:
    """Nothing of nvidia-smi tells of it."""
    faults.apply_to_container(NODE, lambda profile: faults.compute_wrongly(profile, 1, "memory"))
    status = run(host, 3, check_start=3600)
    assert "benchmark_memory_errors GPU-" in status["reason"], status
    assert [gpu["checks"]["start"]["verdict"] for gpu in status["gpus"]] == ["ok", "failed", "ok", "ok"]
    assert node(host)["SchedulingEligibility"] == "ineligible"
    faults.apply_to_container(NODE, lambda profile: faults.recover_cuda(profile, 1))
    reopen(host)


@pytest.mark.usefixtures("by_hand")
def test_of_two_nodes_with_one_name_the_gate_takes_its_own(host: Host) -> None:
    """The other one is younger, so by name it would be taken."""
    docker("exec", SERVER, "sh", "-c", f"mkdir -p /root/twin && cat > /root/twin.hcl <<'END'\n{TWIN}\nEND")
    unit = ("--unit=twin", "--collect", "--property=UnsetEnvironment=AWS_CA_BUNDLE")
    docker("exec", SERVER, "systemd-run", *unit, "nomad", "agent", "-config=/root/twin.hcl")
    own = node_id(host)

    def twins() -> list[dict[str, Any]]:
        found = [each for each in nomad_api(host, "/v1/nodes") if each["Name"] == NODE and each["Status"] == "ready"]
        return found if len(found) == 2 else []

    try:
        until(twins, "a second node of this name", host)
        run(host, 3, health={"gpus": 5})
        assert {each["ID"]: each["SchedulingEligibility"] for each in twins()}[own] == "ineligible"
        assert {each["SchedulingEligibility"] for each in twins() if each["ID"] != own} == {"eligible"}
        reopen(host)
        assert {each["SchedulingEligibility"] for each in twins()} == {"eligible"}
    finally:
        docker("exec", SERVER, "systemctl", "stop", "twin")


def test_status_does_not_go_on_saying_healthy_while_nomad_is_away(host: Host) -> None:
    def status() -> dict[str, Any]:
        read: dict[str, Any] = json.loads(host.file(STATUS).content_string)
        return read

    before = until(lambda: status()["healthy"] and status(), "a healthy node", host)
    host.check_output("systemctl stop nomad")
    try:
        told = until(lambda: not status()["healthy"] and status(), "a status that knows of it", host)
        assert (told["healthy"], told["action"], told["nomad_problems"]) == (None, "failed", None)
        assert told["verdict"] == before["verdict"]
        assert told["checked_at"] > before["checked_at"]
        assert "cannot be reached" in told["message"]
    finally:
        host.check_output("systemctl start nomad")
    until(lambda: status()["healthy"], "healthy again", host)


def test_verification_tells_of_a_gate_that_cannot_work(host: Host) -> None:
    host.check_output(f"cp -p {CONFIG} /root/whole.json && truncate --size=20 {CONFIG}")
    run = enter("gpu_health/verify", limit=NODE)
    host.check_output(f"mv /root/whole.json {CONFIG}")
    assert run.code != 0
    said = rf'{NODE}: {PROGRAM} ended with 2 and said "{NODE}: no verdict: {CONFIG} cannot be used \(.*'
    assert re.search(rf"{said}\. Expected: a verdict\. Next step: what it says itself", words(run.output)), run.output
    run = enter("gpu_health/verify", limit=NODE)
    assert run.code == 0, run.output


def playbook(name: str, *options: str) -> str:
    ended = subprocess.run(
        [str(Path(sys.executable).with_name("ansible-playbook")), "-i", os.environ["MOLECULE_INVENTORY_FILE"],
         str(Path(__file__).parents[1] / name), *options],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # Molecule asks for colours.
    return re.sub(r"\x1b\[[0-9;]*m", "", ended.stdout)


def changed_tasks(output: str) -> set[str]:
    return set(
        re.findall(r"^(?:TASK|RUNNING HANDLER) \[(?:[\w.]+ : )?([^\]]+)\][^\n]*\nchanged:", output, re.MULTILINE)
    )


def test_role_removes_what_it_brought_and_check_mode_tells_of_its_timer(host: Host) -> None:
    timer = {"Have the timer running", "Restart the timer of the gate"}
    assert not timer & changed_tasks(playbook("converge.yml", "--check"))
    # One that goes on would write what it has found when that was taken away.
    goes_on = """
        folder=/run/systemd/system/gpufarm-health.service.d
        mkdir -p $folder && printf '[Service]\\nExecStartPre=sleep infinity\\n' >$folder/test.conf
        systemctl daemon-reload && systemctl stop gpufarm-health.service
        systemctl start --no-block gpufarm-health.service
        until [ "$(systemctl is-active gpufarm-health.service)" = activating ]; do sleep 0.1; done
        rm -r $folder"""
    host.check_output(goes_on)
    for changed in (True, False):
        told = playbook("remove.yml")
        assert (" changed=0 " not in told) == changed, told
    for path in (PROGRAM, "/usr/local/lib/gpufarm", CONFIG, STATUS, METRICS):
        assert not host.file(path).exists
    assert host.run("systemctl cat gpufarm-health.timer").rc == 1
    assert host.check_output("systemctl list-units --all --plain --no-legend 'gpufarm-health.*'") == ""
    assert node(host)["SchedulingEligibility"] == "eligible"
    assert timer <= changed_tasks(playbook("converge.yml", "--check"))
    assert not host.file(PROGRAM).exists
