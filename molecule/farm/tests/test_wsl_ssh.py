"""The same distribution by SSH to its Windows machine: a node from nothing over connections that are cut.

Windows is doubled and speaks German; sshd, community.general.wsl and all in the distribution are real.
"""

from __future__ import annotations

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
from tests.simulator.windows import PACKAGES
from tests.simulator.windows.sshd import Sshd
from tests.testinfra import playbooks
from tests.testinfra.helpers import boot_id, wait_for

FARM = os.environ["GPUFARM_FARM"]
WSL = f"{FARM}-wsl"


@pytest.fixture(scope="module")
def inventory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The farm's inventory, but for the file in which Windows is the machine that Ansible runs on."""
    windows = farm.windows(FARM)
    folder = tmp_path_factory.mktemp("by-ssh") / "inventory"
    shutil.copytree(farm.INVENTORY, folder)
    (source,) = folder.glob("*.wsl.yml")
    config = yaml.safe_load(source.read_text(encoding="utf-8"))
    shutil.rmtree(windows.folder / "ssh", ignore_errors=True)
    with windows.changed() as machine:
        machine.language = "de"
    with Sshd(windows, ["alice"]) as sshd:
        client = sshd.folder / "client"
        client.write_text(sshd.client_configuration("windows"), encoding="utf-8")
        config["windows_hosts"] = [
            {"name": "windows", "connection": "ssh", "user": "alice", "ssh_arguments": ["-F", str(client)]}
        ]
        source.write_text(yaml.safe_dump(config), encoding="utf-8")
        yield folder
    with windows.changed() as machine:
        machine.language = "en"


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


def site(inventory: Path) -> playbooks.Run:
    return play(inventory, "playbooks/site.yml", "--limit", "server,wsl")


def role(inventory: Path) -> playbooks.Run:
    """Run the role as its example does, by a connection that knows PowerShell."""
    return play(inventory, "examples/playbooks/wsl.yml", collections=community_general.newer())


def cut_at(expression: str | None) -> None:
    with farm.windows(FARM).changed() as machine:
        machine.cut = expression


def nodes() -> list[dict[str, Any]]:
    return [each for each in jobs.api(FARM, "/v1/nodes") if each["Name"] == "wsl"]


def works() -> bool:
    return [(each["Status"], each["SchedulingEligibility"]) for each in nodes()] == [("ready", "eligible")]


@pytest.fixture
def fresh() -> None:
    """A distribution as it was installed, that Nomad has never heard of."""
    (node,) = [each for each in farm.inventory_nodes(FARM, {}) if each.hostname == "wsl"]
    image = docker("inspect", "--format", "{{.Config.Image}}", WSL).strip()
    docker("rm", "--force", "--volumes", WSL)
    farm.start_node(FARM, node, image)
    farm.wait_for_systemd(WSL)
    for each in nodes():
        jobs.nomad(FARM, "operator", "api", "-X", "POST", f"/v1/node/{each['ID']}/purge")


@pytest.mark.usefixtures("fresh")
def test_distribution_becomes_a_node_though_the_connection_is_cut(inventory: Path) -> None:
    begun = len(farm.windows(FARM).calls())
    # While packages are installed; that goes on in the distribution.
    cut_at(r"python[\d.]* \S+/AnsiballZ_apt\.py")
    run = site(inventory)
    assert farm.windows(FARM).machine.cut is None, run.output
    assert run.code != 0
    assert not nodes()

    run = site(inventory)
    assert run.code == 0, run.output
    assert run.changed["wsl"] > 0
    wait_for("the node works", works)
    # This way and no other.
    assert {program for program, _line in farm.windows(FARM).calls()[begun:]} == {
        "ssh", "powershell.exe", r"C:\Windows\System32\wsl.exe",
    }  # fmt: skip

    # Nothing of Windows' user, whom it does not know.
    assert "alice" not in docker("exec", WSL, "ls", "/")
    # verify.yml is a part of it.
    run = site(inventory)
    assert (run.code, run.changed["wsl"]) == (0, 0), playbooks.changed_tasks(run.output)
    jobs.load_image(FARM, "wsl")
    assert jobs.run_gpu_docker(FARM, node="wsl", count=1).node == "wsl"


@pytest.fixture
def shell() -> Iterator[Callable[[str | None], None]]:
    """What SSH starts, and an /etc/wsl.conf of somebody's own words, by which the distribution runs."""

    def starts(shell: str | None) -> None:
        with farm.windows(FARM).changed() as machine:
            machine.default_shell = shell
        sh = r"rm -f /run/gpufarm/*.wsl-conf /etc/wsl.conf.*~; printf '[boot]\nsystemd=true\n' >/etc/wsl.conf"
        docker("exec", WSL, "/bin/sh", "-c", sh)

    yield starts
    starts(None)


def test_distribution_ends_and_comes_back_though_the_connection_is_cut(
    inventory: Path, shell: Callable[[str | None], None]
) -> None:
    shell(None)
    boot = boot_id(WSL)
    cut_at("--terminate wsl")
    run = role(inventory)
    assert farm.windows(FARM).machine.cut is None, run.output
    assert run.code != 0
    assert [each["SchedulingEligibility"] for each in nodes()] == ["ineligible"]

    run = role(inventory)
    assert run.code == 0, run.output
    assert boot_id(WSL) != boot
    wait_for("the node works again", works)

    shell(r"C:\Windows\System32\WindowsPowerShell\v1.0\powershell.exe")
    boot = boot_id(WSL)
    run = role(inventory)
    assert run.code == 0, run.output
    assert boot_id(WSL) != boot
    wait_for("the node works again", works)
