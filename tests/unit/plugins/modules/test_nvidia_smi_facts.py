# Copyright (c) gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module as a program, with an executable in place of nvidia-smi."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.plugins.module_utils import nvidia_smi
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi import query_csv
from ansible_collections.gpufarm.core.plugins.modules import nvidia_smi_facts
from ansible_collections.gpufarm.core.tests.unit.plugins.modules.program_helper import run_as_program

CORPUS = Path(__file__).parents[1] / "module_utils" / "nvidia_smi_corpus"
COLLECTIONS = Path(__file__).parents[4] / ".collections"
QUERY = f"--query-gpu={','.join(query_csv.QUERY_FIELDS)} --format=csv,noheader,nounits"
# Writes down how it was called, then prints the file that is named after its arguments.
FAKE = """#!/bin/sh
here=$(dirname "$0")
echo "$LC_ALL|$*" >> "$here/calls"
case "$1" in
  -q) name=full ;;
  --query-gpu=*) name=query ;;
  *) name=$(echo "$*" | tr -d ' -') ;;
esac
[ -e "$here/$name.hang" ] && sleep 60
[ -e "$here/$name" ] || { echo "ERROR: Option $* is not recognized. Please run 'nvidia-smi -h'."; exit 255; }
cat "$here/$name"
exit "$(cat "$here/$name.code" 2>/dev/null || echo 0)"
"""


class Fake:
    """A folder with an nvidia-smi, to be put on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        program = folder / "nvidia-smi"
        program.write_text(FAKE, encoding="utf-8")
        program.chmod(0o755)

    def answer(self, name: str, text: str, code: int = 0) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")
        (self.folder / f"{name}.code").write_text(str(code), encoding="utf-8")

    def hang(self, name: str) -> None:
        (self.folder / f"{name}.hang").touch()

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return sorted(path.read_text(encoding="utf-8").splitlines()) if path.exists() else []


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    fake = Fake(tmp_path / "bin")
    fake.answer("full", (CORPUS / "580.159.04-h100-queried.xml").read_text(encoding="utf-8"))
    fake.answer("query", (CORPUS / "580.159.04-h100-queried.csv").read_text(encoding="utf-8").strip() + ", P0\n")
    fake.answer("version", (CORPUS / "580.159.04-h100-queried.version.txt").read_text(encoding="utf-8"))
    fake.answer("nvlinkse", "")
    return fake


def run_module(folder: Path, /, **parameters: Any) -> dict[str, Any]:
    return run_as_program("nvidia_smi_facts", folder, parameters)


def facts_of(result: dict[str, Any]) -> dict[str, Any]:
    assert result["changed"] is False
    facts: dict[str, Any] = result["ansible_facts"]["nvidia_smi"]
    return facts


def test_default_run(fake: Fake) -> None:
    facts = facts_of(run_module(fake.folder))
    assert fake.calls == sorted([f"C|{QUERY}", "C|--version"])
    assert facts["available"] is True
    assert facts["driver_version"] == "580.159.04"
    assert facts["cuda_version"] == "13.0"
    assert facts["gpus"][0]["memory_total_mib"] == 81559
    assert facts["gpus"][0]["ecc"]["mode"] is None


def test_full_run(fake: Fake) -> None:
    facts = facts_of(run_module(fake.folder, gather_subset=["all"]))
    assert fake.calls == ["C|-q -x", "C|nvlink -s -e", "C|topo -m"]
    gpu = facts["gpus"][0]
    assert (gpu["power_draw_w"], gpu["ecc"]["mode"], gpu["nvlinks"]) == (70.53, "Enabled", [])


def test_check_mode_is_the_same(fake: Fake) -> None:
    assert facts_of(run_module(fake.folder, _ansible_check_mode=True)) == facts_of(run_module(fake.folder))


def test_given_path_is_run(fake: Fake, tmp_path: Path) -> None:
    facts = facts_of(run_module(tmp_path / "elsewhere", path=str(fake.folder / "nvidia-smi")))
    assert facts["available"] is True
    missing = facts_of(run_module(fake.folder, path=str(tmp_path / "none")))
    assert missing["reason"] == "not_installed"
    assert str(tmp_path / "none") in missing["message"]


def test_no_driver_is_no_failure(fake: Fake) -> None:
    words = (CORPUS / "550.163.01-driver-not-loaded.failure.txt").read_text(encoding="utf-8").rsplit("exit code", 1)[0]
    fake.answer("query", words, 9)
    facts = facts_of(run_module(fake.folder))
    assert (facts["available"], facts["reason"], facts["gpus"]) == (False, "driver_not_loaded", [])


def test_a_hanging_program_is_killed_in_time(fake: Fake) -> None:
    fake.hang("full")
    facts = facts_of(run_module(fake.folder, gather_subset=["ecc"], timeout=0.5))
    assert facts["reason"] == "timeout"


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"gather_subset": ["gpus"]}, "gather_subset has 'gpus'; expected one of all, min, mig"),
        ({"timeout": 0}, "timeout is 0; expected more than 0 seconds, and an end."),
        ({"timeout": "inf"}, "timeout is inf; expected more than 0 seconds, and an end."),
        ({"timeout": "nan"}, "timeout is nan; "),
        ({"timeout": -1.5}, "timeout is -1.5"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_wrong_use_fails(fake: Fake, parameters: dict[str, Any], words: str) -> None:
    result = run_module(fake.folder, **parameters)
    assert result["failed"] is True
    assert words in result["msg"]
    assert fake.calls == []


@pytest.mark.controller
def test_through_ansible_itself(fake: Fake, tmp_path: Path) -> None:
    """Once the whole way: documentation to argument spec, packed module, facts back in the play."""
    config = tmp_path / "ansible.cfg"
    config.write_text("[defaults]\n", encoding="utf-8")
    adhoc = [sys.executable, "-m", "ansible", "adhoc", "-i", "localhost,", "-c", "local", "localhost", "--check"]
    arguments = f"path={fake.folder}/nvidia-smi gather_subset=all"
    done = subprocess.run(
        [*adhoc, "-m", "gpufarm.core.nvidia_smi_facts", "-a", arguments],
        env={
            **{key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")},
            "ANSIBLE_COLLECTIONS_PATH": str(COLLECTIONS),
            "ANSIBLE_CONFIG": str(config),
            "ANSIBLE_HOME": str(tmp_path / "home"),
            "ANSIBLE_LOAD_CALLBACK_PLUGINS": "1",
            "ANSIBLE_STDOUT_CALLBACK": "ansible.builtin.minimal",
            "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert "SUCCESS" in done.stdout, done.stdout + done.stderr
    facts = json.loads(done.stdout[done.stdout.index("{") :])["ansible_facts"]["nvidia_smi"]
    assert facts["gpus"][0]["name"] == "NVIDIA H100 80GB HBM3"


# The documentation


def documented(contents: dict[str, Any]) -> dict[str, Any]:
    return {key: documented(value["contains"]) if "contains" in value else None for key, value in contents.items()}


def shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    return shape(value[0]) if isinstance(value, list) and value and isinstance(value[0], dict) else None


def test_return_values_are_documented_one_by_one() -> None:
    """Every key that can be returned has its documentation, and no other has."""
    gpu = nvidia_smi.empty_gpu()
    process = "<process_info><pid>1</pid></process_info>"
    xml = (CORPUS / "510.47.03-a100-40gb-mig.xml").read_text(encoding="utf-8")
    parsed = nvidia_smi.parse_query_xml(xml.replace("</processes>", f"{process}</processes>", 1))["gpus"][0]
    links = nvidia_smi.parse_nvlink_status("GPU 0: X (UUID: GPU-1)\nLink 0: <inactive>")["GPU-1"]
    gpu.update(mig_devices=parsed["mig_devices"], processes=parsed["processes"], nvlinks=links)
    gpu["nvlink_peers"] = [{"index": 1, "links": 18}]
    facts = dict(nvidia_smi.empty_facts("linux"), gpus=[gpu])
    returned = yaml.safe_load(nvidia_smi_facts.RETURN)
    assert documented(returned) == {"ansible_facts": {"nvidia_smi": shape(facts)}}


def types(contents: dict[str, Any], prefix: str = "") -> dict[str, tuple[str, Any]]:
    found = {}
    for key, value in contents.items():
        found[prefix + key] = (value["type"], value.get("sample"))
        found.update(types(value.get("contains", {}), f"{prefix}{key}."))
    return found


def test_samples_have_the_documented_type() -> None:
    kinds = {"int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict, "complex": dict}
    for key, (kind, sample) in types(yaml.safe_load(nvidia_smi_facts.RETURN)).items():
        assert sample is None or type(sample) is kinds[kind], key


def test_every_reason_and_subset_is_documented() -> None:
    text = nvidia_smi_facts.RETURN
    assert [reason for reason in nvidia_smi.REASONS if f"V({reason})" not in text] == []
    options = yaml.safe_load(nvidia_smi_facts.DOCUMENTATION)["options"]
    described = " ".join(options["gather_subset"]["description"])
    assert [name for name in ("all", *nvidia_smi.SUBSETS) if f"V({name})" not in described] == []
    assert options["gather_subset"]["default"] == list(nvidia_smi.DEFAULT_SUBSETS)
    assert options["timeout"]["default"] == 60


def test_examples_are_tasks_with_known_options() -> None:
    options = yaml.safe_load(nvidia_smi_facts.DOCUMENTATION)["options"]
    tasks = yaml.safe_load(nvidia_smi_facts.EXAMPLES)
    used = [task["gpufarm.core.nvidia_smi_facts"] or {} for task in tasks if "gpufarm.core.nvidia_smi_facts" in task]
    assert len(used) >= 3
    for parameters in used:
        assert set(parameters) <= set(options)
        nvidia_smi.resolve_subsets(parameters.get("gather_subset", ["min"]))
