# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What people and programs are told, word for word, in files that are read when they change.

    GPUFARM_RECORD=1 python -m pytest tests/unit/plugins -k recorded

writes them anew; what then differs is the change to be judged.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "recorded"


def assert_recorded(name: str, found: Any) -> None:
    path = FOLDER / f"{name}.json"
    plain = json.loads(json.dumps(found))
    if os.environ.get("GPUFARM_RECORD"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(plain, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    assert plain == json.loads(path.read_text(encoding="utf-8"))
