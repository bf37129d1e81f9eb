from __future__ import annotations

import os
import re

import pytest
from testinfra.host import Host

from tests.simulator import farm
from tests.simulator.docker import docker
from tests.simulator.gpu import faults
from tests.testinfra.helpers import boot_id, daemon_reloads, driver_parts_of_packages, gpu_uuids
from tests.testinfra.playbooks import changed_tasks, enter, run_in_scenario, words

CONVERGE = "molecule/nvidia_driver/converge.yml"
WANTED = {"driver-t4": ("570.", 4), "driver-h100": ("580.", 8), "driver-wsl": ("58", 1)}


def test_every_gpu_answers_with_the_branch_that_was_asked_for(host: Host) -> None:
    branch, count = WANTED[host.backend.get_hostname()]
    version = host.check_output(
        "PATH=$PATH:/usr/lib/wsl/lib nvidia-smi --query-gpu=driver_version --format=csv,noheader"
    ).splitlines()
    assert len(version) == count
    assert all(line.startswith(branch) for line in version)
    assert len(set(gpu_uuids(host))) == count


def test_wsl_keeps_windows_driver_and_others_have_that_of_packages(host: Host) -> None:
    if host.backend.get_hostname() != "driver-wsl":
        assert driver_parts_of_packages(host) != []
        return
    assert driver_parts_of_packages(host) == []
    packages = host.check_output("dpkg-query --show --showformat '${Package}\n'")
    assert not [name for name in packages.splitlines() if "nvidia" in name]
    assert not host.file("/etc/apt/sources.list.d/nvidia-cuda.sources").exists


def test_repository_key_is_a_readable_keyring(host: Host) -> None:
    if host.backend.get_hostname() == "driver-wsl":
        pytest.skip("no repository on WSL")
    key = host.file("/etc/apt/keyrings/nvidia-cuda.asc")
    assert key.mode == 0o644
    assert "BEGIN PGP PUBLIC KEY BLOCK" in key.content_string


def test_branch_stays_pinned(host: Host) -> None:
    name = host.backend.get_hostname()
    if name == "driver-wsl":
        pytest.skip("no package on WSL")
    policy = host.check_output("apt-cache policy nvidia-driver-cuda")
    candidate = next(line.split()[1] for line in policy.splitlines() if "Candidate:" in line)
    assert candidate.startswith(WANTED[name][0])


def test_every_package_is_of_that_branch(host: Host) -> None:
    name = host.backend.get_hostname()
    if name == "driver-wsl":
        pytest.skip("no package on WSL")
    shown = host.check_output(
        "dpkg-query --show --showformat '${Package} ${Version} ${db:Status-Status}\\n' '*nvidia*' 'libcuda1'"
    )
    rows = [line.split() for line in shown.splitlines()]
    installed = {row[0]: row[1] for row in rows if row[-1] == "installed" and len(row) == 3}
    assert {"libcuda1", "libnvidia-ml1", "nvidia-driver-cuda", "nvidia-kernel-open-dkms"} <= set(installed)
    assert {package: version for package, version in installed.items() if not version.startswith(WANTED[name][0])} == {}
    # And stays so: unattended-upgrades compares the beginning of a name, as Python does.
    left_alone = host.check_output("apt-config dump Unattended-Upgrade::Package-Blacklist")
    patterns = [text for text in re.findall('"(.*)"', left_alone) if text]
    assert [package for package in installed if not any(re.match(pattern, package) for pattern in patterns)] == []


def test_no_other_branch_is_pinned(host: Host) -> None:
    name = host.backend.get_hostname()
    if name == "driver-wsl":
        pytest.skip("no package on WSL")
    pins = host.check_output("ls /etc/apt/preferences.d").split()
    assert pins == [f"nvidia-driver-pinning-{WANTED[name][0].rstrip('.')}"]


def test_the_driver_stays_initialised(host: Host) -> None:
    if host.backend.get_hostname() == "driver-wsl":
        pytest.skip("Windows keeps it")
    modes = host.check_output("nvidia-smi --query-gpu=persistence_mode --format=csv,noheader").splitlines()
    assert set(modes) == {"Enabled"}
    assert host.service("nvidia-persistenced").is_enabled


def test_nothing_is_left_to_do() -> None:
    before = {node: daemon_reloads(node) for node in ("driver-t4", "driver-h100")}
    check = run_in_scenario(CONVERGE, "--check")
    assert (check.code, set(check.changed.values())) == (0, {0}), check.output
    # Verified in check mode too, as nothing is to come.
    assert check.output.count("TASK [gpufarm.core.nvidia_driver : Require a driver that answers]") >= 1
    run = run_in_scenario(CONVERGE)
    assert (run.code, set(run.changed.values())) == (0, {0}), run.output
    assert {node: daemon_reloads(node) for node in before} == before


def test_a_driver_that_others_look_after_is_upgraded_as_they_say() -> None:
    limited = (CONVERGE, "--limit", "driver-h100")
    run = run_in_scenario(*limited, "-e", "nvidia_driver_managed=false")
    assert changed_tasks(run.output) == ["Have upgrades as they were where others have the driver"], run.output
    assert docker("exec", "driver-h100", "apt-config", "dump", "Unattended-Upgrade::Package-Blacklist").strip() == ""
    run = run_in_scenario(*limited)
    assert changed_tasks(run.output) == ["Have unattended upgrades leave the driver alone"], run.output


def test_check_mode_announces_another_branch_and_its_reboot() -> None:
    boot = boot_id("driver-t4")
    run = run_in_scenario(CONVERGE, "--check", "--limit", "driver-t4", "-e", "nvidia_driver_branch=580")
    assert run.code == 0, run.output
    # The pin that is there hides the other branch's packages from apt until it goes.
    assert changed_tasks(run.output) == ["Have no other driver branch pinned", "Reboot into the installed driver"]
    assert boot_id("driver-t4") == boot
    assert "570." in docker("exec", "driver-t4", "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def packages() -> list[str]:
    """Return what apt has of the driver, what it keeps, and what it would bring."""
    script = """
        dpkg-query --show --showformat '${db:Status-Abbrev}${Package} ${Version}\\n' '*nvidia*' libcuda1
        sha256sum /etc/apt/preferences.d/*
        apt-get --simulate dist-upgrade | grep nvidia || true"""
    # Of names that others only mention nothing is there.
    told = docker("exec", "driver-t4", "sh", "-euc", script).splitlines()
    return [line for line in told if not re.match(".n ", line)]


def test_a_download_that_breaks_off_leaves_the_driver_as_it_was() -> None:
    docker("exec", "driver-t4", "apt-get", "clean")
    before = packages()
    faults_of_mirror = farm.faults_file(os.environ["GPUFARM_FARM"])
    faults_of_mirror.write_text('{"/cuda/repos/*/nvidia-driver-cuda_580*.deb": "truncate"}', encoding="utf-8")
    try:
        run = run_in_scenario(CONVERGE, "--limit", "driver-t4", "-e", "nvidia_driver_branch=580")
    finally:
        faults_of_mirror.unlink()
    assert run.code != 0
    told = words(run.output)
    assert re.search(
        r"driver-t4: the packages of driver 580 could not be installed \(.*nvidia-driver-cuda_580.*\); the driver that "
        r"is there stays, and is pinned as before\. Expected: nvidia-driver-cuda=580\.\*, .*\. Next step: ",
        told,
    ), told
    assert packages() == before
    again = run_in_scenario(CONVERGE, "--limit", "driver-t4")
    assert (again.code, set(again.changed.values())) == (0, {0}), again.output


def test_check_mode_sees_a_driver_that_does_not_answer() -> None:
    docker("exec", "driver-h100", "systemctl", "stop", "nvidia-persistenced")
    faults.apply_to_container("driver-h100", faults.unload_driver)
    unloaded = run_in_scenario(CONVERGE, "--check", "--limit", "driver-h100")
    # A container has no module for its machine's kernel, and modprobe says so.
    unbuilt = run_in_scenario(CONVERGE, "--limit", "driver-h100")
    faults.apply_to_container("driver-h100", faults.restore_driver)
    faults.apply_to_container("driver-h100", lambda profile: faults.mismatch_driver(profile, "580.1.1"))
    mismatched = run_in_scenario(CONVERGE, "--check", "--limit", "driver-h100", "-e", "nvidia_driver_reboot=false")
    faults.apply_to_container("driver-h100", faults.restore_driver)
    docker("exec", "driver-h100", "systemctl", "start", "nvidia-persistenced")
    assert unloaded.code == 0, unloaded.output
    assert changed_tasks(unloaded.output) == [
        "Load the kernel module of a driver that is new on this node",
        "Have the persistence daemon running",
    ]
    assert unbuilt.code != 0
    told = words(unbuilt.output)
    assert re.search(
        r'driver-h100: nvidia-smi says ".*" \(driver_not_loaded\); modprobe says ".* Module nvidia not', told
    )
    assert "Expected: a driver that lists at least one GPU. Next step: run `dkms status` and read the make.log" in told
    assert mismatched.code != 0
    assert "library_mismatch" in mismatched.output


def test_verification_tells_what_is_wrong() -> None:
    smi = "/usr/lib/wsl/lib/nvidia-smi"
    faults.apply_to_container("driver-h100", faults.block_driver)
    docker("exec", "driver-wsl", "mv", smi, "/root/")
    run = enter("nvidia_driver/verify", nvidia_driver_branch="580")
    docker("exec", "driver-wsl", "mv", "/root/nvidia-smi", smi)
    faults.apply_to_container("driver-h100", faults.restore_driver)
    assert run.code != 0
    told = words(run.output)
    no_answer = r"\. Expected: a driver that lists at least one GPU\. Next step:"
    for part in (
        r"driver-t4: driver 570\.[0-9.]+ runs\. Expected: branch 580\. Next step: run gpufarm\.core\.nvidia_driver",
        rf'driver-h100: nvidia-smi says ".*" \(access_blocked\){no_answer} run `nvidia-modprobe -c 0`',
        rf'driver-wsl: nvidia-smi says ".*" \(not_installed\){no_answer} install the NVIDIA driver in Windows',
    ):
        assert re.search(part, told), told
    branches = "{{ '570' if inventory_hostname == 'driver-t4' else '580' }}"
    run = enter("nvidia_driver/verify", nvidia_driver_branch=branches)
    assert run.code == 0, run.output
