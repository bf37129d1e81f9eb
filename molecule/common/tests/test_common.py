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


def test_a_login_is_for_apt_alone(host: Host) -> None:
    login = host.file("/etc/apt/auth.conf.d/scenario.conf")
    assert (login.user, login.group, login.mode) == ("root", "root", 0o600)
    assert "machine https://mirror.gpufarm.test/libnvidia-container/stable/deb/amd64/ login robot password s3cret!" in (
        login.content_string
    )
    assert host.check_output("grep -rlE 's3cret(!|%%21)' /etc /var/lib").split() == [login.path]


def test_what_apt_reads_is_open_to_apt(host: Host) -> None:
    for path in ("/etc/apt/keyrings/scenario.asc", "/etc/apt/sources.list.d/scenario.sources"):
        assert host.file(path).mode == 0o644
    assert host.file("/etc/apt/keyrings").mode == 0o755
