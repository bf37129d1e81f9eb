from __future__ import annotations

import pytest
from testinfra.host import Host

from tests.testinfra.helpers import gpu_uuids

WANTED = {"driver-t4": ("570.", 4), "driver-h100": ("580.", 8), "driver-wsl": ("58", 1)}


def test_every_gpu_answers_with_the_branch_that_was_asked_for(host: Host) -> None:
    branch, count = WANTED[host.backend.get_hostname()]
    version = host.check_output(
        "PATH=$PATH:/usr/lib/wsl/lib nvidia-smi --query-gpu=driver_version --format=csv,noheader"
    ).splitlines()
    assert len(version) == count
    assert all(line.startswith(branch) for line in version)
    assert len(set(gpu_uuids(host))) == count


def test_wsl_keeps_windows_driver(host: Host) -> None:
    if host.backend.get_hostname() != "driver-wsl":
        pytest.skip("not WSL")
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
