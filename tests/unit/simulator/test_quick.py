"""What makes tests quick gives what Ansible gives without it."""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader

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
