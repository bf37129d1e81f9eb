"""Servers leave the farm one after the other, after the other tests, which find all of them."""

from __future__ import annotations

import json

from tests.simulator.docker import docker
from tests.testinfra.helpers import wait_for
from tests.testinfra.playbooks import changed_tasks, run_in_scenario, words

REMOVE = "playbooks/remove.yml"
FIRST, SECOND, THIRD = SERVERS = ["nomad-server-1", "nomad-server-2", "nomad-server-3"]


def asked(server: str, path: str) -> object:
    program = f"import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:4646{path}').read().decode())"
    return json.loads(docker("exec", server, "python3", "-c", program))


def peers(server: str) -> int:
    found = asked(server, "/v1/status/peers")
    assert isinstance(found, list)
    return len(found)


def active(server: str) -> bool:
    return docker("exec", server, "sh", "-c", "systemctl is-active nomad || true").strip() == "active"


def test_two_of_three_servers_do_not_leave() -> None:
    wait_for("three servers", lambda: peers(FIRST) == 3)
    run = run_in_scenario(REMOVE, "--limit", f"{FIRST},{SECOND}")
    assert run.code != 0
    assert f"{FIRST}, {SECOND} are to go and {THIRD} to stay. Expected: " in words(run.output)
    assert "Nothing was changed." in words(run.output)
    assert changed_tasks(run.output) == []
    assert [active(server) for server in SERVERS] == [True] * 3


def test_one_of_three_servers_leaves_the_others_with_a_leader() -> None:
    run = run_in_scenario(REMOVE, "--limit", FIRST)
    assert run.code == 0, run.output
    assert asked(SECOND, "/v1/status/leader")
    assert [peers(server) for server in (SECOND, THIRD)] == [2, 2]
    assert run_in_scenario(REMOVE, "--limit", FIRST).changed == {FIRST: 0}


def test_of_two_servers_none_leaves_whatever_the_inventory_names() -> None:
    run = run_in_scenario(REMOVE, "--limit", SECOND)
    assert run.code != 0
    assert f"of the servers {SECOND}, {THIRD}, {SECOND} are to go and {THIRD} to stay. Expected: " in words(run.output)
    assert active(SECOND)


def test_the_last_servers_leave_together() -> None:
    run = run_in_scenario(REMOVE, "--extra-vars", "remove_whole_farm=true")
    assert run.code == 0, run.output
    assert [active(server) for server in SERVERS] == [False] * 3
    for server in SERVERS:
        assert docker("exec", server, "find", "/etc", "/usr/local", "-iname", "*nomad*") == ""
    assert run_in_scenario(REMOVE, "--extra-vars", "remove_whole_farm=true").changed == dict.fromkeys(SERVERS, 0)
