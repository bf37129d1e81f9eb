# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import wsl
from hypothesis import given, settings
from hypothesis import strategies as st

ENCODINGS = ("utf-8", "utf-8-sig", "utf-16-le", "utf-16-be", "utf-16")
LINE_ENDS = ("\n", "\r\n", "\r\r\n")
# English is in the source; the others are what closed in-box builds may print.
HEADERS = (
    ("NAME", "STATE", "VERSION"),
    ("NAME", "STATUS", "VERSION"),
    ("名称", "状态", "版本"),
    ("NOM", "ÉTAT", "VERSION"),
    ("ИМЯ", "СОСТОЯНИЕ", "ВЕРСИЯ"),
)
# The texts of localization/strings of microsoft/WSL, and the usage that old builds print (tailscale#3170).
NO_DISTRIBUTION = (
    "Windows Subsystem for Linux has no installed distributions.\n"
    "You can resolve this by installing a distribution with the instructions below:\n\n"
    "Use 'wsl.exe --list --online' to list available distributions\nand 'wsl.exe --install <Distro>' to install.\n",
    "Windows-Subsystem für Linux verfügt über keine installierten Distributionen.\n"
    "Sie können dies beheben, indem Sie eine Distribution mit den folgenden Anweisungen installieren:\n",
    "适用于 Linux 的 Windows 子系统没有已安装的分发。\n可按照以下说明安装分发来解决此问题:\n",
    "\nCopyright (c) Microsoft Corporation. Tous droits réservés.\n\nUtilisation : wsl.exe [Argument]\n\n"
    "Arguments :\n\n    --install <Options>\n        Installez le sous-système Windows pour Linux, version 2\n",
    "System Windows nie może uzyskać dostępu do pliku.\n",
    "",
    "\n\n",
)


def table(rows: list[dict[str, Any]], header: tuple[str, str, str] = HEADERS[0]) -> str:
    """Return what wsl.exe prints: its format string is `%s %-(longest + 4)s%-16s%s`."""
    width = max(4, *(len(row["name"]) for row in rows)) + 4 if rows else 8
    lines = [(" ", *header), *(("*" if r["default"] else " ", r["name"], r["state"], str(r["version"])) for r in rows)]
    return "".join(f"{mark} {name:<{width}}{state:<16}{version}\n" for mark, name, state, version in lines)


def row(name: str, state: str = "Stopped", version: int = 2, default: bool = False) -> dict[str, Any]:
    return {"name": name, "state": state, "version": version, "default": default}


LAB = [row("Ubuntu-24.04", "Running", default=True), row("docker-desktop"), row("legacy_1", "Converting", 1)]
rows_of_a_host = st.lists(
    st.builds(
        row,
        st.text("aZ0._-", min_size=1, max_size=20),
        # The last two are no state of the open source: a closed build may have translated them.
        st.sampled_from((*wsl.STATES, "Wird ausgeführt", "已停止")),
        st.sampled_from((1, 2)),
    ),
    min_size=1,
    max_size=8,
).map(lambda rows: [{**rows[0], "default": True}, *rows[1:]])


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("line_end", LINE_ENDS)
@pytest.mark.parametrize("header", HEADERS)
def test_every_encoding_line_ending_and_header(encoding: str, line_end: str, header: tuple[str, str, str]) -> None:
    raw = table(LAB, header).replace("\n", line_end).encode(encoding)
    assert wsl.parse_distribution_list(raw) == LAB


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("line_end", LINE_ENDS)
@pytest.mark.parametrize("text", NO_DISTRIBUTION)
def test_a_text_without_a_row_is_an_empty_list(encoding: str, line_end: str, text: str) -> None:
    assert wsl.parse_distribution_list(text.replace("\n", line_end).encode(encoding)) == []


def test_a_header_alone_is_an_empty_list() -> None:
    assert wsl.parse_distribution_list(table([]).encode("utf-16-le")) == []


def test_a_consoles_code_page_does_not_hide_rows() -> None:
    raw = table(LAB, ("NAME", "ÉTAT", "VERSION")).encode("cp850")
    assert wsl.parse_distribution_list(raw) == LAB


def test_a_warning_before_the_list_is_no_row() -> None:
    raw = f"wsl: A localhost proxy was detected but not mirrored into WSL 2\n{table(LAB)}".encode()
    assert wsl.parse_distribution_list(raw) == LAB


def test_a_list_of_which_somebody_has_cut_the_blanks_around_it() -> None:
    assert wsl.parse_distribution_list(table(LAB).strip().encode()) == LAB
    assert wsl.parse_distribution_list(table(LAB).split("\n", 1)[1].encode()) == LAB


@pytest.mark.parametrize(
    "damaged",
    [
        "* Ubuntu    Running",
        "* Ubuntu    Running         x",
        "* Ubuntu    Running         2 2x",
        "* Ubuntu            2",
        "  Übuntu    Running         2",
        "  a b       Running         ",
        "Ubuntu    Running         2",
        "   Ubuntu    Running         2",
        "* \0buntu    Running         2",
        "Error code: Wsl/Service/E_UNEXPECTED",
        "NAME      STATE           VERSION",
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le"])
def test_a_damaged_row_is_an_error_and_never_half_a_list(damaged: str, encoding: str) -> None:
    before = table([row("a", default=True), row("b")])
    with pytest.raises(wsl.DamagedListError) as error:
        wsl.parse_distribution_list(f"{before}{damaged}\n".encode(encoding))
    assert "a line that is none of its rows" in str(error.value)
    with pytest.raises(wsl.DamagedListError):
        wsl.parse_distribution_list(f"{table([])}{damaged}\n{before.splitlines()[2]}\n".encode(encoding))


def test_a_damaged_default_is_an_error_without_a_header() -> None:
    with pytest.raises(wsl.DamagedListError):
        wsl.parse_distribution_list(b"* Ubuntu  Running\n")


def test_two_defaults_are_damage() -> None:
    with pytest.raises(wsl.DamagedListError, match="more than one default"):
        wsl.parse_distribution_list(table([row("a", default=True), row("b", default=True)]).encode())


def test_text_that_ends_inside_a_character_is_damage() -> None:
    with pytest.raises(wsl.DamagedListError, match="inside a character at byte"):
        wsl.parse_distribution_list(table(LAB).encode("utf-16-le")[:-1])


@settings(max_examples=200, deadline=None)
@given(rows_of_a_host, st.sampled_from(ENCODINGS), st.sampled_from(LINE_ENDS), st.sampled_from(HEADERS))
def test_what_wsl_prints_is_read_back(
    rows: list[dict[str, Any]], encoding: str, line_end: str, header: tuple[str, str, str]
) -> None:
    raw = table(rows, header).replace("\n", line_end).encode(encoding)
    assert wsl.parse_distribution_list(raw) == rows


@settings(max_examples=300, deadline=None)
@given(rows_of_a_host, st.data())
def test_a_list_cut_anywhere_is_whole_rows_or_the_exception(rows: list[dict[str, Any]], data: st.DataObject) -> None:
    encoding = data.draw(st.sampled_from(("utf-8", "utf-16-le")))
    raw = table(rows).encode(encoding)
    try:
        found = wsl.parse_distribution_list(raw[: data.draw(st.integers(0, len(raw)))])
    except wsl.DamagedListError:
        return
    assert found == rows[: len(found)]


@settings(max_examples=300, deadline=None)
@given(rows_of_a_host, st.data())
def test_a_line_that_is_damaged_is_never_left_out(rows: list[dict[str, Any]], data: st.DataObject) -> None:
    lines = table(rows).splitlines()
    index = data.draw(st.integers(1, len(rows)))
    at = data.draw(st.integers(0, len(lines[index].rstrip()) - 1))
    lines[index] = lines[index][:at] + data.draw(st.characters(exclude_characters="\r\n")) + lines[index][at + 1 :]
    try:
        found = wsl.parse_distribution_list("\n".join(lines).encode("utf-16-le", "surrogatepass"))
    except wsl.DamagedListError:
        return
    assert len(found) == len(rows)


@settings(max_examples=300, deadline=None)
@given(rows_of_a_host, st.sampled_from(("utf-8", "utf-16-le")), st.sampled_from(("\n", "\r\n")), st.data())
def test_a_lost_or_changed_byte_loses_no_row(
    rows: list[dict[str, Any]], encoding: str, line_end: str, data: st.DataObject
) -> None:
    raw = table(rows).replace("\n", line_end).encode(encoding)
    at = data.draw(st.integers(0, len(raw) - 1))
    damaged = raw[:at] + data.draw(st.binary(max_size=2)) + raw[at + 1 :]
    try:
        found = wsl.parse_distribution_list(damaged)
    except wsl.DamagedListError:
        return
    assert len(found) == len(rows)


@pytest.mark.parametrize("default", [True, False])
def test_a_header_that_runs_into_a_row_with_a_long_state_is_damage(default: bool) -> None:
    raw = table([{"name": "0", "state": "Wird ausgef\xfchrt", "version": 1, "default": default}])
    with pytest.raises(wsl.DamagedListError):
        wsl.parse_distribution_list(raw.replace("\n", "", 1).encode())


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_a_list_or_the_exception(raw: bytes) -> None:
    try:
        rows = wsl.parse_distribution_list(raw)
    except wsl.DamagedListError:
        return
    for found in rows:
        assert set(found) == {"name", "state", "version", "default"}
        assert wsl.NAME.fullmatch(found["name"])
        assert isinstance(found["version"], int)
        assert isinstance(found["default"], bool)
    assert wsl.readable(raw).isprintable() or not wsl.readable(raw)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("line_end", LINE_ENDS)
def test_names_alone(encoding: str, line_end: str) -> None:
    raw = f"Ubuntu{line_end}docker-desktop{line_end}".encode(encoding)
    assert wsl.parse_names(raw) == ["Ubuntu", "docker-desktop"]
    assert wsl.parse_names(b"") == []


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("There is no distribution.\nError code: Wsl/Service/WSL_E_DISTRO_NOT_FOUND\n", True),
        ("Es ist keine Distribution vorhanden.\nFehlercode: Wsl/Service/WSL_E_DISTRO_NOT_FOUND\n", True),
        ("不存在具有所提供名称的分发。\n错误代码: Wsl/Service/WSL_E_DISTRO_NOT_FOUND\n", True),
        ("错误代码\uff1aWsl/Service/WSL_E_DISTRO_NOT_FOUND\n", True),
        ("see Wsl/Service/WSL_E_DISTRO_NOT_FOUND for more", False),
        ("/home/me/Wsl/Service", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le"])
def test_the_code_of_an_error_in_every_language(text: str, code: bool, encoding: str) -> None:
    expected = "Wsl/Service/WSL_E_DISTRO_NOT_FOUND" if code else None
    assert wsl.error_code(text.encode(encoding)) == expected


def test_what_is_shown_is_one_line_without_what_steers_a_terminal() -> None:
    assert wsl.readable("a\x1b[31m\r\nb\r\n".encode("utf-16-le")) == "a [31m b"
    assert wsl.readable(b"a\0b") == "ab"
