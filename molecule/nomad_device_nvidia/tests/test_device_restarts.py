"""Restarts of the agent and of the node, after test_device.py, which counts starts."""

from __future__ import annotations

import json
from typing import Any

from testinfra.host import Host

from tests.simulator.docker import docker
from tests.testinfra.helpers import gpu_uuids, nomad_api, wait_for

testinfra_hosts = ["device-t4"]

COMMAND = "/bin/sleep 98765"
TASK = {"Name": "main", "Driver": "raw_exec", "Config": {"command": "/bin/sleep", "args": ["98765"]}}
JOB = {"ID": "lives-on", "Type": "batch", "TaskGroups": [{"Name": "main", "Tasks": [TASK]}]}


def send(host: Host, method: str, path: str, body: Any = None) -> None:
    program = (
        "import sys, urllib.request; "
        "urllib.request.urlopen(urllib.request.Request("
        "'http://127.0.0.1:4646' + sys.argv[2], sys.argv[3].encode(), method=sys.argv[1]))"
    )
    host.check_output("python3 -c %s %s %s %s", program, method, path, json.dumps(body))


def allocation(host: Host) -> tuple[str, int]:
    """Return state and number of restarts of the job's task."""
    found = nomad_api(host, "/v1/job/lives-on/allocations")
    states = [(item["ClientStatus"], item["TaskStates"]["main"]["Restarts"]) for item in found if item["TaskStates"]]
    return states[0] if len(states) == 1 else ("none", len(states))


def gpus_with_statistics(host: Host) -> set[str]:
    """Return the GPUs that the plugin of the running agent has looked at; the servers would tell of an older one."""
    program = (
        "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:4646/v1/client/stats').read().decode())"
    )
    answer = host.run("python3 -c %s", program)
    found = json.loads(answer.stdout)["DeviceStats"] if answer.rc == 0 else []
    return {uuid for group in found or [] for uuid in group["InstanceStats"]}


def test_job_lives_across_a_restart_of_the_agent(host: Host) -> None:
    send(host, "POST", "/v1/jobs", {"Job": JOB})
    wait_for("a job that runs", lambda: allocation(host) == ("running", 0))
    pid = host.check_output("pgrep -xf %s", COMMAND)
    agent = host.check_output("systemctl show nomad --value --property=MainPID")
    host.check_output("systemctl restart nomad")
    assert host.check_output("systemctl show nomad --value --property=MainPID") != agent
    wait_for("an agent that has all its GPUs again", lambda: gpus_with_statistics(host) == set(gpu_uuids(host)))
    assert host.check_output("pgrep -xf %s", COMMAND) == pid
    assert allocation(host) == ("running", 0)
    send(host, "DELETE", "/v1/job/lives-on?purge=true")
    wait_for("an ended job", lambda: host.run("pgrep -xf %s", COMMAND).rc != 0)


def test_node_that_lost_its_power_comes_back_with_its_gpus(host: Host) -> None:
    wanted = set(gpu_uuids(host))
    docker("restart", "--time", "0", "device-t4")
    wait_for("GPUs in Nomad", lambda: gpus_with_statistics(host) == wanted)
    started = "systemctl show %s --value --property=%s"
    agent = int(host.check_output(started, "nomad", "ExecMainStartTimestampMonotonic"))
    assert 0 < int(host.check_output(started, "docker", "ActiveEnterTimestampMonotonic")) <= agent
    after = host.check_output(started, "nomad", "After").split()
    assert {
        "network-online.target",
        "docker.service",
        "nvidia-persistenced.service",
        "nvidia-fabricmanager.service",
    } <= set(after)
    (node,) = [item for item in nomad_api(host, "/v1/nodes") if item["Name"] == "device-t4"]
    assert (node["Status"], node["SchedulingEligibility"]) == ("ready", "eligible")
