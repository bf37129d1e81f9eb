"""``python -m tests.xids SPREADSHEET DATE``: NVIDIA's immediate action for each Xid.

The spreadsheet is Xid-Catalog.xlsx of docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, and the date the
day on which it was there. What is printed is unit/plugins/fixtures/xid/immediate.json, by which the catalogue in
plugins/module_utils/xid.py is tested: where a new one makes tests fail, NVIDIA has changed what is to be judged there.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import re
import sys
import xml.etree.ElementTree as ET
import zipfile
from collections import defaultdict
from pathlib import Path

KIND, NUMBER, ACTION = "Type (XID)", "Code", "Resolution Bucket (Immediate Action)"
_MAIN = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"


def _text(element: ET.Element) -> str:
    return " ".join("".join(part.text or "" for part in element.iter(f"{_MAIN}t")).split())


def _rows(archive: zipfile.ZipFile, sheet: str, shared: list[str]) -> list[dict[str, str]]:
    """The cells of each row by the letters of their columns; an empty cell is not there."""
    rows = []
    for row in ET.fromstring(archive.read(sheet)).iter(f"{_MAIN}row"):  # noqa: S314  (of the person who runs it)
        cells = {}
        for cell in row.iter(f"{_MAIN}c"):
            value = cell.findtext(f"{_MAIN}v") or ""
            text = shared[int(value)] if cell.get("t") == "s" else value or _text(cell)
            cells[re.sub("[0-9]", "", cell.attrib["r"])] = text
        rows.append(cells)
    return rows


def immediate(spreadsheet: Path) -> dict[str, list[int]]:
    """The numbers of each immediate action; of the empty one those for which there is none yet."""
    sheets: list[list[dict[str, str]]] = []
    # Whatever else it is, as the page on which it is offered, has no sheet.
    with contextlib.suppress(zipfile.BadZipFile, KeyError), zipfile.ZipFile(spreadsheet) as archive:
        shared = [_text(item) for item in ET.fromstring(archive.read("xl/sharedStrings.xml"))]  # noqa: S314  (as above)
        names = sorted(name for name in archive.namelist() if name.startswith("xl/worksheets/sheet"))
        sheets = [_rows(archive, name, shared) for name in names]
    for rows in sheets:
        columns = {text: column for column, text in (rows or [{}])[0].items()}
        if {KIND, NUMBER, ACTION} <= columns.keys():
            break
    else:
        sys.exit(
            f"xids: found no sheet in {spreadsheet} whose first row has the columns {KIND}, {NUMBER} and {ACTION}. "
            "Expected: NVIDIA's Xid-Catalog.xlsx. Next step: look whether NVIDIA names its columns otherwise now."
        )
    actions = defaultdict(list)
    for row in rows:
        number = row.get(columns[NUMBER], "")
        if row.get(columns[KIND]) == "XID" and number.isdigit():
            actions[row.get(columns[ACTION], "")].append(int(number))
    return {action: sorted(numbers) for action, numbers in sorted(actions.items())}


def text(spreadsheet: Path, date: datetime.date) -> str:
    actions = [f"  {json.dumps(action)}: {json.dumps(numbers)}" for action, numbers in immediate(spreadsheet).items()]
    return f'{{\n "date": "{date}",\n "immediate": {{\n' + ",\n".join(actions) + "\n }\n}\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="xids", description="NVIDIA's immediate action for each Xid")
    parser.add_argument("spreadsheet", type=Path)
    parser.add_argument("date", type=datetime.date.fromisoformat)
    given = parser.parse_args()
    sys.stdout.write(text(given.spreadsheet, given.date))
