# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

pytestmark = pytest.mark.controller

ROLES = ["_common", "nomad", "wandb_launch_agent"]
KEY = "k" * 40
DOCKER = "file /usr/local/lib/gpufarm-wandb/bin/docker"
UNIT = "file /etc/systemd/system/gpufarm-wandb-launch.service"
PRESENT: dict[str, Any] = {
    "inventory_hostname": "gpu01", "groups": {"all": ["gpu01"]}, "nomad_acl_enabled": False,
    "nomad_secrets_dir": "/nowhere", "ansible_facts": role_helper.facts("Debian: Debian 12"),
    "wandb_launch_agent_entity": "lab", "wandb_launch_agent_queues": ["gpus"], "wandb_launch_agent_api_key": KEY,
}  # fmt: skip


def given(*lines: str, **more: Any) -> dict[str, Any]:
    said = {"stdout_lines": [*(lines or ("python 3.11", "ensurepip yes")), "group docker"]}
    named = {name if name.startswith("nomad") else f"wandb_launch_agent_{name}": value for name, value in more.items()}
    return {**PRESENT, "__wandb_launch_agent_said": said, **named}


REFUSALS: list[tuple[dict[str, Any], str]] = [
    (given(), ""),
    (given(way="nomad"), ""),
    (given("python 3.9", "ensurepip yes"), "python3 is Python 3.9. Expected: 3.10 or newer, which wandb 0.31.0 needs"),
    (given("python 3.11", "ensurepip no"), ""),
    (given("python 3.12", "ensurepip no", python="python3.12"), "python3.12 has no ensurepip. Expected: a Python that"),
    (given("nothing"), "found no Python python3. Expected: one of version 3.10 or newer"),
    (
        given(entity="", api_key=""),
        "wandb_launch_agent_entity and wandb_launch_agent_api_key not set. Expected: the team",
    ),
    (given(queues=[]), "wandb_launch_agent_queues not set"),
    (
        given(api_key="short"),
        "wandb_launch_agent_api_key has 5 characters, or some that no key has. Expected: 40 or more",
    ),
    (given(api_key=KEY + "\nX=1"), "wandb_launch_agent_api_key has 44 characters"),
    (given(api_key=KEY + "\n"), "wandb_launch_agent_api_key has 41 characters"),
    (given(base_url="wandb.example.com"), "wandb_launch_agent_base_url is wandb.example.com. Expected: an address"),
    (given(base_url="https://a:b@w.example"), "wandb_launch_agent_base_url is"),
    (given(base_url="https://w.example\n"), "wandb_launch_agent_base_url is https://w.example\n."),
    (given(base_url="https://w.example/\n"), "wandb_launch_agent_base_url is https://w.example/\n."),
    (given(name="agent\n"), 'wandb_launch_agent_name is "agent\n".'),
    (given(name="Big Agent"), 'wandb_launch_agent_name is "Big Agent". Expected: at most 50 lower-case'),
    (given(max_jobs=0), "wandb_launch_agent_max_jobs is 0. Expected: 1 or more, or -1"),
    (given(options={"queues": []}), "wandb_launch_agent_options has queues. Expected: keys that have no variable"),
    (
        given(pip_options=["--index-url=https://me:secret@pypi.example.com/simple"]),
        "wandb_launch_agent_pip_options has an address with a password. Expected: none",
    ),
    (
        given(pip_options=["--index-url=https://me:se/cret@pypi.example.com/simple"]),
        "wandb_launch_agent_pip_options has an address with a password. Expected: none",
    ),
    (given(pip_options=["--find-links=https://pypi.example.com/a@b"]), ""),
    (given(gpus=[]), "wandb_launch_agent_gpus is []. Expected: numbers of GPUs"),
    (given(gpus=[1, -2]), "wandb_launch_agent_gpus is [1, -2]."),
    (given(way="nomad", nomad_acl_enabled=True), "found no /nowhere/nomad-management-token.txt on the control machine"),
    # What is taken away needs Nomad as well, where something of it is there, and nothing else.
    (given("python 3.9", DOCKER, state="absent", nomad_acl_enabled=True), "found no /nowhere/nomad-management"),
    (given(DOCKER, "python 3.11", "ensurepip yes", nomad_acl_enabled=True), "found no /nowhere/nomad-management"),
    (given("python 3.9", state="absent", queues=[], api_key="", nomad_acl_enabled=True), ""),
]


def test_what_cannot_be_had_is_refused() -> None:
    told = role_helper.values("__wandb_launch_agent_refusal", ROLES, [case for case, _told in REFUSALS])
    for (case, wanted), found in zip(REFUSALS, told, strict=True):
        assert found.startswith(wanted) and bool(found) == bool(wanted), (case, found)
        assert not found or ("Expected: " in found and "Next step: " in found and KEY not in found), found


def test_the_package_that_makes_environments_comes_where_the_distributions_python_lacks_it() -> None:
    cases = [given("python 3.11", "ensurepip no"), given(), given("python 3.12", "ensurepip no", python="python3.12")]
    assert role_helper.values("__wandb_launch_agent_lacks_venv", ROLES, cases) == [True, False, False]
    assert role_helper.values("__wandb_launch_agent_package", ROLES, cases[:1]) == ["python3-venv"]


def test_an_environment_that_works_is_not_emptied_for_a_version_that_pip_may_not_get() -> None:
    has = ("wandb 0.30.0", "venv 3.11")
    cases = [given("python 3.11"), given("python 3.12", *has), given("python 3.11", *has)]
    fresh, other, there = role_helper.values("__wandb_launch_agent_makes", ROLES, cases)
    assert [command[2] for command in fresh] == [command[2] for command in other] == ["venv", "pip"]
    assert there == fresh[1:] and there[0][-1] == "wandb==0.31.0"


def test_the_former_way_is_known_by_its_files() -> None:
    cases = [given(), given(DOCKER), given(UNIT), given(DOCKER, UNIT)]
    assert role_helper.values("__wandb_launch_agent_in_nomad", ROLES, cases) == [False, True, False, True]
    assert role_helper.values("__wandb_launch_agent_in_systemd", ROLES, cases) == [False, False, True, True]


# Files and templates of the role are found by its tasks; here they stand beside the variables.
def configuration(**more: Any) -> Any:
    return role_helper.values("__wandb_launch_agent_config", ROLES, [given(**more)])[0]


def test_the_configuration_has_what_was_asked_for() -> None:
    wanted = {"entity": "lab", "queues": ["gpus"], "max_jobs": 1}
    assert configuration() == wanted
    # A number of the command line is text.
    assert configuration(way="nomad", max_jobs="-1", options={"stopped_run_timeout": 5}) == {
        **wanted, "builder": {"type": "noop"}, "max_jobs": -1, "stopped_run_timeout": 5,
    }  # fmt: skip
    builder = {"type": "kaniko"}
    assert configuration(way="nomad", options={"builder": builder})["builder"] == builder


def test_counts_have_a_job_each_and_the_first_comes_first() -> None:
    (found,) = role_helper.values("__wandb_launch_agent_run_jobs", ROLES, [given(gpus=[2, "1", 2])])
    assert list(json.loads(found).items()) == [("2", "wandb-launch-gpus-2"), ("1", "wandb-launch-gpus-1")]


def test_check_mode_tells_that_another_wandb_would_come() -> None:
    (task,) = [
        task for task in role_helper.tasks_of("wandb_launch_agent/tasks/install.yml")
        if task.get("register") == "__wandb_launch_agent_pip"
    ]  # fmt: skip
    # Without either the module is passed over there.
    assert task["ansible.builtin.command"]["removes"] == "/sys"


def test_a_variable_of_several_lines_stays_one_line_of_the_unit() -> None:
    """systemd would read the rest as a line of its own, and say so in its log alone."""
    text = (role_helper.ROLES / "wandb_launch_agent/templates/gpufarm-wandb-launch.service.j2").read_text()
    case = {**given(environment={"A": "x\ny", "B": 'a "quoted" 5% \\n'}), "ansible_managed": "ours"}
    templar = Templar(DataLoader(), variables={**role_helper.variables(*ROLES), **case})
    # As a file, whose backslashes are its own.
    lines = templar.template(trust_as_template(text), escape_backslashes=False).splitlines()
    assert r'Environment="A=x\ny"' in lines and r'Environment="B=a \"quoted\" 5%% \\n"' in lines, lines
    assert "y" + '"' not in lines


def test_the_key_is_in_no_configuration() -> None:
    for name in ("__wandb_launch_agent_config_text", "__wandb_launch_agent_variables", "__wandb_launch_agent_command"):
        (found,) = role_helper.values(name, ROLES, [given(way="nomad")])
        assert KEY not in json.dumps(found), name
