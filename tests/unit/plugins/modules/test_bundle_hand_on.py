# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a host tells that it lacks of a bundle, and how it takes what it is handed."""

from __future__ import annotations

import hashlib
import os
import platform
import stat
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.modules import bundle_hand_on
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

INDEX, DEB = "apt/cuda/InRelease", "apt/cuda/driver_580_amd64.deb"
DPKG = """#!/bin/sh
printf 'installed other_1:2.0~a+b_all.deb\\nconfig-files driver_580_amd64.deb\\n'
"""


class Node:
    """The module on a host whose folder is another one."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root = folder / "node"
        self.folder = folder
        self._capsys = capsys

    def ask(self, *files: dict[str, Any], check: bool = False, **more: Any) -> helper.Outcome:
        given = {"bundle": "/b", "platform": "debian-trixie-amd64", "packages": ["driver"], "files": files, **more}
        return helper.run_module(bundle_hand_on.main, self._capsys, given, check_mode=check)

    def staged(self, path: str, text: str, sent: str | None = None) -> dict[str, Any]:
        copy = self.folder / f"staged-{Path(path).name}"
        copy.write_text(text if sent is None else sent)
        return {**file(path, text), "staged": str(copy)}


def file(path: str, text: str, package: str | None = None) -> dict[str, Any]:
    return {"path": path, "sha256": hashlib.sha256(text.encode()).hexdigest(), "package": package}


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Node:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/dpkg-query").write_text(DPKG)
    (tmp_path / "bin/dpkg-query").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=os.pathsep)
    monkeypatch.setattr(bundle_hand_on, "ROOT", tmp_path / "node")
    monkeypatch.setattr(bundle_hand_on.shutil, "chown", lambda *_args: None)
    return Node(tmp_path, capsys)


def test_packages_that_are_installed_in_that_version_are_not_lacked(node: Node) -> None:
    """apt escapes the colon of an epoch in the name of a file; what only its settings are left of is not installed."""
    files = [
        file(INDEX, "signed"), file(DEB, "driver", "driver_580_amd64.deb"),
        file("apt/o.deb", "other", "other_1%3a2.0~a+b_all.deb"), file("apt/p.deb", "other", "other_1%3a2.1_all.deb"),
    ]  # fmt: skip
    answer = node.ask(*files)
    assert answer["changed"] and answer["missing"] == [INDEX, DEB, "apt/p.deb"]


def test_what_is_handed_lies_where_apt_reads_it_whole(node: Node) -> None:
    os.umask(0o077)
    answer = node.ask(node.staged(INDEX, "signed"), node.staged(DEB, "driver"))
    os.umask(0o022)
    assert answer["changed"] and (node.root / DEB).read_text() == "driver"
    for path in (node.root / DEB, node.root / INDEX):
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert stat.S_IMODE((node.root / "apt/cuda").stat().st_mode) == 0o755
    assert not list(node.folder.glob("staged-*"))
    again = node.ask(file(INDEX, "signed"), file(DEB, "driver", "driver_580_amd64.deb"), known=[INDEX, DEB])
    assert not again["changed"] and again["missing"] == []


def test_what_was_damaged_on_its_way_is_not_taken(node: Node) -> None:
    node.ask(node.staged(DEB, "driver"))
    answer = node.ask(node.staged(DEB, "newer", sent="newe"))
    assert answer["failed"] and f"{DEB} came with the SHA-256 " in answer["msg"]
    assert ". Expected: " in answer["msg"] and ". Next step: " in answer["msg"]
    assert (node.root / DEB).read_text() == "driver"


def test_what_is_damaged_on_the_host_is_lacked(node: Node) -> None:
    node.ask(node.staged(INDEX, "signed"))
    (node.root / INDEX).write_text("Signed")
    assert node.ask(file(INDEX, "signed"), known=[INDEX])["missing"] == [INDEX]


def test_what_no_bundle_has_any_more_goes(node: Node) -> None:
    """An entry of an older bundle that leads nowhere would stop apt."""
    node.ask(node.staged(DEB, "driver"), node.staged("sources.list.d/older.sources", "older"))
    (node.root / "lists").mkdir()
    (node.root / "lists/read").touch()
    announced = node.ask(file(DEB, "driver"), known=[DEB], check=True)
    assert announced["changed"] and (node.root / "sources.list.d/older.sources").exists()
    answer = node.ask(file(DEB, "driver"), known=[DEB])
    assert answer["changed"] and not (node.root / "sources.list.d/older.sources").exists()
    assert (node.root / DEB).exists() and (node.root / "lists/read").exists()
    assert not node.ask(file(DEB, "driver"), known=[DEB])["changed"]


def test_texts(node: Node) -> None:
    given = {"texts": {"apt.conf": "one\n", "sources.list.d/d.sources": "two\n"}, "known": ["sources.list.d/d.sources"]}
    assert node.ask(check=True, **given)["changed"] and not node.root.exists()
    assert node.ask(**given)["changed"] and (node.root / "apt.conf").read_text() == "one\n"
    assert (node.root / "lists/partial").is_dir() and (node.root / "cache/archives/partial").is_dir()
    assert not node.ask(**given)["changed"]
    (node.root / "apt.conf").write_text("other\n")
    assert node.ask(**given)["changed"] and (node.root / "apt.conf").read_text() == "one\n"


@pytest.mark.parametrize("path", ["/etc/cron.d/evil", "sources.list.d/../../evil", ""])
def test_nothing_is_written_outside_of_its_folder(node: Node, path: str) -> None:
    for answer in (
        node.ask(texts={"apt.conf": "one\n", path: "evil"}),
        node.ask(node.staged(DEB, "driver"), {**node.staged("evil", "evil"), "path": path}),
    ):
        assert answer["failed"] and "is to be written, which is not below /var/lib/gpufarm/bundle." in answer["msg"]
        assert ". Next step: " in answer["msg"] and not node.root.exists()


def test_where_it_cannot_be_written(node: Node) -> None:
    node.root.write_text("no folder")
    answer = node.ask(texts={"apt.conf": "one\n"})
    assert answer["failed"] and answer["msg"].startswith(
        f"{platform.node()}: /var/lib/gpufarm/bundle cannot be written ("
    )
    assert answer["msg"].endswith("Next step: check the free space there.") and node.root.read_text() == "no folder"
