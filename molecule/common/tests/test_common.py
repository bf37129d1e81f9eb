from __future__ import annotations

from testinfra.host import Host


def test_packages_come_from_the_pinned_repository(host: Host) -> None:
    policy = host.check_output("apt-cache policy nvidia-container-toolkit")
    assert "https://mirror.gpufarm.test/libnvidia-container/stable/deb/amd64" in policy


def test_older_entry_is_gone(host: Host) -> None:
    assert not host.file("/etc/apt/sources.list.d/older.list").exists


def test_unpinned_key_left_nothing(host: Host) -> None:
    assert not host.file("/etc/apt/keyrings/impostor.asc").exists
    assert not host.file("/etc/apt/sources.list.d/impostor.sources").exists


def test_a_package_that_older_lists_do_not_name_is_found(host: Host) -> None:
    assert host.package("cuda-toolkit-config-common").is_installed
