"""What the role says of teams that cannot be had, and of those that use too much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.template import trust_as_template
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

PLAYBOOK = Path(__file__).resolve().parents[3] / "playbooks/tenancy.yml"
OWN = {"nomad_token": "from-a-vault", "nomad_acl_enabled": True, "nomad_secrets_dir": "/nowhere"}
POLICIES, TOKENS = "nomad_tenancy_policies", "nomad_tenancy_tokens"
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({POLICIES: {"a": "node {}"}, TOKENS: {"a": ["a"]}}, ""),
    ({"nomad_acl_enabled": False}, ""),
    ({POLICIES: {"a": "node {}"}, "nomad_acl_enabled": False}, "nomad_acl_enabled is false. Expected: a farm with"),
    ({TOKENS: {"a": ["a"]}, "nomad_acl_enabled": False}, "nomad_acl_enabled is false. Expected: a farm with"),
    ({POLICIES: {"gpufarm-farm": "node {}"}}, "found gpufarm-farm in nomad_tenancy_policies"),
    ({TOKENS: {"gpufarm-gate": ["a"]}}, "found gpufarm-gate in nomad_tenancy_policies or nomad_tenancy_tokens"),
    ({TOKENS: {"../a": ["a"]}}, "nomad_tenancy_tokens has ../a. Expected: names of letters, digits"),
    ({TOKENS: {"a": []}}, "nomad_tenancy_tokens has a without a policy."),
    ({POLICIES: {"a": {"state": "absent"}}, TOKENS: {"a": {"state": "absent"}}}, ""),
    ({TOKENS: {"a": {"state": "absent"}}, "nomad_acl_enabled": False}, "nomad_acl_enabled is false."),
    ({TOKENS: {"a": {"state": "present"}}}, "nomad_tenancy_policies or nomad_tenancy_tokens has a with a dictionary."),
    ({POLICIES: {"a": {"rules": ""}}}, "a dictionary. Expected: rules, a list of policies, or `state: absent`"),
    ({"nomad_token": ""}, "found no /nowhere/nomad-management-token.txt on the control machine, and nomad_token"),
    ({"nomad_token": "", "nomad_acl_enabled": False}, ""),
    ({TOKENS: {"a": ["a"]}, "nomad_secrets_dir": "secrets"}, 'nomad_secrets_dir is "secrets". Expected: an absolute'),
]  # fmt: skip


def test_what_cannot_be_had_is_told() -> None:
    cases = [{**OWN, **given} for given, _ in REFUSALS]
    told = role_helper.values("__nomad_tenancy_refusal", ["nomad", "nomad_tenancy"], cases)
    for found, (given, expected) in zip(told, REFUSALS, strict=True):
        assert (expected in found) if expected else found == "", (given, found)
        assert found == "" or found.count("Next step: ") == 1


def over(use: Any) -> list[str]:
    given = {**role_helper.variables("nomad", "nomad_tenancy"), "__nomad_tenancy_use": use}
    found: list[str] = role_helper.value("__nomad_tenancy_over", given)
    return found


@pytest.mark.parametrize("use", [{}, {"msg": "refused"}, {"usage": None}, {"usage": {"namespaces": [], "jobs": []}}])
def test_nothing_is_said_of_use_that_is_not_known(use: Any) -> None:
    assert over(use) == []


def test_who_is_over_budget_is_named_with_the_jobs() -> None:
    namespaces = [
        {"namespace": "free", "gpus": 9, "budget": None},
        {"namespace": "full", "gpus": 2, "budget": 2},
        {"namespace": "none", "gpus": 1, "budget": 0},
        {"namespace": "research", "gpus": 13, "budget": 8},
    ]
    jobs = [{"namespace": "research", "job_id": f"train-{gpus}", "gpus": gpus} for gpus in (4, 3, 2, 2, 1, 1)]
    usage = {"namespaces": namespaces, "jobs": [*jobs, {"namespace": "none", "job_id": "look", "gpus": 1}]}
    assert over({"usage": usage}) == [
        f"region global: the namespace {name} uses {gpus} GPU(s): {told}. Expected: at most {budget}, its budget. "
        "Next step: stop jobs of it, or raise gpus in nomad_tenancy_namespaces."
        for name, gpus, budget, told in [
            ("none", 1, 0, "look 1"),
            ("research", 13, 8, "train-4 4, train-3 3, train-2 2, train-2 2, train-1 1 and 1 more job(s)"),
        ]
    ]


@pytest.mark.parametrize("checks", [True, False])
def test_budgets_that_are_only_to_change_are_not_judged(checks: bool) -> None:
    """Neither by the role nor by the playbook, which asks the regions that the role was not run for."""
    of_playbook = yaml.safe_load(PLAYBOOK.read_text(encoding="utf-8"))[-1]["tasks"]
    judging = [
        task["when"]
        for task in [*role_helper.tasks_of("nomad_tenancy/tasks/main.yml"), *of_playbook]
        if task["name"].startswith("Require budgets that are kept")
    ]
    assert len(judging) == 2
    given = {
        "judged": [trust_as_template(f"{{{{ {when} }}}}") for when in judging], "ansible_check_mode": checks,
        "inventory_hostname": "a", "__farm_speakers": {"global": "a"}, "__nomad_tenancy_use": {},
    }  # fmt: skip
    assert role_helper.value("judged", given) == [not checks] * 2


@pytest.mark.parametrize("checks", [True, False])
def test_tokens_that_a_check_has_not_changed_count_as_they_will_be(checks: bool) -> None:
    tasks = role_helper.tasks_of("nomad_tenancy/tasks/main.yml")
    (gone,) = (task["vars"] for task in tasks if task["name"].startswith("Have no policies and tokens"))
    given = {
        **role_helper.variables("nomad", "nomad_tenancy"), **OWN, TOKENS: {"alice": ["see"]},
        POLICIES: {"old": {"state": "absent"}}, "ansible_check_mode": checks,
        "told": [trust_as_template(gone[f"__nomad_acl_tokens{each}"]) for each in ("", "_own")],
    }  # fmt: skip
    assert role_helper.value("told", given) == ([{"alice": ["see"]}, {"alice": ""}] if checks else [{}, {}])


def test_tokens_of_teams_lie_beside_those_of_the_farm(tmp_path: Path) -> None:
    (tmp_path / "team-same-token.txt").write_text("kept", encoding="ascii")
    secrets = {"gpufarm-farm": "1", "research": "2", "same": "kept"}
    given = {**OWN, "nomad_secrets_dir": str(tmp_path), "__nomad_acl": {"secrets": secrets}}
    (found,) = role_helper.values("__nomad_acl_tokens_to_keep", ["nomad"], [given])
    assert found == [{"key": "nomad-farm", "value": "1"}, {"key": "team-research", "value": "2"}]


def test_only_the_token_that_lies_in_the_folder_is_ours(tmp_path: Path) -> None:
    (tmp_path / "team-gone-token.txt").write_text("its-secret", encoding="ascii")
    (tmp_path / "team-kept-token.txt").write_text("kept", encoding="ascii")
    absent = {"state": "absent"}
    given = {
        **OWN, "nomad_secrets_dir": str(tmp_path),
        TOKENS: {"gone": absent, "unknown": absent, "kept": ["kept"], "new": ["kept"]},
        POLICIES: {"gone": absent, "kept": "node {}"},
    }  # fmt: skip
    roles = ["nomad", "nomad_tenancy"]
    for name, expected in {
        "__nomad_tenancy_tokens_gone": {"gone": "its-secret", "unknown": ""}, "__nomad_tenancy_policies_gone": ["gone"],
        "__nomad_tenancy_tokens_own": {"kept": "kept", "new": ""},
        "__nomad_tenancy_tokens_had": {"new": ["kept"], "kept": ["kept"]},
        "__nomad_tenancy_policies_had": {"kept": "node {}"},
    }.items():  # fmt: skip
        assert role_helper.values(name, roles, [given]) == [expected], name
    # One without a file is asked for all the same, so that somebody is told where it goes on existing.
    cases = [{**given, POLICIES: {}, TOKENS: {"unknown": each}} for each in (absent, ["kept"])]
    assert role_helper.values("__nomad_tenancy_rights_go", roles, cases) == [True, False]
