"""The WSL distribution of the farm: found by the inventory plugin, held, ended with consent only, mended, or refused.

Windows is doubled and speaks German; the distribution is a container, Nomad and the container toolkit in it are real.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.simulator import farm
from tests.simulator.cache import ROOT
from tests.simulator.docker import docker
from tests.simulator.farm import jobs
from tests.simulator.windows import life, modules
from tests.simulator.windows.host import Windows
from tests.testinfra import playbooks
from tests.testinfra.helpers import boot_id, wait_for
from tests.testinfra.playbooks import words

FARM = os.environ["GPUFARM_FARM"]
WSL = f"{FARM}-wsl"
CONF = "/etc/wsl.conf"
PLAY = ROOT / "examples/playbooks/wsl.yml"
# Windows, and then the node.
WHOLE = ROOT / "playbooks/wsl.yml"
TEN_TIMEOUTS_S = 10 * 15
# What the example says of it.
AUTOMOUNT = "options=metadata,umask=022"
MINE = "# mine\n[boot]\nsystemd=true # as it came\n"
STORE = "/usr/lib/wsl/drivers/nv_dispi.inf_amd64_"
SLEEPER = """
job "sleeper" {
  datacenters = ["*"]
  constraint {
    attribute = "${node.unique.name}"
    value     = "wsl"
  }
  group "one" {
    task "sleep" {
      driver = "raw_exec"
      config {
        command = "sleep"
        args    = ["86400"]
      }
      resources {
        cpu    = 50
        memory = 64
      }
    }
  }
}
"""


def sh(script: str) -> str:
    return docker("exec", WSL, "/bin/sh", "-c", script)


def play(playbook: Path = PLAY, *options: str, before: Path | None = None, **extra: Any) -> playbooks.Run:
    """Run the role as its example does, with other variables where a test has them.

    Collections in ``before`` stand before those that are installed.
    """
    environment = playbooks.environment(FARM)
    if before:
        environment["ANSIBLE_COLLECTIONS_PATH"] = f"{before}:{environment['ANSIBLE_COLLECTIONS_PATH']}"
    result = subprocess.run(
        [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(farm.INVENTORY), str(playbook), *options,
         "--extra-vars", json.dumps(extra)],
        cwd=ROOT, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    counts = re.findall(r"^(\S+) +: ok=.* changed=([0-9]+)", result.stdout, re.MULTILINE)
    return playbooks.Run(result.returncode, result.stdout + result.stderr, {host: int(count) for host, count in counts})


def terminations() -> int:
    return sum("--terminate" in line for _program, line in farm.windows(FARM).calls())


def node() -> dict[str, Any]:
    (listed,) = [each for each in jobs.api(FARM, "/v1/nodes") if each["Name"] == "wsl"]
    found: dict[str, Any] = listed
    return found


def works_again() -> bool:
    found = node()
    return (found["Status"], found["SchedulingEligibility"]) == ("ready", "eligible")


def answers() -> bool:
    """Tell whether the server reaches the node, which it has for ready until heartbeats are missing."""
    try:
        jobs.api(FARM, f"/v1/client/stats?node_id={node()['ID']}")
    except jobs.JobError:
        return False
    return True


def wsl_exe(*arguments: str) -> None:
    exe = str(farm.windows(FARM).mounted(r"C:\Windows\System32\wsl.exe"))
    subprocess.run([exe, *arguments], check=True, capture_output=True)


@pytest.fixture
def windows() -> Iterator[Windows]:
    """The farm's Windows machine, which has afterwards what it had before."""
    machine = farm.windows(FARM)
    before, profile = machine.machine, machine.mounted(r"C:\Users\alice")
    profile.mkdir(parents=True)
    yield machine
    shutil.rmtree(profile)
    wsl_exe("-d", "wsl", "--exec", "/bin/true")
    Windows.create(machine.folder, before)
    wait_for("the node works again", lambda: works_again() and answers())


@pytest.fixture(scope="module", autouse=True)
def german() -> Iterator[None]:
    """All before and after these tests is English."""
    with farm.windows(FARM).changed() as machine:
        machine.language = "de"
    yield
    with farm.windows(FARM).changed() as machine:
        machine.language = "en"


@pytest.fixture
def as_it_came() -> Iterator[None]:
    """A file with somebody's own words, by which the distribution runs."""
    docker("exec", WSL, "/bin/sh", "-c", f'rm -f /run/gpufarm/*.wsl-conf {CONF}.*~; printf "$1" >{CONF}', "sh", MINE)
    yield
    sh(f"rm -f /run/gpufarm/*.wsl-conf {CONF}.*~")


@pytest.fixture
def sleeper() -> Iterator[None]:
    docker("exec", "-i", f"{FARM}-server", "nomad", "job", "run", "-detach", "-", stdin=SLEEPER.encode())

    def runs() -> bool:
        return any(each["ClientStatus"] == "running" for each in jobs.api(FARM, "/v1/job/sleeper/allocations"))

    wait_for("the sleeper runs", runs)
    yield
    jobs.nomad(FARM, "job", "stop", "-purge", "sleeper")
    wait_for("the sleeper has gone", lambda: not runs())


def test_inventory_finds_the_distribution_and_how_it_is_reached() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("ansible-inventory")), "-i", str(farm.INVENTORY), "--host", "wsl"],
        cwd=ROOT, env=playbooks.environment(FARM), capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout, object_hook=lambda each: each.get("__ansible_unsafe", each))
    assert (found["ansible_connection"], found["wsl_host"], found["wsl_systemd"]) == (
        "gpufarm.core.wsl",
        "windows",
        True,
    )
    assert [gpu["name"] for gpu in found["wsl_gpus"]] == ["NVIDIA GeForce RTX 4090"]
    # site.yml has come this way and no other.
    assert any(line.startswith("-d wsl --exec") for _program, line in farm.windows(FARM).calls())


def test_idle_distribution_takes_its_node_down_unless_the_role_holds_it(windows: Windows, tmp_path: Path) -> None:
    """The clock of Windows stands still unless a test lets time pass, so no other test sees a distribution end."""
    life.wait(windows, 16)
    wait_for("Nomad misses the node", lambda: node()["Status"] == "down")
    wsl_exe("-d", "wsl", "--exec", "/bin/true")
    wait_for("the node works again", lambda: works_again() and answers())

    # A machine that is asked by interop gets no modules for Windows, and these connect to none.
    doubled = {"ansible_connection": "ssh", "windows_double": str(windows.folder)}
    (tmp_path / "hosts.yml").write_text(json.dumps({"wsl_hosts": {"hosts": {"windows": doubled}}}), encoding="utf-8")
    run = play(
        WHOLE, "-i", str(tmp_path / "hosts.yml"), "--limit", "windows,server,wsl",
        before=modules.install(tmp_path / "collections"), wsl_shutdown=True, wsl_driver_version_min="",
    )  # fmt: skip
    assert run.code == 0, run.output

    for booted in (False, True):
        if booted:
            life.boot(windows)
        boot = boot_id(WSL)
        life.wait(windows, TEN_TIMEOUTS_S)
        assert windows.machine.distributions[0].state == "Running"
        assert boot_id(WSL) == boot
        wait_for("the node works", lambda: works_again() and answers())


def test_node_advertises_the_chosen_address_of_its_windows_machine(tmp_path: Path) -> None:
    """Nothing leads from there to the container, so that all that the server does with the node goes without it."""
    addresses = [
        {"address": "192.0.2.31", "prefix": 24, "interface": "Ethernet", "default_route": True},
        {"address": "198.51.100.7", "prefix": 24, "interface": "Lab", "default_route": False},
    ]
    (tmp_path / "hosts.yml").write_text(
        json.dumps({"wsl_hosts": {"hosts": {"windows": {"wsl_addresses": addresses}}}}), encoding="utf-8"
    )

    def site(**extra: Any) -> tuple[int, str]:
        hosts = ("-i", str(tmp_path / "hosts.yml")) if extra else ()
        return playbooks.run_playbook(FARM, "site.yml", *hosts, "--limit", "wsl", "--tags", "nomad", **extra)

    code, output = site(wsl_address="Wi-Fi")
    assert code != 0
    assert (
        "wsl: the IPv4 addresses of its Windows machine are 192.0.2.31/24 (Ethernet), 198.51.100.7/24 (Lab). "
        "Expected: one of an interface named Wi-Fi"
    ) in words(output)
    assert re.search(r"^wsl +: .* changed=0 ", output, re.MULTILINE)

    before = node()["Address"]
    try:
        code, output = site(wsl_address="lab")
        assert code == 0, output
        wait_for("the node works again", lambda: works_again() and answers())
        agent = jobs.api(FARM, f"/v1/node/{node()['ID']}")
        assert agent["HTTPAddr"] == "198.51.100.7:4646"
        config = sh("cat /etc/nomad.d/nomad.hcl")
        assert re.findall(r'^  (http|rpc|serf) +=.*"198\.51\.100\.7"$', config, re.MULTILINE) == ["http", "rpc", "serf"]
        # A client listens on no other port of Nomad's than that which wsl_ports have to lead to.
        assert set(re.findall(r":(464[678]) ", sh("ss --listening --numeric --tcp"))) == {"4646"}
    finally:
        code, output = site()
    assert code == 0, output
    wait_for("the node is where it was", lambda: node()["Address"] == before and works_again())


@pytest.mark.usefixtures("as_it_came")
def test_change_is_told_without_consent_and_made_with_it() -> None:
    boot, ended = boot_id(WSL), terminations()
    for changed in (1, 0):
        run = play(wsl_terminate=False)
        assert (run.code, run.changed["wsl"]) == (0, changed), run.output
        assert "wsl: /etc/wsl.conf has changed since wsl started" in words(run.output)
        assert "Next step: set `wsl_terminate: true`" in words(run.output)
    assert sh(f"cat {CONF}") == f"{MINE}\n[automount]\n{AUTOMOUNT}\n"
    assert sh(f"cat {CONF}.*~") == MINE
    assert (boot_id(WSL), terminations()) == (boot, ended)

    run = play()
    assert run.code == 0, run.output
    assert terminations() == ended + 1
    assert boot_id(WSL) != boot
    assert sh("systemctl is-system-running").strip() == "running"
    wait_for("the node works again", works_again)

    run = play()
    assert (run.code, run.changed["wsl"]) == (0, 0), run.output
    assert terminations() == ended + 1


@pytest.mark.usefixtures("as_it_came", "sleeper")
def test_distribution_is_not_ended_under_a_job() -> None:
    boot, ended = boot_id(WSL), terminations()
    run = play()
    assert run.code != 0
    assert "sleeper" in run.output
    assert "node_maintenance_policy" in run.output
    assert (boot_id(WSL), terminations()) == (boot, ended)


@pytest.mark.usefixtures("as_it_came")
def test_distribution_without_systemd_is_refused_before_anything_changes_and_mended_with_consent() -> None:
    docker("exec", WSL, "/bin/sh", "-c", f"echo '[boot]' >{CONF}")
    wsl_exe("--terminate", "wsl")
    code, output = playbooks.run_playbook(FARM, "site.yml", "--limit", "server,wsl")
    assert code != 0
    assert "wsl: systemd does not run here" in words(output), output
    assert "Next step: set `wsl_terminate: true` for this host" in words(output)
    assert re.search(r"^wsl +: .* changed=0 ", output, re.MULTILINE)
    assert sh(f"cat {CONF}") == "[boot]\n"

    code, output = playbooks.run_playbook(FARM, "site.yml", "--limit", "server,wsl", wsl_terminate=True)
    assert code == 0, output
    assert sh("cat /proc/1/comm").strip() == "systemd"
    wait_for("the node works again", works_again)


def test_linux_driver_beside_that_of_windows_is_refused_by_name() -> None:
    library = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
    sh(
        f"mkdir -p /root/deb/DEBIAN /root/deb{library.rpartition('/')[0]} && touch /root/deb{library} && printf"
        " 'Package: libnvidia-ml1\\nVersion: 1\\nArchitecture: amd64\\nMaintainer: n\\nDescription: d\\n'"
        " >/root/deb/DEBIAN/control && dpkg-deb --build /root/deb /root/x.deb && dpkg --install /root/x.deb"
    )
    try:
        run = play()
    finally:
        sh("dpkg --purge libnvidia-ml1; ldconfig")
    assert run.code != 0
    assert "wsl: a Linux driver is in the way: libnvidia-ml1. Expected: none" in words(run.output)
    sh(f"touch {library}.1")
    try:
        run = play()
    finally:
        sh(f"rm {library}.1; ldconfig")
    assert run.code != 0
    assert f"in the way: {library}.1. Expected: none" in words(run.output)


def update(old: str, new: str) -> None:
    """Have Windows' driver in another folder of its store; the double's profile goes there, too."""
    profile, double = "/etc/gpufarm-simulator/gpu.yml", "/usr/share/gpufarm-simulator"
    sh(f"sed -i 's|{old}|{new}|' {profile} && rm /run/gpufarm-simulator/linked")
    sh(f"sh {double}/install-driver.sh {double} {profile}")


def test_specification_is_made_again_after_a_driver_update_of_windows() -> None:
    """Windows keeps the folder of the old driver in its store, and Linux runs on."""
    assert play().code == 0
    before = sh("cat /run/cdi/nvidia.yaml")
    (old,) = set(re.findall(STORE + r"\w+", before))
    update(old, f"{STORE}updated")
    try:
        for changed in (1, 0):
            run = play()
            assert (run.code, run.changed["wsl"]) == (0, changed), run.output
            assert set(re.findall(STORE + r"\w+", sh("cat /run/cdi/nvidia.yaml"))) == {f"{STORE}updated"}
        jobs.load_image(FARM, "wsl")
        assert jobs.run_gpu_docker(FARM, node="wsl", count=1).node == "wsl"
        # One that nobody makes again stays wrong.
        sh("mkdir -p /etc/cdi")
        docker("exec", "-i", WSL, "/bin/sh", "-c", "cat >/etc/cdi/mine.yaml", stdin=before.encode())
        run = play()
        assert run.code != 0
        assert "the CDI specification in /etc/cdi/mine.yaml names another driver store" in words(run.output)
    finally:
        sh("rm -f /etc/cdi/mine.yaml")
        update(f"{STORE}updated", old)
        assert play().code == 0
