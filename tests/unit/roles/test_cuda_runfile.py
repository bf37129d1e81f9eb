# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The toolkit from a runfile: the double of one is run, in folders of the test, and what is refused is told."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from ansible.template import trust_as_template
from ansible_collections.gpufarm.core.tests.unit.playbooks.playbook_helper import LOCAL, run_playbook
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

from tests.simulator.cache import ROOT

RUNFILE = (ROOT / "tests/simulator/cuda/runfile.sh").read_text(encoding="utf-8")
URL = "https://a/cuda.run"
SUM = "0123456789abcdef" * 4
DIR, NOTE = "/usr/local/cuda-13.0", "/var/lib/gpufarm/cuda/13.0-runfile"


def entered(folder: Path, parts: list[str], **hosts: str) -> tuple[set[str], str]:
    """Return which hosts did not fail, each with a runfile of this text, and all that was said."""
    known: dict[str, Any] = {}
    for name, text in hosts.items():
        path = folder / f"{name}.run"
        path.write_text(text, encoding="utf-8")
        checksum = SUM if name == "another" else hashlib.sha256(text.encode()).hexdigest()
        known[name] = {**LOCAL, "cuda_runfile_url": f"file://{path}", "cuda_runfile_checksum": checksum}
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    # It reads what there is to read.
    (programs / "ldconfig").write_text('#!/bin/sh\ncd "$HERE"\ncat /dev/null ld.so-*.conf >linked || :\n', "utf-8")
    (programs / "ldconfig").chmod(0o755)
    here = f"{folder}/{{{{ inventory_hostname }}}}"
    tasks: list[dict[str, Any]] = [{"ansible.builtin.find": {"paths": f"{here}/notes"}, "register": "__cuda_ours"}]
    tasks += [
        {"ansible.builtin.include_role": {"name": "gpufarm.core.cuda", "tasks_from": f"{part}.yml"}} for part in parts
    ]
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "HERE": here}
    play = {"hosts": "all", "gather_facts": False, "environment": environment, "tasks": tasks}
    (folder / "play.yml").write_text(json.dumps([play]), encoding="utf-8")
    given = {
        "__cuda_link": f"{here}/cuda", "__cuda_ours_dir": f"{here}/notes", "__cuda_linker": f"{here}/ld.so-%s.conf",
        "cuda_verify_program": False,
    }  # fmt: skip
    ran = run_playbook(folder, {"all": {"hosts": known}}, str(folder / "play.yml"), "--extra-vars", json.dumps(given))
    well = re.findall(r"^(\S+) +: .* unreachable=0 +failed=0 ", ran.stdout, re.MULTILINE)
    return set(well), " ".join(ran.stdout.split())


@pytest.mark.skipif(os.geteuid() != 0, reason="what is installed is root's")
def test_a_toolkit_comes_from_its_runfile_and_goes(tmp_path: Path) -> None:
    good, note = tmp_path / "good", tmp_path / "good/notes/13.0-runfile"
    broken = RUNFILE.replace("set -eu\n", "set -eu\necho 'Failed to write' >&2; exit 3\n", 1)
    for name in ("good", "another", "broken"):
        (tmp_path / name).mkdir()
    well, said = entered(tmp_path, ["runfile", "verify"], good=RUNFILE, another=RUNFILE, broken=broken)
    assert well == {"good"}, said
    assert f"another: the runfile could not be had (The checksum for {tmp_path}/another/notes/13.0-work/" in said
    assert f"Expected: file://{tmp_path}/another.run with the SHA-256 {SUM}; what was there before stays." in said
    assert list((tmp_path / "another/notes").iterdir()) == []
    assert "broken: the runfile ended with 3 (Failed to write). Expected: it installs the toolkit in" in said
    # An installation that did not come to its end begins again, and goes with the others.
    assert (tmp_path / "broken/notes/13.0-runfile").read_text("utf-8") == ""
    assert note.read_text("utf-8") == hashlib.sha256(RUNFILE.encode()).hexdigest() + "\n"
    assert sorted(path.name for path in note.parent.iterdir()) == ["13.0-runfile", "13.0-untried"]
    assert (good / "linked").read_text("utf-8") == f"{good}/cuda-13.0/lib64\n"
    assert (good / "cuda").resolve() == good / "cuda-13.0"
    (good / "cuda-13.0/stale").touch()
    # Another one takes its place, nothing of it is left, and the verification sees that it is of another version.
    well, said = entered(tmp_path, ["runfile", "verify"], good=RUNFILE.replace("13.0.2", "12.8.1"))
    assert not well and not (good / "cuda-13.0/stale").exists(), said
    assert re.search(
        r'version.json says .*"12[.]8[.]1".* Expected: CUDA 13[.]0[.] Next step: correct cuda_runfile_u', said
    )
    well, said = entered(tmp_path, ["runfile_absent"], good="")
    assert well == {"good"} and sorted(path.name for path in good.iterdir()) == ["linked", "notes"], said
    assert (good / "linked").read_text("utf-8") == ""


@pytest.mark.parametrize(
    ("url", "more", "paths", "told"),
    [
        (URL, {}, (), ""),
        (URL, {"cuda_runfile_checksum": f"SHA256:{SUM.upper()}"}, (NOTE,), ""),
        (URL, {}, (DIR, NOTE), ""),
        # As on a distribution that NVIDIA has no repository for.
        (URL, {"__nvidia_repository_refusal": "the distribution is Mint."}, (), ""),
        ("", {"__nvidia_repository_refusal": "the distribution is Mint."}, (), "the distribution is Mint. Next step: "),
        ("", {}, (DIR,), ""),
        ("", {}, (DIR, NOTE), f"{DIR} is from a runfile, and cuda_runfile_url is not set. Expected: one source "),
        (URL, {}, (DIR,), f"{DIR} is there, and not from a runfile of this role. Expected: one source"),
        (URL, {"cuda_runfile_checksum": ""}, (), 'cuda_runfile_checksum is "". Expected: a SHA-256, bec'),
        (URL, {"cuda_runfile_checksum": f"md5:{SUM}"}, (), f'cuda_runfile_checksum is "md5:{SUM}". Expe'),
        (
            URL, {"cuda_packages": ["cuda-nvcc"]}, (),
            "cuda_runfile_url is set, and cuda_packages has cuda-nvcc. Expected: one of them, because a runfile has",
        ),
        (URL, {"_common_family": {}}, (), "the distribution is "),
    ],
)  # fmt: skip
def test_what_is_refused(url: str, more: dict[str, Any], paths: tuple[str, ...], told: str) -> None:
    known = {**role_helper.variables("_common", "cuda"), "cuda_runfile_url": url, "cuda_runfile_checksum": SUM}
    known |= {"ansible_facts": role_helper.facts("Debian: Debian 13"), "_common_host": role_helper.host(*paths)}
    known |= {"_common_is_wsl": False, "__nvidia_repository_refusal": "", **more}
    found = role_helper.value("__cuda_refusal", known)
    assert found.startswith(told) and bool(found) is bool(told), found


def test_what_is_there_from_its_runfile_is_not_installed_again() -> None:
    def look(*paths: str, text: str = f"{SUM}\n") -> dict[str, Any]:
        host = role_helper.host(*paths)
        checksums = {NOTE: hashlib.sha1(text.encode()).hexdigest()}  # noqa: S324
        host["files"] = [{**file, "checksum": checksums.get(file["path"])} for file in host["files"]]
        return {
            "_common_host": host,
            "cuda_runfile_url": URL,
            "cuda_runfile_checksum": f"sha256:{SUM}",
        }

    cases = [look(DIR, NOTE), look(DIR, NOTE, text=""), look(NOTE), look()]
    assert role_helper.values("__cuda_runfile_there", ["_common", "cuda"], cases) == [True, False, False, False]
    known = role_helper.variables("cuda")
    assert {NOTE, DIR} <= set(role_helper.value("__cuda_looks_at", known)["files"])
    steps = {task["name"]: task for task in role_helper.tasks_of("cuda/tasks/install.yml")}
    packages, runfile = steps["Have the toolkit from NVIDIA's repository"], steps["Have the toolkit from a runfile"]
    for url, there, settled, does in (
        ("", False, False, (True, False)),
        ("", False, True, (False, False)),
        (URL, False, False, (False, True)),
        (URL, True, False, (False, False)),
    ):
        given = {"cuda_runfile_url": url, "__cuda_runfile_there": there, "_common_repository_settled": settled}
        found = []
        for task in (packages, runfile):
            conditions = task["when"] if isinstance(task["when"], list) else [task["when"]]
            whole = " and ".join(f"({each})" for each in conditions)
            found.append(role_helper.value("here", {**given, "here": trust_as_template(f"{{{{ {whole} }}}}")}))
        assert tuple(found) == does
