# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.plugins.modules import nomad_gossip_key
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import nomad_helper as farm
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

OLDEST, OLD, NEW = ("b2xkZXN0LWtleS0xMjM0NQ==", "b2xkLW9sZC1vbGQta2V5MQ==", "bmV3LW5ldy1uZXcta2V5MQ==")


class Server(farm.Agent):
    """A Nomad server that changes its keyring as Nomad does, after some refusals."""

    def __init__(self, keyring: Path, *keys: str) -> None:
        super().__init__()
        self.keyring = keyring
        self.refusals: list[tuple[int, str]] = []
        keyring.write_text(json.dumps(keys))
        self.answer = self.change_keys

    @property
    def ring(self) -> list[str]:
        return list(json.loads(self.keyring.read_text()))

    @property
    def steps(self) -> list[tuple[str, str]]:
        return [(path.removeprefix("/v1/agent/keyring/"), body["Key"]) for path, body in self.writes]

    def change_keys(self, request: Any) -> bool:
        if self.refusals:
            status, text = self.refusals.pop(0)
            request.reply(status, text.encode(), {})
            return True
        verb, key = self.steps[-1]
        ring = self.ring
        if verb == "install":
            ring += [] if key in ring else [key]
        elif verb == "use":
            ring.remove(key)
            ring.insert(0, key)
        else:
            assert ring[0] != key, "removing the primary key is not allowed"
            ring.remove(key)
        self.keyring.write_text(json.dumps(ring, indent=2))
        request.reply(200, b'{"Messages": {}, "Keys": {}, "NumNodes": 3}', {})
        return True


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    running = Server(tmp_path / "serf.keyring", OLD)
    yield running
    running.close()


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nomad_gossip_key, "PAUSE_S", 0.0)
    for name in ("ADDR", "TOKEN"):
        monkeypatch.delenv(f"NOMAD_{name}", raising=False)


def run(server: Server, capsys: pytest.CaptureFixture[str], **arguments: Any) -> helper.Outcome:
    settings = {name: arguments.pop(name) for name in ("check_mode",) if name in arguments}
    given = {"address": server.url, "keyring": str(server.keyring), "key": NEW, **arguments}
    result = helper.run_module(nomad_gossip_key.main, capsys, given, **settings)
    for key in (OLDEST, OLD, NEW):
        assert key not in json.dumps(result)
    return result


def test_all_servers_get_a_key_before_they_use_it_and_forget_the_others_last(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.keyring.write_text(json.dumps([OLD, OLDEST]))
    assert run(server, capsys)["changed"] is True
    assert server.steps == [("install", NEW), ("use", NEW), ("remove", OLD), ("remove", OLDEST)]
    assert server.ring == [NEW]


def test_the_only_key_is_left_alone_without_asking(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.keyring.write_text(json.dumps([NEW]))
    server.close()
    assert run(server, capsys)["changed"] is False
    assert server.writes == []


@pytest.mark.parametrize(
    ("left", "steps"),
    [
        ([OLD, NEW], [("install", NEW), ("use", NEW), ("remove", OLD)]),
        ([NEW, OLD], [("install", NEW), ("use", NEW), ("remove", OLD)]),
    ],
)
def test_a_rotation_that_was_broken_off_is_completed(
    server: Server, capsys: pytest.CaptureFixture[str], left: list[str], steps: list[tuple[str, str]]
) -> None:
    server.keyring.write_text(json.dumps(left))
    assert run(server, capsys)["changed"] is True
    assert server.steps == steps
    assert server.ring == [NEW]


def test_check_mode_says_it_and_asks_nobody(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(server, capsys, check_mode=True)["changed"] is True
    assert server.writes == [] and server.ring == [OLD]
    server.keyring.unlink()
    assert run(server, capsys, check_mode=True)["changed"] is False
    server.keyring.write_text(json.dumps([NEW]))
    assert run(server, capsys, check_mode=True)["changed"] is False


def test_servers_that_are_busy_are_asked_again(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.refusals = [(500, "2/3 nodes reported success"), (500, "2/3 nodes reported success")]
    assert run(server, capsys)["changed"] is True
    assert server.steps == [("install", NEW)] * 3 + [("use", NEW), ("remove", OLD)]


def test_servers_that_never_agree_are_an_error(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.refusals = [(500, f"1/3 nodes reported failure with {OLD}")] * 2
    result = run(server, capsys, timeout=-1)
    assert result["failed"] is True
    assert result["msg"].startswith(f"{platform.node()}: {server.url}/v1/agent/keyring/install answered HTTP 500: 1/3")
    assert server.steps == [("install", NEW)]
    assert server.ring == [OLD]


def test_a_token_without_the_right_is_told_which(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.refusals = [(403, "Permission denied")] * 2
    result = run(server, capsys, token="11111111-2222-3333-4444-555555555555")
    assert result["msg"] == (
        f"{platform.node()}: {server.url}/v1/agent/keyring/install was refused (HTTP 403: Permission denied). "
        "Expected: a token that may change the keyring. "
        "Next step: set 'token' to one whose policy has agent { policy = \"write\" }."
    )
    assert server.steps == [("install", NEW)]


def test_other_refusals_are_final(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.refusals = [(501, "Invalid method"), (400, "bad")]
    run(server, capsys, timeout=-1)
    result = run(server, capsys)
    assert "answered HTTP 400: bad" in result["msg"]
    assert server.steps == [("install", NEW)] * 2


def test_a_server_without_keyring_is_not_rotated(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.keyring.unlink()
    result = run(server, capsys)
    assert result["msg"] == (
        f"{platform.node()}: there is no keyring {server.keyring}, so this server does not encrypt its gossip. "
        "Expected: a server that was started with a key. "
        "Next step: set server { encrypt } in its configuration and restart it."
    )
    assert server.writes == []


@pytest.mark.parametrize("content", [f'["{OLD}"', "\xff"])
def test_a_keyring_that_cannot_be_read_is_named_and_not_shown(
    server: Server, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    server.keyring.write_text(content, encoding="latin-1")
    result = run(server, capsys)
    kind = "UnicodeDecodeError" if content == "\xff" else "JSONDecodeError"
    assert result["msg"] == (
        f"{platform.node()}: the keyring {server.keyring} cannot be read ({kind}). "
        "Expected: the keys of this server, as Nomad writes them. "
        "Next step: check the option 'keyring' and who may read the file."
    )


def test_the_keyring_of_another_server_is_noticed(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    other = Server(server.keyring.with_name("other"), OLD, OLDEST, NEW)
    result = run(other, capsys, keyring=str(server.keyring))
    other.close()
    assert result["msg"] == (
        f"{platform.node()}: after the rotation {server.keyring} holds 1 keys or another one. "
        "Expected: the given key alone. Next step: check that 'keyring' and 'address' are of the same server."
    )


def test_documentation_is_the_real_one() -> None:
    documentation = yaml.safe_load(nomad_gossip_key.DOCUMENTATION)
    assert documentation["module"] == "nomad_gossip_key"
    assert documentation["options"]["timeout"]["default"] == 60
    assert yaml.safe_load(nomad_gossip_key.EXAMPLES)


def test_defaults(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    parameters = run(server, capsys)["invocation"]["module_args"]
    assert parameters["timeout"] == 60
    assert parameters["key"] == "VALUE_SPECIFIED_IN_NO_LOG_PARAMETER"
