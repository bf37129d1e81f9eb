"""Servers that are changed one at a time, after the other tests, which find them as they were converged."""

from __future__ import annotations

import json

from tests.simulator.docker import docker
from tests.testinfra.playbooks import run_in_scenario

SERVERS = ["nomad-server-1", "nomad-server-2", "nomad-server-3"]
CONVERGE = "molecule/nomad_server/converge.yml"


def leads(server: str) -> bool:
    program = (
        "import json, urllib.request; "
        "print(json.load(urllib.request.urlopen('http://127.0.0.1:4646/v1/agent/self'))['stats']['nomad']['leader'])"
    )
    return docker("exec", server, "python3", "-c", program).strip() == "true"


def stopped_and_ready(server: str) -> tuple[int, int]:
    """Return when the agent was stopped last and when it was ready again, by the clock that all containers share."""
    properties = "InactiveEnterTimestampMonotonic,ActiveEnterTimestampMonotonic"
    said = docker("exec", server, "systemctl", "show", "nomad", f"--property={properties}")
    found = dict(line.split("=") for line in said.split())
    return int(found["InactiveEnterTimestampMonotonic"]), int(found["ActiveEnterTimestampMonotonic"])


def test_servers_are_changed_one_at_a_time_and_the_leader_last() -> None:
    (leader,) = [server for server in SERVERS if leads(server)]
    before = {server: stopped_and_ready(server) for server in SERVERS}
    run = run_in_scenario(CONVERGE, "--extra-vars", json.dumps({"nomad_log_level": "DEBUG"}))
    assert run.code == 0, run.output
    turns = sorted((stopped_and_ready(server), server) for server in SERVERS)
    assert all(times > before[server] for times, server in turns)
    assert [server for _times, server in turns][-1] == leader
    for (_stopped, ready), (next_stopped, _ready) in zip(
        [times for times, _server in turns], [times for times, _server in turns[1:]], strict=False
    ):
        assert ready < next_stopped, turns
    assert sum(leads(server) for server in SERVERS) == 1
