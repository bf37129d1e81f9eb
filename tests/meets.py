"""Which unit tests meet which lines of plugins/; for ``make mutants``, and as its pytest plugin.

As a plugin, with GPUFARM_MEETS=FOLDER, it records there for each test the lines that run in pytest's own process, the
files of plugins/ that the programs open which the test starts, and the seconds that it takes. With
GPUFARM_CHOSEN=FILE only the tests that the file names run, in its order.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).resolve().parents[1]
# The tests of what holds for every file of plugins/.
OF_ALL = "tests/unit/plugins/test_plugins.py::"
# With the GPU double are the tests of what needs a GPU.
TESTS = ["tests/unit/plugins", "tests/unit/playbooks", "tests/unit/roles", "tests/unit/simulator/gpu"]
# Python imports this in everything that a test starts; pytest tells each program the test's name.
SITECUSTOMIZE = """
import os, sys
def note(event, values):
    if event == "open" and "PYTEST_CURRENT_TEST" in os.environ:
        path = str(values[0])
        if "/plugins/" in path and path.endswith((".py", ".pyc")):
            file = os.open(os.environ["GPUFARM_MEETS"] + "/opened", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, (os.environ["PYTEST_CURRENT_TEST"].rsplit(" ", 1)[0] + "\\t" + path + "\\n").encode())
            os.close(file)
sys.addaudithook(note)
"""


@dataclass(frozen=True)
class Meetings:
    """The tests that meet plugins/, by the path of a file there."""

    lines: dict[str, dict[int, set[str]]]
    opened: dict[str, set[str]]
    seconds: dict[str, float]

    @classmethod
    def recorded(cls, folder: Path) -> Meetings:
        """Run every unit test once, in the checkout, and keep the records in a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sitecustomize.py").write_text(SITECUSTOMIZE, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.meets", "-n", "2", "--dist", "loadfile", *TESTS]
        environment = {**os.environ, "GPUFARM_PLAIN": "1", "GPUFARM_MEETS": str(folder), "PYTHONPATH": str(folder)}
        ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if ran.returncode:
            sys.exit(f"{ran.stdout}\nmutants: expected unit tests that pass, found the above. Next step: make test")
        return cls.read(folder)

    @classmethod
    def read(cls, folder: Path) -> Meetings:
        """Read what was recorded in a folder."""
        lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        data = coverage.CoverageData(basename=str(folder / "all"))
        for part in folder.glob("lines.*"):
            other = coverage.CoverageData(basename=str(part))
            other.read()
            data.update(other)
        for path in data.measured_files():
            for number, tests in data.contexts_by_lineno(path).items():
                lines[str(Path(path).relative_to(ROOT))][number].update(filter(None, tests))
        opened: dict[str, set[str]] = defaultdict(set)
        for line in set((folder / "opened").read_text(encoding="utf-8").splitlines()):
            test, path = line.split("\t")
            inside = path.rpartition("/plugins/")[2].replace("/__pycache__", "")
            opened[f"plugins/{inside.partition('.')[0]}.py"].add(test)
        seconds: dict[str, float] = defaultdict(float)
        for line in (folder / "seconds").read_text(encoding="utf-8").splitlines():
            test, duration = line.rsplit("\t", 1)
            seconds[test] += float(duration)
        return cls(lines, opened, seconds)

    def of(self, path: str, line: int) -> list[str]:
        """Return the tests that meet a line: those that run it, then those that open its file; quick files first."""
        here = self.lines.get(path, {})
        lines, imported = _statement(path, line)
        running = set().union(*(here.get(number, set()) for number in lines))
        if imported or not running:
            # Every test may notice that runs anything of the file, and those that compare its tables with records.
            recorded = {test for test in self.seconds if "recorded" in test.rpartition("::")[2]}
            running = recorded.union(*here.values())
        running = running | {test for test in self.seconds if test.startswith(OF_ALL)}
        return [*self._quick_first(running), *self._quick_first(self.opened.get(path, set()) - running)]

    def _quick_first(self, tests: set[str]) -> list[str]:
        by_file: dict[str, list[str]] = defaultdict(list)
        for test in sorted(tests & self.seconds.keys(), key=self.seconds.__getitem__):
            by_file[test.partition("::")[0]].append(test)
        files = sorted(by_file.values(), key=lambda names: sum(self.seconds[name] for name in names))
        return [name for names in files for name in names]


def _statement(path: str, line: int) -> tuple[range, bool]:
    """Return the lines of the innermost statement at a line, without those of a body, and whether an import runs it."""
    found, imported = range(line, line + 1), True
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = body[0].lineno if body else (node.end_lineno or node.lineno) + 1
            # Walked from outside to inside, the last one is the innermost.
            if node.lineno <= line < max(end, node.lineno + 1):
                found = range(node.lineno, end)
            if isinstance(node, ast.FunctionDef) and node.body[0].lineno <= line <= (node.end_lineno or line):
                imported = False
    return found, imported


class Recorder:
    """The pytest plugin that records."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.coverage = coverage.Coverage(
            data_file=f"{folder}/lines", data_suffix=True, include=[f"{ROOT}/plugins/*"], messages=False
        )
        # A GPU is measured in a process of its own, which the test's process forks and which ends without its leave.
        self.coverage.set_option("run:patch", ["_exit"])
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        result = yield
        self.coverage.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        with Path(f"{self.folder}/seconds").open("a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}\t{report.duration}\n")

    def pytest_unconfigure(self) -> None:
        self.coverage.stop()
        self.coverage.save()


def pytest_configure(config: pytest.Config) -> None:
    # pytest-xdist's workers run the tests.
    if "GPUFARM_MEETS" in os.environ and hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(os.environ["GPUFARM_MEETS"]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "GPUFARM_CHOSEN" in os.environ:
        names = Path(os.environ["GPUFARM_CHOSEN"]).read_text(encoding="utf-8").splitlines()
        order = {name: place for place, name in enumerate(names)}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])
