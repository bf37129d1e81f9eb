# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.plugins.modules import nomad_deregister
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import nomad_helper as farm
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

OWN = "00000000-5555-4444-8888-000000000000"


class Server(farm.Agent):
    """A Nomad server with nodes and two other servers."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = [farm.make_node(number, 0) for number in range(3)]
        for node in self.nodes:
            node["Name"] = "gpu0"
        self.nodes[1]["Status"] = "down"
        self.members = [self.member(number) for number in range(3)]
        self.peers = [f"192.0.2.{number}:4647" for number in range(3)]
        self.refusals: dict[str, tuple[int, str]] = {}
        self.warned: list[str] = []
        self.forgets = True
        self.votes = 0
        self.answer = self.tell

    @staticmethod
    def member(number: int) -> dict[str, Any]:
        return {
            "Name": f"gpu{number}.global", "Addr": f"192.0.2.{number}", "Status": "failed" if number == 0 else "alive",
            "Tags": {"port": "4647", "region": "global"},
        }  # fmt: skip

    @property
    def written(self) -> list[str]:
        return [path for path, _body in self.writes]

    def tell(self, request: Any) -> bool:
        path = request.path.partition("?")[0]
        if path in self.refusals:
            status, text = self.refusals[path]
            request.reply(status, text.encode(), {})
        elif path == "/v1/agent/members":
            told = {"ServerRegion": "global", "Members": self.members}
            request.reply(200, json.dumps(told).encode(), {})
        elif path == "/v1/status/peers":
            if len(self.members) < len(self.peers):
                self.votes -= 1
                self.peers = self.peers[self.votes < 0 :]
            request.reply(200, json.dumps(self.peers).encode(), {})
        elif path == "/v1/agent/force-leave":
            if self.forgets:
                self.members = self.members[1:]
            request.reply(200, b"", {})
        else:
            return False
        return True


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(nomad_deregister, "PAUSE_S", 0.0)
    for name in ("ADDR", "TOKEN"):
        monkeypatch.delenv(f"NOMAD_{name}", raising=False)
    # It asks the agent of its own host.
    farm.stand_behind_a_proxy(monkeypatch)
    running = Server()
    # Ansible keeps warnings for the life of the process, which here runs other modules too.
    monkeypatch.setattr(nomad_deregister.AnsibleModule, "warn", lambda _self, text: running.warned.append(text))
    yield running
    running.close()


def run(running: Server, capsys: pytest.CaptureFixture[str], /, **arguments: Any) -> helper.Outcome:
    settings = {name: arguments.pop(name) for name in ("check_mode",) if name in arguments}
    given = {"address": running.url, "name": "gpu0", **arguments}
    return helper.run_module(nomad_deregister.main, capsys, given, **settings)


def test_its_node_and_its_former_ones_go_and_another_that_lives_stays(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(server, capsys, node_id=OWN)
    former, other = (server.nodes[number]["ID"] for number in (1, 2))
    assert (result["changed"], result["forgotten"], result["kept"]) == (True, [OWN, former], [other])
    assert server.written == [f"/v1/node/{OWN}/purge", f"/v1/node/{former}/purge"]
    (query,) = [query for path, query, _headers in server.requests if path == "/v1/nodes"]
    assert query["filter"] == f'Name == "gpu0" or ID == "{OWN}"'


@pytest.mark.parametrize("node_id", [OWN, None])
@pytest.mark.parametrize(("field", "value"), [("Datacenter", "dc2"), ("Address", "192.0.2.99")])
def test_what_is_down_elsewhere_is_another_machine(
    server: Server, capsys: pytest.CaptureFixture[str], field: str, value: str, node_id: str | None
) -> None:
    server.nodes[1][field], server.nodes[2]["Status"] = value, "down"
    former, other = (server.nodes[number]["ID"] for number in (2, 1))
    result = run(server, capsys, node_id=node_id)
    if node_id:
        assert (result["forgotten"], result["kept"]) == ([OWN, former], [other])
    else:
        assert (result["forgotten"], len(result["kept"])) == ([], 3)
    kept = ", ".join(result["kept"])
    assert other in kept and server.warned == [
        f"{platform.node()}: more nodes are named gpu0 and stay in Nomad ({kept}): they live, or have another "
        "datacenter or address. Next step: purge those of the same machine by ID."
    ]


def test_an_id_that_the_farm_does_not_know_leaves_the_nodes_of_its_name(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(server, capsys, node_id="00000000-5555-4444-8888-00000000ffff")
    assert (result["forgotten"], len(result["kept"])) == ([], 3)


def test_without_an_id_only_what_is_down_goes(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(server, capsys)
    assert result["forgotten"] == [server.nodes[1]["ID"]]
    assert len(result["kept"]) == 2


def test_what_nobody_knows_is_no_change(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.nodes, server.members, server.peers = [], server.members[1:], server.peers[1:]
    result = run(server, capsys, node_id=OWN, server=True)
    assert (result["changed"], result["forgotten"], server.writes) == (False, [], [])


def test_check_mode_says_and_deletes_nothing(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(server, capsys, node_id=OWN, server=True, check_mode=True)
    assert (result["changed"], len(result["forgotten"]), server.writes) == (True, 3, [])


def test_a_server_leaves_the_others(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.nodes = []
    result = run(server, capsys, server=True)
    assert result["forgotten"] == ["gpu0.global"]
    assert server.written == ["/v1/agent/force-leave?node=gpu0.global&prune=true"]


def test_the_vote_of_a_server_that_left_is_waited_for(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.nodes, server.votes = [], 3
    assert run(server, capsys, server=True)["forgotten"] == ["gpu0.global"]
    assert len(server.peers) == 2


def test_a_server_that_left_and_still_votes_is_asked_for_again(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.nodes, server.members[0]["Status"] = [], "left"
    assert run(server, capsys, server=True)["forgotten"] == ["gpu0.global"]


def test_a_server_is_taken_out_when_the_others_have_seen_that_it_is_stopped(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they would not hear that it is back, as gossip has never lost it."""
    server.nodes, server.members[0]["Status"] = [], "alive"
    written: list[list[str]] = []

    def sees(_seconds: float) -> None:
        written.append(server.written)
        server.members[0]["Status"] = "failed"

    monkeypatch.setattr(nomad_deregister.time, "sleep", sees)
    assert run(server, capsys, server=True)["forgotten"] == ["gpu0.global"]
    assert written[0] == [] and len(server.written) == 1


def test_one_that_runs_is_taken_out_in_the_end(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.nodes, server.members[0]["Status"] = [], "alive"
    assert run(server, capsys, server=True, timeout=0)["forgotten"] == ["gpu0.global"]


def test_a_server_that_the_others_keep_is_told(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.forgets = False
    result = run(server, capsys, server=True, timeout=0)
    assert result["msg"] == (
        f"{platform.node()}: the servers still count on gpu0.global (192.0.2.0:4647), 0 s after it left. Expected: "
        "servers that go on without it. Next step: check `nomad server members` and `nomad operator raft list-peers` "
        "on a server; its agent must not run."
    )


@pytest.mark.parametrize(("status", "failed"), [(404, False), (403, True)])
def test_a_node_that_somebody_else_deletes_is_gone_and_a_refusal_is_told(
    server: Server, capsys: pytest.CaptureFixture[str], status: int, failed: bool
) -> None:
    server.refusals[f"/v1/node/{OWN}/purge"] = (status, "Permission denied")
    result = run(server, capsys, node_id=OWN)
    assert result.get("failed", False) is failed
    if failed:
        assert "Expected: a token that may do this. Next step: " in result["msg"]


def test_options_are_those_of_the_documentation() -> None:
    documented = yaml.safe_load(nomad_deregister.DOCUMENTATION)["options"]
    assert {name: option.get("default") for name, option in documented.items()} == {
        "name": None, "node_id": None, "server": False, "timeout": 60,
    }  # fmt: skip
