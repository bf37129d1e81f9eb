# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import platform
import shutil
import ssl
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.plugins.module_utils import gate, nomad, nomad_plugin_log
from ansible_collections.gpufarm.core.plugins.module_utils.nomad import client
from ansible_collections.gpufarm.core.plugins.module_utils.nomad import client as nomad_client
from ansible_collections.gpufarm.core.plugins.modules import nomad_agent_info
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import nomad_helper as farm
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

MEMBERS, PEERS = "/v1/agent/members", "/v1/status/peers"
HEALTH, LEADER, STATS, SELF = "/v1/agent/health", "/v1/status/leader", "/v1/client/stats", "/v1/agent/self"
TOKEN = "11111111-2222-3333-4444-555555555555"
CUT_OFF = (0, "")
NO_LEADER = (500, "No cluster leader")
WELL = (200, {"client": {"message": "ok", "ok": True}, "server": {"message": "ok", "ok": True}})
SICK = (500, {"client": {"message": "no known servers", "ok": False}, "server": {"message": "ok", "ok": True}})
VALUES = ("state", "message", "leader", "uptime", "servers")
OF_THE_NODE = ("driver_versions", "maintenance", "meta")
OF_A_SERVER = ("leads", "encrypted", "peers")


def stats(newest: str = "2026-11-21T15:11:01Z") -> dict[str, Any]:
    """Statistics taken at 15:11:02 UTC."""
    group = {"Type": "gpu", "InstanceStats": {"GPU-0": {"Timestamp": newest}}}
    return {"Timestamp": 1795273862000000000, "Uptime": 86400, "DeviceStats": [group]}


def own(
    known_servers: str = "192.0.2.1:4647, 192.0.2.2:4647", heartbeat_ttl: str = "14.3s", last_heartbeat: str = "3.1s"
) -> dict[str, Any]:
    told = {"known_servers": known_servers, "heartbeat_ttl": heartbeat_ttl, "last_heartbeat": last_heartbeat}
    return {"config": {"Version": {"Version": "1.11.3"}}, "stats": {"client": told}}


class Server(farm.Agent):
    """An agent with a list of answers to each question, the last of which it gives for ever."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(tls)
        self.answers: dict[str, list[tuple[int, Any]]] = {
            HEALTH: [WELL], LEADER: [(200, "192.0.2.1:4647")], STATS: [(200, stats())], SELF: [(200, own())],
            MEMBERS: [(403, "Permission denied")],
        }  # fmt: skip
        self.hangs: set[str] = set()
        self.ended = threading.Event()
        self.answer = self.tell

    def tell(self, request: Any) -> bool:
        path = urllib.parse.urlsplit(request.path).path
        if path in self.hangs:
            self.ended.wait(300)
            return True
        left = self.answers[path]
        status, content = left.pop(0) if len(left) > 1 else left[0]
        if status == CUT_OFF[0]:
            return True
        text = content if status != 200 and isinstance(content, str) else json.dumps(content)
        request.reply(status, text.encode(), {})
        return True

    @property
    def asked(self) -> list[str]:
        return [path for path, _query, _headers in self.requests]

    def close(self) -> None:
        self.ended.set()
        super().close()


class Clock:
    """Time that goes on only while the module sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(nomad_agent_info, "time", made)
    for name in (
        "ADDR",
        "TOKEN",
        "REGION",
        "NAMESPACE",
        "CACERT",
        "CAPATH",
        "CLIENT_CERT",
        "CLIENT_KEY",
        "SKIP_VERIFY",
    ):
        monkeypatch.delenv(f"NOMAD_{name}", raising=False)
    return made


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that each request may take."""
    seen = []
    real = nomad.Client.within

    def within(client: nomad.Client, seconds: float) -> nomad.Client:
        made = real(client, seconds)
        seen.append(made.connection.request_timeout)
        return made

    monkeypatch.setattr(nomad.Client, "within", within)
    return seen


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


def run(server: Server, capsys: pytest.CaptureFixture[str], **arguments: Any) -> helper.Outcome:
    settings = {name: arguments.pop(name) for name in ("check_mode",) if name in arguments}
    given = {"address": server.url, "token": TOKEN, **arguments}
    result = helper.run_module(nomad_agent_info.main, capsys, given, **settings)
    assert TOKEN not in json.dumps(result)
    assert result.get("changed", False) is False
    return result


def values(result: helper.Outcome) -> tuple[Any, ...]:
    return tuple(result[name] for name in VALUES)


# --- how the agent is ------------------------------------------------------------------------


@pytest.mark.parametrize("check_mode", [False, True])
def test_agent_that_is_well(server: Server, capsys: pytest.CaptureFixture[str], check_mode: bool) -> None:
    result = run(server, capsys, check_mode=check_mode)
    assert values(result) == ("ok", None, "192.0.2.1:4647", 86400, None)
    assert "failed" not in result
    assert server.asked == [HEALTH, LEADER, STATS, SELF, MEMBERS]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (SICK[1], "client: no known servers"),
        (
            {"client": {"message": "a\u001b[1m", "ok": False}, "server": {"message": "b", "ok": False}},
            "client: a [1m; server: b",
        ),
        ("down for work", "{url} answered HTTP 500: down for work"),
        ("[1]", "{url} answered HTTP 500: [1]"),
        ({"client": {"ok": True}, "more": None}, '{url} answered HTTP 500: {{"client": {{"ok": true}}, "more": null}}'),
    ],
)
def test_agent_that_is_not_well_says_why(
    server: Server, capsys: pytest.CaptureFixture[str], body: Any, message: str
) -> None:
    server.answers.update({HEALTH: [(500, body)], LEADER: [NO_LEADER]})
    result = run(server, capsys)
    assert values(result) == ("unhealthy", message.format(url=server.url + HEALTH), None, 86400, None)
    # An answer that is no state is not asked for again.
    assert server.asked == [HEALTH, LEADER, STATS, SELF, MEMBERS]


def test_other_answers_are_those_of_an_agent_that_is_not_well(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers[HEALTH] = [(400, "Client sent an HTTP request to an HTTPS server.")]
    result = run(server, capsys)
    assert result["state"] == "unhealthy"
    assert result["message"].endswith("answered HTTP 400: Client sent an HTTP request to an HTTPS server.")


def test_agent_that_is_busy_is_asked_again(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nomad_client, "FIRST_PAUSE_S", 0.01)
    server.answers[HEALTH] = [(429, "Your IP is issuing too many concurrent connections"), WELL]
    assert run(server, capsys)["state"] == "ok"


def test_agent_that_is_away(server: Server, capsys: pytest.CaptureFixture[str], limits: list[float]) -> None:
    server.close()
    result = run(server, capsys)
    state, message, *others = values(result)
    assert (state, others) == ("stopped", [None, None, None])
    assert message.startswith(f"{server.url}{HEALTH} cannot be reached (")
    assert "failed" not in result
    assert limits == [30]


def test_agent_that_hangs_is_asked_no_more(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.hangs = {HEALTH, LEADER, STATS}
    result = run(server, capsys, request_timeout=1)
    assert values(result) == ("stopped", f"{server.url}{HEALTH} cannot be reached (timed out)", None, None, None)
    assert server.asked == [HEALTH]


@pytest.mark.parametrize(
    ("newest", "age", "state", "message"),
    [
        ("2026-11-21T15:10:02Z", None, "ok", None),
        ("2026-11-21T15:10:01Z", None, "plugin_stopped", "the statistics of GPUs are 61 s older than the client's own"),
        ("2026-11-21T15:10:01Z", 61, "ok", None),
        ("2026-11-21T15:11:00Z", 1.5, "plugin_stopped", "the statistics of GPUs are 2 s older than the client's own"),
    ],
)
def test_device_plugin_that_stopped(
    server: Server,
    capsys: pytest.CaptureFixture[str],
    *,
    newest: str,
    age: float | None,
    state: str,
    message: str | None,
) -> None:
    server.answers[STATS] = [(200, stats(newest))]
    result = run(server, capsys, **({} if age is None else {"plugin_age_max": age}))
    assert values(result)[:2] == (state, message)
    assert result["uptime"] == 86400


@pytest.mark.parametrize(
    "answer",
    [
        (400, "No local Node and node_id not provided"), (403, "Permission denied"), (500, "x"), (200, []), (200, {}),
        (200, {"Uptime": "long"}),
    ],
)  # fmt: skip
def test_statistics_that_nobody_tells_are_unknown(
    server: Server, capsys: pytest.CaptureFixture[str], answer: tuple[int, Any]
) -> None:
    server.answers[STATS] = [answer]
    assert values(run(server, capsys)) == ("ok", None, "192.0.2.1:4647", None, None)
    assert server.asked.count(STATS) == 1


@pytest.mark.parametrize("answer", [(200, ""), (200, None), (200, {"a": 1}), (200, "192.0.2.1"), NO_LEADER])
def test_no_leader(server: Server, capsys: pytest.CaptureFixture[str], answer: tuple[int, Any]) -> None:
    server.answers[LEADER] = [answer]
    assert values(run(server, capsys)) == ("ok", None, None, 86400, None)


@pytest.mark.parametrize("echo", [HEALTH, LEADER, STATS, SELF])
@pytest.mark.parametrize("status", [200, 500])
def test_token_is_sent_and_never_shown(
    server: Server, capsys: pytest.CaptureFixture[str], echo: str, status: int
) -> None:
    server.answers[echo] = [(status, own(TOKEN, "0s") if echo == SELF else f"no {TOKEN}")]
    for goal in nomad_agent_info.argument_spec()["wait_for"]["choices"]:
        run(server, capsys, wait_for=goal, timeout=0)
    assert {headers["X-Nomad-Token"] for _path, _query, headers in server.requests} == {TOKEN}


# --- servers ---------------------------------------------------------------------------------


def members(**states: str) -> dict[str, Any]:
    regions = {"elsewhere": "other"}
    return {
        "ServerRegion": "global",
        "Members": [
            {"Name": f"{name}.{region}", "Status": state, "Tags": {"region": region}}
            for name, state in states.items()
            for region in [regions.get(name, "global")]
        ],
    }


@pytest.fixture
def servers(server: Server) -> Server:
    """Three servers, of which the first, which is asked, leads."""
    server.answers.update({
        SELF: [(200, {"stats": {"nomad": {"leader": "true"}, "serf": {"encrypted": "false"}}})],
        MEMBERS: [(200, members(s1="alive", s2="alive", s3="alive", s0="left", elsewhere="failed"))],
        PEERS: [(200, ["192.0.2.1:4647", "192.0.2.2:4647", "192.0.2.3:4647"])],
    })  # fmt: skip
    return server


def test_all_servers_are_there(servers: Server, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(servers, capsys, wait_for="servers")
    assert "failed" not in result and result["leader"] == "192.0.2.1:4647"
    assert [result[name] for name in OF_A_SERVER] == [True, False, ["s1", "s2", "s3"]]
    servers.answers[SELF] = [(200, {"stats": {"nomad": {"leader": "false"}, "serf": {"encrypted": "true"}}})]
    result = run(servers, capsys, wait_for="servers")
    assert [result[name] for name in OF_A_SERVER] == [False, True, ["s1", "s2", "s3"]]


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        (
            {MEMBERS: [(200, members(s1="alive", s2="failed", s3="leaving"))]},
            "s2.global is failed, s3.global is leaving",
        ),
        ({MEMBERS: [(200, members(s1="alive"))]}, "2 of 3 servers not met yet"),
        ({MEMBERS: [(200, None)]}, "3 of 3 servers not met yet"),
        ({LEADER: [NO_LEADER]}, "{url}/v1/status/leader?stale=true answered HTTP 500: No cluster leader"),
        ({MEMBERS: [(500, "no")]}, "{url}/v1/agent/members answered HTTP 500: no"),
    ],
)
def test_server_that_is_away_is_waited_for(
    servers: Server, capsys: pytest.CaptureFixture[str], clock: Clock, *, answers: dict[str, Any], found: str
) -> None:
    well = {path: servers.answers[path] for path in answers}
    servers.answers.update(answers)
    result = run(servers, capsys, wait_for="servers", timeout=3)
    assert result["failed"] and clock.now == 1003
    assert result["msg"] == (
        f"{platform.node()}: not all servers in 3 s, at last {found.format(url=servers.url)}. "
        "Expected: a leader and every server alive. Next step: read `journalctl -u nomad` on those that are not, or "
        "`nomad server force-leave` one that is gone."
    )
    servers.answers.update({path: [*answers[path], *well[path]] for path in answers})
    assert "failed" not in run(servers, capsys, wait_for="servers", timeout=3)


@pytest.mark.parametrize("path", [SELF, MEMBERS])
def test_without_leave_to_ask_the_leader_is_enough(
    servers: Server, capsys: pytest.CaptureFixture[str], path: str
) -> None:
    servers.answers[path] = [(403, "Permission denied")]
    result = run(servers, capsys, wait_for="servers")
    assert "failed" not in result and [result[name] for name in OF_A_SERVER] == [None, None, None]


@pytest.mark.parametrize(
    ("answers", "leader", "leads"),
    [
        ({}, "192.0.2.1:4647", True),
        ({MEMBERS: [(200, members(s1="alive", s2="failed"))]}, "192.0.2.1:4647", True),
        ({SELF: [(403, "Permission denied")]}, "192.0.2.1:4647", None),
        ({LEADER: [(200, "")]}, None, None),
        ({LEADER: [NO_LEADER]}, None, None),
        # One that has TLS tells of a leader without, whom it cannot ask.
        ({LEADER: [(200, "192.0.2.1:4647"), (500, "rpc error: EOF")]}, "192.0.2.1:4647", True),
    ],
)
def test_no_leader_is_a_word_too(
    servers: Server, capsys: pytest.CaptureFixture[str], answers: dict[str, Any], leader: str | None, leads: bool | None
) -> None:
    servers.answers.update(answers)
    result = run(servers, capsys, wait_for="word", timeout=0)
    assert "failed" not in result and (result["leader"], result["leads"]) == (leader, leads)


def test_who_says_nothing_of_a_leader_has_not_said_that_there_is_none(
    servers: Server, capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    servers.answers[LEADER] = [(503, "busy")]
    result = run(servers, capsys, wait_for="word", timeout=3)
    assert result["failed"] and clock.now == 1003
    assert "no word on a leader in 3 s, at last" in result["msg"]
    servers.answers[LEADER] = [(503, "busy"), (200, "")]
    assert "failed" not in run(servers, capsys, wait_for="word", timeout=3)


def built(**builds: str | None) -> dict[str, Any]:
    told = members(**dict.fromkeys(builds, "alive"))
    for member in told["Members"]:
        member["Tags"]["build"] = builds[member["Name"].partition(".")[0]]
    return told


def test_version_of_the_oldest_server(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(server, capsys)["servers_version"] is None
    for builds, oldest in (
        ({"s1": "1.11.3", "s2": "1.9.7+ent", "s3": "1.10.0-rc.1"}, "1.9.7+ent"),
        # Of another region, and one that does not tell.
        ({"s1": "1.11.3", "elsewhere": "1.8.0", "s3": None}, "1.11.3"),
        ({}, None),
    ):
        server.answers[MEMBERS] = [(200, built(**builds))]
        assert run(server, capsys)["servers_version"] == oldest
    gone = built(s1="1.11.3", s2="1.9.7")
    gone["Members"][1]["Status"] = "failed"
    server.answers[MEMBERS] = [(200, gone)]
    assert run(server, capsys)["servers_version"] == "1.11.3"
    assert run(server, capsys, wait_for="leader")["servers_version"] is None


# --- its node --------------------------------------------------------------------------------


def device(*versions: str | None) -> list[dict[str, Any]]:
    return [
        {
            "Type": "gpu", "Vendor": "nvidia", "Name": f"T{number}", "Instances": [{"ID": f"GPU-{number}"}],
            "Attributes": {"driver_version": {"String": version}} if version else {},
        }
        for number, version in enumerate(versions)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("node", "told"),
    [
        ({"NodeResources": {"Devices": device("580.1", "580.1")}, "Meta": {"a": "b"}}, (["580.1"], None, {"a": "b"})),
        ({"NodeResources": {"Devices": device("580.1", "570.1")}, "Meta": None}, (["570.1", "580.1"], None, {})),
        ({"NodeResources": {"Devices": device("580.1", None)}}, (["580.1"], None, {})),
        ({"NodeResources": {"Devices": device(None)}}, (None, None, {})),
        (
            {"NodeResources": {"Devices": None}, "Meta": {"gpufarm_maintenance": "a"}},
            ([], "a", {"gpufarm_maintenance": "a"}),
        ),
        ("what", (None, None, None)),
    ],
)
def test_client_tells_of_its_node(
    server: Server, capsys: pytest.CaptureFixture[str], node: Any, told: tuple[Any, ...]
) -> None:
    known = own()
    known["stats"]["client"]["node_id"] = "id-0"
    server.answers.update({SELF: [(200, known)], "/v1/node/id-0": [(200, node)]})
    result = run(server, capsys, wait_for="client")
    assert tuple(result[name] for name in OF_THE_NODE) == told
    server.answers["/v1/node/id-0"] = [(403, "Permission denied")]
    result = run(server, capsys, wait_for="client")
    assert "failed" not in result and [result[name] for name in OF_THE_NODE] == [None, None, None]
    assert run(server, capsys)["driver_versions"] is None


# --- waiting ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("goal", "path", "answers"),
    [
        ("answer", HEALTH, [(404, "a"), (502, "b"), WELL]),
        ("leader", LEADER, [NO_LEADER, (200, ""), (200, "192.0.2.1:4647")]),
        ("client", SELF, [(500, "a"), (200, own(heartbeat_ttl="0s")), (200, own())]),
        # Servers that are gone are known for ever; a heartbeat may be late by Nomad's own grace.
        (
            "client",
            SELF,
            [(200, own(last_heartbeat=last)) for last in ("1m2.5s", "24.4s", "24.3s")],
        ),
        ("client", SELF, [(200, {"stats": {"nomad": {}}}), (200, own(known_servers="")), (200, own())]),
        ("client", SELF, [(200, None), (200, {"stats": {"client": {"known_servers": "a:1"}}}), (200, own())]),
        # A token of another region.
        ("permission", SELF, [(403, "Permission denied"), (500, "a"), (200, own())]),
    ],
)
def test_what_is_waited_for_comes(
    server: Server,
    capsys: pytest.CaptureFixture[str],
    *,
    clock: Clock,
    goal: str,
    path: str,
    answers: list[Any],
) -> None:
    server.answers[path] = answers
    result = run(server, capsys, wait_for=goal)
    servers = ["192.0.2.1:4647", "192.0.2.2:4647"] if goal == "client" else None
    assert values(result) == ("ok", None, "192.0.2.1:4647", 86400, servers)
    assert "failed" not in result
    assert server.asked == [path] * 3 + [other for other in (HEALTH, LEADER, STATS, SELF) if other != path]
    assert clock.now == 1002


def test_an_agent_that_is_not_well_answers(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.answers[HEALTH] = [SICK]
    result = run(server, capsys, wait_for="answer")
    assert values(result)[:2] == ("unhealthy", "client: no known servers")
    assert "failed" not in result
    assert server.asked == [HEALTH, LEADER, STATS, SELF]


def test_a_token_that_never_comes_from_another_region(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.answers[SELF] = [(403, "Permission denied")]
    result = run(server, capsys, wait_for="permission", timeout=2)
    assert result["msg"] == (
        f"{platform.node()}: no permission in 2 s, at last {server.url}{SELF} was refused (HTTP 403: Permission "
        "denied). "
        "Expected: an agent that knows the token, and its rule agent:read. "
        "Next step: read `journalctl -u nomad` on the servers of this region for what keeps them from the ACLs of the "
        "authoritative one, check that its ports 4647 and 4648 are open to them, and join them by `nomad server join` "
        "where `nomad server members` lacks that region."
    )
    assert result["version"] is None


def test_who_has_no_token_waits_for_no_permission(
    server: Server, capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    result = run(server, capsys, wait_for="permission", token="")
    assert result["msg"] == (
        f"{platform.node()}: no token was given. Expected: one that the authoritative region has made. Next step: set "
        "'token' or NOMAD_TOKEN, or nomad_token of the roles, or bring the farm's folder of secrets."
    )
    assert (server.asked.count(SELF), clock.now) == (1, 1000)


def test_an_agent_that_starts_is_waited_for(
    server: Server, capsys: pytest.CaptureFixture[str], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nomad_client, "FIRST_PAUSE_S", 0.01)
    server.answers[HEALTH] = [CUT_OFF] * client.ATTEMPTS + [WELL]
    assert run(server, capsys, wait_for="answer")["state"] == "ok"
    assert clock.now == 1001


@pytest.mark.parametrize("goal", ["answer", "leader", "client", "permission"])
@pytest.mark.parametrize(("timeout", "asked"), [(-1, 1), (0, 1), (1, 2), (60, 61)])
def test_time_is_what_was_given(
    server: Server,
    capsys: pytest.CaptureFixture[str],
    *,
    clock: Clock,
    limits: list[float],
    goal: str,
    timeout: int,
    asked: int,
) -> None:
    path = {"answer": HEALTH, "leader": LEADER, "client": SELF, "permission": SELF}[goal]
    server.answers[path] = [(403 if goal == "permission" else 502, "x")]
    result = run(server, capsys, wait_for=goal, timeout=timeout)
    assert result["failed"] is True
    assert server.asked.count(path) == asked
    assert clock.now == 1000 + max(0, timeout)
    assert limits == [min(30, max(1, timeout - second)) for second in range(asked)] + [1] * (len(limits) - asked)


def test_requests_after_the_wait_have_what_is_left(
    server: Server, capsys: pytest.CaptureFixture[str], limits: list[float]
) -> None:
    server.answers[LEADER] = [NO_LEADER, (200, "192.0.2.1:4647")]
    run(server, capsys, wait_for="leader", timeout=10)
    assert limits == [10, 9, 9, 9, 9]


@pytest.mark.parametrize(("goal", "path"), [("answer", HEALTH), ("leader", LEADER), ("client", SELF)])
def test_an_agent_that_hangs_does_not_hang_the_module(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, goal: str, path: str
) -> None:
    monkeypatch.setattr(nomad_agent_info, "time", time)
    server.hangs = {HEALTH, LEADER, STATS, SELF}
    began = time.monotonic()
    result = run(server, capsys, wait_for=goal, timeout=1, request_timeout=120)
    assert time.monotonic() - began < 60
    assert f"{server.url}{path} cannot be reached (timed out)" in result["msg"]
    assert values(result)[0] == "stopped" and values(result)[2:] == (None, None, None)
    assert set(server.asked) == {path, HEALTH}


# --- failures --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("goal", "answers", "expected", "found"),
    [
        (
            "answer",
            {HEALTH: [(404, "what?")]},
            "no answer in 3 s, at last {url}/v1/agent/health answered HTTP 404: what?. "
            "Expected: an agent that tells its health. "
            "Next step: read `journalctl -u nomad` on this host.",
            ("unhealthy", "{url}/v1/agent/health answered HTTP 404: what?", "192.0.2.1:4647", 86400, None),
        ),
        (
            "leader",
            {LEADER: [NO_LEADER], HEALTH: [SICK]},
            "no leader in 3 s, at last {url}/v1/status/leader answered HTTP 500: No cluster leader. "
            "Expected: an elected leader. "
            "Next step: read `journalctl -u nomad` on every server and check that port 4648 is open between them.",
            ("unhealthy", "client: no known servers", None, 86400, None),
        ),
        (
            "leader",
            {LEADER: [(200, "")]},
            "no leader in 3 s, at last {url}/v1/status/leader answered ''. "
            "Expected: an elected leader. "
            "Next step: read `journalctl -u nomad` on every server and check that port 4648 is open between them.",
            ("ok", None, None, 86400, None),
        ),
        (
            "client",
            {SELF: [(200, own(heartbeat_ttl="0s"))]},
            "no heartbeats in 3 s, at last the client knows 192.0.2.1:4647, 192.0.2.2:4647, "
            "its heartbeat_ttl is 0s and its last_heartbeat 3.1s ago. "
            "Expected: heartbeats to a server. "
            "Next step: read `journalctl -u nomad` on this host, where `Permission denied` is that of servers that "
            "want a client introduced (nomad_client_introduction), and check that port 4647 of the servers is open to "
            "it; with TLS, also that its certificate has the name of this region.",
            ("ok", None, "192.0.2.1:4647", 86400, ["192.0.2.1:4647", "192.0.2.2:4647"]),
        ),
        (
            "client",
            {SELF: [(200, own("", "9s"))]},
            "no heartbeats in 3 s, at last the client knows no servers, its heartbeat_ttl is 9s and its "
            "last_heartbeat 3.1s ago. "
            "Expected: heartbeats to a server. "
            "Next step: read `journalctl -u nomad` on this host, where `Permission denied` is that of servers that "
            "want a client introduced (nomad_client_introduction), and check that port 4647 of the servers is open to "
            "it; with TLS, also that its certificate has the name of this region.",
            ("ok", None, "192.0.2.1:4647", 86400, []),
        ),
        (
            "client",
            {SELF: [(200, {"stats": {"client": {"known_servers": "192.0.2.1:4647"}}})]},
            "no heartbeats in 3 s, at last the client knows 192.0.2.1:4647, its heartbeat_ttl is 0s and its "
            "last_heartbeat 0s ago. "
            "Expected: heartbeats to a server. "
            "Next step: read `journalctl -u nomad` on this host, where `Permission denied` is that of servers that "
            "want a client introduced (nomad_client_introduction), and check that port 4647 of the servers is open to "
            "it; with TLS, also that its certificate has the name of this region.",
            ("ok", None, "192.0.2.1:4647", 86400, ["192.0.2.1:4647"]),
        ),
        (
            "client",
            {SELF: [(200, {"stats": {"nomad": {}}})], STATS: [(400, "No local Node")]},
            "no heartbeats in 3 s, at last an agent that is no client. "
            "Expected: heartbeats to a server. "
            "Next step: read `journalctl -u nomad` on this host, where `Permission denied` is that of servers that "
            "want a client introduced (nomad_client_introduction), and check that port 4647 of the servers is open to "
            "it; with TLS, also that its certificate has the name of this region.",
            ("ok", None, "192.0.2.1:4647", None, []),
        ),
    ],
)
def test_what_does_not_come_is_an_error_with_all_that_is_known(
    server: Server,
    capsys: pytest.CaptureFixture[str],
    *,
    goal: str,
    answers: dict[str, Any],
    expected: str,
    found: tuple[Any, ...],
) -> None:
    server.answers.update(answers)
    result = run(server, capsys, wait_for=goal, timeout=3)
    assert result["failed"] is True
    assert result["msg"] == f"{platform.node()}: {expected.format(url=server.url)}"
    assert values(result) == tuple(text.format(url=server.url) if isinstance(text, str) else text for text in found)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1h1m2.5s", 3662.5), ("300ms", 0.3), ("2us", 2e-6), ("2\N{MICRO SIGN}s", 2e-6), ("5ns", 5e-9), ("3.", 0),
        ("2y", 0), ("", 0),
    ],
)  # fmt: skip
def test_times_of_go(text: str, seconds: float) -> None:
    assert nomad_agent_info.seconds_of(text) == pytest.approx(seconds)


def test_answers_that_were_lost_again_are_unknown(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.answers[SELF] = [(200, own(heartbeat_ttl="0s")), (500, "no path")]
    assert run(server, capsys, wait_for="client", timeout=1)["servers"] is None


@pytest.mark.parametrize("goal", ["answer", "leader", "client"])
def test_nobody_listens(server: Server, capsys: pytest.CaptureFixture[str], goal: str) -> None:
    server.close()
    result = run(server, capsys, wait_for=goal, timeout=2)
    missing = {"answer": "no answer", "leader": "no leader", "client": "no heartbeats"}[goal]
    assert result["msg"].startswith(f"{platform.node()}: {missing} in 2 s, at last {server.url}/v1/")
    assert " cannot be reached (" in result["msg"]
    assert values(result)[0] == "stopped" and values(result)[2:] == (None, None, None)


def test_a_token_without_the_right_ends_the_wait(
    server: Server, capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    server.answers[SELF] = [(403, f"Permission denied for {TOKEN}")]
    result = run(server, capsys, wait_for="client")
    assert result["msg"] == (
        f"{platform.node()}: {server.url}{SELF} was refused (HTTP 403: Permission denied for ********). "
        "Expected: a token that may ask an agent for its state. "
        "Next step: set 'token' or NOMAD_TOKEN, or nomad_token of the roles, to one with agent:read."
    )
    assert values(result) == ("ok", None, "192.0.2.1:4647", 86400, None)
    assert clock.now == 1000 + nomad_agent_info.REFUSED_S


def test_a_server_that_has_just_started_may_not_know_the_token_yet(
    server: Server, capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    """Until it has a leader, and for a moment after that, it refuses every token (seen with Nomad 1.11.3)."""
    without = int(nomad_agent_info.REFUSED_S) + 5
    server.answers[SELF] = [(403, "Permission denied")] * (without + 3) + [(200, own())]
    server.answers[LEADER] = [(500, "No cluster leader")] * without + [(200, "192.0.2.1:4647")]
    result = run(server, capsys, wait_for="client", timeout=100)
    assert "failed" not in result and result["servers"] == ["192.0.2.1:4647", "192.0.2.2:4647"]
    assert clock.now == 1000 + without + 3


def test_a_wait_that_ends_before_it_tells_the_refusal(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.answers[SELF] = [(403, "Permission denied")]
    assert "a token that may ask an agent for its state" in run(server, capsys, wait_for="client", timeout=2)["msg"]


@pytest.mark.parametrize("goal", ["nothing", "answer", "leader", "client"])
@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"address": "127.0.0.1:4646"}, "the address of Nomad is '127.0.0.1:4646'"),
        ({"address": "http://127.0.0.1:http"}, "the address of Nomad is 'http://127.0.0.1:http'"),
        ({"address": "http://[::1"}, "the address of Nomad is 'http://[::1'"),
        ({"address": "http://127.0.0.1:0"}, "the address of Nomad is 'http://127.0.0.1:0'"),
        ({"address": "https://127.0.0.1:1", "ca_cert": "/missing.pem"}, "the TLS files /missing.pem cannot be used"),
        ({"client_cert": "/missing.pem"}, "parameters are required together: client_cert, client_key"),
        ({"token": "two\nlines"}, "the token of Nomad holds characters"),
    ],
)
def test_options_that_are_wrong_fail_always(
    server: Server, capsys: pytest.CaptureFixture[str], goal: str, wrong: dict[str, Any], told: str
) -> None:
    result = run(server, capsys, wait_for=goal, **wrong)
    assert result["failed"] is True and told in result["msg"]
    assert "state" not in result and server.requests == []


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[tuple[Server, str]]:
    if not shutil.which("openssl"):
        pytest.skip("openssl is needed to make certificates")
    certificate = helper.new_certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate.path, certificate.key)
    running = Server(tls)
    yield running, str(certificate.path)
    running.close()


def test_tls(tls_server: tuple[Server, str], capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    server, certificate = tls_server
    assert run(server, capsys, ca_cert=certificate)["state"] == "ok"
    assert run(server, capsys, validate_certs=False, wait_for="client")["state"] == "ok"

    result = run(server, capsys)
    assert "failed" not in result and result["state"] == "stopped"
    assert result["message"].startswith(f"the certificate of {server.url}{HEALTH} is not accepted (")
    for goal, path in (("answer", HEALTH), ("leader", LEADER), ("client", SELF)):
        result = run(server, capsys, wait_for=goal)
        start = f"{platform.node()}: the certificate of {server.url}{path} is not accepted ("
        assert result["failed"] is True and result["msg"].startswith(start)
        assert "Next step: set ca_cert to the farm's CA" in result["msg"]
        assert result["state"] == "stopped"
    assert clock.now == 1000


def test_the_end_of_certificates_is_told(
    tls_server: tuple[Server, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(nomad_agent_info.AnsibleModule, "warn", lambda _self, text: warnings.append(text))
    server, ours = tls_server
    key = str(Path(ours).with_suffix(".key"))
    given = {"ca_cert": ours, "client_cert": ours, "client_key": key, "wait_for": "leader"}
    assert run(server, capsys, **given)["certificates"] is None

    result = run(server, capsys, certificate_days=1, **given)
    assert [(one["of"], one["path"], one["days_left"], one["state"]) for one in result["certificates"]] == [
        ("agent", None, 1, "ok"), ("file", ours, 1, "ok"), ("ca", ours, 1, "ok"),
    ]  # fmt: skip
    assert warnings == []

    result = run(server, capsys, certificate_days=30, **given)
    file, ca = warnings
    end = result["certificates"][1]["not_after"]
    assert file == (
        f"{platform.node()}: the certificate in {ours} expires on {end}, in 1 day(s). Expected: one that holds for "
        "30 days or more. Next step: run playbooks/site.yml, which renews it where nomad_tls is generate; where it is "
        "files, bring a new one and `systemctl reload nomad` on this host."
    )
    assert ca.startswith(f"{platform.node()}: the CA certificate in {ours} expires on ")
    assert result["state"] == "ok"

    # A file that was renewed while the agent runs with the former one.
    (tmp_path / "new").mkdir()
    newer = helper.new_certificate(tmp_path / "new", days=300)
    renewed = {**given, "client_cert": str(newer.path), "client_key": str(newer.key)}
    warnings.clear()
    run(server, capsys, certificate_days=30, **renewed)
    agent, _ca = warnings
    assert "the certificate with which the agent runs, which is not that of its file (20" in agent
    assert agent.endswith("Next step: `systemctl reload nomad` on this host, which reads the certificate anew.")

    # Nobody waits for what no wait mends.
    old = helper.new_certificate(tmp_path / "new", days=-1)
    server.requests.clear()
    result = run(
        server, capsys, certificate_days=30, **{**given, "client_cert": str(old.path), "client_key": str(old.key)}
    )
    assert result["failed"] and server.requests == []
    assert f"{platform.node()}: the certificate in {old.path} has expired on 20" in result["msg"]
    assert "Expected: one that holds now, by this host's clock. Next step: " in result["msg"]
    assert [one["days_left"] < 0 for one in result["certificates"]] == [False, True, False]
    # Who only asks is told.
    result = run(server, capsys, certificate_days=30, ca_cert=ours, client_cert=str(old.path), client_key=str(old.key))
    assert "failed" not in result and "has expired" in warnings[-1]

    # One that does not run shows none.
    server.close()
    result = run(server, capsys, certificate_days=1, **{**given, "wait_for": "nothing"})
    assert [one["of"] for one in result["certificates"]] == ["file", "ca"]


def test_an_agent_that_runs_with_an_expired_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = helper.new_certificate(tmp_path, days=-1)
    (tmp_path / "new").mkdir()
    new = helper.new_certificate(tmp_path / "new", days=300)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(old.path, old.key)
    running = Server(tls)
    try:
        given = {"ca_cert": str(old.path), "client_cert": str(new.path), "client_key": str(new.key)}
        result = run(running, capsys, certificate_days=30, wait_for="client", **{**given, "ca_cert": str(new.path)})
        assert result["failed"] and "with which the agent runs, which is not that of its file (20" in result["msg"]
        assert "has expired on" in result["msg"] and "Next step: `systemctl reload nomad`" in result["msg"]
        # Where nobody has asked for them.
        result = run(running, capsys, wait_for="client", **given)
        assert "is not accepted (" in result["msg"] and "certificate has expired" in result["msg"]
        assert "Expected: one that holds now by this host's clock" in result["msg"]
    finally:
        running.close()


def test_an_agent_without_tls_has_no_certificate(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(server, capsys, certificate_days=30, wait_for="leader")["certificates"] == []


# --- what is documented ----------------------------------------------------------------------


def test_documented_defaults_are_the_real_ones() -> None:
    documentation = yaml.safe_load(nomad_agent_info.DOCUMENTATION)
    assert documentation["module"] == "nomad_agent_info"
    assert documentation["options"]["plugin_age_max"]["default"] == gate.PLUGIN_AGE_MAX_S
    assert nomad_agent_info.PAUSE_S == 1


def test_returned_values_are_the_documented_ones(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    documented = yaml.safe_load(nomad_agent_info.RETURN)
    result = run(server, capsys, wait_for="client")
    assert set(result) - {"changed", "invocation"} == set(documented) == {
        "version", "servers_version", "plugin_log", "certificates", *VALUES, *OF_THE_NODE, *OF_A_SERVER,
    }  # fmt: skip
    assert yaml.safe_load(nomad_agent_info.EXAMPLES)


@pytest.mark.parametrize("goal", ["nothing", "leader", "client"])
def test_the_version_that_runs(server: Server, capsys: pytest.CaptureFixture[str], goal: str) -> None:
    assert run(server, capsys, wait_for=goal)["version"] == "1.11.3"
    assert server.asked.count(SELF) == 1


@pytest.mark.parametrize(
    ("more", "version"),
    [
        ({"VersionPrerelease": "", "VersionMetadata": ""}, "1.11.3"),
        ({"VersionPrerelease": "beta.1", "VersionMetadata": ""}, "1.11.3-beta.1"),
        ({"VersionPrerelease": "", "VersionMetadata": "ent"}, "1.11.3+ent"),
        ({"VersionPrerelease": "rc.1", "VersionMetadata": "ent"}, "1.11.3-rc.1+ent"),
    ],
)
def test_a_version_has_more_than_numbers(
    server: Server, capsys: pytest.CaptureFixture[str], more: dict[str, str], version: str
) -> None:
    server.answers[SELF] = [(200, {"config": {"Version": {"Version": "1.11.3", **more}}})]
    assert run(server, capsys)["version"] == version


@pytest.mark.parametrize(
    "answer", [(403, "Permission denied"), (200, {}), (200, {"config": {"Version": {"Version": ""}}}), (200, [1])]
)
def test_a_version_that_is_not_told(
    server: Server, capsys: pytest.CaptureFixture[str], answer: tuple[int, Any]
) -> None:
    server.answers[SELF] = [answer]
    result = run(server, capsys)
    assert (result["version"], result["state"]) == (None, "ok")


def test_module_is_of_the_action_group() -> None:
    runtime = yaml.safe_load((Path(__file__).parents[4] / "meta" / "runtime.yml").read_text(encoding="utf-8"))
    group = runtime["action_groups"]["nomad"]
    assert "nomad_agent_info" in group and group == sorted(group)


def test_no_proxy_stands_before_the_own_agent(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where it listens on another address than the loopback's."""
    farm.stand_behind_a_proxy(monkeypatch)
    assert run(server, capsys)["state"] == "ok"


def test_what_the_plugin_says_is_read_where_it_is_asked_for(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def journal() -> nomad_plugin_log.PluginLog:
        read.append("journal")
        return nomad_plugin_log.judged(["fingerprinting returned an error: nvml: GPU is lost"])

    monkeypatch.setattr(nomad_plugin_log, "read", journal)
    assert (run(server, capsys)["plugin_log"], read) == (None, [])
    # An agent that does not answer has said something all the same.
    server.answers[HEALTH] = [CUT_OFF]
    told = run(server, capsys, plugin_log=True)
    assert (told["state"], read) == ("stopped", ["journal"])
    assert told["plugin_log"] == {
        "lines": ["fingerprinting returned an error: nvml: GPU is lost"],
        "cause": "one GPU that the plugin cannot read, which hides all of the node",
        "message": journal().message,
    }
