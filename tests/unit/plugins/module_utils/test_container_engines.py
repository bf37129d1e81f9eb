# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What engines answer and what their settings say. The scenario containerd holds the same to real ones."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils.commands import Command
from ansible_collections.gpufarm.core.plugins.module_utils.container_engines import answers, cri, texts

FIXTURES = Path(__file__).parents[1] / "fixtures/container_engines"
# Of containerd 1.6.20 and 1.7.24 as Debian has them, with the runtime that the role gives them.
ANSWERS = sorted(FIXTURES.glob("status-*.bin"))


# --- the call ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(folder: Path, sent: Callable[[socket.socket], None]) -> Iterator[str]:
    """A socket on which one call is answered."""
    path = str(folder / "engine.sock")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _from = listening.accept()
                with connection:
                    sent(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield path
    thread.join()


def body(message: bytes) -> bytes:
    return b"\x00" + len(message).to_bytes(4, "big") + message


def test_the_answer_is_what_the_data_frames_bring(tmp_path: Path) -> None:
    heard = bytearray()

    def sent(connection: socket.socket) -> None:
        heard.extend(connection.recv(65536))
        whole = body(b"an answer in two parts")
        connection.sendall(
            cri.frame(cri.SETTINGS, 0, 0, b"")
            + cri.frame(cri.PING, 0, 0, b"12345678")
            + cri.frame(cri.HEADERS, cri.END_HEADERS, 1, b"\x88")
            + cri.frame(cri.DATA, 0, 1, whole[:9])
            + cri.frame(cri.DATA, cri.PADDED, 1, b"\x02" + whole[9:] + b"\0\0")
            + cri.frame(cri.HEADERS, cri.END_HEADERS | cri.END_STREAM, 1, b"\x88")
        )
        deadline = time.monotonic() + 60
        while b"12345678" not in heard and time.monotonic() < deadline:
            heard.extend(connection.recv(65536))

    with server(tmp_path, sent) as path:
        assert cri.call(path, cri.STATUS, cri.VERBOSE, 60) == b"an answer in two parts"
    assert heard.startswith(cri.PREFACE) and cri.header(":path", cri.STATUS) in heard
    assert cri.frame(cri.SETTINGS, cri.ACK, 0) in heard and cri.frame(cri.PING, cri.ACK, 0, b"12345678") in heard


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        # As gRPC says that it knows no such service: trailers and nothing else.
        (cri.frame(cri.HEADERS, cri.END_HEADERS | cri.END_STREAM, 1, b"\x88"), "its CRI plugin does not answer"),
        (cri.frame(cri.DATA, cri.END_STREAM, 1, body(b"cut")[:-1]), "its CRI plugin does not answer"),
        (cri.frame(cri.RST_STREAM, 0, 1, b"\0\0\0\2"), "it refused the call"),
        (cri.frame(cri.GOAWAY, 0, 0, b"\0" * 8), "it refused the call"),
        (b"", "it closed the connection"),
    ],
)
def test_no_answer_has_a_reason(tmp_path: Path, reply: bytes, reason: str) -> None:
    def sent(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(reply)

    with server(tmp_path, sent) as path:
        engine = answers.containerd(path, 60)
    assert (engine.runtimes, engine.default, engine.reason) == ({}, None, f"{path}: {reason}")


def test_frames_have_the_numbers_of_http_2() -> None:
    """RFC 9113, section 6."""
    kinds = (cri.DATA, cri.HEADERS, cri.RST_STREAM, cri.SETTINGS, cri.PING, cri.GOAWAY, cri.WINDOW_UPDATE)
    assert kinds == (0, 1, 3, 4, 6, 7, 8)
    assert (cri.END_STREAM, cri.ACK, cri.END_HEADERS, cri.PADDED) == (1, 1, 4, 8)


def test_no_socket_and_silence(tmp_path: Path) -> None:
    assert "No such file" in str(answers.containerd(str(tmp_path / "none.sock"), 60).reason)
    with server(tmp_path, lambda _connection: time.sleep(0.5)) as path:
        assert "timed out" in str(answers.containerd(path, 0.1).reason)


@pytest.mark.parametrize("recorded", ANSWERS, ids=lambda path: path.stem)
def test_what_containerd_has_said(monkeypatch: pytest.MonkeyPatch, recorded: Path) -> None:
    monkeypatch.setattr(cri, "call", lambda *_given: recorded.read_bytes())
    found = {"nvidia": "/usr/bin/nvidia-container-runtime", "runc": ""}
    assert cri.runtimes("path", 1) == (found, "runc")


def test_there_are_recorded_answers() -> None:
    assert len(ANSWERS) == 2


@pytest.mark.parametrize("message", [b"", b"\x12\x02\x0a\x00", b"\xff", b"\x12\x0e\x0a\x06config\x12\x04nope"])
def test_answers_of_another_kind(monkeypatch: pytest.MonkeyPatch, message: bytes) -> None:
    monkeypatch.setattr(cri, "call", lambda *_given: message)
    assert "its answer is of another kind" in str(answers.containerd("path", 1).reason)


# --- the other engines ------------------------------------------------------------------------------


def said(stdout: str, code: int | None = 0, stderr: str = "", **more: Any) -> Command:
    return Command(("program",), code, stdout, stderr, **more)


def test_docker() -> None:
    runtimes = {"nvidia": {"path": "nvidia-container-runtime"}, "runc": {"path": "runc"}}
    found = answers.docker(said(json.dumps({"runtimes": runtimes, "default": "runc"})))
    assert found == answers.Engine({"nvidia": "nvidia-container-runtime", "runc": "runc"}, "runc")
    # Debian 13's client ends well without a daemon.
    nobody = said('{"runtimes": null, "default": ""}', stderr="Cannot connect to the Docker daemon\nmore")
    assert answers.docker(nobody) == answers.Engine({}, reason="Cannot connect to the Docker daemon")
    assert answers.docker(said("", 1)).reason == "no reason given"
    assert answers.docker(said("", None, error="No such file or directory")).reason == "No such file or directory"
    assert answers.docker(said("", None, timed_out=True, limit=120)).reason == "program did not end within 120 s"


def test_podman() -> None:
    assert answers.podman(said("crun 5.4.2\n")) == answers.Engine({"crun": ""}, "crun", version="5.4.2")
    assert answers.podman(said("", 125, "Error: no storage")).reason == "Error: no storage"


CRIO = """\
INFO[2026-11-25] nothing of interest
[crio]
  root = "/var/lib/containers/storage"
  [crio.api]
    listen = "/var/run/crio/crio.sock"
  [crio.runtime]
    default_runtime = "crun"
    runtime_path = "not of a runtime"
    [crio.runtime.runtimes]
      [crio.runtime.runtimes.crun]
        runtime_path = "/usr/libexec/crio/crun"
        runtime_type = ""
      [crio.runtime.runtimes.nvidia]
        runtime_path = "/usr/bin/nvidia-container-runtime"
        runtime_type = "oci"
    [crio.runtime.workloads]
      runtime_path = "neither"
  [crio.image]
    default_runtime = "nor this"
"""


def test_crio() -> None:
    """As `crio status config` prints it, which was not to be had here: written after cri-o's documentation."""
    found = answers.crio([said("", None, error="No such file"), said(CRIO)])
    paths = {"crun": "/usr/libexec/crio/crun", "nvidia": "/usr/bin/nvidia-container-runtime"}
    assert found == answers.Engine(paths, "crun")
    gone = answers.crio([said("", 1, "connection refused"), said("", None, error="No such file")])
    assert gone.reason == "connection refused"


# Two of the three that pass, between what stays, as nvidia-ctk 1.20.1 writes mounts.
MOUNT = """\
        - hostPath: {path}
          containerPath: {path}
          options:
            - nosuid
            - nodev
"""
LIBRARY = MOUNT.format(path="/usr/lib/libcuda.so.580")
SOCKETS = [f"/run/nvidia-{name}/socket" for name in ("fabricmanager", "persistenced")] + ["/tmp/nvidia-mps"]


@pytest.mark.parametrize("path", [*SOCKETS, "/var/run/nvidia-persistenced/socket", "/root/driver/tmp/nvidia-mps"])
def test_what_comes_and_goes_makes_no_specification_old(path: str) -> None:
    there = f"    mounts:\n{LIBRARY}"
    now = f"    mounts:\n{MOUNT.format(path=path)}{LIBRARY}"
    for one, other in ((there, now), (now, there), (f"{there}{MOUNT.format(path=path)}", now)):
        assert answers.is_current(said(one), other) is True
    assert answers.is_current(said(now), there.replace("580", "570")) is False
    assert answers.is_current(said(now), f"{there}{MOUNT.format(path='/tmp/mine')}") is False
    assert answers.is_current(said(now), None) is False
    assert answers.is_current(said(now, 1), now) is None


# --- settings ---------------------------------------------------------------------------------------

NVIDIA = {"path": "nvidia-container-runtime", "args": []}


@pytest.mark.parametrize(
    ("asked", "default", "wanted"),
    [
        ({"default-runtime": "nvidia", "debug": True}, False, {"default-runtime": "runc", "debug": True}),
        ({"default-runtime": "nvidia"}, True, {"default-runtime": "nvidia"}),
        ({"default-runtime": "mine"}, False, {"default-runtime": "mine"}),
        ({}, False, {}),
    ],
)
def test_a_default_of_docker_that_was_set_is_taken_back(asked: Any, default: bool, wanted: Any) -> None:
    given = json.dumps({"runtimes": {"nvidia": NVIDIA}, **asked})
    assert texts.docker_with(given, default) == {"runtimes": {"nvidia": NVIDIA}, **wanted}


@pytest.mark.parametrize(
    ("before", "left"),
    [
        ({}, None),
        ({"runtimes": {"mine": {}}, "debug": True}, None),
        ({"runtimes": {"nvidia": NVIDIA}}, {}),
        ({"runtimes": {"nvidia": NVIDIA, "mine": {}}, "debug": True}, {"runtimes": {"mine": {}}, "debug": True}),
        ({"runtimes": {"nvidia": NVIDIA}, "default-runtime": "nvidia"}, {"default-runtime": "runc"}),
        ({"default-runtime": "mine", "runtimes": {"nvidia": NVIDIA}}, {"default-runtime": "mine"}),
    ],
)
def test_what_a_removal_leaves_of_dockers_settings(before: dict[str, Any], left: dict[str, Any] | None) -> None:
    assert texts.docker_without(before) == left


def test_docker_s_settings_are_written_as_before() -> None:
    assert (
        texts.json_text({"b": [1], "a": {"c": "ä"}})
        == '{\n    "a": {\n        "c": "\\u00e4"\n    },\n    "b": [\n        1\n    ]\n}\n'
    )


OWN = f'"{texts.IMPORT}"'
PLUGINS = "[plugins]\n  # mine\n  [plugins.x]\n    imports = []\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", f"imports = [{OWN}]\nversion = 2\n"),
        (f"version = 2\n{PLUGINS}", f"imports = [{OWN}]\nversion = 2\n{PLUGINS}"),
        (f"# mine\nversion = 2\nimports = []\n{PLUGINS}", f"# mine\nversion = 2\nimports = [{OWN}]\n{PLUGINS}"),
        ('imports = ["/a.toml"] # mine\n', f'imports = ["/a.toml", {OWN}] # mine\n'),
        ("imports=['/a.toml']\n", f"imports=['/a.toml', {OWN}]\n"),
        ('imports = [\n  "/a.toml",\n  "/b.toml",\n]\n', f'imports = [\n  "/a.toml",\n  "/b.toml", {OWN},\n]\n'),
        ('imports = [\n  "/a.toml"\n]\n', f'imports = [\n  "/a.toml", {OWN}\n]\n'),
    ],
)
def test_the_import_comes_last_and_goes_without_a_trace(before: str, after: str) -> None:
    assert texts.with_import(before) == after
    assert texts.with_import(after) == after
    assert texts.without_import(after) == before
    assert texts.without_import(before) == before


def test_an_import_of_the_whole_folder_is_enough() -> None:
    text = 'imports = ["/etc/containerd/conf.d/*.toml"]\nversion = 2\n'
    assert texts.with_import(text) == text == texts.without_import(text)


DUMP = """\
disabled_plugins = []
imports = ["/etc/containerd/config.toml"]

[plugins]

  [plugins."io.containerd.grpc.v1.cri"]
    sandbox_image = "registry.example/pause:9"

    [plugins."io.containerd.grpc.v1.cri".containerd]
      default_runtime_name = "runc"

      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
        runtime_type = "io.containerd.runc.v2"
"""
ADDED = """\

      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]
        runtime_type = "io.containerd.runc.v2"
"""


def test_what_would_be_lost_is_seen() -> None:
    changed = DUMP.replace("config.toml", "other.toml").replace('"runc"', '"nvidia"')
    assert texts.lost(DUMP, changed + ADDED) == []
    # The same line of another table is another setting.
    without = DUMP.replace('        runtime_type = "io.containerd.runc.v2"\n', "")
    runc = '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]'
    assert texts.lost(DUMP, without + ADDED) == [f'runtime_type = "io.containerd.runc.v2" in {runc}']
    found = texts.lost(DUMP, DUMP.replace("registry.example/pause:9", "registry.k8s.io/pause:3.8"))
    assert found == ['sandbox_image = "registry.example/pause:9" in [plugins."io.containerd.grpc.v1.cri"]']


def test_what_a_dump_says_of_runtimes() -> None:
    assert not texts.runtime_in(DUMP) and texts.runtime_in(DUMP + ADDED)
    # As containerd 2 writes it.
    assert texts.runtime_in("    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia]\n")
    assert texts.default_in(DUMP) == "runc" and texts.default_in("default_runtime_name = 'nvidia'\n") == "nvidia"
    assert texts.default_in("") is None


@pytest.mark.parametrize(
    ("line", "off"),
    [
        ("disabled_plugins = []", False),
        ('disabled_plugins = ["io.containerd.snapshotter.v1.btrfs"]', False),
        # Docker's containerd.io has it so.
        ('disabled_plugins = ["cri"]', True),
        ("disabled_plugins = ['a', 'io.containerd.cri.v1.runtime']", True),
        ("", False),
    ],
)
def test_the_plugin_that_knows_runtimes_can_be_off(line: str, off: bool) -> None:
    assert texts.cri_is_off(f"version = 2\n{line}\n") is off
