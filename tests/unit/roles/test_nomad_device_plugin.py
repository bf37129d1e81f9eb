# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A device plugin is tried by the real Nomad before it, its configuration or a restart can cost a working agent.

The plugin is the ancestor of nomad-device-nvidia that the simulator builds; both start without a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.server
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.tests.unit.playbooks import playbook_helper
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper
from ansible_collections.gpufarm.core.tests.unit.roles.role_helper import ROLES

from tests.simulator import cache
from tests.simulator.mirror import build

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the roles give files to root")

NAME = "nomad-device-nvidia"
gpg = release_helper.gpg


@pytest.fixture(scope="module")
def nomad() -> Path:
    """Return the oldest Nomad; what takes minutes to build is not built for a unit test."""
    for product in (build.NOMADS[0], build.NVIDIA_PLUGIN):
        if not (cache.cache_dir() / f"mirror-{product.name}" / cache.key_of(product.inputs())).is_dir():
            pytest.skip("not built: python -m tests.simulator.farm build")
    return next(iter(build.nomads().values())) / "nomad"


@pytest.fixture
def server() -> Iterator[release_helper.Server]:
    running = release_helper.Server()
    yield running
    running.close()


class Node:
    """This machine, with folders of its own; a restart of the agent is only told of."""

    def __init__(self, folder: Path, nomad: Path) -> None:
        self.folder = folder
        core = folder / "collections/ansible_collections/gpufarm/core"
        shutil.copytree(ROLES, core / "roles")
        for name in ("plugins", "meta", "galaxy.yml"):
            (core / name).symlink_to(ROLES.parent / name)
        told = [{"name": "Restart Nomad", "ansible.builtin.debug": {"msg": "the agent is restarted"}}]
        (core / "roles/nomad/handlers/main.yml").write_text(json.dumps(told), encoding="utf-8")
        self.plugins = folder / "plugins"
        self.config = folder / "nomad.d"
        for path in (self.plugins, self.config):
            path.mkdir()
        self.plugin = self.plugins / NAME
        self.hcl = self.config / "device_nvidia.hcl"
        (self.config / "nomad.hcl").write_text(f'data_dir = "{folder}/data"\n', encoding="utf-8")
        (self.config / "client.hcl").write_text("client { enabled = true }\n", encoding="utf-8")
        self.given = {
            "nomad_plugin_dir": str(self.plugins),
            "nomad_config_dir": str(self.config),
            "__nomad_binary": str(nomad),
            "__nomad_handed": str(folder / "handed"),
            "_common_host": {"files": []},
            "_common_bundle": "",
            "_common_download_environment": {},
            "ansible_facts": {"architecture": "x86_64"},
        }

    def run(self, tasks: str, *options: str, **given: Any) -> tuple[int, str]:
        """Return how it ended and what it told."""
        role, _slash, entry = tasks.partition("/")
        entries = {"nomad": "variables.yml", "nomad_device_nvidia": "variables.yml", role: f"{entry}.yml"}
        includes = [
            {"ansible.builtin.include_role": {
                "name": f"gpufarm.core.{name}", "tasks_from": file, "rolespec_validate": False, "public": True,
            }}
            for name, file in [("nomad", "variables.yml"), *entries.items()]
        ]  # fmt: skip
        play = [{"hosts": "all", "gather_facts": False, "tasks": includes}]
        (self.folder / "play.yml").write_text(json.dumps(play), encoding="utf-8")
        ran = playbook_helper.run_playbook(
            self.folder, {"all": {"hosts": {"gpu1": playbook_helper.LOCAL}}}, str(self.folder / "play.yml"),
            "--extra-vars", json.dumps({**self.given, **given}), *options, before=self.folder / "collections",
        )  # fmt: skip
        return ran.returncode, " ".join((ran.stdout + ran.stderr).split())


@pytest.fixture
def node(tmp_path: Path, nomad: Path) -> Node:
    return Node(tmp_path, nomad)


def own(path: Path) -> dict[str, str]:
    return {"path": str(path), "checksum": hashlib.sha256(path.read_bytes()).hexdigest()}


def restarted(told: str) -> bool:
    return "the agent is restarted" in told


def changed(told: str) -> int:
    (number,) = re.findall(r"gpu1 : .* changed=(\d+) ", told)
    return int(number)


def left(node: Node) -> list[str]:
    return sorted(path.name for path in [*node.plugins.iterdir(), *node.folder.glob("handed/*")])


def program(folder: Path, text: str) -> Path:
    path = folder / "program"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Unrecognized remote plugin message: nothing; by itself it ends with exit code 0)"),
        (
            "echo hello; echo 'no libnvidia-ml.so.1 here' >&2; exit 3",
            "Unrecognized remote plugin message: hello; by itself it ends with exit code 3: no libnvidia-ml.so.1 here)",
        ),
        ("echo '1|1|unix|/nowhere|grpc'; exec sleep 600", "incompatible API version with plugin. Plugin version: 1"),
    ],
)
def test_a_plugin_of_ones_own_that_does_not_start_replaces_none(node: Node, text: str, words: str) -> None:
    node.plugin.write_bytes(b"the one that works")
    given = own(program(node.folder, f"#!/bin/sh\n{text}\n"))
    code, told = node.run("nomad_device_nvidia/install_own", nomad_device_nvidia_program=given)
    assert (code, restarted(told)) == (2, False), told
    assert f"gpu1: {given['path']} does not start as a device plugin ({words}" in told
    assert "Expected: one that " in told and "was there before stays" in told and "Next step: give a plugin" in told
    assert (node.plugin.read_bytes(), left(node)) == (b"the one that works", [NAME])


def test_a_plugin_of_another_architecture_is_no_plugin(node: Node) -> None:
    other = node.folder / "arm"
    other.write_bytes(b"\x7fELF another machine's")
    code, told = node.run("nomad_device_nvidia/install_own", nomad_device_nvidia_program=own(other))
    assert code == 2 and "exec format error" in told, told
    assert left(node) == []


def test_a_plugin_of_ones_own_is_tried_once(node: Node) -> None:
    given = own(build.nvidia_plugin() / NAME)
    code, told = node.run("nomad_device_nvidia/install_own", "--check", nomad_device_nvidia_program=given)
    assert (code, changed(told), left(node)) == (0, 1, []), told
    code, told = node.run("nomad_device_nvidia/install_own", nomad_device_nvidia_program=given)
    assert (code, restarted(told), left(node)) == (0, True, [NAME]), told
    assert node.plugin.stat().st_mode & 0o7777 == 0o755
    # Nothing is tried where nothing changes.
    again = {"nomad_device_nvidia_program": given, "__nomad_binary": "/nowhere/nomad"}
    code, told = node.run("nomad_device_nvidia/install_own", **again)
    assert (code, changed(told), restarted(told)) == (0, 0, False), told


class Files(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def files(tmp_path: Path) -> Iterator[str]:
    """Return the address of a server that has the plugin and a program that is none."""
    (tmp_path / "files").mkdir()
    shutil.copy(build.nvidia_plugin() / NAME, tmp_path / "files/good")
    shutil.copy("/bin/true", tmp_path / "files/bad")
    handler = functools.partial(Files, directory=str(tmp_path / "files"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_download_that_does_not_start_replaces_none(node: Node, files: str) -> None:
    folder = node.folder / "files"
    good, bad = ({"url": f"{files}/{name}", "checksum": own(folder / name)["checksum"]} for name in ("good", "bad"))
    code, told = node.run("nomad_device_nvidia/install_own", "--check", nomad_device_nvidia_program=good)
    assert (code, changed(told) > 0, left(node), (node.folder / "handed").exists()) == (0, True, [], False), told
    code, told = node.run("nomad_device_nvidia/install_own", nomad_device_nvidia_program=good)
    assert (code, restarted(told), left(node)) == (0, True, [NAME]), told
    code, told = node.run("nomad_device_nvidia/install_own", nomad_device_nvidia_program=bad)
    assert (code, restarted(told), left(node)) == (2, False, [NAME]), told
    assert "what nomad_device_nvidia_program.url has does not start as a device plugin (Unrecognized remote" in told
    assert own(node.plugin)["checksum"] == good["checksum"]
    # What is there is neither fetched nor tried again.
    (folder / "good").unlink()
    node.plugin.chmod(0o700)
    again = {"nomad_device_nvidia_program": good, "__nomad_binary": "/nowhere/nomad"}
    code, told = node.run("nomad_device_nvidia/install_own", **again)
    assert (code, node.plugin.stat().st_mode & 0o7777) == (0, 0o755), told
    code, told = node.run("nomad_device_nvidia/install_own", **again)
    assert (code, changed(told)) == (0, 0), told


def test_a_download_that_fails_tells_no_login(node: Node, files: str) -> None:
    cases = (("robot:s3cret@", "none", "404"), ("robot:s3cret@", "good", "checksum"), ("robot:s3@cret@", "good", ""),
             ("robot:s3/cret@", "good", ""))  # fmt: skip
    for login, name, found in cases:
        given = {"url": f"{files.replace('://', f'://{login}')}/{name}", "checksum": "0" * 64}
        code, told = node.run("nomad_device_nvidia/install_own", "-vvv", nomad_device_nvidia_program=given)
        assert (code, left(node)) == (2, []), told
        assert re.search(rf"{re.escape(files)}/{name} could not be downloaded \([^)]*{found}", told), told
        said = told[told.index("TASK [") :]
        assert "cret@" not in said and "s3@" not in said and "Next step: correct nomad_device_nvidia_program" in said


@pytest.mark.skipif(not release_helper.HAS_GPG, reason=release_helper.GPG_MISSING)
@pytest.mark.parametrize("handed_on", [False, True])
def test_a_release_that_does_not_start_replaces_none(
    node: Node, server: release_helper.Server, gpg: release_helper.Gpg, handed_on: bool
) -> None:
    releases = release_helper.Releases(server, gpg, gpg.new_key(f"signer {handed_on}"))
    # What stands behind the end no program minds.
    releases.publish(NAME, "1.1.0", (build.nvidia_plugin() / NAME).read_bytes())
    releases.publish(NAME, "1.2.0", Path("/bin/true").read_bytes())
    wanted = {
        "product": NAME,
        "version": "{{ nomad_device_nvidia_version }}",
        "base_url": server.url,
        "key_url": f"{server.url}/key.txt",
        "key_fingerprints": [releases.signer],
        "dest": str(node.plugins),
        "receipt_dir": str(node.folder / "receipts"),
    }
    folder = str(node.folder / "releases") if handed_on else ""
    given = {"__nomad_device_nvidia_release": wanted, "nomad_release_dir": folder}
    code, told = node.run("nomad_device_nvidia/install", **given)
    assert (code, restarted(told), left(node)) == (0, True, [NAME]), told
    before = node.plugin.read_bytes()
    code, told = node.run("nomad_device_nvidia/install", nomad_device_nvidia_version="1.2.0", **given)
    assert code == 2 and "refuses nomad-device-nvidia 1.2.0 (Unrecognized remote plugin message: nothing" in told, told
    assert (node.plugin.read_bytes() == before, left(node)) == (True, [NAME])


def test_a_configuration_that_the_plugin_does_not_take_replaces_none(node: Node) -> None:
    shutil.copy(build.nvidia_plugin() / NAME, node.plugin)
    code, told = node.run("nomad_device_nvidia/configure")
    assert (code, restarted(told), left(node)) == (0, True, [NAME]), told
    before = node.hcl.read_text(encoding="utf-8")
    code, told = node.run("nomad_device_nvidia/configure", nomad_device_nvidia_fingerprint_period="100% soon")
    assert (code, restarted(told), left(node)) == (2, False, [NAME]), told
    assert "failed to parse fingerprint period" in told
    assert node.hcl.read_text(encoding="utf-8") == before
    code, told = node.run("nomad_device_nvidia/configure", __nomad_binary="/nowhere/nomad")
    assert (code, changed(told)) == (0, 0), told


def test_no_agent_is_restarted_whose_plugin_does_not_start(node: Node) -> None:
    shutil.copy(build.nvidia_plugin() / NAME, node.plugin)
    assert node.run("nomad_device_nvidia/configure")[0] == 0
    code, told = node.run("nomad/validate")
    assert (code, changed(told), left(node)) == (0, 0, [NAME]), told
    # A new driver may take away what it was linked with.
    shutil.copy("/bin/true", node.plugin)
    code, told = node.run("nomad/validate")
    assert code == 2
    assert f"gpu1: {node.plugin} does not start (Unrecognized remote plugin message: nothing; by itself it " in told
    assert "one that runs goes on. Next step: set nomad_device_nvidia_version" in told
    # A server alone starts no plugin.
    (node.config / "client.hcl").rename(node.config / "server.hcl")
    (node.config / "server.hcl").write_text("server { enabled = true }\n", encoding="utf-8")
    assert node.run("nomad/validate")[0] == 0


@pytest.mark.parametrize("program_is", ["no plugin", "a plugin with a wrong configuration"])
def test_the_trial_leaves_no_process(node: Node, program_is: str) -> None:
    """Nomad itself ends without the plugin where a configuration is wrong."""
    shutil.copy(build.nvidia_plugin() / NAME, node.plugin)
    # Others run this at the same time.
    mark = f"sleep 9{os.getpid():07}"
    if program_is == "no plugin":
        given = own(program(node.folder, f"#!/bin/sh\necho hello\n{mark} &\nexec {mark}\n"))
        code, told = node.run("nomad_device_nvidia/install_own", nomad_device_nvidia_program=given)
    else:
        code, told = node.run("nomad_device_nvidia/configure", nomad_device_nvidia_fingerprint_period="soon")
    assert code == 2, told
    assert subprocess.run(["pgrep", "-xf", mark], check=False, capture_output=True).returncode == 1
    running = []
    for path in Path("/proc").glob("[0-9]*/exe"):
        with contextlib.suppress(OSError):
            running.append(str(path.readlink()))
    assert [path for path in running if str(node.folder) in path] == []
