"""A plugin of one's own, after test_device.py, which sees the release: a wrong one is refused, and the way back."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from testinfra.host import Host

from tests.simulator.cache import ROOT
from tests.simulator.mirror import build
from tests.testinfra.helpers import full, gpu_uuids, nomad_gpus, wait_for
from tests.testinfra.playbooks import Run, run_in_scenario, words

testinfra_hosts = ["device-t4"]
PLUGIN = "/opt/nomad/plugins/nomad-device-nvidia"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Return the plugin with something behind its end, which no program minds."""
    path = tmp_path / "plugin"
    shutil.copy(build.nvidia_plugin() / "nomad-device-nvidia", path)
    with path.open("ab") as file:
        file.write(b"own")
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def converge(**program: Any) -> Run:
    return run_in_scenario(
        ROOT / "molecule/nomad_device_nvidia/converge.yml",
        "--extra-vars", json.dumps({"nomad_device_nvidia_program": program}),
    )  # fmt: skip


def test_a_disk_that_is_full_leaves_the_plugin_as_it_was(host: Host, own: Path) -> None:
    before = host.file(PLUGIN).sha256sum
    agent = host.check_output("systemctl show nomad --value --property=MainPID")
    with full("device-t4", str(Path(PLUGIN).parent)):
        run = converge(path=str(own), checksum=sha256(own))
        assert host.file(PLUGIN).sha256sum == before
    assert run.code != 0
    assert "No space left on device" in words(run.output), run.output
    assert host.check_output("systemctl show nomad --value --property=MainPID") == agent != "0"
    # Nothing was to be restarted either.
    run = converge()
    assert (run.code, set(run.changed.values())) == (0, {0}), run.output


def test_plugin_of_ones_own(host: Host, own: Path) -> None:
    before = host.file(PLUGIN).sha256sum
    run = converge(path=str(own), checksum="0" * 64)
    assert run.code != 0
    assert (
        f"device-t4: {own} on the control node has the SHA-256 {sha256(own)}. Expected: a file with {'0' * 64}."
    ) in words(run.output)
    assert "nomad_device_nvidia_program has path. Expected: checksum" in words(converge(path=str(own)).output)
    told = f"{own.parent} on the control node is no file. Expected: a file with {'0' * 64}. Next step: "
    assert told in words(converge(path=str(own.parent), checksum="0" * 64).output)
    assert host.file(PLUGIN).sha256sum == before

    # One that is no plugin costs the agent nothing.
    wrong = own.with_name("wrong")
    shutil.copy("/bin/true", wrong)
    agent = host.check_output("systemctl show nomad --value --property=MainPID")
    run = converge(path=str(wrong), checksum=sha256(wrong))
    assert run.code != 0
    assert f"device-t4: {wrong} does not start as a device plugin (Unrecognized remote plugin" in words(run.output)
    assert host.file(PLUGIN).sha256sum == before
    assert host.check_output("systemctl show nomad --value --property=MainPID") == agent != "0"

    link = own.with_name("link")
    link.symlink_to(own)
    run = converge(path=str(link), checksum=f"sha256:{sha256(own)}")
    assert (run.code, host.file(PLUGIN).sha256sum) == (0, sha256(own)), run.output
    wait_for("Nomad has the GPUs", lambda: sorted(nomad_gpus(host, "device-t4")) == sorted(gpu_uuids(host)))
    run = converge(path=str(own), checksum=sha256(own))
    assert (run.code, run.changed["device-t4"]) == (0, 0), run.output

    run = converge()
    assert (run.code, host.file(PLUGIN).sha256sum) == (0, before), run.output
    wait_for("Nomad has the GPUs", lambda: sorted(nomad_gpus(host, "device-t4")) == sorted(gpu_uuids(host)))
