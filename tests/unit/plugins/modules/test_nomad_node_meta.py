# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.modules import nomad_node_meta
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import nomad_helper as farm
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

PATH = "/v1/client/metadata"


class Client(farm.Agent):
    """An agent whose metadata is that of its configuration with what was set over it, as a Nomad 1.11.3 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.node = farm.make_node(0, 0)
        self.static: dict[str, str] = {"rack": "r1"}
        self.dynamic: dict[str, str | None] = {"gpu_count": "4"}
        self.client = {"node_id": self.node["ID"]}
        self.refusal = 0
        self.answer = self.tell

    def tell(self, request: Any) -> bool:
        told: Any = self.node
        if request.path == PATH:
            if self.refusal:
                request.reply(self.refusal, b"Permission denied", {})
                return True
            if request.command == "POST":
                self.dynamic.update(self.writes[-1][1]["Meta"])
            meta = {name: value for name, value in {**self.static, **self.dynamic}.items() if value is not None}
            told = {"Meta": meta, "Dynamic": self.dynamic, "Static": self.static}
        elif request.path == "/v1/agent/self":
            told = {"stats": {"client": self.client}}
        request.reply(200, json.dumps(told).encode(), {"X-Nomad-Index": "7"})
        return True


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    for name in ("ADDR", "TOKEN"):
        monkeypatch.delenv(f"NOMAD_{name}", raising=False)
    # It asks the agent of its own host.
    farm.stand_behind_a_proxy(monkeypatch)
    running = Client()
    yield running
    running.close()


def run(running: Client, capsys: pytest.CaptureFixture[str], check_mode: bool = False, **meta: Any) -> helper.Outcome:
    given = {"address": running.url, "meta": meta}
    return helper.run_module(nomad_node_meta.main, capsys, given, check_mode=check_mode)


def test_what_differs_is_written_and_nothing_else(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(client, capsys, gpu_count="8", gpu_model="Tesla T4", rack="r1", absent=None)
    changes = {"gpu_count": "8", "gpu_model": "Tesla T4"}
    assert client.writes == [(PATH, {"NodeID": client.node["ID"], "Meta": changes})]
    assert (result["changed"], result["meta"]) == (True, {"rack": "r1", **changes})
    assert result["diff"] == {"before": {"gpu_count": "4", "gpu_model": None}, "after": changes}

    result = run(client, capsys, gpu_count="8", gpu_model="Tesla T4", rack="r1", absent=None)
    assert (result["changed"], len(client.writes)) == (False, 1)


def test_null_takes_away(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(client, capsys, rack=None, gpu_count=None)
    assert (result["changed"], result["meta"]) == (True, {})
    assert run(client, capsys, rack=None, gpu_count=None)["changed"] is False


def test_check_mode_writes_nothing(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(client, capsys, check_mode=True, gpu_count="8")
    assert (result["changed"], result["meta"]["gpu_count"], client.writes) == (True, "8", [])


def test_what_is_no_text_is_refused(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(client, capsys, gpu_count=8)
    assert result["msg"] == (
        f"{platform.node()}: meta.gpu_count is of type int. Expected: a text, as all metadata of Nomad is. "
        "Next step: put quotes around it."
    )
    assert not client.writes and not client.requests


def test_a_server_has_no_meta(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    client.client = {}
    assert "is no client" in run(client, capsys, gpu_count="8")["msg"]


def test_token_that_may_not(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    client.refusal = 403
    result = run(client, capsys, gpu_count="8")
    assert result["failed"] and "Next step: " in result["msg"]
