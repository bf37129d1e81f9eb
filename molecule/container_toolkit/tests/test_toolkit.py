from __future__ import annotations

import json
import re

import pytest
from testinfra.host import Host

from tests.simulator.docker import docker
from tests.testinfra.helpers import daemon_reloads, gpu_uuids, reboot
from tests.testinfra.playbooks import changed_tasks, enter, run_in_scenario, words

CONVERGE = "molecule/container_toolkit/converge.yml"
SETTINGS = "/etc/docker/daemon.json"


def test_four_packages_have_one_version(host: Host) -> None:
    packages = ["nvidia-container-toolkit", "nvidia-container-toolkit-base", "libnvidia-container-tools",
                "libnvidia-container1"]  # fmt: skip
    wanted = "1.20.0" if host.backend.get_hostname() == "toolkit-t4" else "1.20.1"
    assert {host.package(name).version.split("-")[0] for name in packages} == {wanted}
    assert f"version {wanted}" in host.check_output("nvidia-ctk --version")
    upgrade = host.check_output("apt-get --simulate dist-upgrade")
    assert not re.search(r"^Inst \S*nvidia-container", upgrade, re.MULTILINE)


def test_docker_has_the_runtime_that_nomad_asks_for(host: Host) -> None:
    runtimes = json.loads(host.check_output("docker info --format '{{json .Runtimes}}'"))
    assert "nvidia" in runtimes
    assert json.loads(host.file(SETTINGS).content_string)["runtimes"]["nvidia"]


def test_settings_of_the_owner_stay(host: Host) -> None:
    file = host.file(SETTINGS)
    settings = json.loads(file.content_string)
    running = host.check_output("docker info --format '{{.DefaultRuntime}} {{.LoggingDriver}}'")
    if host.backend.get_hostname() == "toolkit-mig":
        assert (file.mode, settings["default-runtime"], running) == (0o640, "mine", "mine json-file")
        assert (settings["log-driver"], settings["log-opts"]) == ("json-file", {"max-size": "10m"})
        assert settings["runtimes"]["mine"] == {"path": "/usr/sbin/runc"}
    elif host.backend.get_hostname() == "toolkit-wsl":
        assert (file.linked_to, running.split()[0]) == ("/srv/docker.json", "runc")
        assert host.file("/srv/docker.json").mode == 0o600
        assert settings["proxies"] == {"no-proxy": "localhost", "http-proxy": "http://farm:correct-horse@127.0.0.1:9"}
    else:
        # It was the role that had made the NVIDIA runtime the default; Docker has taken it back without a restart.
        assert (file.mode, settings["default-runtime"], running.split()[0]) == (0o644, "runc", "runc")


def test_cdi_lists_every_gpu(host: Host) -> None:
    devices = host.check_output("nvidia-ctk cdi list 2>/dev/null").split()
    if host.backend.get_hostname() == "toolkit-wsl":
        assert devices == ["nvidia.com/gpu=all"]
        return
    if host.backend.get_hostname() == "toolkit-mig":
        migs = re.findall(r"UUID: (MIG-[^)]+)", host.check_output("nvidia-smi -L"))
        assert len(migs) == 14
        assert {f"nvidia.com/gpu={name}" for name in [*migs, "0:0", "1:6", "all"]} <= set(devices)
        assert not {f"nvidia.com/gpu={uuid}" for uuid in gpu_uuids(host)} & set(devices)
        return
    uuids = gpu_uuids(host)
    assert len(uuids) == 4
    assert {f"nvidia.com/gpu={name}" for name in [*uuids, "0", "3", "all"]} <= set(devices)


def test_container_sees_only_its_gpu(host: Host) -> None:
    if host.backend.get_hostname() != "toolkit-t4":
        pytest.skip("WSL cannot separate GPUs, and MIG devices have no /proc of their own here")
    # A root file system of the node's own files: the runtime, not an image, is under test.
    wanted = gpu_uuids(host)[2]
    image = host.check_output(
        "tar -C / -c bin lib lib64 usr/bin usr/lib/x86_64-linux-gnu etc/ld.so.conf etc/ld.so.conf.d usr/lib64 "
        "--exclude='*nvidia*' --exclude='*libcuda*' 2>/dev/null | docker import -"
    )
    seen = host.check_output(
        f"docker run --rm --network none --runtime nvidia -e NVIDIA_VISIBLE_DEVICES={wanted} {image} nvidia-smi -L"
    )
    assert wanted in seen
    assert len(seen.splitlines()) == 1


def test_docker_that_was_there_is_left_alone(host: Host) -> None:
    if host.backend.get_hostname() != "toolkit-t4":
        pytest.skip("the role brought Docker here")
    assert host.package("docker-ce").is_installed
    assert not host.package("docker.io").is_installed
    now = host.check_output("docker inspect --format '{{.Id}} {{.State.StartedAt}} {{.State.Running}}' before")
    assert now.endswith(" true")
    assert now == host.file("/root/container-before").content_string.strip()


def test_check_mode_has_nothing_to_tell_and_shows_no_password() -> None:
    run = run_in_scenario(CONVERGE, "--check", "--diff", "-vvv")
    assert run.code == 0, run.output
    assert run.changed == {"toolkit-t4": 0, "toolkit-mig": 0, "toolkit-wsl": 0}
    assert "Have the engines and the container toolkit" in run.output
    assert "correct-horse" not in run.output


def test_second_run_does_not_reload_systemd() -> None:
    before = daemon_reloads("toolkit-t4")
    assert before > 0
    run = run_in_scenario(CONVERGE, "--limit", "toolkit-t4")
    assert (run.code, run.changed) == (0, {"toolkit-t4": 0}), run.output
    assert daemon_reloads("toolkit-t4") == before


def test_check_mode_announces_what_a_run_then_does() -> None:
    stop = "systemctl stop docker.service docker.socket nvidia-cdi-refresh.path && rm /var/run/cdi/nvidia.yaml"
    docker("exec", "toolkit-mig", "sh", "-c", stop)
    state = (
        "exec",
        "toolkit-mig",
        "sh",
        "-c",
        "systemctl is-active docker nvidia-cdi-refresh.path; ls /var/run/cdi || true",
    )
    run = run_in_scenario(CONVERGE, "--check", "--limit", "toolkit-mig")
    assert run.code == 0, run.output
    announced = changed_tasks(run.output)
    assert announced == [
        "Have Docker running",
        "Ask the engines which runtimes they have read, and for the node's CDI devices",
        "Reload Docker",
        "Refresh the CDI specification that does not hold the node's GPUs",
        "Have the CDI specification refreshed with every boot and driver change",
    ]
    assert docker(*state).split() == ["inactive", "inactive"]
    run = run_in_scenario(CONVERGE, "--limit", "toolkit-mig")
    assert run.code == 0, run.output
    assert docker(*state).split() == ["active", "active", "nvidia.yaml"]


def test_cdi_specification_follows_the_driver() -> None:
    specification = (
        "exec",
        "toolkit-mig",
        "grep",
        "-o",
        "libnvidia-ml[.]so[.][0-9.]*[0-9]",
        "/var/run/cdi/nvidia.yaml",
    )
    assert set(docker(*specification).split()) >= {"libnvidia-ml.so.580.95.05"}
    docker("exec", "--env", "DEBIAN_FRONTEND=noninteractive", "toolkit-mig",
           "apt-get", "install", "-qy", "nvidia-driver-cuda", "nvidia-kernel-open-dkms")  # fmt: skip
    reboot("toolkit-mig")
    libraries = set(docker(*specification).split())
    assert "libnvidia-ml.so.580.159.04" in libraries
    assert "libnvidia-ml.so.580.95.05" not in libraries


def test_a_kernel_module_with_a_name_of_debians() -> None:
    """NVIDIA's unit takes it for none, and leaves itself out."""
    rename = "sed -i 's/nvidia[.]ko/nvidia-current-open.ko/' /lib/modules/*/modules.dep && rm /var/run/cdi/nvidia.yaml"
    docker("exec", "toolkit-mig", "sh", "-c", f"{rename} && systemctl restart nvidia-cdi-refresh.service")
    there = ("exec", "toolkit-mig", "sh", "-c", "ls /var/run/cdi")
    assert docker(*there).split() == []
    run = run_in_scenario(CONVERGE, "--limit", "toolkit-mig")
    assert run.code == 0, run.output
    assert docker(*there).split() == ["nvidia.yaml"]
    reboot("toolkit-mig")
    run = run_in_scenario(CONVERGE, "--limit", "toolkit-mig")
    assert (run.code, run.changed) == (0, {"toolkit-mig": 0}), run.output


def test_docker_that_does_not_start_is_told() -> None:
    broken = (
        f"systemctl stop docker.service docker.socket && mv {SETTINGS} /root/ && echo '{{\"none\": 1}}' >{SETTINGS}"
    )
    docker("exec", "toolkit-wsl", "sh", "-c", broken)
    run = enter("docker/main", limit="toolkit-wsl")
    mended = f"mv /root/daemon.json {SETTINGS} && systemctl reset-failed docker.service docker.socket"
    docker("exec", "toolkit-wsl", "sh", "-c", mended)
    assert run.code != 0
    told = words(run.output)
    assert "toolkit-wsl: Docker does not run (Unable to start service docker: Job for docker.service failed" in told
    assert "Expected: a service docker that systemd can start. Next step: read `journalctl -u docker`" in told
    run = enter("docker/main", limit="toolkit-wsl")
    assert run.code == 0, run.output


def test_verification_tells_what_is_wrong() -> None:
    def verify() -> tuple[int, str]:
        # The driver is that of prepare.yml.
        run = enter("nvidia_driver/verify", "container_toolkit/verify", nvidia_driver_managed=False)
        return run.code, words(run.output)

    # A restart would give its container time to end.
    docker("exec", "toolkit-t4", "docker", "kill", "before")
    docker("exec", "toolkit-t4", "sh", "-c", f"mv {SETTINGS} /root/ && systemctl restart docker")
    docker("exec", "toolkit-mig", "rm", "/var/run/cdi/nvidia.yaml")
    docker("exec", "toolkit-wsl", "systemctl", "stop", "docker.service", "docker.socket")
    code, told = verify()
    docker("exec", "toolkit-t4", "sh", "-c", f"mv /root/daemon.json {SETTINGS} && systemctl restart docker")
    docker("exec", "toolkit-mig", "systemctl", "restart", "nvidia-cdi-refresh")
    docker("exec", "toolkit-wsl", "systemctl", "start", "docker")
    assert code != 0
    for part in (
        r"toolkit-t4: Docker's runtimes are [\w., ]*runc\. Expected: one named nvidia, .* Next step: run gpufarm",
        r"toolkit-mig: the CDI specification lists nothing\. Expected also: .*=MIG-.* Next step: run `systemctl res",
        r"toolkit-wsl: no Docker daemon answers \(.*\)\. Expected: one with a runtime named nvidia\. Next step: read",
    ):
        assert re.search(part, told), told
    code, told = verify()
    assert code == 0, told
