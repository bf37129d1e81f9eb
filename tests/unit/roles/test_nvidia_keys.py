"""Each distribution gets the key file that NVIDIA signs its repository with, and the one fingerprint of that file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

VARIABLES = Path(__file__).resolve().parents[3] / "roles/_common/vars/main.yml"


def key_of(distribution: str, version: str, kernel: str = "6.12.0") -> Any:
    loader = DataLoader()
    family = "Debian" if distribution in ("Debian", "Ubuntu") else "RedHat"
    facts = {
        "architecture": "x86_64",
        "distribution": distribution,
        "distribution_major_version": version.partition(".")[0],
        "distribution_version": version,
        "kernel": kernel,
        "os_family": family,
    }
    variables = loader.load_from_file(str(VARIABLES), trusted_as_template=True)
    templar = Templar(loader, variables={**variables, "ansible_facts": facts})
    return templar.template(variables["_common_nvidia_key"])


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
