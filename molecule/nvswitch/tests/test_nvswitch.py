from __future__ import annotations

import re

from testinfra.host import Host

from tests.simulator.docker import docker
from tests.simulator.gpu import faults
from tests.testinfra.helpers import boot_id, daemon_reloads, reboot, wait_for
from tests.testinfra.playbooks import changed_tasks, enter, run_in_scenario, words

CONVERGE = "molecule/nvswitch/converge.yml"
NODE = "nvswitch-h100"
READY = ["Completed, Success"] * 8
GPUS = "GPU 0, 1, 2, 3, 4, 5, 6, 7"
CUDA = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"


def asked(command: str) -> str:
    return docker("exec", NODE, "sh", "-c", f"{command} || true").strip()


def cuda() -> int:
    return int(asked(f'python3 -c "{CUDA}"'))


def fabric() -> list[str]:
    return asked("nvidia-smi --query-gpu=fabric.state,fabric.status --format=csv,noheader").splitlines()


def installed() -> dict[str, str]:
    """Return the versions of the driver and of every Fabric Manager that is there."""
    lines = asked(
        "dpkg-query --show --showformat '${db:Status-Status} ${Package} ${Version}\\n' "
        "nvidia-driver-cuda 'nvidia-fabricmanager*'"
    ).splitlines()
    return {name: version for state, name, version in (line.split(" ") for line in lines) if state == "installed"}


def test_every_gpu_has_joined_and_computes(host: Host) -> None:
    assert installed() == {"nvidia-driver-cuda": "580.159.04-1", "nvidia-fabricmanager": "580.159.04-1"}
    assert fabric() == READY
    assert cuda() == 0
    unit = host.service("nvidia-fabricmanager")
    assert (unit.is_running, unit.is_enabled) == (True, True)


def test_nothing_is_left_to_do() -> None:
    before = daemon_reloads(NODE)
    check = run_in_scenario(CONVERGE, "--check")
    assert (check.code, set(check.changed.values())) == (0, {0}), check.output
    # Open kernel modules need none that is loaded for network cards.
    run = run_in_scenario(CONVERGE, "-e", "nvidia_driver_gpudirect_rdma=true")
    assert (run.code, set(run.changed.values())) == (0, {0}), run.output
    assert "by dma-buf, so nothing is loaded for GPUDirect RDMA" in words(run.output)
    assert daemon_reloads(NODE) == before


def test_a_boot_brings_it_back() -> None:
    reboot(NODE)
    wait_for("GPUs that have joined", lambda: fabric() == READY)
    assert cuda() == 0


def test_another_version_is_named_and_mended_without_the_driver() -> None:
    asked("apt-get install -y --allow-downgrades nvidia-fabricmanager=580.95.05-1")
    asked("systemctl restart nvidia-fabricmanager")
    assert cuda() == 802
    boot = boot_id(NODE)
    named = enter("nvidia_driver/verify", nvidia_driver_branch="580")
    assert named.code != 0
    told = words(named.output)
    for part in (
        f"{NODE}: Fabric Manager 580.95.05 is installed and its unit is failed; {GPUS} has fabric state In Progress "
        "with status unknown, and CUDA ends there with error 802 (system not yet initialized); it said",
        "interface version 580.95.05 don't match with driver version 580.159.04.",
        "Expected: Fabric Manager 580.159.04, the driver's own version, active,",
        "Next step: run gpufarm.core.nvidia_driver on this host.",
    ):
        assert part in told, told
    check = run_in_scenario(CONVERGE, "--check")
    assert (check.code, changed_tasks(check.output)) == (0, ["Have the driver"]), check.output
    assert installed()["nvidia-fabricmanager"] == "580.95.05-1"

    run = run_in_scenario(CONVERGE)
    assert run.code == 0, run.output
    assert changed_tasks(run.output) == ["Have the driver", "Have Fabric Manager running"]
    # What is exchanged may be in use.
    assert run.output.index("Have no work on this node") < run.output.index("Have the driver]")
    assert installed() == {"nvidia-driver-cuda": "580.159.04-1", "nvidia-fabricmanager": "580.159.04-1"}
    assert (fabric(), cuda(), boot_id(NODE)) == (READY, 0, boot)


def test_one_that_does_not_run_is_named_and_started() -> None:
    asked("systemctl disable --now nvidia-fabricmanager")
    named = enter("nvidia_driver/verify", nvidia_driver_branch="580")
    told = words(named.output)
    assert re.search(rf"Fabric Manager 580\.159\.04 is installed and its unit is inactive; {GPUS} has", told), told
    assert "Next step: run gpufarm.core.nvidia_driver on this host" in told
    run = run_in_scenario(CONVERGE)
    assert (run.code, changed_tasks(run.output)) == (0, ["Have Fabric Manager running"]), run.output
    assert cuda() == 0
    assert enter("nvidia_driver/verify", nvidia_driver_branch="580").code == 0


def test_a_gpu_that_does_not_join_is_named() -> None:
    faults.apply_to_container(NODE, lambda profile: faults.set_value(profile, 3, "fabric.state", "In Progress"))
    told = words(enter("nvidia_driver/verify", nvidia_driver_branch="580").output)
    faults.apply_to_container(NODE, lambda profile: faults.set_value(profile, 3, "fabric.state", "Completed"))
    assert re.search(r"its unit is active; GPU 3 has fabric state In Progress with status Success,", told), told
    assert "Next step: read `journalctl -u nvidia-fabricmanager` on this host" in told


def test_another_branch_takes_it_along_and_back() -> None:
    # As on a machine whose driver has never had it.
    asked("systemctl disable nvidia-fabricmanager")
    run = run_in_scenario(CONVERGE, "-e", "nvidia_driver_branch=570", "-e", "nvidia_driver_reboot=false")
    assert run.code != 0
    assert "Next step: reboot this host" in words(run.output)
    assert installed() == {"nvidia-driver-cuda": "570.195.03-1", "nvidia-fabricmanager-570": "570.195.03-1"}
    # Whoever restarts the machine needs no Ansible for it.
    reboot(NODE)
    wait_for("GPUs that have joined", lambda: fabric() == READY)
    named = enter("nvidia_driver/verify", nvidia_driver_branch="570")
    assert named.code == 0, named.output
    run = run_in_scenario(CONVERGE)
    assert run.code == 0, run.output
    assert installed() == {"nvidia-driver-cuda": "580.159.04-1", "nvidia-fabricmanager": "580.159.04-1"}
    assert (fabric(), cuda()) == (READY, 0)


def test_removal_takes_it_along() -> None:
    run = enter("nvidia_driver/absent", nvidia_driver_branch="580")
    assert run.code == 0, run.output
    assert installed() == {}
    assert asked("ls /run/nvidia-fabricmanager; systemctl list-units --all --plain --no-legend 'nvidia-fabric*'") == ""
    again = enter("nvidia_driver/absent", nvidia_driver_branch="580")
    assert (again.code, set(again.changed.values())) == (0, {0}), again.output
