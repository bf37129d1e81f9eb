# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module in a Python of its own, because what it installs is what has been imported with it."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.plugins.module_utils import gate_service
from ansible_collections.gpufarm.core.plugins.modules import nvidia_gpu_gate_code

NAME = "ansible_collections.gpufarm.core.plugins.module_utils.gate_service"
PROGRAM = f"""
import sys
from ansible.module_utils.testing import patch_module_args
from {nvidia_gpu_gate_code.__name__} import main
with patch_module_args({{"dest": sys.argv[1], "_ansible_diff": True, "_ansible_check_mode": sys.argv[2] == "check"}}):
    main()
"""


def run(dest: Path, mode: str = "do") -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM, str(dest), mode]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def tree(dest: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_mode & 0o777, path.read_bytes()) for path in dest.rglob("*") if path.is_file()}


def gate(dest: Path) -> subprocess.CompletedProcess[str]:
    """The gate under a Python that has no Ansible in its path, with a configuration that is not there."""
    arguments = ["/nowhere", str(dest.parent / "status.json")]
    code = f"import sys; sys.path.insert(0, {str(dest)!r}); from {NAME} import main; sys.exit(main({arguments!r}))"
    return subprocess.run([sys.executable, "-I", "-S", "-B", "-c", code], capture_output=True, text=True, check=False)


def test_all_that_the_gate_needs_and_nothing_of_ansible(tmp_path: Path) -> None:
    dest = tmp_path / "lib"
    result = run(dest)
    assert result["changed"] and result["files"] == sorted(tree(dest))
    assert {mode for mode, _content in tree(dest).values()} == {0o644}
    # With it the gate lets GPUs compute.
    assert str(dest / NAME.replace(".", "/").replace("gate_service", "gpu_benchmark/measuring.py")) in result["files"]
    done = gate(dest)
    assert done.returncode == gate_service.BROKEN, done.stderr
    assert "/nowhere cannot be used" in done.stderr
    assert not run(dest)["changed"]


def test_check_mode_says_it_and_changes_nothing(tmp_path: Path) -> None:
    dest = tmp_path / "lib"
    looked = run(dest, "check")
    assert looked["changed"] and not dest.exists()
    assert looked["diff"] == run(dest)["diff"] and looked["diff"]["before"] == ""
    assert len(looked["diff"]["after"].splitlines()) == len(looked["files"])


def test_what_differs_is_mended_and_what_is_older_goes(tmp_path: Path) -> None:
    dest = tmp_path / "lib"
    run(dest)
    good = tree(dest)
    folder = dest / NAME.replace(".", "/")
    spoilt, old, foreign = folder.with_name("gate_status.py"), folder.with_name("health.py"), dest / "theirs.py"
    spoilt.write_text("import os")
    old.write_text("import os")
    foreign.write_text("import os")
    spoilt.with_name("text.py").chmod(0o666)
    spoilt.parent.chmod(0o777)
    assert run(dest, "check")["changed"] and spoilt.read_text() == old.read_text() == "import os"
    assert run(dest)["changed"]
    assert spoilt.parent.stat().st_mode & 0o777 == 0o755
    foreign.unlink()
    assert tree(dest) == good


def test_what_python_has_compiled_of_an_older_file_goes(tmp_path: Path) -> None:
    dest = tmp_path / "lib"
    run(dest)
    file = (dest / NAME.replace(".", "/")).with_name("text.py")
    compiled = file.parent / "__pycache__/text.cpython-311.pyc"
    foreign = dest / "theirs/__pycache__"
    for each in (compiled.parent, foreign):
        each.mkdir(parents=True)
    compiled.touch()
    assert not run(dest)["changed"] and compiled.exists()
    file.write_text("import os")
    assert run(dest, "check")["changed"] and compiled.exists()
    assert run(dest)["changed"] and not compiled.parent.exists() and foreign.exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run(tmp_path / "file/lib")
    assert re.fullmatch(
        rf"{platform.node()}: found that {tmp_path}/file/lib cannot be written \(.*\)\. Expected: a folder that this "
        r"task may write to, with room\. Next step: check 'dest' and the free space, or use 'become'\.",
        result["msg"],
    )


@pytest.mark.parametrize(("text", "keys"), [("DOCUMENTATION", {"dest"}), ("RETURN", {"files"})])
def test_documentation_is_of_the_options_and_values(text: str, keys: set[str]) -> None:
    told = yaml.safe_load(getattr(nvidia_gpu_gate_code, text))
    assert set(told["options"] if text == "DOCUMENTATION" else told) == keys
