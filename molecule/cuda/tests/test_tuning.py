"""What node_tuning sets on a machine whose kernel and devices are doubles (tests/simulator/tuning), and takes back."""

from __future__ import annotations

import json
import re

from tests.simulator.docker import docker
from tests.simulator.farm import wait_for_systemd
from tests.testinfra.playbooks import Run, enter, run_in_scenario, words

NODE = "cuda-linux"
OURS = "find / -xdev -name '*gpufarm-tuning*' -o -xdev -path '/var/lib/gpufarm/tuning*'"


def node(command: str) -> str:
    return docker("exec", NODE, "sh", "-c", command).strip()


def settings() -> dict[str, str]:
    """Return what the kernel, the devices and a daemon that runs have now."""
    limits = "sed -n 's/^Max \\(open files\\|locked memory\\) *\\([^ ]*\\) .*/\\2/p' /proc/$(pidof dbus-daemon)/limits"
    return {
        "governors": node("cat /sys/devices/system/cpu/cpufreq/policy*/scaling_governor | sort -u"),
        "acs": node("cat /sys/bus/pci/devices/*/acs | sort -u"),
        "numa_balancing": node("cat /proc/sys/kernel/numa_balancing"),
        "huge_pages": node("cat /proc/sys/vm/nr_hugepages"),
        "iommu": node("grep -o iommu=pt /proc/cmdline || true"),
        "limits": node(limits),
    }


def site(**extra: object) -> Run:
    """Run site.yml for the tuning alone; no server is asked for it."""
    # This node has no GPU.
    alone = {"nvidia_driver_without_gpu": "skip", "nomad_client_servers": ["192.0.2.10"]}
    known = json.dumps({"gpu_node_tuning": True, **alone, **extra})
    return run_in_scenario("playbooks/site.yml", "--limit", NODE, "--tags", "tuning", "--extra-vars", known)


WANTED = {
    "governors": "performance", "acs": "0000", "numa_balancing": "0", "huge_pages": "64", "iommu": "iommu=pt",
    "limits": "4096\n65536",
}  # fmt: skip


def test_settings_are_there_after_a_reboot() -> None:
    """The role has rebooted for those of the command line and of the daemon."""
    assert settings() == WANTED
    assert node("su -s /bin/sh -c 'ulimit -Hl; ulimit -Hn' nobody").splitlines() == ["64", "4096"]


def test_this_machine_has_what_it_had() -> None:
    """The node's doubles lie over the files that all containers share with this machine."""
    for path in ("/proc/sys/vm/nr_hugepages", "/sys/devices/system/cpu/cpufreq", "/sys/bus/pci/devices"):
        assert node(f"findmnt --noheadings --output FSTYPE {path}") == "tmpfs", path


def test_what_somebody_has_changed_is_told_and_set_again() -> None:
    node("echo schedutil >/sys/devices/system/cpu/cpufreq/policy1/scaling_governor")
    node("echo 001d >/sys/bus/pci/devices/0000:02:00.0/acs")
    run = enter("node_tuning/verify", limit=NODE)
    assert run.code != 0
    assert (
        f"{NODE}: the governors are performance, schedutil and not performance; ACS is on at 0000:02:00.0. Expected: "
    ) in words(run.output), run.output
    run = site()
    assert (run.code, run.changed) == (0, {NODE: 1}), run.output
    assert settings() == WANTED


def test_a_governor_that_the_cpus_lack_is_refused_before_anything_changes() -> None:
    run = site(node_tuning_governor="warp", node_tuning_huge_pages=8)
    assert run.code != 0 and run.changed == {NODE: 0}
    told = "its CPUs have the governors conservative, ondemand, powersave, performance, schedutil. Expected: warp among"
    assert f"{NODE}: {told}" in words(run.output)
    assert settings() == WANTED


def test_a_reboot_needs_consent() -> None:
    """As where a boot entry of somebody's is without the argument."""
    node("cp /proc/cmdline /root/cmdline && sed 's/ iommu=pt//' /root/cmdline >/run/gpufarm-tuning/cmdline")
    run = enter("node_tuning/main", limit=NODE, node_tuning_reboot=False)
    node("cat /root/cmdline >/run/gpufarm-tuning/cmdline")
    assert run.code != 0
    assert re.search(
        f"{NODE}: the kernel was started without iommu=pt. Expected: .* Next step: reboot this host, or set "
        "`node_tuning_reboot`", words(run.output),
    ), run.output  # fmt: skip


def test_zz_all_of_it_is_taken_back() -> None:
    assert node(OURS)
    run = enter("node_tuning/absent", limit=NODE)
    assert run.code == 0, run.output
    assert "until the next boot the kernel goes on with what it was started with" in words(run.output)
    assert node(OURS) == ""
    assert "iommu=pt" not in node("cat /boot/grub/grub.cfg")
    now = {"governors": "schedutil", "acs": "001d", "numa_balancing": "1", "huge_pages": "0"}
    assert settings() == {**WANTED, **now}
    run = enter("node_tuning/absent", limit=NODE)
    assert (run.code, run.changed) == (0, {NODE: 0}), run.output
    docker("restart", "--time=0", NODE)
    wait_for_systemd(NODE)
    back = settings()
    assert (back["iommu"], back["acs"]) == ("", "001d")
    assert back["limits"] != WANTED["limits"]
