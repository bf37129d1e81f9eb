# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""/etc/wsl.conf as WSL reads it, changed without touching anything else."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import wsl_conf
from hypothesis import given
from hypothesis import strategies as st

FILE = """\
# Mine.
[boot]  # what starts
Systemd = False   # not yet
command="service \\"a # b\\" start" # by hand
systemd = true

[network]
hostname = pc \\
   two
[boot]
protectBinfmt=true"""


def test_a_file_is_read_as_wsl_reads_it() -> None:
    assert wsl_conf.read(FILE) == {
        "boot": {"systemd": "False", "command": 'service "a # b" start', "protectbinfmt": "true"},
        "network": {"hostname": "pc    two"},
    }


def test_only_the_value_changes_and_the_first_counts() -> None:
    assert wsl_conf.changed(FILE, {"boot": {"systemd": True}}) == FILE.replace("= False ", "= true ")


@pytest.mark.parametrize(
    ("settings", "old", "new"),
    [
        ({"network": {"hostname": "pc"}}, "pc \\\n   two\n", "pc\n"),
        ({"Boot": {"COMMAND": "x"}}, '"service \\"a # b\\" start" #', "x #"),
        ({"boot": {"command": "a # b"}}, '"service \\"a # b\\" start" #', '"a # b" #'),
        # A new key comes to the end of its section, wherever that was written last; a section to the end of the file.
        ({"boot": {"initTimeout": 5}}, "protectBinfmt=true", "protectBinfmt=true\ninitTimeout = 5\n"),
        ({"network": {"generateHosts": False}}, "   two\n", "   two\ngenerateHosts = false\n"),
        ({"user": {"default": "bob"}}, "protectBinfmt=true", "protectBinfmt=true\n\n[user]\ndefault = bob\n"),
        ({"network": {"hostname": None}}, "hostname = pc \\\n   two\n", ""),
        ({"user": {"default": None}}, "", ""),
    ],
)
def test_what_is_not_named_stays(settings: dict[str, dict[str, Any]], old: str, new: str) -> None:
    assert wsl_conf.changed(FILE, settings) == FILE.replace(old, new)


def test_a_key_is_taken_out_wherever_it_is() -> None:
    after = wsl_conf.changed(FILE, {"boot": {"systemd": None}})
    assert "systemd" not in wsl_conf.read(after)["boot"]
    assert after == "".join(line for line in FILE.splitlines(keepends=True) if "ystemd" not in line)


@pytest.mark.parametrize("found", ["true", "TRUE", '"true"', "  true\t# yes"])
def test_what_says_the_same_is_not_touched(found: str) -> None:
    text = f"[boot]\nsystemd={found}\n"
    assert wsl_conf.changed(text, {"boot": {"systemd": True}}) == text


def test_text_in_another_case_is_another_text() -> None:
    assert wsl_conf.changed("[user]\ndefault=Bob\n", {"user": {"default": "bob"}}) == "[user]\ndefault=bob\n"


def test_line_ends_of_windows_stay() -> None:
    after = wsl_conf.changed("[boot]\r\nsystemd=false\r\n", {"boot": {"systemd": True, "command": "x"}})
    assert after == "[boot]\r\nsystemd=true\r\ncommand = x\r\n"


def test_a_file_that_is_not_there() -> None:
    assert wsl_conf.changed("", {"boot": {"systemd": True}}) == "[boot]\nsystemd = true\n"


@pytest.mark.parametrize(
    ("text", "invalid"),
    [
        (FILE, None),
        ("[boot]\n; no comment\n", (2, "; no comment")),
        ("[my boot]\n", (1, "[my boot]")),
        ("a = b \\\n c\n[boot\n", (3, "[boot")),
        ('[boot]\ncommand = "open\n', (2, 'command = "open')),
        ("[boot]\ncommand = C:\\Windows\n", (2, "command = C:\\Windows")),
        ("systemd\n", (1, "systemd")),
    ],
)
def test_where_wsl_stops_reading(text: str, invalid: tuple[int, str] | None) -> None:
    assert wsl_conf.first_invalid(text) == invalid


def test_a_line_that_cannot_be_read_is_replaced_where_it_is_ours() -> None:
    for text in ('[boot]\ncommand = "open\n', "[boot]\ncommand = C:\\Windows\n"):
        assert wsl_conf.changed(text, {"boot": {"command": "x"}}) == "[boot]\ncommand = x\n"


@given(st.text(alphabet='ab=[]#"\\ \t\n\r;', max_size=60), st.text(alphabet='ab=#"\\ \t\n', max_size=12))
def test_whatever_a_file_holds(text: str, value: str) -> None:
    """Nothing is lost, what is set can be read back, and nothing is changed twice."""
    assert "".join(line.raw for line in wsl_conf.parsed(text)) == text
    after = wsl_conf.changed(text, {"user": {"default": value}})
    assert wsl_conf.read(after)["user"]["default"] == value
    assert wsl_conf.changed(after, {"user": {"default": value}}) == after
    assert after.startswith(text)
