"""Tools of this machine: what is missing is installed by its package's name, or asked for by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulator import tools


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    asked: list[list[str]] = []
    monkeypatch.setattr(tools, "_install", asked.append)
    return asked


def test_only_what_is_missing_is_installed(installed: list[list[str]], tmp_path: Path) -> None:
    header = tmp_path / "there.h"
    header.touch()
    tools.need("sh", str(header))
    assert installed == []
    tools.need("sh", str(header), f"{tmp_path}/missing.h", "no-such-tool")
    assert installed == [[f"{tmp_path}/missing.h", "no-such-tool"]]


def test_where_nothing_can_be_installed_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools.os, "geteuid", lambda: 1000)
    with pytest.raises(tools.BuildError) as failure:
        tools._install(["/usr/include/yaml.h", "gcc"])
    assert "/usr/include/yaml.h, gcc not found" in str(failure.value)
    assert "Next step: install gcc, libyaml-dev" in str(failure.value)


def test_every_tool_of_the_tests_has_a_package() -> None:
    assert set(tools.FOR_TESTS) <= set(tools.PACKAGES)
