"""A second distribution, by SSH to its Windows machine: a node from nothing over connections that are cut.

Beside it in the inventory is the farm's own, by the local connection. Windows is doubled and speaks German; sshd,
community.general.wsl and all in the distributions are real.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.simulator import community_general, farm
from tests.simulator.cache import ROOT
from tests.simulator.docker import docker
from tests.simulator.farm import jobs
from tests.simulator.gpu import faults
from tests.simulator.windows import PACKAGES
from tests.simulator.windows.host import POWERSHELL, SYSTEM32, Distribution, Machine, Windows
from tests.simulator.windows.sshd import Sshd
from tests.testinfra import playbooks
from tests.testinfra.helpers import boot_id, wait_for

FARM = os.environ["GPUFARM_FARM"]
SECOND = f"{FARM}-second"


@pytest.fixture(scope="module")
def pc2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Windows]:
    """A Windows machine with a card of its own, and a distribution as it was installed."""
    (wsl,) = [each for each in farm.inventory_nodes(FARM, {}) if each.is_wsl]
    image = docker("inspect", "--format", "{{.Config.Image}}", wsl.container).strip()
    farm.start_node(FARM, dataclasses.replace(wsl, container=SECOND, hostname="second"), image)
    try:
        farm.wait_for_systemd(SECOND)
        own = {"uuid": "GPU-5d0b7b8e-3c1f-9a42-86d7-1f2e0c9b4a63"}
        faults.apply_to_container(SECOND, lambda profile: faults.find_gpu(profile, 0).update(own))
        distribution = Distribution("second", container=SECOND, default=True)
        yield Windows.create(tmp_path_factory.mktemp("pc2"), Machine("pc2", [distribution], language="de"))
    finally:
        docker("rm", "--force", "--volumes", SECOND)
        for each in nodes("second"):
            jobs.nomad(FARM, "operator", "api", "-X", "POST", f"/v1/node/{each['ID']}/purge")


@pytest.fixture(scope="module")
def inventory(pc2: Windows, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The farm's inventory, whose Windows is the machine that Ansible runs on, and another machine by SSH."""
    folder = tmp_path_factory.mktemp("both-ways") / "inventory"
    shutil.copytree(farm.INVENTORY, folder)
    (source,) = folder.glob("*.wsl.yml")
    config = yaml.safe_load(source.read_text(encoding="utf-8"))
    with Sshd(pc2, ["alice"]) as sshd:
        client = sshd.folder / "client"
        client.write_text(sshd.client_configuration("pc2"), encoding="utf-8")
        config["windows_hosts"].append(
            {"name": "pc2", "connection": "ssh", "user": "alice", "ssh_arguments": ["-F", str(client)]}
        )
        source.write_text(yaml.safe_dump(config), encoding="utf-8")
        yield folder


def play(inventory: Path, playbook: str, *options: str, collections: Path | None = None) -> playbooks.Run:
    environment = playbooks.environment(FARM) | {"PYTHONPATH": str(PACKAGES)}
    if collections:
        environment["ANSIBLE_COLLECTIONS_PATH"] += f":{collections}"
    result = subprocess.run(
        [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(inventory), playbook, *options],
        cwd=ROOT, env=environment,
        capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    counts = re.findall(r"^(\S+) +: ok=.* changed=([0-9]+)", result.stdout, re.MULTILINE)
    return playbooks.Run(result.returncode, result.stdout + result.stderr, {host: int(count) for host, count in counts})


def site(inventory: Path, *hosts: str, collections: Path | None = None) -> playbooks.Run:
    return play(inventory, "playbooks/site.yml", "--limit", ",".join(hosts), collections=collections)


def role(inventory: Path) -> playbooks.Run:
    """Run the role as its example does, by a connection that knows PowerShell."""
    return play(inventory, "examples/playbooks/wsl.yml", "--limit", "second", collections=community_general.newer())


def nodes(name: str) -> list[dict[str, Any]]:
    return [each for each in jobs.api(FARM, "/v1/nodes") if each["Name"] == name]


def works(name: str) -> bool:
    return [(each["Status"], each["SchedulingEligibility"]) for each in nodes(name)] == [("ready", "eligible")]


def programs(windows: Windows, begun: int = 0) -> set[str]:
    """Return what was started on a machine."""
    return {program for program, _line in windows.calls()[begun:]}


def test_distributions_become_nodes_locally_and_by_ssh_though_a_connection_is_cut(
    inventory: Path, pc2: Windows
) -> None:
    # While packages are installed; that goes on in the distribution.
    with pc2.changed() as machine:
        machine.cut = r"python[\d.]* \S+/AnsiballZ_apt\.py"
    run = site(inventory, "server", "second")
    assert pc2.machine.cut is None, run.output
    assert run.code != 0
    assert not nodes("second")

    begun = len(farm.windows(FARM).calls())
    run = site(inventory, "server", "wsl", "second")
    assert run.code == 0, run.output
    assert run.changed["second"] > 0
    wait_for("the nodes work", lambda: works("wsl") and works("second"))
    # Each this way and no other.
    assert programs(farm.windows(FARM), begun) == {SYSTEM32}
    assert programs(pc2) == {"ssh", "powershell.exe", SYSTEM32}

    # Nothing of Windows' user, whom it does not know.
    assert "alice" not in docker("exec", SECOND, "ls", "/")
    with pc2.changed() as machine:
        machine.default_shell = POWERSHELL
    # verify.yml is a part of it.
    run = site(inventory, "server", "wsl", "second", collections=community_general.newer())
    assert (run.code, run.changed) == (0, {"server": 0, "wsl": 0, "second": 0}), playbooks.changed_tasks(run.output)
    jobs.load_image(FARM, "second")
    assert jobs.run_gpu_docker(FARM, node="second", count=1).node == "second"


@pytest.fixture
def shell(pc2: Windows) -> Callable[[str | None], None]:
    """What SSH starts, and an /etc/wsl.conf of somebody's own words, by which the distribution runs."""

    def starts(shell: str | None) -> None:
        with pc2.changed() as machine:
            machine.default_shell = shell
        sh = r"rm -f /run/gpufarm/*.wsl-conf /etc/wsl.conf.*~; printf '[boot]\nsystemd=true\n' >/etc/wsl.conf"
        docker("exec", SECOND, "/bin/sh", "-c", sh)

    return starts


def test_distribution_ends_and_comes_back_though_the_connection_is_cut(
    inventory: Path, pc2: Windows, shell: Callable[[str | None], None]
) -> None:
    shell(None)
    boot = boot_id(SECOND)
    with pc2.changed() as machine:
        machine.cut = "--terminate second"
    run = role(inventory)
    assert pc2.machine.cut is None, run.output
    assert run.code != 0
    assert [each["SchedulingEligibility"] for each in nodes("second")] == ["ineligible"]

    run = role(inventory)
    assert run.code == 0, run.output
    assert boot_id(SECOND) != boot
    wait_for("the node works again", lambda: works("second"))

    shell(POWERSHELL)
    boot = boot_id(SECOND)
    run = role(inventory)
    assert run.code == 0, run.output
    assert boot_id(SECOND) != boot
    wait_for("the node works again", lambda: works("second"))
