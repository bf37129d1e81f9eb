"""The double of the device plugin that knows MIG, under real Nomad, held to what the plugin itself told Nomad."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.simulator import cache
from tests.simulator.gpu import faults
from tests.simulator.mirror import build

from .conftest import needs

pytestmark = needs("unshare")

# GET /v1/nodes?resources=true, of Nomad 1.11.3 with the plugin's commit 05e83c3 on the same profile.
RECORDED = Path(__file__).parent / "fixtures/mig-2x-a100-plugin-05e83c3.json"
GPUS = ("GPU-ae46d06e-f17b-83b4-14b1-b4dc98a67359", "GPU-95457690-2180-8204-2a69-325e4a3c7855")
MODEL = "NVIDIA A100-SXM4-80GB"
PERIOD_S = 0.3
AGENT = """
disable_update_check = true
ports {
  http = %d
  rpc  = %d
  serf = %d
}
client {
  options = {
    "driver.allowlist"     = "raw_exec"
    "fingerprint.denylist" = "consul,env_aws,env_azure,env_digitalocean,env_gce,vault"
  }
}
plugin "nomad-device-nvidia" {
  config {
    fingerprint_period = "%gs"
    ignored_gpu_ids    = %s
  }
}
"""
JOB = {
    "ID": "reserve",
    "Type": "batch",
    "Datacenters": ["*"],
    "TaskGroups": [
        {
            "Name": "reserve",
            "Tasks": [
                {
                    "Name": "reserve",
                    "Driver": "raw_exec",
                    "Config": {"command": "/bin/sh", "args": ["-c", 'printf %s "$NVIDIA_VISIBLE_DEVICES"']},
                    "Resources": {"CPU": 10, "MemoryMB": 10, "Devices": [{"Name": "nvidia/gpu", "Count": 2}]},
                }
            ],
        }
    ],
}


@dataclass
class Machine:
    """A folder with the GPU double's files and a Nomad agent that has the plugin's double."""

    root: Path
    nomad: Path
    process: subprocess.Popen[bytes] | None = None
    http: int = 0

    @property
    def profile(self) -> Path:
        return self.root / "etc/gpufarm-simulator/gpu.yml"

    @property
    def smi(self) -> Path:
        return self.root / "bin/nvidia-smi"

    def change(self, change: faults.Change) -> None:
        def write(text: str) -> None:
            self.profile.write_text(text)

        faults.apply(self.profile.read_text, write, change)

    def start(self, double: Path, ignored: list[str]) -> None:
        with contextlib.ExitStack() as held:
            sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
            ports = [each.getsockname()[1] for each in sockets]
        self.http = ports[0]
        config = self.root / "agent.hcl"
        config.write_text(AGENT % (*ports, PERIOD_S, json.dumps(ignored)))
        command = [str(self.nomad), "agent", "-dev", f"-config={config}", f"-plugin-dir={self.root / 'plugins'}"]
        # An agent of root would set up control groups on this machine.
        self.process = subprocess.Popen(
            [*(["unshare", "--user"] if os.geteuid() == 0 else []), *command],
            env={
                "GPUFARM_SIM_ROOT": str(self.root),
                "LD_LIBRARY_PATH": str(double),
                "PATH": f"{self.root / 'bin'}:/usr/bin:/bin",
                "TMPDIR": str(self.root / "tmp"),
            },
            stdin=subprocess.DEVNULL,
            stdout=(self.root / "log").open("wb"),
            stderr=subprocess.STDOUT,
        )
        wait_for(self, "the agent has a node", lambda: bool(self.api("/v1/nodes")))

    def stop(self) -> None:
        if self.process:
            self.process.terminate()
            self.process.wait(60)

    def api(self, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http}{path}", None if body is None else json.dumps(body).encode()
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - our own agent
                text = answer.read().decode()
        except urllib.error.URLError:
            return None
        return json.loads(text) if text.startswith(("{", "[")) else text

    def devices(self) -> list[dict[str, Any]]:
        """Return the groups of devices that Nomad has, in the order of their names."""
        (node,) = self.api("/v1/nodes?resources=true")
        return sorted(node["NodeResources"]["Devices"] or [], key=lambda group: str(group["Name"]))

    def uuids(self) -> set[str]:
        return {instance["ID"] for group in self.devices() for instance in group["Instances"]}

    def statistics(self) -> dict[str, datetime.datetime]:
        """Return by UUID when statistics were taken."""
        return {
            uuid: datetime.datetime.fromisoformat(f"{told['Timestamp'][:19]}+00:00")
            for group in self.api("/v1/client/stats")["DeviceStats"] or []
            for uuid, told in group["InstanceStats"].items()
        }

    def log(self) -> str:
        return (self.root / "log").read_text(errors="replace")


def wait_for(machine: Machine, what: str, found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not found():
        if time.monotonic() > deadline or (machine.process and machine.process.poll() is not None):
            raise AssertionError(f"not so: {what}\n{machine.log()[-3000:]}")
        time.sleep(0.1)


def later() -> None:
    """Let several periods pass."""
    time.sleep(10 * PERIOD_S)


@pytest.fixture(scope="module")
def double() -> Path:
    """Return the GPU double; what takes minutes to build is not built for a unit test."""
    made = cache.cache_dir() / "mirror-nomad" / cache.key_of(build.NOMADS[-1].inputs())
    if not made.is_dir():
        pytest.skip("Nomad is not built: python -m tests.simulator.farm build")
    return build.gpu_double()


@pytest.fixture
def machine(double: Path, tmp_path: Path) -> Iterator[Machine]:
    """Return a node with two A100, seven MIG devices on each, whose agent is not started yet."""
    for folder in ("bin", "dev/nvidia-caps", "etc/gpufarm-simulator", "plugins", "run", "tmp"):
        (tmp_path / folder).mkdir(parents=True)
    made = Machine(tmp_path, build.nomad() / "nomad")
    shutil.copy(build.GPU / "profiles/a100-mig-x2.yml", made.profile)
    made.smi.symlink_to(double / "nvidia-smi")
    (tmp_path / "plugins/nomad-device-nvidia").symlink_to(build.nvidia_plugin_mig())
    for device in ("nvidiactl", "nvidia0", "nvidia1"):
        (tmp_path / "dev" / device).touch()
    for gpu in range(2):
        for instance in range(7, 14):
            first = 3 + gpu * 135 + instance * 9
            (tmp_path / f"dev/nvidia-caps/nvidia-cap{first}").touch()
            (tmp_path / f"dev/nvidia-caps/nvidia-cap{first + 1}").touch()
    try:
        yield made
    finally:
        made.stop()


def test_nomad_has_what_the_plugin_itself_told(machine: Machine, double: Path) -> None:
    (recorded,) = json.loads(RECORDED.read_text("utf-8"))
    told = recorded["NodeResources"]["Devices"]
    assert [len(group["Instances"]) for group in told] == [14]
    machine.start(double, [])
    wait_for(machine, "the devices are there", lambda: machine.devices() != [])
    assert machine.devices() == told
    # As the plugin itself: the agent tells of none.
    later()
    assert machine.statistics() == {}

    machine.api("/v1/jobs", {"Job": JOB})
    wait_for(machine, "the job has ended", lambda: any(
        each["ClientStatus"] == "complete" for each in machine.api("/v1/job/reserve/allocations") or []))  # fmt: skip
    (allocation,) = machine.api("/v1/job/reserve/allocations")
    (given,) = machine.api(f"/v1/allocation/{allocation['ID']}")["AllocatedResources"]["Tasks"]["reserve"]["Devices"]
    assert len(given["DeviceIDs"]) == 2
    path = f"/v1/client/fs/cat/{allocation['ID']}?path=alloc/logs/reserve.stdout.0"
    assert machine.api(path) == ",".join(given["DeviceIDs"])


def test_what_changes_is_told_and_one_lost_gpu_ends_it(machine: Machine, double: Path) -> None:
    machine.change(lambda profile: faults.set_mig(profile, 1, None))
    parts = [each["uuid"] for each in faults.load(machine.profile.read_text())["gpus"][0]["mig_devices"]]
    machine.start(double, parts[:2])
    wait_for(machine, "a GPU and five parts of the other", lambda: machine.uuids() == {GPUS[1], *parts[2:]})
    whole, divided = machine.devices()
    assert (whole["Name"], divided["Name"]) == (MODEL, f"{MODEL} MIG 1g.10gb")
    differ = {key for key in whole["Attributes"] if whole["Attributes"][key] != divided["Attributes"][key]}
    assert whole["Attributes"].keys() == divided["Attributes"].keys()
    assert (differ, whole["Attributes"]["memory"]["Int"]) == ({"memory"}, 81920)

    # The GPU that is whole has statistics, and its parts none. Their time goes on.
    wait_for(machine, "statistics of the whole GPU", lambda: machine.statistics().keys() == {GPUS[1]})
    before = machine.statistics()[GPUS[1]]
    wait_for(machine, "newer ones", lambda: machine.statistics()[GPUS[1]] > before)

    machine.change(lambda profile: faults.set_mig(profile, 0, None))
    wait_for(machine, "two whole GPUs", lambda: machine.uuids() == set(GPUS))
    # In MIG mode and not divided yet: no device.
    machine.change(lambda profile: faults.set_mig(profile, 0, []))
    wait_for(machine, "one whole GPU", lambda: machine.uuids() == {GPUS[1]})

    machine.change(lambda profile: faults.lose_gpu(profile, 1))
    wait_for(machine, "no devices", lambda: machine.uuids() == set())
    machine.change(lambda profile: faults.recover_gpu(profile, 1))
    later()
    assert machine.uuids() == set()
    assert "Unable to determine the device handle" in machine.log()


@pytest.mark.parametrize("cause", ["no nvidia-smi", "no driver", "a GPU less"])
def test_what_is_not_there_at_the_start_is_not_seen_later(machine: Machine, double: Path, cause: str) -> None:
    hidden = machine.root / "hidden"
    if cause == "no nvidia-smi":
        machine.smi.rename(hidden)
    elif cause == "no driver":
        machine.change(faults.unload_driver)
    else:
        (machine.root / "dev/nvidia1").rename(hidden)
    machine.start(double, [])
    if cause == "a GPU less":
        wait_for(machine, "seven devices", lambda: len(machine.uuids()) == 7)
        hidden.rename(machine.root / "dev/nvidia1")
    else:
        wait_for(machine, "it is told", lambda: "fingerprinting returned an error" in machine.log())
        assert "nvidia-smi does not answer at the start" in machine.log()
        if hidden.is_symlink():
            hidden.rename(machine.smi)
        machine.change(faults.restore_driver)
    listed = subprocess.run(
        [double / "nvidia-smi", "-L"],
        env={"GPUFARM_SIM_ROOT": str(machine.root), "LD_LIBRARY_PATH": str(double)},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert listed.count("UUID: MIG-") == 14
    later()
    assert len(machine.uuids()) == (7 if cause == "a GPU less" else 0)
