# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import os
import platform
import stat
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.modules import wsl_conf
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

BEFORE = "# mine\n[boot]\nsystemd=false\n"
AFTER = "# mine\n[boot]\nsystemd=true\n"
SYSTEMD = {"boot": {"systemd": True}}


class Distribution:
    """A distribution with its file; with its end it loses what the module remembers."""

    def __init__(self, folder: Path, capsys: Any) -> None:
        self.path = folder / "wsl.conf"
        self.run_folder = folder / "run"
        self._capsys = capsys

    def run(self, settings: Any, check: bool = False, **arguments: Any) -> helper.Outcome:
        given = {"settings": settings, "path": str(self.path), **arguments}
        return helper.run_module(
            wsl_conf.main, self._capsys, given, check_mode=check, diff=True, remote_tmp=str(self.path.parent)
        )

    def terminate(self) -> None:
        for mark in self.run_folder.glob("*"):
            mark.unlink()


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Distribution:
    found = Distribution(tmp_path, capsys)
    monkeypatch.setattr(wsl_conf, "RUN", found.run_folder)
    found.path.write_text(BEFORE, encoding="utf-8")
    found.path.chmod(0o640)
    return found


def test_one_key_changes_and_what_was_there_is_kept(distribution: Distribution) -> None:
    result = distribution.run(SYSTEMD)
    assert result["changed"] and result["pending"]
    assert distribution.path.read_text(encoding="utf-8") == AFTER
    assert stat.S_IMODE(distribution.path.stat().st_mode) == 0o640
    assert Path(result["backup_file"]).read_text(encoding="utf-8") == BEFORE
    assert result["settings"] == {"boot": {"systemd": "true"}}
    assert (result["diff"]["before"], result["diff"]["after"]) == (BEFORE, AFTER)


def test_a_change_waits_until_the_distribution_has_ended(distribution: Distribution) -> None:
    distribution.run(SYSTEMD)
    again = distribution.run(SYSTEMD)
    assert not again["changed"] and again["pending"] and "backup_file" not in again
    distribution.terminate()
    assert not distribution.run(SYSTEMD)["pending"]


def test_what_is_changed_back_waits_for_nothing(distribution: Distribution) -> None:
    distribution.run(SYSTEMD)
    distribution.run({"boot": {"command": "x"}})
    back = distribution.run({"boot": {"systemd": False, "command": None}})
    assert back["changed"] and not back["pending"]
    assert distribution.path.read_text(encoding="utf-8") == BEFORE


def test_check_mode_says_it_and_changes_nothing(distribution: Distribution) -> None:
    result = distribution.run(SYSTEMD, check=True)
    assert result["changed"] and result["pending"] and result["settings"] == {"boot": {"systemd": "true"}}
    assert distribution.path.read_text(encoding="utf-8") == BEFORE
    assert not distribution.run_folder.exists()


def test_a_file_that_is_not_there_comes_without_a_backup(distribution: Distribution) -> None:
    distribution.path.unlink()
    mask = os.umask(0o077)
    try:
        result = distribution.run(SYSTEMD)
    finally:
        os.umask(mask)
    assert result["changed"] and "backup_file" not in result
    assert distribution.path.read_text(encoding="utf-8") == "[boot]\nsystemd=true\n"
    assert stat.S_IMODE(distribution.path.stat().st_mode) == 0o644


def test_no_backup_where_none_is_wanted(distribution: Distribution) -> None:
    assert "backup_file" not in distribution.run(SYSTEMD, backup=False)
    assert {each.name for each in distribution.path.parent.glob("wsl.conf*")} == {"wsl.conf"}


@pytest.mark.parametrize("raw", [b"# \xff\n[boot]\nsystemd=false\n", "# für\n[boot]\nsystemd=false\n".encode()])
def test_bytes_that_are_no_text_stay(distribution: Distribution, raw: bytes) -> None:
    distribution.path.write_bytes(raw)
    result = distribution.run({**SYSTEMD, "user": {"default": None}})
    assert distribution.path.read_bytes() == raw.replace(b"false", b"true")
    # What the module returns is to be UTF-8, or the whole result is lost.
    json.dumps(dict(result), ensure_ascii=False).encode("utf-8")


@pytest.mark.parametrize("there", [True, False])
def test_what_a_link_leads_to_is_changed(distribution: Distribution, there: bool) -> None:
    real = distribution.path.with_name("real.conf")
    if there:
        distribution.path.rename(real)
    else:
        distribution.path.unlink()
    distribution.path.symlink_to(real)
    assert distribution.run(SYSTEMD)["changed"]
    assert distribution.path.is_symlink()
    assert "systemd=true" in real.read_text(encoding="utf-8")


def test_a_key_that_wsl_does_not_have_is_warned_of(distribution: Distribution, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(wsl_conf.AnsibleModule, "warn", lambda _self, text: warnings.append(text))
    distribution.run({"boot": {"systemD": True, "sytemd": True}})
    assert warnings == [f"WSL is not known to have the key sytemd in [boot] of {distribution.path}."]


CORRECT = "Next step: correct the setting."


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"boot": True},
            "'boot' in 'settings'. Expected: sections with keys and values. Next step: write {boot: {systemd: true}}.",
        ),
        (
            {"my boot": {"systemd": True}},
            f"my boot.systemd with True. Expected: names of letters and digits. {CORRECT}",
        ),
        ({"boot": {"sys temd": True}}, f"boot.sys temd with True. Expected: names of letters and digits. {CORRECT}"),
        (
            {"boot": {"systemd": ["true"]}},
            f"boot.systemd with ['true']. Expected: a value that is a word, a number or a boolean. {CORRECT}",
        ),
        (
            {"boot": {"command": "a\nb"}},
            f"boot.command with 'a\\nb'. Expected: a value of letters that can be printed. {CORRECT}",
        ),
        (
            {"User": {"Default": "nobody-here"}},
            "no user 'nobody-here' in this distribution. Expected: the default user is there. Next step: make the user "
            "first, or name another.",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(distribution: Distribution, settings: Any, told: str) -> None:
    result = distribution.run(settings)
    assert result["failed"]
    assert result["msg"] == f"{platform.node()}: found {told}"
    assert distribution.path.read_text(encoding="utf-8") == BEFORE


def test_a_user_who_is_there_may_be_the_default(distribution: Distribution) -> None:
    assert distribution.run({"user": {"default": "root"}})["settings"]["user"] == {"default": "root"}


def test_a_line_at_which_wsl_stops_is_refused(distribution: Distribution) -> None:
    distribution.path.write_text("[boot]\n; mine\nsystemd=false\n", encoding="utf-8")
    result = distribution.run(SYSTEMD)
    assert result["failed"]
    assert result["msg"] == (
        f"{platform.node()}: found line 2 of {distribution.path}, '; mine', at which WSL stops reading the file. "
        "Expected: [section], key = value, # comment or nothing. Next step: correct the line; nothing was changed."
    )
    assert distribution.path.read_text(encoding="utf-8") == "[boot]\n; mine\nsystemd=false\n"


def test_a_file_that_cannot_be_written(distribution: Distribution) -> None:
    distribution.path.unlink()
    distribution.path.mkdir()
    result = distribution.run(SYSTEMD)
    assert result["failed"]
    assert result["msg"] == (
        f"{platform.node()}: found that {distribution.path} cannot be changed ([Errno 21] Is a directory: "
        f"'{distribution.path}'). Expected: a file that this task may write. Next step: use 'become'."
    )
