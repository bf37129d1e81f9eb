"""Each distribution gets the key file that NVIDIA signs its repository with, and the one fingerprint of that file.

And what is WSL, or has no repository of NVIDIA's, is known.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi import node

ROLES = Path(__file__).resolve().parents[3] / "roles"
VARIABLES = ("_common/vars", "nvidia_repository/defaults", "nvidia_repository/vars")


def value(
    name: str, distribution: str, *, version: str = "13", kernel: str = "6.12.0", has: tuple[str, ...] = (),
    family: str | None = None,
) -> Any:  # fmt: skip
    loader = DataLoader()
    family = family or ("Debian" if distribution in ("Debian", "Ubuntu") else "RedHat")
    facts = {
        "architecture": "x86_64",
        "distribution": distribution,
        "distribution_major_version": version.partition(".")[0],
        "distribution_version": version,
        "kernel": kernel,
        "os_family": family,
    }
    variables: dict[str, Any] = {}
    for folder in VARIABLES:
        variables.update(loader.load_from_file(str(ROLES / folder / "main.yml"), trusted_as_template=True))
    variables.update(ansible_facts=facts, _common_host={"stdout_lines": ["0", "/usr/bin/gpgv", *has]})
    return Templar(loader, variables=variables).template(variables[name])


def key_of(distribution: str, version: str, kernel: str = "6.12.0") -> Any:
    return value("__nvidia_repository_key", distribution, version=version, kernel=kernel)


SIGNS = ("/dev/dxg", node.WSL_DIRECTORY)


@pytest.mark.parametrize(
    ("kernel", "has", "wsl"),
    [
        ("6.6.87.2-microsoft-standard-WSL2", (), True),
        ("6.6.87.2-Microsoft", (), True),
        ("6.6.87.2-WSL2-xanmod1", SIGNS, True),
        ("6.6.87.2-WSL2-xanmod1", SIGNS[:1], False),
        ("6.12.0", SIGNS[1:], False),
        ("6.12.0", (), False),
    ],
)
def test_wsl_is_what_the_facts_call_so(tmp_path: Path, kernel: str, has: tuple[str, ...], wsl: bool) -> None:
    assert value("_common_is_wsl", "Debian", kernel=kernel, has=has) is wsl
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/osrelease").write_text(kernel, encoding="utf-8")
    for path in has:
        (tmp_path / path[1:]).mkdir(parents=True)
    assert node.detect_platform(tmp_path) == ("wsl" if wsl else "linux")


def test_a_derivative_is_told_that_it_has_no_repository() -> None:
    refusal = value("__nvidia_repository_refusal", "Linux Mint", version="22", family="Debian")
    assert refusal == (
        "the distribution is Linux Mint, for which NVIDIA has no repository. Expected: Debian, Ubuntu, or RHEL and its "
        "rebuilds."
    )
    for known in ("Debian", "Ubuntu", "Rocky"):
        assert value("__nvidia_repository_refusal", known) == ""
    assert value("__nvidia_repository_refusal", "Kali", family="Debian", has=SIGNS) == ""
    assert value("__nvidia_repository_refusal", "Archlinux", family="Archlinux") != ""


@pytest.mark.parametrize(
    ("distribution", "version", "file"),
    [
        ("Debian", "12", "3bf863cc.pub"),
        ("Debian", "13", "8793F200.pub"),
        ("Ubuntu", "22.04", "3bf863cc.pub"),
        ("Ubuntu", "24.04", "3bf863cc.pub"),
        ("Ubuntu", "26.04", "60DF8A40.pub"),
        ("RedHat", "9.4", "D42D0685.pub"),
        ("Rocky", "8.10", "D42D0685.pub"),
    ],
)
def test_file_and_fingerprint_belong_together(distribution: str, version: str, file: str) -> None:
    key = key_of(distribution, version)
    assert key["file"] == file
    assert len(key["fingerprint"]) == 40
    assert key["fingerprint"].endswith(file.removesuffix(".pub").upper())


def test_wsl_uses_the_key_of_its_own_repository() -> None:
    assert key_of("Debian", "13", kernel="6.6.87.2-microsoft-standard-WSL2")["file"] == "3bf863cc.pub"


def test_no_fingerprint_is_made_up_for_rhel_10() -> None:
    assert key_of("RedHat", "10.0") == {"file": "CDF6BA43.pub", "fingerprint": ""}
