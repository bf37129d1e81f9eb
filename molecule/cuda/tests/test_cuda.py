from __future__ import annotations

import json

from testinfra.host import Host


def test_toolkit_of_the_version_that_was_asked_for(host: Host) -> None:
    version = json.loads(host.file("/usr/local/cuda-13.0/version.json").content_string)
    assert version["cuda"]["version"].startswith("13.0")


def test_no_driver_came_with_it(host: Host) -> None:
    packages = host.check_output("dpkg-query --show --showformat '${Package}\n'").splitlines()
    assert not [name for name in packages if name.startswith(("nvidia-driver", "libnvidia-ml", "cuda-drivers"))]


def test_repository_is_the_one_of_the_platform(host: Host) -> None:
    source = host.file("/etc/apt/sources.list.d/nvidia-cuda.sources").content_string
    expected = "wsl-ubuntu/x86_64" if host.backend.get_hostname() == "cuda-wsl" else "debian13/x86_64"
    assert expected in source
