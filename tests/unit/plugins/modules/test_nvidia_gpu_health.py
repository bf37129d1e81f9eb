# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module as a program, with executables in place of nvidia-smi and journalctl, and its documentation."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.plugins.module_utils import health, xid
from ansible_collections.gpufarm.core.plugins.modules import nvidia_gpu_health
from ansible_collections.gpufarm.core.tests.unit.plugins.modules.program_helper import run_as_program

CORPUS = Path(__file__).parents[1] / "module_utils" / "nvidia_smi_corpus"
XID_79 = "NVRM: Xid (PCI:0000:00:06): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)


def log(folder: Path, *messages: str) -> None:
    """Let journalctl print these messages of the kernel."""
    entries = [
        {"MESSAGE": text, "__REALTIME_TIMESTAMP": "1795272213031485", "SYSLOG_FACILITY": "0"} for text in messages
    ]
    (folder / "log").write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    program(folder, "journalctl", f"cat {folder}/log")


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A folder for PATH on which one healthy GPU answers and the kernel has nothing to say of it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program(folder, "nvidia-smi", f'[ "$1" = -q ] && exec cat {CORPUS}/580.159.04-h100-queried.xml\nexit 0')
    log(folder, "Linux version 6.12")
    return folder


def run_module(folder: Path, /, **parameters: Any) -> dict[str, Any]:
    chosen = {"acknowledged_file": str(folder / "acknowledged"), "dcgm": False, **parameters}
    return run_as_program("nvidia_gpu_health", folder, chosen)


def test_a_healthy_gpu(node: Path) -> None:
    result = run_module(node, gpus=1)
    assert (result["changed"], result["verdict"], result["reason"], result["problems"]) == (False, "ok", None, [])
    assert result["checks"]["kernel_log"] == "journal"
    assert result["nvidia_smi"]["gpus"][0]["ecc"]["mode"] == "Enabled"


def test_options_that_cannot_be(node: Path) -> None:
    result = run_module(node, severities={"nonsense": "ignore"})
    assert result["failed"] and result["msg"].startswith(f"{platform.node()}: ") and "nonsense" in result["msg"]


def test_a_sick_gpu_is_no_failure(node: Path) -> None:
    log(node, XID_79)
    result = run_module(node)
    assert (result["changed"], result["verdict"], result["gpus"][0]["verdict"]) == (False, "critical", "critical")
    assert result["problems"][0]["code"] == "xid_79"


def test_no_driver_is_no_failure(node: Path) -> None:
    program(
        node,
        "nvidia-smi",
        "echo 'NVIDIA-SMI has failed because it couldn'\"'\"'t communicate with the NVIDIA driver.'; exit 9",
    )
    result = run_module(node)
    assert (result["verdict"], result["reason"], result["gpus"]) == ("critical", "driver_not_loaded", [])


def test_check_mode_is_the_same(node: Path) -> None:
    log(node, XID_79)
    checked = run_module(node, _ansible_check_mode=True)
    assert {key: value for key, value in checked.items() if key != "invocation"} == {
        key: value for key, value in run_module(node).items() if key != "invocation"
    }


def test_options_reach_the_judgement(node: Path) -> None:
    log(node, XID_79)
    options = {"severities": {"xid_79": "ignore"}, "gpus": 2, "temperature_gpu_max_c": 1}
    assert [problem["code"] for problem in run_module(node, **options)["problems"]] == ["gpu_count", "temperature"]


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"timeout": 0}, "found timeout is 0. Expected: more than 0 seconds, and an end. Next step: "),
        ({"severities": {"xid79": "ignore"}}, "found severities has the unknown code 'xid79'. Expected: "),
        ({"severities": {"xid_79": "bad"}}, "Expected: one of ignore, warning, critical."),
        ({"xid_since": "once"}, "found xid_since is 'once'. Expected: "),
        ({"dcgm_diag_level": 5}, "dcgm_diag_level"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_wrong_options_fail(node: Path, parameters: dict[str, Any], words: str) -> None:
    result = run_module(node, **parameters)
    assert result["failed"] is True
    assert words in result["msg"]


# The documentation

DOCUMENTATION = yaml.safe_load(nvidia_gpu_health.DOCUMENTATION)
RETURN = yaml.safe_load(nvidia_gpu_health.RETURN)


def test_documentation_specification_and_dataclass_agree() -> None:
    options = DOCUMENTATION["options"]
    assert list(options) == list(nvidia_gpu_health.TYPES) == list(health.defaults())
    for name, default in health.defaults().items():
        documented = {key: value for key, value in options[name].items() if key not in ("description", "default")}
        assert documented == nvidia_gpu_health.TYPES[name], name
        assert options[name].get("default") == default, name


def test_the_specification_takes_its_defaults_from_the_dataclass() -> None:
    specification = nvidia_gpu_health.argument_spec()
    assert {name: option.get("default") for name, option in specification.items()} == health.defaults()


def test_every_code_and_action_is_documented() -> None:
    notes = " ".join(DOCUMENTATION["notes"])
    assert [code for code in health.PROBLEMS if f"C({code})" not in notes] == []
    critical, warning = (notes.index(f"These codes are {word}") for word in ("critical", "warnings"))
    for code, kind in health.PROBLEMS.items():
        assert (critical < notes.index(f"C({code})") < warning) == (kind.severity == "critical"), code
    actions = " ".join(RETURN["problems"]["contains"]["action"]["description"])
    assert [action for action in xid.ACTIONS if f"V({action})" not in actions] == []


def test_return_values_are_documented_one_by_one(node: Path) -> None:
    log(node, XID_79)
    result = run_module(node)
    assert set(result) - {"changed", "invocation"} == set(RETURN)
    assert set(result["gpus"][0]) == set(RETURN["gpus"]["contains"])
    assert set(result["problems"][0]) == set(RETURN["problems"]["contains"])
    assert set(result["xids"][0]) == set(RETURN["xids"]["contains"])
    assert set(result["checks"]) == set(RETURN["checks"]["contains"])


def test_samples_have_the_documented_type() -> None:
    kinds = {"int": int, "str": str, "list": list, "dict": dict}

    def check(contents: dict[str, Any]) -> None:
        for key, value in contents.items():
            assert type(value["sample"]) is kinds[value["type"]] if "contains" not in value else True, key
            check(value.get("contains", {}))

    check(RETURN)


def test_examples_are_tasks_with_valid_options() -> None:
    tasks = [task for task in yaml.safe_load(nvidia_gpu_health.EXAMPLES) if "gpufarm.core.nvidia_gpu_health" in task]
    assert len(tasks) >= 3
    for task in tasks:
        health.HealthOptions.from_mapping(task["gpufarm.core.nvidia_gpu_health"])


def test_the_sample_of_a_message_is_a_real_one(node: Path) -> None:
    log(node, XID_79.replace("pid='<unknown>', name=<unknown>", "pid=123, name=python"))
    (problem,) = run_module(node)["problems"]
    sample = RETURN["problems"]["contains"]["message"]["sample"]
    variable = re.compile(r"Node \S+|GPU-[0-9a-f-]{36}|[0-9A-F]{8}(?::[0-9A-F]{2}){2}|[0-9T:-]{19}Z")
    assert variable.sub("*", problem["message"]) == variable.sub("*", sample)
