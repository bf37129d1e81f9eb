"""Every command that README and docs print is run by a test, as it is printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulator.cache import ROOT
from tests.testinfra import printed

PRINTED = [
    (document, command)
    for document in printed.DOCUMENTS
    for kind, text in printed.fences(document)
    if kind == "sh"
    for command in printed.commands(text)
]
BIN = ".venv/bin"
# What make's targets run. `make demo` and `make test` inside `make test` would build a second farm and never end; what
# they call is run by the suite itself: the demo's steps by the scenario farm, run.sh by whoever reads this result.
TARGETS = {
    "setup": "",
    "demo": f"{BIN}/python -m tests.simulator.demo up",
    "demo-down": f"{BIN}/python -m tests.simulator.demo down",
    "test": f"sh tests/run.sh {BIN}",
    "lint": f"sh tests/lint.sh {BIN}",
    "bench": f"PYTHON={BIN}/python sh tests/bench/run.sh",
}


def test_every_fenced_block_says_what_it_is() -> None:
    for document in printed.DOCUMENTS:
        for kind, text in printed.fences(document):
            assert kind in {"sh", "text", "yaml"}, f"{document.name}: {text}"


@pytest.mark.parametrize(("document", "command"), PRINTED, ids=[command for _document, command in PRINTED])
def test_every_printed_command_is_run_by_a_test(document: Path, command: str) -> None:
    places = [place for pattern, place in printed.RUN_BY.items() if re.fullmatch(pattern, command)]
    assert places, f"{document.name} prints `{command}`, which no test runs. Next step: run it, say where in RUN_BY."
    assert (ROOT / places[0]).is_file()


@pytest.mark.parametrize("document", [*printed.DOCUMENTS, ROOT / "examples/jobs/README.md"], ids=lambda path: path.name)
def test_every_link_to_a_part_of_a_document_leads_there(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", document.read_text(encoding="utf-8"))
    broken = [(path, part) for path, part in links if part not in parts(document.parent / path if path else document)]
    assert broken == []


def parts(document: Path) -> list[str]:
    """Return what links call the parts of a document."""
    heads = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads]


@pytest.mark.parametrize("target", [match[1] for _, line in PRINTED if (match := re.fullmatch(r"make (\S+)", line))])
def test_make_runs_what_the_suite_runs(target: str) -> None:
    said = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", target], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert TARGETS[target] in said
    module = re.search(r"-m (\S+) (\S+)", TARGETS[target])
    if module:
        described = subprocess.run(
            [sys.executable, "-m", module[1], "--help"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        assert module[2] in described


@pytest.mark.parametrize(
    "command", sorted(set(re.findall(r"`(ansible-doc [^`]+)`", (ROOT / "README.md").read_text(encoding="utf-8"))))
)
def test_documentation_is_printed(command: str) -> None:
    program, *words = command.split()
    said = subprocess.run(
        [str(Path(sys.executable).with_name(program)), *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr
    assert words[-1] in said.stdout
