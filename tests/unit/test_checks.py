"""docs/checks.md names only what is there: codes of problems, modules, roles, variables, options and playbooks.

And it has all that its four lists have, which is in C(checks.yml).
"""

from __future__ import annotations

import re

import pytest
import yaml
from ansible_collections.gpufarm.core.plugins.module_utils import health
from ansible_collections.gpufarm.core.plugins.module_utils.health.problems import NUMBERED, PROBLEMS
from ansible_collections.gpufarm.core.plugins.module_utils.xid import WARNING
from ansible_collections.gpufarm.core.plugins.modules import nomad_gpu_verify, nvidia_gpu_benchmark, nvidia_gpu_health

from tests.simulator.cache import ROOT

HEAD = "| Check | List | Codes | By |"
LEFT_OUT = "| Check | List | Why |"


def rows(head: str) -> list[list[str]]:
    """Return the cells of the tables with this head."""
    found = []
    for table in (ROOT / "docs/checks.md").read_text(encoding="utf-8").split(head)[1:]:
        lines = table.strip().partition("\n\n")[0].splitlines()[1:]
        found += [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return found


ROWS = rows(HEAD)


def names(cell: str) -> list[str]:
    found = re.findall(r"`([^`]+)`", cell)
    assert not re.sub(r"`[^`]+`|\s", "", cell), cell
    return found


def known() -> set[str]:
    """Return what a check can be done by."""
    modules = {path.stem for path in (ROOT / "plugins/modules").glob("*.py")}
    playbooks = {path.stem for path in (ROOT / "playbooks").glob("*.yml")}
    roles = {path.parents[1].name for path in (ROOT / "roles").glob("*/tasks/main.yml")}
    specs = [yaml.safe_load(path.read_text()) for path in (ROOT / "roles").glob("*/meta/argument_specs.yml")]
    variables = {
        name for spec in specs for entry in spec["argument_specs"].values() for name in entry.get("options", {})
    }
    sources = [module.DOCUMENTATION for module in (nvidia_gpu_health, nvidia_gpu_benchmark)]
    options = {name for text in sources for name in yaml.safe_load(text)["options"]}
    return modules | playbooks | roles | variables | options


def test_there_are_rows_of_both_kinds() -> None:
    assert len(ROWS) > 30 and all(len(row) == 4 for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_what_a_row_names_is_there(row: list[str]) -> None:
    notes = " ".join(yaml.safe_load(nomad_gpu_verify.DOCUMENTATION)["notes"])
    for code in names(row[2]):
        whole = re.sub(r"<(number|system)>", lambda match: {"number": "1", "system": "pcie"}[match[1]], code)
        assert whole in health.PROBLEMS or NUMBERED.match(whole) or f"C({code})" in notes, code
    assert names(row[3]) and set(names(row[3])) <= known() | {"gpu_node_gpus"}, row[3]


def test_no_problem_of_a_gpu_is_missing() -> None:
    told = {code for row in ROWS for code in names(row[2])}
    # That nvidia-smi gives no answer has many reasons, of which the table names some.
    silent = {"not_installed", "no_devices", "crashed", "unsupported", "invalid_output", "unknown_error"}
    assert set(health.PROBLEMS) - told == silent


def test_each_point_of_the_lists_has_its_row_and_each_row_a_point() -> None:
    """Whoever reads a list again enters what is new there, and this asks for a row."""
    lists = yaml.safe_load((ROOT / "tests/unit/checks.yml").read_text(encoding="utf-8"))
    asked = {
        (letter, row)
        for letter, points in lists.items()
        for named in points.values()
        for row in ([named] if isinstance(named, str) else named)
    }
    told = {(letter, row[0]) for row in [*ROWS, *rows(LEFT_OUT)] for letter in row[1].split()}
    assert (sorted(asked - told), sorted(told - asked)) == ([], [])


def test_what_does_not_close_a_node_while_its_gpu_works_is_named() -> None:
    text = (ROOT / "docs/checks.md").read_text(encoding="utf-8")
    (told,) = re.findall(r"^A GPU that fails closes the node.*?\n\n", text, re.MULTILINE | re.DOTALL)
    warnings = {code for code, kind in PROBLEMS.items() if code.startswith("benchmark_") and kind.severity == WARNING}
    assert set(re.findall(r"`(benchmark_\w+)`", told)) == warnings and len(warnings) > 1
