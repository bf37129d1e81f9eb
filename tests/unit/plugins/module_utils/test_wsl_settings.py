# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What WSL reads of changed settings, as the double of its own reader does."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import wsl_settings
from ansible_collections.gpufarm.core.plugins.module_utils.problem import FoundError
from hypothesis import example, given
from hypothesis import strategies as st

from tests.simulator.windows import wslconfig

WANTED = {"general": {"instanceIdleTimeout": -1}}


def changed(text: str, **sections: dict[str, Any]) -> str:
    return wsl_settings.changed(text, sections, windows=True)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "[general]\r\ninstanceIdleTimeout=-1\r\n"),
        ("[wsl2]\nmemory=8GB\n", "[wsl2]\nmemory=8GB\n\n[general]\ninstanceIdleTimeout=-1\n"),
        ("[wsl2]\r\nmemory=8GB", "[wsl2]\r\nmemory=8GB\r\n\r\n[general]\r\ninstanceIdleTimeout=-1\r\n"),
        ("[general]\n# mine\n\n[wsl2]\n", "[general]\ninstanceIdleTimeout=-1\n# mine\n\n[wsl2]\n"),
        ("[General] # x\r\n", "[General] # x\r\ninstanceIdleTimeout=-1\r\n"),
        ("[general]\nINSTANCEidletimeout = 15000 # ms\n", "[general]\nINSTANCEidletimeout = -1 # ms\n"),
        ("[general]\na=1 # b\r\n", "[general]\na=1 # b\r\ninstanceIdleTimeout=-1\r\n"),
        ("\ufeff[general]\na=b\\\nc\n", "\ufeff[general]\na=b\\\nc\ninstanceIdleTimeout=-1\n"),
        ("[general]\ninstanceIdleTimeout=1\ninstanceIdleTimeout=2\n", "[general]\ninstanceIdleTimeout=-1\n"
         "instanceIdleTimeout=2\n"),
        # A line that WSL cannot read sets nothing; it is replaced where it is ours.
        ('[general]\ninstanceIdleTimeout="-1\n', "[general]\ninstanceIdleTimeout=-1\n"),
        ('[general]\ninstanceIdleTimeout=C:\\Windows # "x\n', "[general]\ninstanceIdleTimeout=-1\n"),
        ('[general]\na="-1\n', '[general]\ninstanceIdleTimeout=-1\na="-1\n'),
        ("[general]\ninstanceIdleTimeout=-1\n", "[general]\ninstanceIdleTimeout=-1\n"),
        ('[general]\ninstanceIdleTimeout="-1"\n', '[general]\ninstanceIdleTimeout="-1"\n'),
    ],
)  # fmt: skip
def test_one_setting_is_changed_and_nothing_else(before: str, after: str) -> None:
    assert changed(before, **WANTED) == after


def test_what_was_experimental_is_changed_where_it_is() -> None:
    before = "[experimental]\nnetworkingMode=nat\n"
    assert changed(before, wsl2={"networkingMode": "mirrored"}) == before.replace("nat", "mirrored")


@pytest.mark.parametrize("text", ["[general]\nx=a\\", '[general]\nx="a\\', "[general]\r\ny=1\r\nx=a\\"])
def test_a_value_that_breaks_off_with_the_file_stays_left_out(text: str) -> None:
    """A newline behind its backslash would continue it."""
    after = wsl_settings.changed(text, {"wsl2": {"vmIdleTimeout": -1}}, windows=True)
    before = wsl_settings.read(text, windows=True)
    assert wsl_settings.read(after, windows=True) == {**before, "wsl2": {"vmidletimeout": "-1"}}
    assert wslconfig.parse(after) == {**wslconfig.parse(text), "wsl2.vmidletimeout": "-1"}
    assert wsl_settings.changed(after, {"wsl2": {"vmIdleTimeout": -1}}, windows=True) == after


def test_booleans_are_words() -> None:
    assert changed("[wsl2]\nfirewall=TRUE\n", wsl2={"firewall": True}) == "[wsl2]\nfirewall=TRUE\n"
    assert changed("[wsl2]\nfirewall=TRUE\n", wsl2={"firewall": False}) == "[wsl2]\nfirewall=false\n"


@pytest.mark.parametrize(
    "wanted",
    [{"a b": {"c": 1}}, {"a": {"b.c": 1}}, {"a": {"": 1}}, {"a": {"b": "x\ny"}}, {"a": {"b": [1]}}],
)
def test_what_cannot_be_meant_is_refused(wanted: dict[str, Any]) -> None:
    with pytest.raises(FoundError, match=r"Expected: (names|a value)"):
        changed("", **wanted)


line = st.one_of(
    st.sampled_from(
        ["[wsl2]", "[general]", " [General] # c", "[experimental]", "[general] x", "memory=8GB",
         "instanceIdleTimeout=5", "INSTANCEIDLETIMEOUT = \"7\" # c", "networkingMode=nat",
         "kernel=C:\\\\linux # \\", "a=b\\", "a=\"b # c\"",
         "instanceIdleTimeout=\"", "a=\\x", "# c", "", "=1", "1=2", "\u00e4=\u00f6"]
    ),
    st.text(st.sampled_from("aw[]=\"\\# \t\r1\u00e4"), max_size=12),
)  # fmt: skip
texts = st.tuples(
    st.sampled_from(["", "\ufeff"]), st.lists(line, max_size=8), st.sampled_from(["\n", "\r\n"]), st.booleans()
).map(lambda given: given[0] + given[2].join(given[1]) + (given[2] if given[3] else ""))
values = st.one_of(
    st.integers(-9, 9), st.booleans(), st.text(st.sampled_from('ab#"\\ 1\u00e4'), max_size=6),
)  # fmt: skip


@given(texts, st.sampled_from(["wsl2", "general"]), st.sampled_from(["networkingMode", "instanceIdleTimeout"]), values)
@example("a=b\\", "general", "instanceIdleTimeout", "#")
@example("[wsl2]\na=b\\", "wsl2", "networkingMode", 0)
def test_wsl_reads_the_new_value_and_all_others_as_before(text: str, section: str, key: str, value: Any) -> None:
    after = changed(text, **{section: {key: value}})
    told, known = wslconfig.parse(after.removeprefix("\ufeff")), wslconfig.parse(text.removeprefix("\ufeff"))
    name = f"{section}.{key}".lower()
    # What was experimental once counts where it stands.
    name = "experimental.networkingmode" if name == "wsl2.networkingmode" and name not in told else name
    assert told.pop(name).lower() == wsl_settings.written(value).lower()
    known.pop(name, None)
    assert {key: told.get(key) for key in known} == known
    assert after.startswith("\ufeff") == text.startswith("\ufeff")
    # Nothing of the user's is lost: without what was added or replaced, the text is what it was.
    assert changed(after, **{section: {key: value}}) == after
    if key.lower() not in text.lower():
        kept = iter(after)
        assert all(char in kept for char in text)


@example("[\ra=")
@example("[ab \rc=1")
@example("[1\rc=1\nd=2")
@given(texts)
def test_both_read_the_same(text: str) -> None:
    read = wsl_settings.read(text, windows=True)
    found = {f"{section}.{key}": value for section, keys in read.items() for key, value in keys.items()}
    assert found == wslconfig.parse(text.removeprefix("\ufeff"))


@given(texts, st.sampled_from(["wsl2", "general"]), st.sampled_from(["networkingMode", "instanceIdleTimeout"]))
def test_what_is_taken_out_is_gone_and_all_else_is_there(text: str, section: str, key: str) -> None:
    after = changed(text, **{section: {key: None}})
    told, known = wslconfig.parse(after.removeprefix("\ufeff")), wslconfig.parse(text.removeprefix("\ufeff"))
    gone = {f"{section}.{key}".lower()}
    if key == "networkingMode" and section == "wsl2":
        gone.add("experimental.networkingmode")
    assert told == {name: value for name, value in known.items() if name not in gone}


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
    assert wsl_settings.read(FILE, windows=False) == {
        "boot": {"systemd": "False", "command": 'service "a # b" start', "protectbinfmt": "true"},
        "network": {"hostname": "pc    two"},
    }


@pytest.mark.parametrize(
    ("settings", "old", "new"),
    [
        ({"boot": {"systemd": True}}, "= False ", "= true "),
        ({"network": {"hostname": "pc"}}, "pc \\\n   two\n", "pc\n"),
        ({"Boot": {"COMMAND": "x"}}, '"service \\"a # b\\" start" #', "x #"),
        ({"boot": {"command": "a # b"}}, '"service \\"a # b\\" start" #', '"a # b" #'),
        # A new key comes to the end of its section, wherever that was written last; a section to the end of the file.
        ({"boot": {"initTimeout": 5}}, "protectBinfmt=true", "protectBinfmt=true\ninitTimeout=5"),
        ({"network": {"generateHosts": False}}, "   two\n", "   two\ngenerateHosts=false\n"),
        ({"user": {"default": "bob"}}, "protectBinfmt=true", "protectBinfmt=true\n\n[user]\ndefault=bob\n"),
        ({"network": {"hostname": None}}, "hostname = pc \\\n   two\n", ""),
        ({"boot": {"protectBinfmt": None}}, "protectBinfmt=true", ""),
        ({"user": {"default": None}}, "", ""),
    ],
)
def test_what_is_not_named_stays(settings: dict[str, dict[str, Any]], old: str, new: str) -> None:
    assert old in FILE
    assert changed(FILE, **settings) == FILE.replace(old, new)


def test_a_key_is_taken_out_wherever_it_is() -> None:
    after = changed(FILE, boot={"systemd": None})
    assert after == "".join(line for line in FILE.splitlines(keepends=True) if "ystemd" not in line)


@pytest.mark.parametrize("found", ["true", "TRUE", '"true"', "  true\t# yes", "1"])
def test_what_says_the_same_is_not_touched(found: str) -> None:
    text = f"[boot]\nsystemd={found}\n"
    assert changed(text, boot={"systemd": True}) == text


def test_text_in_another_case_is_another_text() -> None:
    assert changed("[user]\ndefault=Bob\n", user={"default": "bob"}) == "[user]\ndefault=bob\n"


def test_a_text_without_a_line_gets_the_line_ends_that_were_asked_for() -> None:
    wanted = {"boot": {"systemd": True}}
    assert wsl_settings.changed("", wanted, windows=False) == "[boot]\nsystemd=true\n"
    assert wsl_settings.changed("[boot]", wanted, windows=False) == "[boot]\nsystemd=true"
    assert wsl_settings.changed("[boot]\r\n", wanted, windows=False) == "[boot]\r\nsystemd=true\r\n"


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
        # Read byte by byte: what Windows' editors write is not what WSL knows.
        ("\ufeff[boot]\nsystemd = true\n", (1, "\ufeff[boot]")),
        ("command = a \\\r\nb\r\n", (2, "b")),
        ("[boot]\r\nsystemd = true\r\n", None),
    ],
)
def test_where_wsl_stops_reading(text: str, invalid: tuple[int, str] | None) -> None:
    assert wsl_settings.first_invalid(text, windows=False) == invalid
