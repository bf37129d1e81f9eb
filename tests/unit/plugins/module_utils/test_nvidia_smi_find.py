# Copyright (c) gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where nvidia-smi is looked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import nvidia_smi
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi import node as smi_node


def program(folder: Path, mode: int = 0o755) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "nvidia-smi"
    path.write_text("#!/bin/sh\n", encoding="utf-8")
    path.chmod(mode)
    return str(path)


@pytest.fixture
def wsl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(smi_node, "WSL_DIRECTORY", str(tmp_path / "wsl"))
    return tmp_path / "wsl"


@pytest.mark.usefixtures("wsl")
def test_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "wsl")
    expected = program(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert nvidia_smi.find_nvidia_smi() == expected


def test_the_folder_of_windows_is_next(tmp_path: Path, wsl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = program(wsl)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert nvidia_smi.find_nvidia_smi() == expected


@pytest.mark.usefixtures("wsl")
def test_nothing_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin", 0o644)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert nvidia_smi.find_nvidia_smi() is None


def test_a_given_program_is_the_only_one(tmp_path: Path, wsl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(wsl)
    monkeypatch.setenv("PATH", str(wsl))
    given = program(tmp_path / "mine")
    assert nvidia_smi.find_nvidia_smi(given) == given
    assert nvidia_smi.find_nvidia_smi(str(tmp_path / "none")) is None
