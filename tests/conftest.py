"""What of the suite is run when, and what is told of tests that are left out.

Such a test is told in the last lines, and fails the run where CI is set, unless it is expected here.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
import zlib
from collections.abc import Container, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScheduling

from tests.simulator.cache import cache_dir

# What these tests start shares work, but for `make mutants`, which changes code from run to run; what a scenario starts
# has it from .config/molecule.
SIMULATOR = Path(__file__).with_name("simulator")
QUICK = str(SIMULATOR / "quick")
if "GPUFARM_PLAIN" not in os.environ:
    os.environ.setdefault("ANSIBLE_CALLBACK_PLUGINS", str(SIMULATOR / "callbacks"))
    if QUICK not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join([QUICK, *filter(None, [os.environ.get("PYTHONPATH")])])

# A part of the test's id → why it may be left out.
EXPECTED = {
    "test_managed_python.py": "no Python 3.9 or 3.10 is to be had from a current distribution",
    "test_sized_volumes.py": "only a root of the machine itself mounts images",
    "test_devices_are_made_from_the_profile": "a container without CAP_SYS_ADMIN mounts nothing",
}

# Parts of the ids of tests that take minutes, the longest first.
LONG = (
    "test_scenario[farm]",
    "test_scenario[kubernetes]",
    "test_scenario[upgrade]",
    "test_scenario[gpu_health]",
    "test_scenario[secure]",
    "test_scenario[container_toolkit]",
    "test_scenario[",
    "test_sanity[",
    "tests/scenarios/",
    "test_servers_go_one_after_the_other",
    "simulator/gpu/test_accept.py",
    "test_sized_volumes.py",
    "test_turns.py",
    "test_wsl_hosts.py",
)

OTHER_GENERATION = Path(__file__).with_name("other-generation.sh")
SHARE = 6


def in_order(tests: list[str]) -> list[str]:
    """Return ids in the order in which several processes are busy with them to the end: long tests first.

    pytest-xdist gives a process one test more than the one that runs, and nobody takes that over. So a short one stands
    behind each long one.
    """
    long = dict.fromkeys(test for part in LONG for test in tests if part in test)
    short = iter([test for test in tests if test not in long])
    ordered = []
    for test in long:
        ordered += [test, *islice(short, 1)]
    return [*ordered, *short]


# These are made of what `make test` builds.
OF_ARTEFACTS = (
    "tests/scenarios/",
    "tests/unit/simulator/",
    "test_nomad_device_plugin.py",
    "test_nomad_tls.py",
    "test_sized_volumes.py",
    "test_turns.py",
)
KEPT_BACK = 40


def in_order_while_building(tests: list[str]) -> list[str]:
    """Return ids in the order in which they are begun as long as artefacts are being built.

    That waits for downloads, and the processes that wait for it would do nothing. Short ones stay to stand behind long
    ones.
    """
    ready = [test for test in tests if not any(part in test for part in OF_ARTEFACTS)]
    ready = in_order(ready)[:-KEPT_BACK]
    begun = set(ready)
    return [*ready, *in_order([test for test in tests if test not in begun])]


class AsBuilt(LoadScheduling):  # type: ignore[misc] # xdist has no types
    """Hands tests out in the one order until the file is there that says that all is built, and then in the other."""

    def __init__(self, config: pytest.Config, log: Any, said: Path) -> None:
        super().__init__(config, log)
        self._said = said
        self._built: bool | None = None

    def _send_tests(self, node: Any, num: int) -> None:
        if self._built is None or self._built != self._said.exists():
            self._built = self._said.exists()
            waiting = {(self.collection or [])[number]: number for number in self.pending}
            order = in_order if self._built else in_order_while_building
            self.pending[:] = [waiting[test] for test in order(list(waiting))]
        super()._send_tests(node, num)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScheduling | None:
    said = os.environ.get("GPUFARM_BUILT")
    return AsBuilt(config, log, Path(said)) if said else None


def left_out(reporter: pytest.TerminalReporter) -> tuple[dict[str, list[str]], list[str]]:
    """Return the tests that were skipped, by reason, and those among them that nobody expects."""
    reasons: dict[str, list[str]] = {}
    unexpected = []
    for report in reporter.stats.get("skipped", []):
        said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons.setdefault(said.removeprefix("Skipped: "), []).append(report.nodeid)
        if not any(name in report.nodeid for name in EXPECTED):
            unexpected.append(report.nodeid)
    return reasons, unexpected


def reporter_of(config: pytest.Config) -> pytest.TerminalReporter | None:
    """Return the reporter of the whole run; the processes that share its tests have none."""
    return None if hasattr(config, "workerinput") else config.pluginmanager.get_plugin("terminalreporter")


def share_of_the_other(tests: list[str]) -> list[str]:
    """Return the tests that the other generation of Python and Ansible runs: one in SHARE, always the same ones.

    By them it shows that it reads and runs what this one does. What each says of the collection is shown by either.
    """
    alone = re.findall(r"--ignore=(\S+)", OTHER_GENERATION.read_text(encoding="utf-8"))
    units = [test for test in tests if test.startswith("tests/unit/") and not test.startswith(tuple(alone))]
    return [test for test in units if zlib.crc32(test.encode()) % SHARE == 0]


# What managed nodes run: scenarios/test_managed_python.py runs these tests with the oldest Python.
MODULES = ("tests/unit/plugins/module_utils", "tests/unit/plugins/modules")


def oldest_python() -> str:
    """Return the oldest interpreter of managed nodes that this machine has: of RHEL 9, or of Ubuntu 22.04."""
    return subprocess.run(
        ["sh", Path(__file__).with_name("python.sh"), "3.9", "3.10"], check=True, capture_output=True, text=True
    ).stdout.strip()


def of_this_run(tests: list[str], of_controller: Container[str] = ()) -> list[str]:
    """Return the tests that are this run's: all, where no other one shares them.

    Each is run by one of the two generations, or by the oldest Python of managed nodes, which runs a module's tests but
    for those of what only the controller has.
    """
    generation = os.environ.get("GPUFARM_GENERATION")
    if generation == "other":
        return share_of_the_other(tests)
    if generation == "this":
        done = set(share_of_the_other(tests))
        if oldest_python():
            done |= {test for test in tests if test.startswith(MODULES) and test not in of_controller}
        return [test for test in tests if test not in done]
    return tests


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    of_controller = {item.nodeid for item in items if item.get_closest_marker("controller")}
    ours = set(of_this_run([item.nodeid for item in items], of_controller))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in ours])
    items[:] = [item for item in items if item.nodeid in ours]
    place = {test: number for number, test in enumerate(in_order([item.nodeid for item in items]))}
    items.sort(key=lambda item: place[item.nodeid])


RUNNING: dict[str, float] = {}
SAID_LAST = 5


def pytest_runtest_logstart(nodeid: str) -> None:
    RUNNING[nodeid] = time.monotonic()


def pytest_runtest_logfinish(nodeid: str) -> None:
    RUNNING.pop(nodeid, None)


def not_ended() -> Iterator[str]:
    """Yield what still runs at an interrupt, since when, and what Molecule said last where that is a scenario."""
    for test, began in sorted(RUNNING.items()):
        yield f"not ended: {test} after {time.monotonic() - began:.0f} s"
        scenario = re.search(r"test_scenario\[(\w+)\]", test)
        log = cache_dir() / f"farms/gpufarm-{scenario[1]}/logs/molecule-test.log" if scenario else Path(os.devnull)
        with suppress(OSError):
            yield from log.read_text(encoding="utf-8", errors="replace").splitlines()[-SAID_LAST:]


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = reporter_of(session.config)
    if reporter and os.environ.get("CI", "false") != "false" and left_out(reporter)[1] and not session.exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


# The last of all: of a long output, only the end may be kept.
@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons, unexpected = left_out(terminalreporter)
    # After an interrupt: one that hangs is among these.
    for line in not_ended():
        terminalreporter.line(line, red=True)
    # What `make test` has run before with the other generation of Python.
    for line in os.environ.get("GPUFARM_LEFT_OUT", "").splitlines():
        terminalreporter.line(line)
    for reason, tests in reasons.items():
        terminalreporter.line(f"left out: {len(tests)} tests ({reason}), the first: {min(tests)}")
    if unexpected and os.environ.get("CI", "false") != "false":
        terminalreporter.line(
            f"CI: {len(unexpected)} tests were left out. Expected: none but those of tests/conftest.py. "
            "Next step: give this machine what they need.", red=True,
        )  # fmt: skip
