"""The suite's conftest: what is left out is told, and red in continuous integration, and long tests begin first."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests import conftest
from tests.conftest import in_order, of_this_run
from tests.unit.patience import PATIENCE_S, wait_for

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_{name}(number):
    if number:
        pytest.skip("no frobnicator here")
"""


def run(folder: Path, name: str, ci: str | None, *options: str) -> tuple[int, str]:
    (folder / "test_sample.py").write_text(SKIPPED.format(name=name), encoding="utf-8")
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in {"CI", "GPUFARM_GENERATION"} and not key.startswith("PYTEST_")
    }
    if ci is not None:
        environment["CI"] = ci
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "--confcutdir", str(folder), "-p", "tests.conftest", *options, str(folder)],
        cwd=folder, env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return result.returncode, result.stdout + result.stderr


SHARED = ("-n", "2")


@pytest.mark.parametrize(
    ("ci", "code", "options"),
    [(None, 0, ()), (None, 0, SHARED), ("false", 0, ()), ("true", 1, SHARED), ("1", 1, ())],
)
def test_a_skip_that_nobody_expects_is_red_in_ci_only(
    tmp_path: Path, ci: str | None, code: int, options: tuple[str, ...]
) -> None:
    returned, output = run(tmp_path, "nobody_knows", ci, *options)
    assert returned == code, output
    assert "left out: 2 tests (no frobnicator here), the first: test_sample.py::test_nobody_knows[1]" in output
    assert ("CI: 2 tests were left out." in output) is bool(code)
    assert "left out: 2" in "".join(output.splitlines()[-4:])


def test_an_expected_skip_is_told_and_green(tmp_path: Path) -> None:
    returned, output = run(tmp_path, "devices_are_made_from_the_profile", "true")
    assert returned == 0, output
    assert "left out: 2 tests (no frobnicator here)" in output


def test_what_was_left_out_before_is_told_and_the_summary_is_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUFARM_LEFT_OUT", "left out: something before")
    _returned, output = run(tmp_path, "nobody_knows", None)
    assert "left out: something before\n" in output
    assert "1 passed, 2 skipped" in output.splitlines()[-1]


ORDERED = """
import os
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range({tests}))
def test_{name}(number):
    said = Path(os.environ["GPUFARM_BUILT"])
    with said.with_name("order").open("a") as order:
        order.write("{name} ")
    if "{name}" == "unit" and number == 4:
        said.touch()
"""


def test_what_needs_artefacts_waits_for_them_and_then_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUFARM_BUILT", str(tmp_path / "built"))
    for folder, name, tests in (("scenarios", "scenario", 2), ("unit", "unit", 60)):
        path = tmp_path / "tests" / folder / f"test_{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text(ORDERED.format(name=name, tests=tests), encoding="utf-8")
    returned, output = run(tmp_path, "nobody_knows", None, "-n", "1", "--maxschedchunk", "1", "-k", "unit or scenario")
    assert returned == 0, output
    order = (tmp_path / "order").read_text(encoding="utf-8").split()
    # One that a process has got already comes before.
    assert [number for number, name in enumerate(order) if name == "scenario"] in ([5, 7], [6, 8], [7, 9])
    assert len(order) == 62


HANGS = """
import time

def test_that_ends():
    pass

def test_that_hangs():
    time.sleep(600)
"""
# Once who tells of all tests knows that it has begun.
INTERRUPTED = """
import os
import signal
import pytest

@pytest.hookimpl(trylast=True)
def pytest_runtest_logstart(nodeid):
    if "hangs" in nodeid and "PYTEST_XDIST_WORKER" not in os.environ:
        # Where this is run behind a shell that goes on, an interrupt is ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize("options", [(), ("-n", "1")])
def test_an_interrupt_tells_what_did_not_end(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "test_other.py").write_text(HANGS, encoding="utf-8")
    (tmp_path / "conftest.py").write_text(INTERRUPTED, encoding="utf-8")
    returned, output = run(tmp_path, "nobody_knows", "true", *options, "--durations", "1", "-k", "that")
    assert returned, output
    # The end of a long output is what is kept.
    assert "not ended: test_other.py::test_that_hangs after" in output.rpartition("slowest durations")[2]
    assert "not ended: test_other.py::test_that_ends" not in output


def test_a_scenario_that_did_not_end_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "farms/gpufarm-farm/logs/molecule-test.log"
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"line {number}\n" for number in range(9)), encoding="utf-8")
    monkeypatch.setenv("GPUFARM_CACHE", str(tmp_path))
    monkeypatch.setattr(
        conftest, "RUNNING", {f"test_scenario[{name}]": time.monotonic() - 60 for name in ("farm", "x")}
    )
    farm, *lines, other = conftest.not_ended()
    assert re.fullmatch(r"not ended: test_scenario\[farm\] after \d{2,} s", farm)
    assert lines == ["line 4", "line 5", "line 6", "line 7", "line 8"]
    assert other.startswith("not ended: test_scenario[x] after")


def test_a_failure_stays_a_failure(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("def test_it():\n    assert False\n", encoding="utf-8")
    returned, output = run(tmp_path, "nobody_knows", "true")
    assert returned == 1
    assert "1 failed" in output


@pytest.mark.parametrize(("ci", "code"), [(None, 0), ("false", 0), ("true", 1)])
def test_a_second_python_that_is_missing_is_told_and_red_in_ci(tmp_path: Path, ci: str | None, code: int) -> None:
    for tool in ("sh", "sed"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or tool)
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path), **({"CI": ci} if ci else {})}
    result = subprocess.run(
        ["/bin/sh", "tests/other-generation.sh", str(Path(sys.executable).parent)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == code, result.stdout + result.stderr
    assert result.stdout.startswith("left out: the unit tests on a second Python")


# What run.sh starts, with nothing of it done.
STARTED = """#!/bin/sh
case "$*" in
"-m tests.simulator.farm build") {build} ;;
"-m tests.simulator.farm down"*) echo "$4" >>down ;;
"-m pytest"*) {pytest} ;;
esac
"""


def make_test(folder: Path, lint: str, build: str = ":", pytest: str = ":") -> subprocess.Popen[str]:
    for name, text in {
        "tests/run.sh": (ROOT / "tests/run.sh").read_text(encoding="utf-8"),
        "tests/lint.sh": f"echo the linters; {lint}\n",
        "tests/other-generation.sh": "echo the other generation\n",
        "molecule/common/molecule.yml": "",
        "python": STARTED.format(build=build, pytest=pytest),
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "python").chmod(0o755)
    return subprocess.Popen(
        # Which may be ignored here, and then a shell cannot trap it.
        ["env", "--default-signal=INT", "/bin/sh", "tests/run.sh", str(folder)],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def is_over(status: Path) -> bool:
    """Whether a process has ended; whatever adopts it may not have seen that."""
    try:
        return "State:\tZ" in status.read_text(encoding="utf-8")
    except OSError:
        return True


HANGING = "echo $$ >>began; exec sleep 600"


@pytest.mark.parametrize("where", [{"lint": HANGING}, {"lint": ":", "build": HANGING, "pytest": HANGING}])
def test_a_run_that_is_interrupted_tells_what_it_has_and_leaves_nothing(tmp_path: Path, where: dict[str, str]) -> None:
    hanging = list(where.values()).count(HANGING)
    began, told = tmp_path / "began", tmp_path / ".cache/other-generation.log"

    def goes() -> bool:
        return began.exists() and len(began.read_text().split()) == hanging and bool(told.read_text())

    with make_test(tmp_path, **where) as run:
        try:
            assert wait_for(goes)
        finally:
            os.killpg(run.pid, signal.SIGINT)
        # What stays keeps the pipe, too.
        output, _nothing = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 130, output
    assert output.splitlines()[1:] == ["the linters", "the other generation"]
    assert (tmp_path / "down").read_text() == "gpufarm-common\n"
    for process in began.read_text().split():
        assert wait_for(partial(is_over, Path(f"/proc/{process}/status")))


@pytest.mark.parametrize(
    ("where", "code", "last"),
    [
        ({"lint": ":", "pytest": "echo 3 passed"}, 0, "3 passed"),
        ({"lint": ":", "pytest": "echo 1 failed; exit 1"}, 1, "1 failed"),
        ({"lint": "exit 1", "build": HANGING, "pytest": "echo 3 passed"}, 1, "the linters"),
        (
            {"lint": ":", "build": "exit 1", "pytest": "echo 3 passed"},
            1,
            "test: FAILED above: what scenarios are made of could not be built",
        ),
    ],
)
def test_a_run_is_as_its_parts_are(tmp_path: Path, where: dict[str, str], code: int, last: str) -> None:
    with make_test(tmp_path, **where) as run:
        output, _nothing = run.communicate()
    assert run.returncode == code, output
    assert output.splitlines()[-1] == last


def test_long_tests_begin_first_and_none_waits_behind_another() -> None:
    scenarios = [f"tests/scenarios/test_scenarios.py::test_scenario[{name}]" for name in ("common", "farm", "secure")]
    gate = "tests/scenarios/test_gates.py::test_galaxy_importer"
    units = [f"tests/unit/test_it.py::test_{number}" for number in range(5)]
    common, farm, secure = scenarios
    assert in_order([gate, *units, *scenarios]) == [
        farm, units[0], secure, units[1], common, units[2], gate, units[3], units[4]
    ]  # fmt: skip
    assert in_order([gate, *scenarios]) == [farm, secure, common, gate]
    assert in_order(units) == units


def test_each_test_is_run_by_one_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [f"tests/unit/{kind}/test_x.py::test_{number}" for kind in ("playbooks", "roles") for number in range(300)]
    plugins = [f"tests/unit/plugins/test_x.py::test_{number}" for number in range(300)]
    # The other generation cannot run it.
    turns = [f"tests/unit/roles/test_turns.py::test_{number}" for number in range(300)]
    # It runs unit tests alone.
    scenarios = [f"tests/scenarios/test_scenarios.py::test_scenario[{number}]" for number in range(300)]
    tests = [*runs, *plugins, *turns, *scenarios]
    monkeypatch.delenv("GPUFARM_GENERATION", raising=False)
    assert of_this_run(tests) == tests
    monkeypatch.setenv("GPUFARM_GENERATION", "other")
    other = of_this_run(tests)
    assert other == of_this_run(tests)
    assert 70 < len(set(other) & set(runs)) < 130 and 30 < len(set(other) & set(plugins)) < 70
    assert not set(other) & {*turns, *scenarios}
    monkeypatch.setenv("GPUFARM_GENERATION", "this")
    assert of_this_run(tests) == [test for test in tests if test not in set(other)]


@pytest.mark.parametrize("oldest", ["/usr/bin/python3.9", ""])
def test_what_the_oldest_python_runs_is_not_run_twice(monkeypatch: pytest.MonkeyPatch, oldest: str) -> None:
    monkeypatch.setattr(conftest, "oldest_python", lambda: oldest)
    tests = [
        f"tests/unit/plugins/{kind}/test_x.py::test_{number}"
        for kind in ("modules", "module_utils", "plugin_utils")
        for number in range(300)
    ]
    of_controller = set(tests[::7])
    monkeypatch.setenv("GPUFARM_GENERATION", "other")
    rest = [test for test in tests if test not in of_this_run(tests, of_controller)]
    monkeypatch.setenv("GPUFARM_GENERATION", "this")
    assert of_this_run(tests, of_controller) == [
        test for test in rest if not oldest or test in of_controller or "/plugin_utils/" in test
    ]
