# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the playbooks say of a run that has nothing to do, and where they write."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.template import trust_as_template
from ansible_collections.gpufarm.core.tests.unit.playbooks import playbook_helper
from ansible_collections.gpufarm.core.tests.unit.playbooks.playbook_helper import LOCAL
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import nomad_helper
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper


def words(text: str) -> str:
    return " ".join(text.split())


def inventory(**groups: list[str]) -> dict[str, Any]:
    children = {group: {"hosts": {host: {} for host in hosts}} for group, hosts in groups.items()}
    return {"all": {"vars": LOCAL, "hosts": {"other": {}}, "children": children}}


FARM = inventory(gpu_nodes=["node"], nomad_servers=["control"])


@pytest.mark.parametrize(
    ("name", "group"),
    [
        *((f"{name}.yml", "gpu_node") for name in ("site", "upgrade", "verify", "health", "accept", "report")),
        ("verify.yml", "gpu_nodes"),
    ],
)
def test_a_farm_without_gpu_nodes_is_no_success(tmp_path: Path, name: str, group: str) -> None:
    """The group is misspelt, or empty."""
    hosts = inventory(**{group: [] if group == "gpu_nodes" else ["node"]}, nomad_servers=["control"])
    result = playbook_helper.run_playbook(tmp_path, hosts, name)
    assert result.returncode == 2, result.stdout + result.stderr
    assert (
        f"{tmp_path}/hosts.yml: found the groups {group}, nomad_servers, and no host in "
        f"{'gpu_nodes or kubernetes_nodes' if name == 'report.yml' else 'gpu_nodes'}. "
        "Expected: the GPU nodes in that group. "
        "Next step: put them there, or name the right inventory with -i."
    ) in words(result.stdout + result.stderr)


def test_a_cluster_without_nodes_is_no_success(tmp_path: Path) -> None:
    result = playbook_helper.run_playbook(tmp_path, inventory(gpu_nodes=["node"]), "kubernetes_health.yml")
    assert result.returncode == 2, result.stdout + result.stderr
    assert (
        f"{tmp_path}/hosts.yml: found the groups gpu_nodes, and no host in kubernetes_nodes. "
        "Expected: the GPU nodes in that group. "
    ) in words(result.stdout + result.stderr)


def test_hosts_that_go_by_themselves_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one of them finds for all would be found by each."""
    monkeypatch.setenv("ANSIBLE_STRATEGY", "ansible.builtin.free")
    hosts = inventory(gpu_nodes=["node"], nomad_servers=["control"])
    result = playbook_helper.run_playbook(tmp_path, hosts, "health.yml")
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Found the strategy ansible.builtin.free in Ansible's configuration." in words(result.stdout + result.stderr)


def test_no_windows_machine_is_no_success_where_it_is_they_that_are_asked_for(tmp_path: Path) -> None:
    hosts = inventory(gpu_nodes=["node"], nomad_servers=["control"], wsl_host=["gaming-pc"])
    result = playbook_helper.run_playbook(tmp_path, hosts, "wsl_hosts.yml")
    assert result.returncode == 2, result.stdout + result.stderr
    assert (
        f"{tmp_path}/hosts.yml: found the groups gpu_nodes, nomad_servers, wsl_host, and no host in wsl_hosts. "
        "Expected: the Windows machines in that group. "
        "Next step: put them there, or name the right inventory with -i."
    ) in words(result.stdout + result.stderr)


def test_a_farm_needs_no_windows_machine(tmp_path: Path) -> None:
    plays = yaml.safe_load((playbook_helper.ROOT / "playbooks/wsl.yml").read_text(encoding="utf-8"))
    (part,) = (play for play in plays if play.get("ansible.builtin.import_playbook") == "wsl_hosts.yml")
    part["ansible.builtin.import_playbook"] = str(playbook_helper.ROOT / "playbooks/wsl_hosts.yml")
    (tmp_path / "part.yml").write_text(json.dumps([part]), encoding="utf-8")
    result = playbook_helper.run_playbook(tmp_path, FARM, str(tmp_path / "part.yml"))
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_run_that_leaves_no_windows_machine_is_no_success(tmp_path: Path) -> None:
    hosts = inventory(gpu_nodes=["node"], wsl_hosts=["gaming-pc"])
    result = playbook_helper.run_playbook(tmp_path, hosts, "wsl_hosts.yml", "--limit", "node")
    assert result.returncode == 2, result.stdout + result.stderr
    assert "found that it leaves node. Expected: at least one host of wsl_hosts," in words(
        result.stdout + result.stderr
    )
    result = playbook_helper.run_playbook(tmp_path, hosts, "wsl_hosts.yml", *NOTHING_ELSE)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_playbook_requires_hosts_first() -> None:
    folder = playbook_helper.ROOT / "playbooks"
    first = {
        path.name: yaml.safe_load(path.read_text(encoding="utf-8"))[0].get("ansible.builtin.import_playbook")
        for path in folder.glob("*.yml")
    }
    assert first.pop("require_hosts.yml") is None
    # What a playbook imports first may be another one that begins so.
    assert {name for name, other in first.items() if first.get(other, other) != "require_hosts.yml"} == set()


def test_an_ansible_that_is_too_old_is_refused_before_anything_else() -> None:
    """Debian 12 has 2.14, which reads all of it and fails somewhere in the middle."""
    (play,) = yaml.safe_load((playbook_helper.ROOT / "playbooks/require_hosts.yml").read_text(encoding="utf-8"))
    options = play["tasks"][0]["ansible.builtin.assert"]
    oldest = yaml.safe_load((playbook_helper.ROOT / "meta/runtime.yml").read_text(encoding="utf-8"))["requires_ansible"]
    for version, enough in (("2.14.18", False), ("2.18.9", False), ("2.19.0", True), ("2.21.0rc1", True)):
        given = {
            "ansible_version": {"full": version}, "that": trust_as_template(f"{{{{ {options['that']} }}}}"),
            "told": trust_as_template(options["fail_msg"]),
        }  # fmt: skip
        assert role_helper.value("that", given) is enough
        assert role_helper.value("told", given).startswith(
            f"This is ansible-core {version}. Expected: {oldest[2:-2]} or"
        )


def test_an_empty_inventory_is_no_success(tmp_path: Path) -> None:
    result = playbook_helper.run_playbook(tmp_path, {}, "verify.yml")
    assert result.returncode == 2
    assert "found the groups none, and no host in gpu_nodes. Expected: " in words(result.stdout + result.stderr)


@pytest.mark.parametrize("name", ["site.yml", "verify.yml", "health.yml", "accept.yml"])
def test_a_farm_without_servers_is_no_success(tmp_path: Path, name: str) -> None:
    result = playbook_helper.run_playbook(tmp_path, inventory(gpu_nodes=["node"], nomad_server=["control"]), name)
    assert result.returncode == 2
    assert (
        "found the groups gpu_nodes, nomad_server, no host in nomad_servers, and no nomad_client_servers. "
        "Expected: the servers that the GPU nodes join. "
        "Next step: put them into that group, or set nomad_client_servers where others run them."
    ) in words(result.stdout + result.stderr)


# With a tag that no task has, only what always runs does.
NOTHING_ELSE = ("--tags", "none-has-this")


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        *(
            (f"{name}.yml", ("gpu_nodes", "nomad_servers"))
            for name in ("site", "verify", "health", "report", "remove", "bundle")
        ),
        *((f"{name}.yml", ("kubernetes_nodes",)) for name in ("kubernetes", "kubernetes_health", "report", "bundle")),
    ],
)
def test_ansible_warns_of_no_group_that_a_farm_need_not_have(
    tmp_path: Path, name: str, groups: tuple[str, ...]
) -> None:
    hosts = inventory(**{group: [f"{group}-1"] for group in groups})
    result = playbook_helper.run_playbook(
        tmp_path, hosts, name, *NOTHING_ELSE, "--extra-vars", "remove_whole_farm=true"
    )
    assert "host pattern" not in result.stdout + result.stderr


@pytest.mark.parametrize("group", ["nomad_servers", "gpu_nodes", "kubernetes_nodes"])
def test_a_bundle_is_for_every_kind_of_host(tmp_path: Path, group: str) -> None:
    hosts = inventory(**{"gpu_nodes": ["node"], group: ["mine"]})
    result = playbook_helper.run_playbook(tmp_path, hosts, "bundle.yml", "--list-hosts")
    assert "mine" in playbook_helper.plays(result.stdout)["What hosts install"], result.stdout
    hosts = inventory(**{"kubernetes_nodes": ["node"], group: ["mine"]})
    result = playbook_helper.run_playbook(tmp_path, hosts, "bundle.yml", "--limit", "mine", *NOTHING_ELSE)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("where", ["nomad_client_servers", "nomad_servers_group"])
def test_servers_can_be_elsewhere(tmp_path: Path, where: str) -> None:
    hosts = inventory(gpu_nodes=["node"], control_plane=["control"])
    given = {"nomad_client_servers": ["192.0.2.10"], "nomad_servers_group": "control_plane"}[where]
    hosts["all"]["vars"] = {**LOCAL, where: given}
    result = playbook_helper.run_playbook(tmp_path, hosts, "health.yml", *NOTHING_ELSE)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("name", "limit", "expected"),
    [
        ("site.yml", "other", "nomad_servers or gpu_nodes"),
        ("upgrade.yml", "other", "nomad_servers or gpu_nodes"),
        ("verify.yml", "other", "gpu_nodes"),
        ("verify.yml", "control", "gpu_nodes"),
        ("health.yml", "control", "gpu_nodes"),
        ("accept.yml", "control", "gpu_nodes"),
        ("report.yml", "control", "gpu_nodes or kubernetes_nodes"),
        ("remove.yml", "other", "nomad_servers or gpu_nodes or wsl_hosts"),
    ],
)
def test_a_limit_that_leaves_nothing_to_do_is_no_success(tmp_path: Path, name: str, limit: str, expected: str) -> None:
    result = playbook_helper.run_playbook(tmp_path, FARM, name, "--limit", limit)
    assert result.returncode == 2
    assert (
        f"--limit {limit}: found that it leaves {limit}. "
        f"Expected: at least one host of {expected}, because nothing would be done otherwise. "
        "Next step: widen --limit, or leave it out."
    ) in words(result.stdout + result.stderr)


@pytest.mark.parametrize(("name", "limit"), [("site.yml", "control"), ("site.yml", "node"), ("verify.yml", "node")])
def test_a_limit_that_leaves_something_to_do(tmp_path: Path, name: str, limit: str) -> None:
    """Whatever the following plays find on this machine, they are reached."""
    result = playbook_helper.run_playbook(tmp_path, FARM, name, "--limit", limit, *NOTHING_ELSE)
    assert "found that it leaves" not in words(result.stdout + result.stderr)
    assert result.stdout.count("PLAY [") > 1, result.stdout


@pytest.mark.parametrize(
    "limit", [(), ("--limit", ""), ("--limit", " , "), ("--limit", "!other"), ("--limit", "!other[1:3]:!another")]
)
def test_no_farm_is_removed_by_mistake(tmp_path: Path, limit: tuple[str, ...]) -> None:
    """Ansible takes a limit that names nobody, or only who is to stay, for all others."""
    result = playbook_helper.run_playbook(tmp_path, FARM, "remove.yml", *limit, *NOTHING_ELSE)
    assert result.returncode == 2
    assert (
        "control: no machine is named that is to leave, so all of these would: control, node. "
        "Expected: those that are to leave. Next step: name them with --limit, or set remove_whole_farm."
    ) in words(result.stdout + result.stderr)


@pytest.mark.parametrize(
    ("name", "variable", "value"),
    [
        ("site.yml", "verify_jobs", "perhaps"),
        ("verify.yml", "verify_jobs_driver", "podman"),
        ("health.yml", "gate_closed_min", "soon"),
        ("report.yml", "report_productivity", "half"),
        ("accept.yml", "accept_level", "soak"),
        ("remove.yml", "remove_also", "everything"),
    ],
)
def test_a_wrong_variable_is_refused_before_a_node_is_asked(
    tmp_path: Path, name: str, variable: str, value: str
) -> None:
    result = playbook_helper.run_playbook(tmp_path, FARM, name, "--extra-vars", json.dumps({variable: value}))
    said = words(result.stdout + result.stderr)
    assert result.returncode == 2 and result.stdout.count("PLAY [") == 1, said
    assert variable in said


# --- verify.yml's comparison -----------------------------------------------------------------


def leads(request: Any) -> bool:
    if request.path != "/v1/status/leader":
        return False
    request.reply(200, b'"127.0.0.1:4647"', {"Content-Type": "application/json"})
    return True


def refuse(request: Any) -> bool:
    request.reply(403, b"Permission denied", {})
    return True


@pytest.fixture
def agent() -> Iterator[nomad_helper.Agent]:
    running = nomad_helper.Agent()
    running.nodes = [nomad_helper.make_node(0, 2)]

    running.answer = leads
    yield running
    running.close()


def compare(folder: Path, agent: nomad_helper.Agent, *entries: dict[str, Any], **variables: Any) -> tuple[int, str]:
    """Run verify.yml's comparison on a host of which nothing but its Nomad is asked."""
    (folder / "compare.yml").write_text(
        yaml.safe_dump(
            [
                {
                    "hosts": "control:gpu_nodes",
                    "gather_facts": False,
                    "tasks": [
                        {
                            "ansible.builtin.include_role": {
                                "name": "gpufarm.core.farm",
                                "tasks_from": "verify.yml",
                                "rolespec_validate": False,
                            },
                            "when": "inventory_hostname == 'control'",
                        }
                    ],
                }
            ]
        ),
        encoding="utf-8",
    )
    forbidden = folder / "forbidden"
    forbidden.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    forbidden.chmod(0o755)
    hosts = {
        "all": {
            "vars": {"ansible_become": True, "ansible_become_exe": str(forbidden)},
            "hosts": {"control": {**LOCAL, "ansible_become": False}},
            "children": {"gpu_nodes": {"hosts": {entry["__farm_verify_expected"]["node"]: entry for entry in entries}}},
        }
    }
    extra = {
        "__nomad_local_url": agent.url, "verify_timeout": 0, "__farm_speakers": {"global": "control"}, **variables
    }  # fmt: skip
    result = playbook_helper.run_playbook(folder, hosts, str(folder / "compare.yml"), "--extra-vars", json.dumps(extra))
    return result.returncode, words(result.stdout + result.stderr)


def node_entry(gpus: int) -> dict[str, Any]:
    (expected,) = nomad_helper.make_expected(1, gpus)
    told = {"node": expected["node"], "region": "global", "gpus": gpus}
    return {"__farm_verify_expected": expected, "__farm_verify_report_entry": told}


def test_the_written_report_needs_no_root_on_the_control_machine(tmp_path: Path, agent: nomad_helper.Agent) -> None:
    told = tmp_path / "told.json"
    code, output = compare(tmp_path, agent, node_entry(2), verify_report=str(told))
    assert code == 0, output
    report = json.loads(told.read_text(encoding="utf-8"))
    assert report["expected"] == [{"node": "node00000", "region": "global", "gpus": 2}]
    assert report["regions"] == [
        {"region": "global", "host": "control", "failed": None, "budgets_failed": None, "jobs_failed": None}
    ]
    assert [node["region"] for node in report["nodes"]] == ["global"]
    assert [(node["name"], node["verdict"]) for node in report["nodes"]] == [("node00000", "ok")]
    assert report["not_compared"] == []


def test_a_run_in_which_every_node_failed_leaves_no_report_of_an_earlier_one(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    told.write_text('{"nodes": [{"name": "node", "verdict": "ok"}]}', encoding="utf-8")
    hosts = inventory(gpu_nodes=["node", "gone"])
    nodes = hosts["all"]["children"]["gpu_nodes"]["hosts"]
    nodes["node"] = {"nomad_client_servers": ["192.0.2.10"], "ansible_become": False}
    nodes["gone"] = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
    begun = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    result = playbook_helper.run_playbook(tmp_path, hosts, "verify.yml", "--extra-vars", f"verify_report={told}")
    said = words(result.stdout + result.stderr)
    assert result.returncode != 0, said
    report = json.loads(told.read_text(encoding="utf-8"))
    assert begun <= report["made_at"] and (report["nodes"], report["regions"]) == ([], [])
    gone, failed = report["not_compared"]
    assert gone == {"host": "gone", "node": None, "why": "it failed, was not reached, or the run has not come to it"}
    assert (failed["host"], failed["node"]) == ("node", None)
    assert "Next step: " in failed["why"] and words(failed["why"]) in said


@pytest.mark.parametrize(
    ("playbook", "option", "name"),
    [("verify.yml", "verify_report", "new.json"), ("report.yml", "report_history", "new.jsonl")],
)
@pytest.mark.parametrize("check", [False, True])
def test_the_folder_of_a_written_report_is_made_before_anything_is_asked(
    tmp_path: Path, playbook: str, option: str, name: str, check: bool
) -> None:
    told, page = tmp_path / "reports" / "new" / name, tmp_path / "page.html"
    hosts = inventory(gpu_nodes=["gone"])
    hosts["all"]["children"]["gpu_nodes"]["hosts"]["gone"] = {
        "ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1, "ansible_become": False,
        "nomad_client_servers": ["192.0.2.10"],
    }  # fmt: skip
    asked = json.dumps({option: str(told), "report_path": str(page)})
    result = playbook_helper.run_playbook(tmp_path, hosts, playbook, "--extra-vars", asked, *["--check"] * check)
    said = words(result.stdout + result.stderr)
    assert "does not exist" not in said and told.exists() is not check, said


def test_where_nomad_has_no_gpu_the_nodes_say_what_their_plugins_do(
    tmp_path: Path, agent: nomad_helper.Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not answer is told of, too."""
    lost = nomad_helper.recorded("plugin-logs-1.11.3")["lost"]
    (tmp_path / "lost").write_text("\n".join(lost), encoding="utf-8")
    for name, does in (("systemctl", "echo InvocationID=abc"), ("journalctl", f"cat {tmp_path}/lost")):
        program = tmp_path / "programs" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{does}\n", encoding="utf-8")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/programs:{os.environ['PATH']}")
    agent.nodes = [nomad_helper.make_node(number, 2) for number in range(3)]
    entries = []
    for number, wanted in enumerate(nomad_helper.make_expected(3, 2)):
        told = {"node": wanted["node"], "region": "global", "gpus": 2}
        entry = {"__farm_verify_expected": wanted, "__farm_verify_report_entry": told, "ansible_become": False}
        entries.append({**entry, **LOCAL, **({"ansible_python_interpreter": "/nowhere"} if number == 1 else {})})
    for node in agent.nodes[:2]:
        node["NodeResources"]["Devices"] = None
    code, output = compare(tmp_path, agent, *entries)
    assert code == 2 and "Node node00000: found no GPU device at all" in output, output
    assert (
        "node00000: The device plugin has said: failed to get fingerprint nvidia devices: nvidia nvml "
        "DeviceInfoByIndex() error: nvml: GPU is lost; "
    ) in output
    assert (
        "Likely cause: one GPU that the plugin cannot read, which hides all of the node. Next step: find it" in output
    )
    assert "node00001: what its device plugin says is not known: " in output
    assert "node00002: " not in output


def test_who_is_over_budget_is_told_and_when_that_is_not_known(tmp_path: Path, agent: nomad_helper.Agent) -> None:
    told = tmp_path / "told.json"
    (held,) = nomad_helper.recorded("allocations-1.11.3")
    agent.allocations = [{**held, "NodeID": agent.nodes[0]["ID"]}]
    agent.namespaces = [{"Name": "default", "Meta": {"gpufarm_gpus": "1"}}]
    code, output = compare(tmp_path, agent, node_entry(2), verify_report=str(told))
    assert (code, "the namespace default uses 2 GPU(s): training 2. Expected: at most 1, its" in output) == (0, True), (
        output
    )
    namespaces = json.loads(told.read_text(encoding="utf-8"))["namespaces"]
    assert namespaces == [{"region": "global", "namespace": "default", "gpus": 2, "budget": 1}]

    def no_jobs(request: Any) -> bool:
        refused = request.path.startswith("/v1/allocations")
        if refused:
            request.reply(403, b"Permission denied", {})
        return refused or leads(request)

    agent.answer = no_jobs
    code, output = compare(tmp_path, agent, node_entry(2), verify_report=str(told))
    assert (code, "Nobody was compared with a budget: " in output) == (0, True), output
    (region,) = json.loads(told.read_text(encoding="utf-8"))["regions"]
    assert "/v1/allocations" in region["budgets_failed"] and region["failed"] is None


def test_a_missing_gpu_fails_and_is_in_the_written_report(tmp_path: Path, agent: nomad_helper.Agent) -> None:
    told = tmp_path / "told.json"
    code, output = compare(tmp_path, agent, node_entry(3), verify_report=str(told))
    assert code == 2
    assert f"Node node00000: found 2 GPUs without it. Expected: GPU {nomad_helper.uuid_of(0, 2)}." in output
    assert json.loads(told.read_text(encoding="utf-8"))["nodes"][0]["verdict"] == "failed"


def test_a_region_that_could_not_be_compared_says_why_in_the_written_report(
    tmp_path: Path, agent: nomad_helper.Agent
) -> None:
    told = tmp_path / "told.json"
    agent.answer = lambda request: refuse(request) if request.path.startswith("/v1/nodes") else leads(request)
    code, _output = compare(tmp_path, agent, node_entry(2), verify_report=str(told))
    assert code == 2
    report = json.loads(told.read_text(encoding="utf-8"))
    assert report["nodes"] == []
    assert "was refused (HTTP 403: Permission denied)" in report["regions"][0]["failed"]
    assert report["not_compared"] == [{"host": "node00000", "node": "node00000", "why": report["regions"][0]["failed"]}]


def test_nothing_to_compare_is_no_success(tmp_path: Path, agent: nomad_helper.Agent) -> None:
    code, output = compare(tmp_path, agent)
    assert code == 2
    assert "the option 'expected' is empty, so nothing would be compared. Expected: at least one node." in output
