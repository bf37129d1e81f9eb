from __future__ import annotations

import json
import re

from testinfra.host import Host

from tests.simulator.docker import docker
from tests.simulator.gpu import faults
from tests.testinfra.helpers import driver_parts_of_packages
from tests.testinfra.playbooks import changed_tasks, enter, run_in_scenario, words


def test_toolkit_of_the_version_that_was_asked_for(host: Host) -> None:
    version = json.loads(host.file("/usr/local/cuda-13.0/version.json").content_string)
    assert version["cuda"]["version"].startswith("13.0")


def test_parts_come_with_what_they_need_alone(host: Host) -> None:
    packages = host.check_output("dpkg-query --show --showformat '${db:Status-Status} ${Package}\n'").splitlines()
    found = sorted(line.split()[1] for line in packages if re.fullmatch(r"installed \S+-13-0", line))
    notes = host.check_output("ls /var/lib/gpufarm/cuda").split()
    needed = ["cuda-cudart-dev-13-0", "cuda-nvcc-13-0"]
    if host.backend.get_hostname() == "cuda-wsl":
        assert (found, notes) == ([*needed, "libnvvm-13-0"], needed)
    else:
        assert (found, "cuda-toolkit-13-0" in notes) == ([*needed, "cuda-toolkit-13-0", "libnvvm-13-0"], True)


def test_no_driver_came_with_it(host: Host) -> None:
    packages = host.check_output("dpkg-query --show --showformat '${Package}\n'").splitlines()
    assert not [name for name in packages if name.startswith(("nvidia-driver", "libnvidia-ml", "cuda-drivers"))]
    assert driver_parts_of_packages(host) == []


def test_repository_is_the_one_of_the_platform(host: Host) -> None:
    source = host.file("/etc/apt/sources.list.d/nvidia-cuda.sources").content_string
    expected = "wsl-ubuntu/x86_64" if host.backend.get_hostname() == "cuda-wsl" else "debian13/x86_64"
    assert expected in source


def test_login_shells_find_the_version_that_was_asked_for_last(host: Host) -> None:
    assert "V13.0." in host.check_output("bash -lc 'nvcc --version'")
    if host.backend.get_hostname() == "cuda-linux":
        assert host.file("/usr/local/cuda-12.8/version.json").exists


def test_check_mode_has_nothing_to_tell() -> None:
    run = run_in_scenario("molecule/cuda/converge.yml", "--check")
    assert (run.code, run.changed) == (0, {"cuda-linux": 0, "cuda-wsl": 0}), run.output
    alone = [f"node_tuning_{name}" for name in ("governor", "iommu_passthrough", "acs_off", "numa_balancing_off")]
    assert f"cuda-wsl: {', '.join(alone)} cannot be set on WSL" in words(run.output)


def test_a_node_without_a_gpu_is_refused_or_left_as_it_is() -> None:
    listed = ("exec", "cuda-linux", "sh", "-c", "dpkg-query --show; systemctl list-unit-files; find /etc -type f")
    before = docker(*listed)
    run = enter("nvidia_driver/main", limit="cuda-linux")
    assert run.code != 0
    told = "cuda-linux: no NVIDIA GPU is on the PCI bus (/sys/bus/pci/devices). Expected: one at least, because"
    assert told in words(run.output)
    assert changed_tasks(run.output) == []
    run = enter("nvidia_driver/main", limit="cuda-linux", nvidia_driver_without_gpu="skip")
    assert (run.code, run.changed) == (0, {"cuda-linux": 0}), run.output
    assert "cuda-linux: no NVIDIA GPU is on the PCI bus, so this role does nothing here." in words(run.output)
    assert docker(*listed) == before


def test_verification_tells_what_is_wrong() -> None:
    version = "/usr/local/cuda-13.0/version.json"
    docker("exec", "cuda-linux", "sh", "-c", f"cp -p {version} /root/ && sed -i s/13.0.2/13.1.0/ {version}")
    docker("exec", "cuda-wsl", "dpkg", "--remove", "cuda-nvcc-13-0")
    run = enter("cuda/verify")
    docker("exec", "cuda-linux", "mv", "/root/version.json", version)
    assert run.code != 0
    told = words(run.output)
    next_step = "Expected: CUDA 13.0. Next step: reinstall the package cuda-toolkit-13-0."
    assert re.search(rf'cuda-linux: {version} says "[^}}]*"13\.1\.0".*?{next_step}', told), told
    assert "cuda-wsl: not installed: cuda-nvcc-13-0. Expected: all of cuda_packages. Next step: run gpufarm" in told
    run = enter("cuda/main")
    assert (run.code, run.changed["cuda-linux"]) == (0, 0), run.output
    assert "Have the CUDA toolkit" in changed_tasks(run.output), run.output


def test_a_compiler_that_is_none_is_told() -> None:
    nvcc = "/usr/local/cuda-13.0/bin/nvcc"
    docker("exec", "cuda-linux", "mv", nvcc, "/root/")
    run = enter("cuda/verify", limit="cuda-linux")
    docker("exec", "cuda-linux", "mv", "/root/nvcc", nvcc)
    assert run.code != 0
    told = words(run.output)
    assert re.search(
        rf'cuda-linux: {nvcc} says "nothing, or is not there"\. Expected: release 13\.0\. Next step: reinstall', told
    ), told


def test_a_program_is_compiled_and_runs_where_there_is_a_gpu() -> None:
    """By NVIDIA's real compiler, on the double's GPU."""
    run = enter("cuda/verify")
    assert run.code == 0, run.output
    shown = run.output.partition("Compile a small program and run it on the first GPU]")[2].partition("TASK [")[0]
    assert re.findall(r"^(\w+): \[(.*?)\]", shown, re.MULTILINE) == [("skipping", "cuda-linux"), ("ok", "cuda-wsl")]
    faults.apply_to_container("cuda-wsl", lambda profile: faults.compute_wrongly(profile, 0, "memory"))
    wrong = enter("cuda/verify", limit="cuda-wsl")
    faults.apply_to_container("cuda-wsl", lambda profile: faults.recover_cuda(profile, 0))
    faults.apply_to_container("cuda-wsl", lambda profile: faults.refuse_context(profile, 0, 46))
    taken = enter("cuda/verify", limit="cuda-wsl")
    faults.apply_to_container("cuda-wsl", lambda profile: faults.recover_cuda(profile, 0))
    docker("exec", "cuda-wsl", "mv", "/usr/bin/gcc", "/root/")
    alone = enter("cuda/verify", limit="cuda-wsl")
    without = enter("cuda/verify", limit="cuda-wsl", cuda_verify_program=False)
    docker("exec", "cuda-wsl", "mv", "/root/gcc", "/usr/bin/")
    refusal = "cuda-wsl: CUDA 13.0 does not compile a small program and run it on the first GPU"
    assert wrong.code != 0
    assert re.search(rf"{refusal} \(number \d+ is \d+ and not \d+\)\. Expected: ", words(wrong.output)), wrong.output
    assert (taken.code, without.code) == (0, 0), taken.output + without.output
    assert "others have the first GPU for themselves (cuCtxCreate_v2: CUDA_ERROR_DEVICE_UNAVAILABLE)" in words(
        taken.output
    )
    assert alone.code != 0
    assert re.search(rf"{refusal} \(nvcc fatal.*host compiler.*\)\. Expected: ", words(alone.output)), alone.output
    assert docker("exec", "cuda-wsl", "sh", "-c", "ls --almost-all /root | grep gpufarm-cuda || true") == ""
