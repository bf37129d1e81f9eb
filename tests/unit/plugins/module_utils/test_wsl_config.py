# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What WSL reads of a changed configuration, as the double of its own reader does."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import wsl_config
from hypothesis import example, given
from hypothesis import strategies as st

from tests.simulator.windows import wslconfig

WANTED = {"general": {"instanceIdleTimeout": -1}}


def merged(text: str, **sections: dict[str, Any]) -> str:
    return wsl_config.merged(text, sections)


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
        # A line that WSL does not read sets nothing.
        ('[general]\ninstanceIdleTimeout="-1\n', '[general]\ninstanceIdleTimeout=-1\ninstanceIdleTimeout="-1\n'),
        ("[general]\ninstanceIdleTimeout=-1\n", "[general]\ninstanceIdleTimeout=-1\n"),
        ('[general]\ninstanceIdleTimeout="-1"\n', '[general]\ninstanceIdleTimeout="-1"\n'),
    ],
)  # fmt: skip
def test_one_setting_is_changed_and_nothing_else(before: str, after: str) -> None:
    assert wsl_config.merged(before, WANTED) == after


def test_what_was_experimental_is_changed_where_it_is() -> None:
    before = "[experimental]\nnetworkingMode=nat\n"
    assert merged(before, wsl2={"networkingMode": "mirrored"}) == before.replace("nat", "mirrored")


def test_booleans_are_words() -> None:
    assert merged("[wsl2]\nfirewall=TRUE\n", wsl2={"firewall": True}) == "[wsl2]\nfirewall=TRUE\n"
    assert merged("[wsl2]\nfirewall=TRUE\n", wsl2={"firewall": False}) == "[wsl2]\nfirewall=false\n"


@pytest.mark.parametrize(
    "wanted",
    [{"a b": {"c": 1}}, {"a": {"b.c": 1}}, {"a": {"": 1}}, {"a": {"b": "x\ny"}}, {"a": {"b": None}}, {"a": {"b": [1]}}],
)
def test_what_cannot_be_meant_is_refused(wanted: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"setting|value"):
        wsl_config.merged("", wanted)


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
def test_wsl_reads_the_new_value_and_all_others_as_before(text: str, section: str, key: str, value: Any) -> None:
    after = wsl_config.merged(text, {section: {key: value}})
    told, known = wslconfig.parse(after.removeprefix("\ufeff")), wslconfig.parse(text.removeprefix("\ufeff"))
    name = f"{section}.{key}".lower()
    # What was experimental once counts where it stands.
    name = "experimental.networkingmode" if name == "wsl2.networkingmode" and name not in told else name
    assert told.pop(name).lower() == wsl_config.written(value).lower()
    known.pop(name, None)
    assert {key: told.get(key) for key in known} == known
    assert after.startswith("\ufeff") == text.startswith("\ufeff")
    # Nothing of the user's is lost: without what was added or replaced, the text is what it was.
    assert wsl_config.merged(after, {section: {key: value}}) == after
    if name not in wslconfig.parse(text.removeprefix("\ufeff")):
        kept = iter(after)
        assert all(char in kept for char in text)


@given(texts)
def test_both_read_the_same(text: str) -> None:
    found: dict[str, str] = {}
    for each in wsl_config.settings(text):
        if each.key:
            found.setdefault(f"{each.section}.{each.key}", each.value)
    assert found == wslconfig.parse(text.removeprefix("\ufeff"))
