"""NVIDIA's spreadsheet of Xids is read as it is laid out: columns have their words, and empty cells are not there."""

from __future__ import annotations

import datetime
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import xids

MAIN = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
HEADER = ("Type \n(XID)", "Code", "Mnemonic", "Description", "H100", "Resolution Bucket \n(Immediate Action)")
DECODING = ("Xid", "Error Status (hex)", "Resolution Bucket \n(Data Center Recovery Action)")
ROWS = (
    ("XID", 79, "GPU_HAS_FALLEN_OFF_THE_BUS", "Unused & <old>", "Yes", "RESTART_BM"),
    ("XID", 46, "GPU_TIMEOUT_ERROR", "", "", "RESET_GPU"),
    ("XID", 162, "PSHC_REENGAGED", "", "Yes", ""),
    ("XID", 8, "IDLE_TIMEOUT", "", "", "RESET_GPU"),
    ("SXID", 12028, "EGRESS", "", "", "RESET_GPU"),
    ("XID", "TBD", "", "", "", "RESET_GPU"),
    ("", "", "The end.", "", "", ""),
)


def spreadsheet(path: Path, *sheets: Sequence[Sequence[str | int]]) -> Path:
    """Write these rows as Excel does: each text once, for all sheets, some in pieces."""
    texts: list[str] = []

    def cell(value: str | int, reference: str) -> str:
        if isinstance(value, int):
            return f'<c r="{reference}"><v>{value}</v></c>'
        if not value:
            return ""
        if value not in texts:
            texts.append(value)
        return f'<c r="{reference}" t="s"><v>{texts.index(value)}</v></c>'

    with zipfile.ZipFile(path, "w") as archive:
        for number, rows in enumerate(sheets, 1):
            written = "".join(
                "<row>" + "".join(cell(value, f"{'ABCDEF'[at]}{line}") for at, value in enumerate(row)) + "</row>"
                for line, row in enumerate(rows, 1)
            )
            body = f"<worksheet {MAIN}><sheetData>{written}</sheetData></worksheet>"
            archive.writestr(f"xl/worksheets/sheet{number}.xml", body)
        escaped = [text.replace("&", "&amp;").replace("<", "&lt;") for text in texts]
        items = "".join(f"<si><r><t>{text[:3]}</t></r><r><t>{text[3:]}</t></r></si>" for text in escaped)
        archive.writestr("xl/sharedStrings.xml", f"<sst {MAIN}>{items}</sst>")
    return path


def test_numbers_by_their_immediate_action(tmp_path: Path) -> None:
    path = spreadsheet(tmp_path / "Xid-Catalog.xlsx", [DECODING, ("144", "0x0", "RESET_GPU")], [HEADER, *ROWS])
    assert xids.immediate(path) == {"": [162], "RESET_GPU": [8, 46], "RESTART_BM": [79]}
    told = xids.text(path, datetime.date(2025, 10, 29))
    assert json.loads(told) == {"date": "2025-10-29", "immediate": xids.immediate(path)}
    assert '\n  "RESET_GPU": [8, 46],\n' in told


def test_columns_of_other_names_are_refused(tmp_path: Path) -> None:
    path = spreadsheet(tmp_path / "other.xlsx", [], [("Type", *HEADER[1:]), *ROWS])
    with pytest.raises(SystemExit, match=r"found no sheet in .*other\.xlsx whose first row has the columns Type "):
        xids.immediate(path)


def test_another_file_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "analyzing-xid-catalog.html"
    page.write_text("<html></html>", encoding="utf-8")
    with pytest.raises(SystemExit, match="found no sheet in "):
        xids.immediate(page)
