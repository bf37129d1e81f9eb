"""What makes tests quick gives what Ansible gives without it."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ansible
import pytest
from ansible.parsing.dataloader import DataLoader
from ansible_collections.gpufarm.core.tests.unit.patience import PATIENCE_S

from tests.simulator.cache import ROOT

QUICK = ROOT / "tests/simulator/quick"
FILES = ("playbooks/site.yml", "roles/nomad/meta/argument_specs.yml", "roles/nomad_client/defaults/main.yml")
TAGS = "_ansible_tags_mapping"


def program(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, QUICK / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parts(value: Any) -> Iterator[tuple[type, Any, dict[type, Any], Any]]:
    """Yield type, text, tags and the object itself of all that a value holds, containers among them."""
    tags = dict(getattr(value, TAGS, {}))
    if isinstance(value, dict):
        yield type(value), len(value), tags, value
        for key, item in value.items():
            yield from parts(key)
            yield from parts(item)
    elif isinstance(value, list):
        yield type(value), len(value), tags, value
        for item in value:
            yield from parts(item)
    else:
        yield type(value), str(value), tags, None


@pytest.mark.parametrize("file", FILES)
def test_a_copy_is_what_a_deep_copy_is(file: str) -> None:
    read = DataLoader().load_from_file(str(ROOT / file), unsafe=True, trusted_as_template=True)
    original, expected, found = (list(parts(it)) for it in (read, copy.deepcopy(read), program("copies").copied(read)))
    assert len(found) > 30
    assert any(tags for _kind, _said, tags, _object in found)
    assert [part[:3] for part in found] == [part[:3] for part in expected]
    ours, theirs = ({id(part[3]) for part in side if part[3] is not None} for side in (found, original))
    assert not ours & theirs


def test_runs_of_tests_begin_with_it(tmp_path: Path) -> None:
    (tmp_path / "ansible-playbook").write_text(
        "from ansible.parsing import dataloader; print(dataloader.copy.deepcopy.__module__)", encoding="utf-8"
    )
    said = subprocess.run(
        [sys.executable, tmp_path / "ansible-playbook"], env={"PYTHONPATH": os.environ["PYTHONPATH"]}, check=True,
        capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert said.strip() == "copies"


def test_code_of_an_archive_is_compiled_once_by_each_python(tmp_path: Path) -> None:
    script = f"""
import sys, zipfile, zipimport
sys.path.insert(0, {str(QUICK)!r})
import archives
name = sys.argv[1] + '.zip'
with zipfile.ZipFile(name, 'w') as archive: archive.writestr('told.py', sys.argv[2])
real = zipimport._compile_source
def counted(path, source): print('compiled'); return real(path, source)
zipimport._compile_source = counted
archives.keep({str(tmp_path)!r})
sys.path.insert(0, name)
import told
"""

    def run(name: str, source: str) -> list[str]:
        line = [sys.executable, "-c", script, str(tmp_path / name), source]
        return subprocess.run(line, check=True, capture_output=True, text=True).stdout.split()

    assert run("first", "print('one')") == ["compiled", "one"]
    assert run("second", "print('one')") == ["one"]
    assert run("third", "print('two')") == ["compiled", "two"]
    (kept,) = {path for path in tmp_path.iterdir() if path.suffix != ".zip" and b"one" in path.read_bytes()}
    kept.unlink()
    assert run("fourth", "print('one')") == ["compiled", "one"]


PACKAGE = "ansible/module_utils"
BASICS = (
    "ansible/__init__", f"{PACKAGE}/__init__", f"{PACKAGE}/_internal/__init__",
    f"{PACKAGE}/_internal/_ansiballz/__init__", f"{PACKAGE}/_internal/_ansiballz/_loader",
)  # fmt: skip


class Node:
    """What a node has of it; a task is a program on standard input that imports Ansible's basics from an archive."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept = folder / "kept"
        self.kept.mkdir()
        program = (ROOT / "tests/simulator/node/sitecustomize.py").read_text(encoding="utf-8")
        program = program.replace("/usr/share/gpufarm-simulator", str(QUICK)).replace(
            "/var/cache/gpufarm-simulator", str(self.kept)
        )
        program = program.replace("instead(FOLDER)", "instead(FOLDER, spares=1)")
        (folder / "sitecustomize.py").write_text(program, encoding="utf-8")
        self.basics = dict.fromkeys(BASICS, "")
        self.environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder)}

    def start(self, task: str, says: str = "one", before: tuple[str, ...] = (), **more: Any) -> subprocess.Popen[str]:
        archive = self.folder / f"{says}.zip"
        with zipfile.ZipFile(archive, "w") as written:
            for name, text in self.basics.items():
                written.writestr(f"{name}.py", text)
            if says:
                written.writestr("ansible/module_utils/basic.py", f"says = {says!r}")
        process = subprocess.Popen(
            [*before, sys.executable], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            **{"env": self.environment, "cwd": self.folder, **more},
        )  # fmt: skip
        assert process.stdin
        process.stdin.write(f"import sys; sys.path.insert(0, {str(archive)!r})\n{task}\n")
        process.stdin.close()
        return process

    def run(self, task: str, says: str = "one", **more: Any) -> tuple[int, str, str]:
        process = self.start(f"from ansible.module_utils import basic\n{task}", says, **more)
        assert process.stdout and process.stderr
        told = process.stdout.read(), process.stderr.read()
        return process.wait(PATIENCE_S), *told

    def sockets(self) -> list[Path]:
        return [path for path in self.kept.iterdir() if path.is_socket()]

    def end(self) -> None:
        """Kill its spares and what they run."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(self.kept).encode() in path.read_bytes():
                    os.kill(int(path.parent.name), signal.SIGKILL)


@pytest.fixture
def fresh() -> Iterator[Node]:
    # The address of a socket may not be as long as the paths of tests that run beside others.
    with tempfile.TemporaryDirectory() as folder:
        made = Node(Path(folder))
        yield made
        made.end()


@pytest.fixture
def node(fresh: Node) -> Node:
    """Return a node whose tasks have a spare, from its first one."""
    first = {**fresh.environment, "FIRST": "1"}
    assert fresh.run("print(basic.says)", env=first, umask=0o77, cwd="/") == (0, "one\n", "")
    until(fresh.sockets)
    assert by_spare(fresh)
    return fresh


def by_spare(node: Node, **more: Any) -> bool:
    code, parent, said = node.run("import os; print(os.getppid())", **more)
    assert code == 0, said
    return int(parent) != os.getpid()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's tasks have a spare")
def test_where_no_spare_can_begin_one_is_tried(fresh: Node) -> None:
    for name in BASICS[2:]:
        fresh.basics[name] = "raise SystemExit"
    for _again in range(2):
        assert fresh.run("print(basic.says)") == (0, "one\n", "")
    (kept,) = fresh.kept.glob("*.zip")
    assert not fresh.sockets() and kept.stat().st_size


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's tasks have a spare")
def test_what_ansible_sends_has_a_spare(fresh: Node) -> None:
    packed = Path(ansible.__file__).parent
    fresh.basics = {
        str(path.relative_to(packed.parent).with_suffix("")): path.read_text(encoding="utf-8")
        for path in packed.glob("module_utils/**/*.py")
    } | {"ansible/__init__": ""}
    assert not by_spare(fresh, says="")
    until(fresh.sockets)
    assert by_spare(fresh, says="")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's tasks have a spare")
def test_who_asks_and_goes_costs_no_other_its_task(node: Node) -> None:
    (place,) = node.sockets()
    for said in ([], [b"nothing that could be read"]):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asks:
            asks.connect(str(place))
            for each in said:
                socket.send_fds(asks, [each], [0, 1, 2, 0])
    assert by_spare(node)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's tasks have a spare")
def test_what_is_killed_with_its_spare_says_so(node: Node) -> None:
    task = "import os, signal\nfor each in (os.getppid(), os.getpid()): os.kill(each, signal.SIGKILL)"
    code, said, error = node.run(task)
    assert (code, said) == (1, "") and "it or what it ran was killed. It said: nothing\n" in error
    assert node.run("print(basic.says)") == (0, "one\n", "")


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


TOLD = """
import os, resource
mask = os.umask(0)
print(basic.says, sys.argv, sys.orig_argv, sorted(os.environ), os.getcwd(), mask, __name__, basic.__file__)
print(resource.getrlimit(resource.RLIMIT_NOFILE), sys.stdin.read(), sorted(os.listdir("/proc/self/fd"))[:5])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's tasks have a spare")
def test_a_spare_runs_a_task_as_python_does(node: Node) -> None:
    def limits() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (77, 99))
        os.umask(0o27)

    given = {"env": {**node.environment, "TOLD": "x"}, "preexec_fn": limits}
    alone = given | {"env": {**given["env"], "PYTHONNOUSERSITE": "1"}}  # type: ignore[dict-item]
    (plain, served) = node.run(TOLD, **alone), node.run(TOLD, **given)
    assert plain[0] == 0, plain
    assert served == (plain[0], plain[1].replace("'PYTHONNOUSERSITE', ", ""), plain[2])
    for task, code in (("sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 15)", -15), ("sys.exit('no')", 1)):
        assert node.run(task)[0] == code
    code, _told, said = node.run("1 / 0")
    assert code == 1 and "ZeroDivisionError" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's tasks have a spare")
def test_what_a_spare_may_not_begin_begins_as_ever(fresh: Node) -> None:
    def limits() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (77, 99))

    weak = ("setpriv", "--inh-caps=-sys_resource", "--bounding-set=-sys_resource")
    assert fresh.run("print(basic.says)", before=weak, preexec_fn=limits) == (0, "one\n", "")
    until(fresh.sockets)
    assert by_spare(fresh, before=weak, preexec_fn=limits)
    code, said, _error = fresh.run("print(basic.says)", before=weak)
    assert (code, said) == (0, "one\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's tasks have a spare")
def test_other_basics_are_imported_from_what_was_sent(node: Node) -> None:
    assert node.run("print(basic.says)", "two") == (0, "two\n", "")
    assert node.run("print(basic.says)") == (0, "one\n", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's tasks have a spare")
def test_another_namespace_has_a_spare_of_its_own(node: Node) -> None:
    task = "import os; print(os.readlink('/proc/self/ns/uts'))"
    here, there = node.run(task), node.run(task, before=("unshare", "--uts"))
    assert here[1] == f"{Path('/proc/self/ns/uts').readlink()}\n"
    assert there[0] == 0 and there[1] not in ("", here[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's tasks have a spare")
def test_who_is_killed_leaves_no_task(node: Node) -> None:
    process = node.start("import os, time; print(os.getpid(), flush=True)\ntime.sleep(600)")
    assert process.stdout
    task = int(process.stdout.readline())
    assert task != process.pid
    process.kill()
    process.wait()
    until(lambda: not Path(f"/proc/{task}").exists())
    assert node.run("print(basic.says)") == (0, "one\n", "")
