# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Volumes that users create through a real Nomad, on a real file system, whose size holds.

The agent has file systems of its own, which end with it, as with a machine.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.tests.unit.patience import PATIENCE_S, wait_for
from ansible_collections.gpufarm.core.tests.unit.roles.role_helper import ROLES

from tests.simulator.mirror import build

MIB = 1024**2
AGENT = """
data_dir             = "%(folder)s/data"
bind_addr            = "127.0.0.1"
disable_update_check = true
advertise {
  http = "127.0.0.1"
  rpc  = "127.0.0.1"
  serf = "127.0.0.1"
}
ports {
  http = %(http)d
  rpc  = %(rpc)d
  serf = %(serf)d
}
server {
  enabled          = true
  bootstrap_expect = 1
}
client {
  enabled = true
  servers = ["127.0.0.1:%(rpc)d"]
  options = {
    "driver.allowlist"     = "raw_exec"
    "fingerprint.denylist" = "bridge,cgroup,consul,env_aws,env_azure,env_digitalocean,env_gce,vault"
  }
}
"""


def mounts() -> bool:
    """Whether this machine lets its root mount an image."""
    if os.geteuid() != 0 or not Path("/dev/loop-control").exists():
        return False
    return subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not mounts(), reason="root cannot mount an image here")


def plugin(path: Path) -> Path:
    text = (ROLES / "nomad_client/templates/ext4-image.j2").read_text(encoding="utf-8")
    # One that an upgrade of the distribution does not take away.
    assert text.startswith("#!/usr/bin/python3\n")
    text = text.replace("/usr/bin/python3", sys.executable, 1)
    assert "{{" not in text.replace("{{ ansible_managed }}", "")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


class Machine:
    """One with an agent that is server and client."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nomad = build.nomad() / "nomad"
        self.process: subprocess.Popen[bytes] | None = None
        self.http = 0
        plugin(folder / "data/host_volume_plugins/ext4-image")

    def start(self) -> None:
        with contextlib.ExitStack() as held:
            sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
            self.http, rpc, serf = (each.getsockname()[1] for each in sockets)
        text = AGENT % {"folder": self.folder, "http": self.http, "rpc": rpc, "serf": serf}
        (self.folder / "agent.hcl").write_text(text, encoding="utf-8")
        # Without control groups, which would be those of this machine.
        program = 'umount --recursive --lazy /sys/fs/cgroup && exec "$0" agent -config="$1"'
        self.process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-ec", program, str(self.nomad), str(self.folder / "agent.hcl")],
            stdout=(self.folder / "log").open("ab"), stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        wait_for(lambda: [node for node in self.nodes() if node["Status"] == "ready"])

    def stop(self) -> None:
        """What is mounted goes with it."""
        if self.process:
            self.process.kill()
            self.process.wait(timeout=PATIENCE_S)

    def nodes(self) -> list[dict[str, Any]]:
        assert self.process and self.process.poll() is None, (self.folder / "log").read_text(encoding="utf-8")
        try:
            found: list[dict[str, Any]] = self.ask("GET", "/v1/nodes")
        except OSError:
            return []
        return found

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http}{path}",
            json.dumps(body).encode() if body is not None else None,
            method=method,
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:  # noqa: S310
            return json.loads(answer.read() or "null")

    def create(self, name: str, size: int, plugin: str = "ext4-image", **parameters: str) -> dict[str, Any]:
        capability = {"AttachmentMode": "file-system", "AccessMode": "single-node-writer"}
        volume = {
            "Name": name, "PluginID": plugin, "RequestedCapacityMaxBytes": size, "RequestedCapabilities": [capability],
            "Parameters": parameters,
        }  # fmt: skip
        made = self.ask("PUT", "/v1/volume/host/create", {"Volume": volume})["Volume"]
        found = wait_for(lambda: self.ready(made["ID"]))
        assert found
        return found

    def ready(self, number: str) -> dict[str, Any] | None:
        found: dict[str, Any] = self.ask("GET", f"/v1/volume/host/{number}")
        return found if found["State"] == "ready" else None

    def deletes(self, number: str) -> bool:
        """Ask for it; a server knows a client that has just started before it has a way to it."""
        try:
            self.ask("DELETE", f"/v1/volume/host/{number}/delete")
        except urllib.error.HTTPError as error:
            told = error.read().decode()
            assert "cannot be removed from unknown node" in told, told
            return False
        return True

    def seen(self, path: str) -> Path:
        """A path as the agent has it."""
        assert self.process
        return Path(f"/proc/{self.process.pid}/root{path}")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    machine.start()
    yield machine
    machine.stop()


def filled(folder: Path) -> int:
    """How many MiB fit into a folder."""
    for number in range(200):
        try:
            (folder / f"{number}").write_bytes(bytes(MIB))
        except OSError as error:
            assert error.errno == errno.ENOSPC
            return number
    return 200


def test_it_is_tried_with_the_python_that_nomad_runs_it_by() -> None:
    tasks = yaml.safe_load((ROLES / "nomad_client/tasks/sized_volumes.yml").read_text(encoding="utf-8"))
    (put,) = [task["ansible.builtin.template"] for task in tasks if "ansible.builtin.template" in task]
    shebang = (ROLES / "nomad_client/templates" / put["src"]).read_text(encoding="utf-8").splitlines()[0]
    assert put["validate"] == f"{shebang[2:]} %s fingerprint"


def test_a_volume_has_its_size_and_no_more_and_is_there_again_after_a_boot(machine: Machine) -> None:
    volume = machine.create("results", 64 * MIB, mode="0770", uid="1234")
    assert volume["CapacityBytes"] == 64 * MIB and volume["HostPath"].endswith(volume["ID"])
    folder = machine.seen(volume["HostPath"])
    found = folder.stat()
    assert (oct(found.st_mode & 0o7777), found.st_uid, list(folder.iterdir())) == ("0o770", 1234, [])
    image = machine.folder / f"data/host_volumes/{volume['ID']}.ext4"
    # Nobody else can take its blocks, nor read them.
    assert image.stat().st_blocks * 512 >= 64 * MIB and oct(image.stat().st_mode & 0o777) == "0o600"
    assert 48 <= filled(folder) < 64
    unlimited = machine.create("folder", 0, plugin="mkdir")
    assert filled(machine.seen(unlimited["HostPath"])) == 200
    machine.stop()
    assert not list(Path(volume["HostPath"]).iterdir())
    machine.start()
    wait_for(lambda: machine.ready(volume["ID"]))
    assert machine.seen(volume["HostPath"]).joinpath("0").stat().st_size == MIB
    wait_for(lambda: machine.deletes(volume["ID"]))
    assert not image.exists() and not Path(volume["HostPath"]).exists()


def test_a_volume_whose_disk_is_missing_at_a_boot_is_left_out_and_not_made_anew(machine: Machine) -> None:
    lost, there = machine.create("lost", 16 * MIB), machine.create("there", 16 * MIB)
    machine.seen(lost["HostPath"]).joinpath("kept").touch()
    machine.stop()
    image = machine.folder / f"data/host_volumes/{lost['ID']}.ext4"
    elsewhere = image.rename(machine.folder / "disk.ext4")
    # A server may still take what it knew before the boot for what is so now.
    log = machine.folder / "log"
    log.unlink()
    machine.start()
    wait_for(lambda: f"found no {image}, which was there before" in log.read_text(encoding="utf-8"))
    wait_for(lambda: machine.seen(there["HostPath"]).is_mount())
    assert not image.exists()
    machine.stop()
    elsewhere.rename(image)
    machine.start()
    wait_for(lambda: machine.seen(lost["HostPath"]).joinpath("kept").exists())


def test_what_cannot_be_had_is_told_and_leaves_nothing(machine: Machine) -> None:
    cases: list[tuple[int, dict[str, str], str]] = [
        (0, {}, "found a capacity of 0 bytes. Expected: 16777216 or more"),
        (64 * MIB, {"mode": "0999"}, "Expected: mode in octal digits"),
        (64 * MIB, {"colour": "red"}, "found the parameters colour. Expected: mode, uid, gid, or none"),
        (2**50, {}, f"% stay free. Expected: room for {2**50}. Next step: ask for less"),
    ]
    for size, parameters, told in cases:
        with pytest.raises(urllib.error.HTTPError) as refused:
            machine.create("results", size, **parameters)
        assert told in refused.value.read().decode()
    assert [path.name for path in (machine.folder / "data/host_volumes").rglob("*.*")] == []
    assert not list((machine.folder / "data/host_volume_receipts").iterdir())
    # A name that was refused is free.
    assert machine.create("results", 16 * MIB)["CapacityBytes"] == 16 * MIB


def call(program: Path, word: str, folder: Path, size: int = 32 * MIB, number: str = "a1") -> dict[str, Any]:
    """Call the plugin as Nomad does, without PATH."""
    given = {
        "DHV_OPERATION": word, "DHV_VOLUMES_DIR": str(folder), "DHV_VOLUME_ID": number, "DHV_PARAMETERS": "null",
        "DHV_CAPACITY_MIN_BYTES": "0", "DHV_CAPACITY_MAX_BYTES": str(size),
    }  # fmt: skip
    ran = subprocess.run([program, word], env=given, capture_output=True, text=True, check=False)
    answer: dict[str, Any] = json.loads(ran.stdout)
    assert ran.returncode == ("error" in answer), ran.stderr
    return answer


@pytest.fixture
def volumes(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """The plugin, and where its volumes are: a disk of their own."""
    folder = tmp_path / "data/host_volumes"
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "none", folder], check=True)
    yield plugin(tmp_path / "data/host_volume_plugins/ext4-image"), folder
    # Lazy: a mount namespace that began meanwhile has a copy of the volume's, which keeps its image open.
    subprocess.run(["umount", "--recursive", "--lazy", folder], check=True)


def test_it_may_be_called_again_and_again(volumes: tuple[Path, Path]) -> None:
    program, folder = volumes
    # One that was half made.
    (folder / "a1").mkdir(parents=True)
    (folder / "a1.part").write_bytes(b"half")
    made = call(program, "create", folder)
    assert made == {"path": f"{folder}/a1", "bytes": 32 * MIB}
    (folder / "a1/kept").touch()
    assert call(program, "create", folder) == made
    assert call(program, "create", folder, 16 * MIB) == made
    assert f"found a volume of {32 * MIB} bytes" in call(program, "create", folder, 64 * MIB)["error"]
    with (folder / "a1/kept").open():
        assert "busy" in call(program, "delete", folder)["error"]
    assert (folder / "a1/kept").exists()
    assert call(program, "delete", folder) == call(program, "delete", folder) == {}
    assert list(folder.iterdir()) == list(receipts(program).iterdir()) == []
    assert "Expected: fingerprint, create or delete" in call(program, "perhaps", folder)["error"]


def receipts(program: Path) -> Path:
    return program.parent.with_name("host_volume_receipts")


def test_nobody_fills_the_disk_of_the_node(volumes: tuple[Path, Path]) -> None:
    program, folder = volumes
    assert f"found room for {90 * MIB} bytes on the node's disk" in call(program, "create", folder, 91 * MIB)["error"]
    assert call(program, "create", folder, 90 * MIB)["bytes"] == 90 * MIB
    assert "found room for 0 bytes" in call(program, "create", folder, 16 * MIB, "b2")["error"]


def test_one_that_was_there_before_is_never_made_anew(volumes: tuple[Path, Path]) -> None:
    program, folder = volumes
    assert "path" in call(program, "create", folder)
    (receipts(program) / "a1").unlink()
    # One of an older plugin gets a receipt.
    assert "path" in call(program, "create", folder)
    subprocess.run(["umount", folder / "a1"], check=True)
    (folder / "a1.ext4").rename(folder / "elsewhere")
    told = call(program, "create", folder)["error"]
    assert f"found no {folder}/a1.ext4, which was there before. Expected: the disk that holds it." in told
    assert sorted(path.name for path in folder.iterdir()) == ["a1", "elsewhere"]
    # Whoever knows that it is gone may delete it, and then have another one of that name.
    assert call(program, "delete", folder) == {}
    assert "path" in call(program, "create", folder)


def test_what_was_written_below_a_volume_stops_its_deletion_and_not_its_data(volumes: tuple[Path, Path]) -> None:
    program, folder = volumes
    assert "path" in call(program, "create", folder)
    (folder / "a1/kept").touch()
    subprocess.run(["umount", folder / "a1"], check=True)
    (folder / "a1/below").touch()
    assert f"found below in {folder}/a1 below the volume" in call(program, "delete", folder)["error"]
    assert "path" in call(program, "create", folder)
    assert f"found below in {folder}/a1 below the volume" in call(program, "delete", folder)["error"]
    # It is as it was.
    assert (folder / "a1/kept").exists() and (receipts(program) / "a1").exists()
    subprocess.run(["umount", folder / "a1"], check=True)
    (folder / "a1/below").unlink()
    assert call(program, "delete", folder) == {}


def test_what_a_killed_call_has_left_goes_when_the_agent_starts(volumes: tuple[Path, Path]) -> None:
    program, folder = volumes
    for number in ("a1", "b2"):
        (folder / number).mkdir()
        (folder / f"{number}.part").write_bytes(bytes(16 * MIB))
    subprocess.run(["mkfs.ext4", "-q", "-F", folder / "a1.part"], check=True)
    subprocess.run(["mount", "-o", "loop", folder / "a1.part", folder / "a1"], check=True)
    assert "path" in call(program, "create", folder, 16 * MIB, "c3")
    assert sorted(path.name for path in folder.iterdir()) == ["c3", "c3.ext4"]
    # One that somebody still makes, and one that is whole.
    (folder / "b2.part").touch()
    (folder / "c3.part").touch()
    with (receipts(program) / "b2").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        ran = subprocess.run([program, "fingerprint"], env={}, capture_output=True, text=True, check=True)
        assert json.loads(ran.stdout) == {"version": "1.0.0"}
        assert sorted(path.name for path in folder.iterdir()) == ["b2.part", "c3", "c3.ext4"]
    assert (folder / "c3").is_mount()
    subprocess.run([program, "fingerprint"], env={}, capture_output=True, text=True, check=True)
    assert sorted(path.name for path in folder.iterdir()) == ["c3", "c3.ext4"]
    assert [path.name for path in receipts(program).iterdir()] == ["c3"]
