"""Servers that are changed one at a time, after the other tests, which find them as they were converged."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.simulator.docker import docker
from tests.testinfra.helpers import wait_for
from tests.testinfra.playbooks import run_in_scenario

SERVERS = ["nomad-server-1", "nomad-server-2", "nomad-server-3"]
CONVERGE = "molecule/nomad_server/converge.yml"
# Times are microseconds of the clock that all containers share, from before the questions to after the answers.
WATCH = """
import json, time, urllib.request

def ask(path):
    try:
        return json.load(urllib.request.urlopen("http://127.0.0.1:4646/v1/status/" + path, timeout=5))
    except (OSError, ValueError):
        return None

while True:
    began = time.monotonic_ns() // 1000
    leader, peers = ask("leader"), ask("peers")
    print(json.dumps([began, time.monotonic_ns() // 1000, leader or "", len(peers or [])]), flush=True)
    time.sleep(0.2)
"""


class Seen(NamedTuple):
    """What a server said once while it was watched."""

    began: int
    ended: int
    leader: str
    peers: int


class Turn(NamedTuple):
    """When a server began to stop last and when it was ready again, by the clock of the watch."""

    begins: int
    ready: int


def leads(server: str) -> bool:
    program = (
        "import json, urllib.request; "
        "print(json.load(urllib.request.urlopen('http://127.0.0.1:4646/v1/agent/self'))['stats']['nomad']['leader'])"
    )
    return docker("exec", server, "python3", "-c", program).strip() == "true"


def turn(server: str) -> Turn:
    names = ["ActiveExitTimestampMonotonic", "ActiveEnterTimestampMonotonic"]
    said = docker("exec", server, "systemctl", "show", "nomad", f"--property={','.join(names)}")
    found = dict(line.split("=") for line in said.split())
    return Turn(*(int(found[name]) for name in names))


def seen(server: str) -> list[Seen]:
    # The last line may be on its way still.
    lines = docker("exec", server, "cat", "/root/watch.log").splitlines(keepends=True)
    return [Seen(*json.loads(line)) for line in lines if line.endswith("\n")]


def watched_since(server: str, moment: int) -> bool:
    return any(each.began > moment for each in seen(server))


@pytest.fixture
def watched() -> Iterator[None]:
    """Have every server asked for its leader and its peers, all along."""
    try:
        for server in SERVERS:
            options = ["--collect", "--unit=watch", "--property=StandardOutput=truncate:/root/watch.log"]
            # Once it runs, its log is there.
            docker("exec", server, "systemd-run", "--service-type=exec", *options, "python3", "-c", WATCH)
        wait_for("every server is watched", lambda: all(watched_since(server, 0) for server in SERVERS))
        yield
    finally:
        for server in SERVERS:
            docker("exec", server, "sh", "-c", "systemctl stop watch; rm -f /root/watch.log")


@pytest.mark.usefixtures("watched")
def test_servers_are_changed_one_at_a_time_and_the_leader_last() -> None:
    # On a busy machine one may be elected just now.
    wait_for("one leads", lambda: sum(leads(server) for server in SERVERS) == 1)
    (leader,) = [server for server in SERVERS if leads(server)]
    before = {server: turn(server) for server in SERVERS}
    run = run_in_scenario(CONVERGE, "--extra-vars", json.dumps({"nomad_log_level": "DEBUG"}))
    assert run.code == 0, run.output
    turns = sorted((turn(server), server) for server in SERVERS)
    assert all(times > before[server] for times, server in turns)
    assert [server for _times, server in turns][-1] == leader
    for (one, _server), (following, _next) in itertools.pairwise(turns):
        assert one.ready < following.begins, turns
    assert sum(leads(server) for server in SERVERS) == 1

    last_ready = turns[-1][0].ready
    wait_for("all are seen after the last turn", lambda: all(watched_since(server, last_ready) for server in SERVERS))
    told = {server: seen(server) for server in SERVERS}
    ends = [*(times.begins for times, _server in turns[1:]), math.inf]
    for (times, server), end in zip(turns, ends, strict=True):
        others = [told[other] for other in SERVERS if other != server]
        # Each as it was last seen before this one began to stop.
        lasts = [[each for each in views if each.ended < times.begins][-1] for views in others]
        assert any(last.leader and last.peers == len(SERVERS) for last in lasts), (server, lasts)
        # A server that follows takes no leader with it. With the one that leads, the last, goes the farm's leader: the
        # others elect one, so there is a moment without.
        after = [each for views in others for each in views if times.begins < each.began and each.ended < end]
        assert any(each.leader for each in after), (server, times, end, after)
