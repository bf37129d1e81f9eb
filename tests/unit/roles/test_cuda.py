"""Which versions of CUDA a repository has, as the package managers list its packages, and what the role refuses."""

from __future__ import annotations

import pytest
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

APT = """\
cuda-toolkit-13-0
cuda-toolkit-12-8-config-common
cuda-toolkit-config-common
cuda-toolkit-12-8
cuda-toolkit-13
"""
DNF = """\
Available Packages
cuda-toolkit-12-8.x86_64                  12.8.1-1      nvidia-cuda
cuda-toolkit-12-8-config-common.noarch    12.8.90-1     nvidia-cuda
cuda-toolkit-13-0.x86_64                  13.0.2-1      nvidia-cuda
"""


@pytest.mark.parametrize(("said", "found"), [(APT, ["12.8", "13.0"]), (DNF, ["12.8", "13.0"]), ("", []), (None, [])])
def test_versions_of_the_repository(said: str | None, found: list[str]) -> None:
    known = {**role_helper.variables("cuda"), "__cuda_packages": {"stdout": said}}
    assert role_helper.value("__cuda_versions", known) == found


@pytest.mark.parametrize(
    ("version", "refusal", "told"),
    [
        ("13.0", "", ""),
        ("13", "", 'cuda_version is "13". Expected: major and minor version'),
        ("13.0.1", "", 'cuda_version is "13.0.1". Expected: major and minor version'),
        ("13.0", "the distribution is Linux Mint.", "the distribution is Linux Mint. Next step: install CUDA yourself"),
    ],
)
def test_what_is_refused(version: str, refusal: str, told: str) -> None:
    given = {"cuda_version": version, "__nvidia_repository_refusal": refusal}
    found = role_helper.value("__cuda_refusal", {**role_helper.variables("cuda"), **given})
    assert found.startswith(told) and bool(found) is bool(told)
