# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Settings of engines, with what their programs print in place of the programs; the scenarios have the real ones."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import commands
from ansible_collections.gpufarm.core.plugins.module_utils.commands import Command
from ansible_collections.gpufarm.core.plugins.module_utils.container_engines import texts
from ansible_collections.gpufarm.core.plugins.modules import nvidia_container_runtime
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

NVIDIA = "/usr/bin/nvidia-container-runtime"
# As nvidia-ctk 1.20.1 prints it, its first line empty.
CRIO = f"""
[crio]

  [crio.runtime]

    [crio.runtime.runtimes]

      [crio.runtime.runtimes.nvidia]
        runtime_path = "{NVIDIA}"
        runtime_type = "oci"
"""
BEFORE = '[plugins]\n  [plugins."io.containerd.grpc.v1.cri"]\n    default_runtime_name = "runc"\n    mine = 1\n'
RUNTIME = f"""\
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia.options]
      BinaryName = "{NVIDIA}"
"""


class Host:
    """A host with engines, whose programs are these answers."""

    def __init__(self, folder: Path, capsys: Any) -> None:
        self.capsys = capsys
        self.etc = folder / "etc"
        self.docker = self.etc / "docker/daemon.json"
        self.containerd = self.etc / "containerd"
        self.crio = self.etc / "crio/crio.conf.d/99-nvidia-gpufarm.toml"
        self.programs = {"nvidia-ctk", "containerd", "crio"}
        self.fails = ""
        self.before, self.after = BEFORE, BEFORE + RUNTIME
        self.calls: list[list[str]] = []
        self.copied = ""

    def answer_of(self, command: list[str], timeout: float) -> Command:
        return Command(tuple(command), *self.said(command), limit=timeout)

    def said(self, command: list[str]) -> tuple[int, str, str]:
        self.calls.append(command)
        if self.fails:
            return 1, "", f"level=info msg=something\n{self.fails}\n"
        if "--runtime=docker" in command:
            there = json.loads(self.docker.read_text()) if self.docker.exists() else {}
            there.setdefault("runtimes", {})["nvidia"] = {"args": [], "path": "nvidia-container-runtime"}
            if "--nvidia-set-as-default=true" in command:
                there["default-runtime"] = "nvidia"
            return 0, json.dumps(there), ""
        if "--runtime=crio" in command:
            return 0, CRIO, ""
        copy, result = (Path(part) for part in command[8:10])
        assert self.containerd.is_dir() and mode(self.containerd) == 0o755
        assert not (copy / nvidia_container_runtime.DROP_IN).exists()
        self.copied = (copy / "config.toml").read_text()
        assert texts.IMPORT not in self.copied
        assert texts.imports((result / "wanted").read_text())
        (copy / "conf.d").mkdir(exist_ok=True)
        (copy / nvidia_container_runtime.DROP_IN).write_text("version = 2\n" + RUNTIME)
        (result / "before").write_text(self.before)
        (result / "after").write_text(self.after)
        return 0, "", ""

    def run(self, *engines: str, check: bool = False, **arguments: Any) -> helper.Outcome:
        return helper.run_module(
            nvidia_container_runtime.main, self.capsys, {"engines": list(engines), **arguments},
            check_mode=check, diff=True, remote_tmp=str(self.etc.parent),
        )  # fmt: skip


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Host:
    found = Host(tmp_path, capsys)
    monkeypatch.setattr(nvidia_container_runtime, "DOCKER", found.docker)
    monkeypatch.setattr(nvidia_container_runtime, "CONTAINERD", found.containerd)
    monkeypatch.setattr(nvidia_container_runtime, "CRIO_FILE", found.crio)
    monkeypatch.setattr(
        nvidia_container_runtime, "program_path", lambda name, _search: name if name in found.programs else None
    )
    monkeypatch.setattr(nvidia_container_runtime, "answer_of", found.answer_of)
    monkeypatch.setattr(nvidia_container_runtime.os, "chown", lambda *_given: None)
    return found


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_docker_keeps_what_it_has(host: Host) -> None:
    host.docker.parent.mkdir(parents=True)
    host.docker.write_text('{"debug": true}')
    host.docker.chmod(0o640)
    announced = host.run("docker", check=True)
    assert announced["changed"] and host.docker.read_text() == '{"debug": true}'
    result = host.run("docker")
    assert result["engines"] == announced["engines"] == {
        "docker": {
            "changed": True, "known": True, "files": [str(host.docker)], "runtime": "nvidia-container-runtime",
            "default": None,
        }
    }  # fmt: skip
    assert json.loads(host.docker.read_text())["debug"] is True and mode(host.docker) == 0o640
    assert not host.run("docker")["changed"]
    assert host.run("docker", default=True)["engines"]["docker"]["default"] == "nvidia"
    assert host.run("docker")["engines"]["docker"]["default"] == "runc"
    assert host.run("docker", state="absent")["changed"]
    assert json.loads(host.docker.read_text()) == {"debug": True, "default-runtime": "runc"}


@pytest.mark.parametrize(
    "settings",
    [
        '{"proxies": {"http-proxy": "http://farm:correct-horse@127.0.0.1:9"}}',
        '{"registry-mirrors": ["https://farm:correct-horse/@127.0.0.1:9"]}',
        '{"log-opts": {"gelf-address": "tcp://127.0.0.1", "x-api-key": "correct-horse"}}',
    ],
)
def test_a_link_stays_one_and_a_password_is_not_shown(host: Host, settings: str) -> None:
    elsewhere = host.etc / "elsewhere.json"
    host.docker.parent.mkdir(parents=True)
    elsewhere.write_text(settings)
    host.docker.symlink_to(elsewhere)
    result = host.run("docker")
    assert result["changed"] and host.docker.is_symlink() and "nvidia" in elsewhere.read_text()
    assert "correct-horse" not in json.dumps(dict(result)) and result["diff"] == []


def test_a_password_in_a_file_that_goes_is_not_shown(host: Host) -> None:
    host.crio.parent.mkdir(parents=True)
    host.crio.write_text('# http_proxy = "http://farm:correct-horse@127.0.0.1:9"\n')
    result = host.run("crio", state="absent")
    assert result["changed"] and not host.crio.exists()
    assert "correct-horse" not in json.dumps(dict(result)) and result["diff"] == []


def test_docker_alone_for_the_runtime_has_no_settings_after_it(host: Host) -> None:
    host.run("docker")
    assert mode(host.docker) == 0o644
    assert host.run("docker", state="absent")["changed"] and not host.docker.exists()
    assert not host.run("docker", state="absent")["changed"]


@pytest.mark.parametrize("text", ["{,}", "[]", '{"runtimes": 1}'])
def test_settings_of_docker_that_are_none_are_not_removed(host: Host, text: str) -> None:
    host.docker.parent.mkdir(parents=True)
    host.docker.write_text(text)
    result = host.run("docker", state="absent")
    assert result["failed"] and "Expected: settings that the engine can read; the file is as it was" in result["msg"]
    assert host.docker.read_text() == text


def test_crio_has_a_file_of_its_own(host: Host) -> None:
    result = host.run("crio")
    assert host.crio.read_text() == CRIO.lstrip()
    assert (result["engines"]["crio"]["runtime"], result["engines"]["crio"]["default"]) == (NVIDIA, None)
    assert host.calls == [["nvidia-ctk", "runtime", "configure", "--runtime=crio", "--nvidia-set-as-default=false",
                           "--dry-run"]]  # fmt: skip
    assert not host.run("crio")["changed"]
    assert host.run("crio", default=True)["engines"]["crio"]["default"] == "nvidia"
    assert host.run("crio", state="absent")["changed"] and list(host.crio.parent.iterdir()) == []


def test_containerd_has_a_file_and_an_import(host: Host) -> None:
    top, drop_in = host.containerd / "config.toml", host.containerd / "conf.d/99-nvidia-gpufarm.toml"
    host.containerd.mkdir(parents=True)
    top.write_text("# mine\nversion = 2\n")
    top.chmod(0o600)
    assert host.run("containerd", check=True)["changed"] and not drop_in.exists()
    result = host.run("containerd")
    assert result["engines"]["containerd"] == {
        "changed": True, "known": True, "files": [str(drop_in), str(top)], "runtime": NVIDIA, "default": "runc",
    }  # fmt: skip
    assert top.read_text() == f"{texts.LINE}# mine\nversion = 2\n"
    # It has what the other may say, too.
    assert (mode(top), mode(drop_in)) == (0o600, 0o600)
    assert not host.run("containerd")["changed"]
    drop_in.write_text("version = 2\n")
    assert host.run("containerd")["engines"]["containerd"]["files"] == [str(drop_in)]
    assert host.run("containerd", state="absent")["changed"]
    assert top.read_text() == "# mine\nversion = 2\n" and list(drop_in.parent.iterdir()) == []
    assert not host.run("containerd", state="absent")["changed"]


def test_containerd_without_a_folder_is_left_without_one(host: Host) -> None:
    """But for one in which its settings come to lie."""
    assert host.run("containerd", check=True)["changed"] and not host.containerd.exists()
    host.after = BEFORE
    assert host.run("containerd")["failed"] and not host.containerd.exists()


def test_what_others_have_named_as_nvidia_ctk_does_stays(host: Host) -> None:
    """The GPU Operator does."""
    for engine, path in (("containerd", host.containerd / "conf.d"), ("crio", host.crio.parent)):
        path.mkdir(parents=True)
        (path / "99-nvidia.toml").write_text("version = 2\n# theirs\n")
        host.run(engine)
        assert host.run(engine, state="absent")["changed"]
        assert (path / "99-nvidia.toml").read_text() == "version = 2\n# theirs\n"
        assert len(list(path.iterdir())) == 1


def test_containerd_without_settings_has_none_after_it(host: Host) -> None:
    host.run("containerd")
    # containerd 1 takes a file without a version for one of version 1, in which plugins have other names.
    assert host.copied == texts.BARE
    top = host.containerd / "config.toml"
    assert top.read_text() == texts.LINE + texts.BARE and mode(top) == 0o644
    host.run("containerd", state="absent")
    assert [path.name for path in host.containerd.iterdir()] == ["conf.d"]


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ('disabled_plugins = ["cri"]\n', RUNTIME, "has containerd's CRI plugin in disabled_plugins, which alone knows"),
        (BEFORE, RUNTIME, "would no longer have mine = 1 in [plugins.\"io.containerd.grpc.v1.cri\"] of "),
        (BEFORE + "    password = 1\n", BEFORE + RUNTIME, "would no longer have a setting of "),
        (BEFORE, BEFORE, "containerd would not read "),
    ],
)  # fmt: skip
def test_containerd_is_left_alone_where_it_would_lose_something(
    host: Host, before: str, after: str, found: str
) -> None:
    host.containerd.mkdir(parents=True)
    (host.containerd / "config.toml").write_text("version = 2\n")
    host.before, host.after = before, after
    result = host.run("containerd")
    assert result["failed"] and found in result["msg"] and "nothing was changed. Next step: " in result["msg"]
    assert "password" not in result["msg"]
    assert (host.containerd / "config.toml").read_text() == "version = 2\n"
    assert len(list(host.containerd.iterdir())) == 1


def test_one_engine_s_error_leaves_the_others_as_they_are(host: Host) -> None:
    host.after = BEFORE
    assert host.run("docker", "containerd")["failed"] and not host.docker.exists()


def test_no_room_leaves_no_empty_settings(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """By which an older Docker does not start, and which the next run would refuse."""

    def full(*_given: Any, **_more: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", full)
        # Ansible's own words, by its version as an answer of the module or as an exception.
        with contextlib.suppress(Exception):
            host.run("docker")
    assert not host.docker.exists()
    assert host.run("docker")["changed"] and host.docker.exists()


def test_what_a_program_says_is_told(host: Host) -> None:
    host.fails = 'time="2026-11-25T08:12:07Z" level=error msg="unable to load config: (2, 1): unterminated array"'
    result = host.run("crio")
    assert "NVIDIA's runtime could not be added to /etc/crio/crio.conf (unable to load config: (2, 1)" in result["msg"]
    host.fails = "containerd: failed to load TOML: /etc/containerd/config.toml: (1, 2): no value"
    assert "(containerd: failed to load TOML: /etc/containerd/config.toml: (1, 2)" in host.run("containerd")["msg"]
    host.fails = "unexpected end of JSON input"
    assert "Expected: Docker's settings as a JSON object; the file is as it was." in host.run("docker")["msg"]


def test_an_engine_that_is_not_there(host: Host) -> None:
    host.programs = {"nvidia-ctk"}
    told = host.run("containerd", check=True)
    assert (told["changed"], told["engines"]["containerd"]["known"]) == (False, False)
    assert (
        "there is no containerd. Expected: containerd and NVIDIA's container toolkit" in host.run("containerd")["msg"]
    )
    assert not host.run("docker", "containerd", "crio", state="absent")["changed"]


def test_a_program_that_hangs_is_told(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia_container_runtime, "answer_of", commands.answer_of)
    monkeypatch.setattr(nvidia_container_runtime, "ANSWER_S", 0.2)
    program = tmp_path / "bin/nvidia-ctk"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    told = host.run("docker")["msg"]
    assert "nvidia-ctk did not end within 0.2 s. Expected: an answer. Next step: see what it waits for on this" in told
    assert not host.docker.exists()
