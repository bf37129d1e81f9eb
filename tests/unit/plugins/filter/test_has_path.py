# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Against the answer of the real module; whom the files belong to here is put to root."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.filter import has_path as plugin
from ansible_collections.gpufarm.core.plugins.modules import host_info
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

has_path = plugin.FilterModule().filters()["has_path"]


@pytest.fixture
def files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    (tmp_path / "folder").mkdir(mode=0o750)
    (tmp_path / "file").write_text("a = 1\n")
    (tmp_path / "file").chmod(0o640)
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "way").symlink_to("folder")
    found = helper.run_module(host_info.main, capsys, {"files": [f"{tmp_path}/*"]})
    return [{**entry, "uid": 0, "gid": 0} for entry in found["files"]]


def test_what_is_as_it_is_wanted(files: list[dict[str, Any]], tmp_path: Path) -> None:
    assert has_path(files, f"{tmp_path}/file", "0640", "a = 1\n")
    assert has_path(files, f"{tmp_path}/folder", "0750")


@pytest.mark.parametrize(
    ("name", "mode", "content"),
    [
        ("file", "0640", "a = 2\n"), ("file", "0640", ""), ("file", "0600", "a = 1\n"), ("file", "0640", None),
        ("folder", "0755", None), ("folder", "0750", ""), ("none", "0640", "a = 1\n"), ("none", "0750", None),
        ("link", "0777", "a = 1\n"), ("way", "0750", None),
    ],
)  # fmt: skip
def test_what_is_not(files: list[dict[str, Any]], tmp_path: Path, name: str, mode: str, content: str | None) -> None:
    assert has_path(files, f"{tmp_path}/{name}", mode, content) is False


@pytest.mark.parametrize("key", ["uid", "gid"])
def test_what_belongs_to_somebody_else(files: list[dict[str, Any]], tmp_path: Path, key: str) -> None:
    theirs = [{**entry, key: 1000} for entry in files]
    assert not has_path(theirs, f"{tmp_path}/file", "0640", "a = 1\n")
