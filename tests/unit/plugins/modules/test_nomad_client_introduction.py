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
from ansible_collections.gpufarm.core.plugins.modules import nomad_client_introduction
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import nomad_helper as farm
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

PATH = "/v1/acl/identity/client-introduction-token"


class Server(farm.Agent):
    """A Nomad server, with the status and the text of its answer where it refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.refusal: tuple[int, str] | None = None
        self.answer = self.tell

    def tell(self, request: Any) -> bool:
        if request.path != PATH:
            return False
        status, text = self.refusal or (200, json.dumps({"JWT": "head.claims.signature"}))
        request.reply(status, text.encode(), {})
        return True


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("ADDR", "TOKEN"):
        monkeypatch.delenv(f"NOMAD_{name}", raising=False)
    # It asks the agent of its own host.
    farm.stand_behind_a_proxy(monkeypatch)
    running = Server()
    yield running
    running.close()


def run(running: Server, capsys: pytest.CaptureFixture[str], /, **arguments: Any) -> helper.Outcome:
    settings = {name: arguments.pop(name) for name in ("check_mode",) if name in arguments}
    given = {"address": running.url, "name": "gpu0", **arguments}
    return helper.run_module(nomad_client_introduction.main, capsys, given, **settings)


def test_a_token_is_for_one_name_and_pool(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(server, capsys)
    assert (result["changed"], result["known"], result["jwt"]) == (True, False, "head.claims.signature")
    assert server.writes == [(PATH, {"NodeName": "gpu0", "NodePool": "default"})]
    (query,) = [query for path, query, _headers in server.requests if path == "/v1/nodes"]
    assert query["filter"] == 'Name == "gpu0" and Status != "down"'

    run(server, capsys, node_pool="research", ttl=90)
    assert server.writes[1] == (PATH, {"NodeName": "gpu0", "NodePool": "research", "TTL": 90_000_000_000})


@pytest.mark.parametrize("check_mode", [False, True])
@pytest.mark.parametrize(("known", "again"), [(True, True), (True, False), (False, False)])
def test_who_is_known_gets_one_only_again(
    server: Server, capsys: pytest.CaptureFixture[str], known: bool, again: bool, check_mode: bool
) -> None:
    server.nodes = [farm.make_node(0, 0)] if known else []
    result = run(server, capsys, again=again, check_mode=check_mode)
    wanted = again or not known
    assert (result["changed"], result["known"]) == (wanted, known)
    assert ("jwt" in result, bool(server.writes)) == (wanted and not check_mode,) * 2


@pytest.mark.parametrize(
    ("refusal", "told"),
    [
        (
            (404, "Invalid URL"),
            ": the agent knows no tokens of introduction. Expected: Nomad 1.11 or newer. Next step: upgrade the "
            "servers, or set nomad_client_introduction to the empty text.",
        ),
        ((403, "Permission denied"), "Expected: a token that may do this. Next step: "),
        ((500, "all servers should be running version 1.11.0 or later to use client intro tokens"), "all servers"),
    ],
)  # fmt: skip
def test_a_refusal_is_told(
    server: Server, capsys: pytest.CaptureFixture[str], refusal: tuple[int, str], told: str
) -> None:
    server.refusal = refusal
    result = run(server, capsys)
    assert result["failed"] and result["msg"].startswith(platform.node())
    assert told in result["msg"]


def test_a_time_that_is_none_is_refused(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(server, capsys, ttl=0)
    assert result["msg"] == (
        f"{platform.node()}: ttl is 0. Expected: seconds, more than 0. Next step: leave it out, or correct it."
    )
    assert not server.writes


def test_options_are_those_of_the_documentation() -> None:
    documented = yaml.safe_load(nomad_client_introduction.DOCUMENTATION)["options"]
    assert {name: option.get("default") for name, option in documented.items()} == {
        "name": None, "node_pool": "default", "again": True, "ttl": None,
    }  # fmt: skip
