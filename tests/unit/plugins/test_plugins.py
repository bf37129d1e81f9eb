"""What holds for every file of plugins: records that nobody changes on their way, modules that are programs."""

from __future__ import annotations

import dataclasses
import importlib
import json
import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

PLUGINS = Path(__file__).resolve().parents[3] / "plugins"
# These collect answers.
COLLECT = {"Answers", "NodeVerdict", "_Child", "_Gathering", "_Seen", "_Watched"}


def modules() -> list[ModuleType]:
    name = "ansible_collections.gpufarm.core.plugins"
    folders = ("module_utils", "modules", "plugin_utils")
    paths = [path for folder in folders for path in sorted((PLUGINS / folder).rglob("[!_]*.py"))]
    return [
        importlib.import_module(".".join([name, *path.relative_to(PLUGINS).with_suffix("").parts])) for path in paths
    ]


def test_records_are_frozen() -> None:
    records: dict[str, Any] = {
        value.__name__: value
        for module in modules()
        for value in vars(module).values()
        if dataclasses.is_dataclass(value) and isinstance(value, type)
    }
    assert len(records) > 20
    assert {name for name, record in records.items() if not record.__dataclass_params__.frozen} == COLLECT


@pytest.mark.parametrize("path", sorted((PLUGINS / "modules").glob("[!_]*.py")), ids=lambda path: path.stem)
def test_every_module_is_a_program(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with patch_module_args({"no_such_option": 1}), pytest.raises(SystemExit):
        runpy.run_path(str(path), run_name="__main__")
    assert json.loads(capsys.readouterr().out)["failed"]
