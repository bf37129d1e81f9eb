# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The document of the report, from the answers of nodes and Nomad."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import json
import math
import re
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.plugin_utils import report, report_page
from ansible_collections.gpufarm.core.plugins.plugin_utils.report import history, records, sums
from ansible_collections.gpufarm.core.plugins.plugin_utils.report import nodes as report_nodes
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils.recorded import assert_recorded
from ansible_collections.gpufarm.core.tests.unit.plugins.plugin_utils import report_helper as helper

# The report is made on the control node.
pytestmark = pytest.mark.controller


def of(*answers: dict[str, Any], nomad: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    """The arguments of a farm of these answers; without a list of Nomad's no server was asked."""
    servers = [] if nomad is None else [helper.server(nomad)]
    return {"hosts": [entry["name"] for entry in answers], "answers": list(answers), "servers": servers, **more}


def one(name: str = "gpu01", recording: str = helper.H100, gpus: int = 2, **values: Any) -> dict[str, Any]:
    return helper.answer(name, helper.health(helper.facts(recording, 1, gpus, **values)))


def by_name(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(node for node in data["nodes"] if node["name"] == name)


# Who answered


@pytest.mark.parametrize(
    ("result", "state", "reason"),
    [
        (
            {"unreachable": True, "msg": "Failed to connect\n to the host"},
            "unreachable",
            "Failed to connect to the host",
        ),
        ({"msg": "gpu01: timeout is -1. Expected: more."}, "failed", "gpu01: timeout is -1. Expected: more."),
        ({"msg": "MODULE FAILURE", "module_stderr": "Trace\nImportError: no x"}, "failed", "ImportError: no x"),
        ({"msg": "MODULE FAILURE\nSee stdout"}, "failed", "MODULE FAILURE See stdout"),
        ({"module_stdout": "a\nlast", "exception": "no"}, "failed", "last"),
        ({"exception": "Traceback\nboom"}, "failed", "boom"),
        ({"rc": 1}, "failed", "no reason was given"),
        ({"unreachable": True}, "unreachable", "no reason was given"),
        ({}, "not_asked", "it was left out of this run (--limit), or failed before it could be asked"),
    ],
)
def test_who_gives_no_answer_stays_with_the_reason(result: dict[str, Any], state: str, reason: str) -> None:
    data = helper.document(of(one("good"), helper.answer("bad", result)))
    node = by_name(data, "bad")
    assert (node["state"], node["reason"], node["verdict"], node["gpus"]) == (state, reason, "unknown", [])
    assert data["summary"]["nodes_unanswered"] == 1 and data["summary"]["nodes_answered"] == 1
    assert [node["name"] for node in data["nodes"]] == ["bad", "good"]


# Kubernetes


def in_kubernetes(name: str, gpus: int = 2, **values: Any) -> dict[str, Any]:
    return {**one(name, gpus=gpus, **values), "kubernetes_name": f"{name}.example"}


def test_a_farm_of_kubernetes_alone_needs_no_nomad() -> None:
    nodes = [helper.kubernetes_node("k1.example", 2, pods={"train-0": 1}), helper.kubernetes_node("k2.example", 2)]
    arguments = of(in_kubernetes("k1"), in_kubernetes("k2"), kubernetes=helper.cluster(nodes, "k1", "k2"))
    data = helper.document(arguments)
    assert (data["notices"], data["nomad"]["regions"], data["summary"]["allocated_gpus"]) == ([], [], None)
    assert (data["kubernetes"]["answered"], data["summary"]["pod_gpus"]) == (True, 1)
    assert [(node["name"], node["verdict"], node["region"], node["nomad"]) for node in data["nodes"]] == [
        ("k1", "ok", None, None), ("k2", "ok", None, None),
    ]  # fmt: skip
    assert by_name(data, "k1")["kubernetes"] == {
        "name": "k1.example", "status": "ready", "schedulable": True, "reason": None, "version": "v1.34.1",
        "devices_allocatable": 2, "devices_used": 1, "gpus_used": 1,
    }  # fmt: skip
    assert data["users"]["pods"] == [
        {"node": "k1", "namespace": "lab", "pod": "train-0", "phase": "Running", "gpus": 1}
    ]
    view = report_page.page(data)
    assert view["headline"]["text"] == "All 4 GPUs healthy"
    assert [node["schedulers"] for node in view["nodes"]] == [
        "Kubernetes: ready, takes work, pods hold 1 of 2 allocatable GPUs",
        "Kubernetes: ready, takes work, pods hold 0 of 2 allocatable GPUs",
    ]
    assert [(tile["value"], tile["note"]) for tile in view["tiles"] if tile["label"] == "Allocated"] == [
        ("1", "of 4 GPUs")
    ]
    # Whose GPUs are idle is not told, so neither is what that costs.
    assert data["cost"]["total"]["idle_cost_per_hour"] is None and data["cost"]["models"][0]["allocated_gpus"] is None
    page = helper.render(data)
    assert "train-0" in page and "Nomad" not in page.split("</style>")[1]


def test_what_kubernetes_lacks_is_told_in_the_words_of_its_verification() -> None:
    lost = helper.kubernetes_node("k1.example", 2, well=0)
    arguments = of(in_kubernetes("k1"), in_kubernetes("k2"), kubernetes=helper.cluster([lost], "k1", "k2"))
    data = helper.document(arguments)
    found = {node["name"]: [problem["code"] for problem in node["problems"]] for node in data["nodes"]}
    assert found == {"k1": ["gpu_unhealthy"], "k2": ["node_missing"]}
    (problem,) = by_name(data, "k2")["problems"]
    assert (problem["source"], problem["severity"], by_name(data, "k2")["verdict"]) == (
        "kubernetes", "warning", "warning",
    )  # fmt: skip
    assert problem["expected"] == "a node of this name in Kubernetes" and "kubelet" in problem["action"]


def test_a_cordoned_node_says_why() -> None:
    marks = {"annotations": {"gpufarm.core/gate-reason": "GPU 3: Xid 79."}}
    node = helper.kubernetes_node("k1.example", 2, cordoned=True, metadata=marks)
    data = helper.document(of(in_kubernetes("k1"), kubernetes=helper.cluster([node], "k1")))
    (view,) = report_page.page(data)["nodes"]
    assert view["closed"] == "cordoned in Kubernetes"
    assert view["schedulers"].startswith("Kubernetes: ready, cordoned, ")
    assert view["schedulers"].endswith(": GPU 3: Xid 79")


def test_a_cluster_that_does_not_answer_is_told() -> None:
    told = {"msg": "k1: control has no kubectl. Expected: kubectl. Next step: install it."}
    data = helper.document(of(in_kubernetes("k1"), kubernetes=helper.cluster([], "k1", result=told)))
    assert data["notices"] == [
        {
            "found": "Kubernetes could not be asked on control: k1: control has no kubectl",
            "expected": "kubectl", "action": "install it",
        }
    ]  # fmt: skip
    assert (data["nodes"][0]["verdict"], data["nodes"][0]["kubernetes"], data["summary"]["pod_gpus"]) == (
        "ok", None, None,
    )  # fmt: skip
    view = report_page.page(data)
    assert view["headline"] == {"level": "unknown", "text": "Kubernetes without an answer"}
    assert view["nodes"][0]["schedulers"] == "Kubernetes: not known"
    (tile,) = [tile for tile in view["tiles"] if tile["label"] == "Allocated"]
    assert (tile["value"], tile["note"]) == (report_page.UNKNOWN, "Kubernetes gave no answer")


def test_gpus_of_the_cluster_that_are_not_in_the_inventory_are_told() -> None:
    nodes = [helper.kubernetes_node("k1.example", 2), helper.kubernetes_node("stray", 8, pods={"a": 8})]
    data = helper.document(of(in_kubernetes("k1"), kubernetes=helper.cluster(nodes, "k1")))
    assert [notice["found"] for notice in data["notices"]] == ["Kubernetes has GPUs on stray"]
    assert [use["node"] for use in data["users"]["pods"]] == ["stray"]


def test_a_node_of_both_schedulers_has_both() -> None:
    smi = helper.facts(helper.H100, 1, 2)
    smi["gpus"][0]["processes"] = [{"pid": 1, "type": "C", "name": "/usr/bin/python3", "memory_used_mib": 10}]
    both = {**helper.answer("gpu01", helper.health(smi)), "kubernetes_name": "gpu01"}
    node = helper.nomad_node("gpu01", helper.devices(smi, {1: "train"}))
    cluster = helper.cluster([helper.kubernetes_node("gpu01", 2, pods={"infer": 1})], "gpu01")
    data = helper.document(of(both, nomad=[node], regions={"gpu01": "global"}, kubernetes=cluster))
    assert (data["summary"]["allocated_gpus"], data["summary"]["pod_gpus"]) == (1.0, 1)
    # It may be the pod's, so nobody says that it is outside.
    assert data["users"]["outside"] == []
    view = report_page.page(data)
    assert view["nodes"][0]["schedulers"] == (
        "Nomad: ready, eligible. Kubernetes: ready, takes work, pods hold 1 of 2 allocatable GPUs"
    )
    assert [gpu["used_by"] for gpu in view["nodes"][0]["gpus"]] == ["1 process, perhaps of a pod", "train"]
    smi["gpus"][0]["processes"] = []
    view = report_page.page(helper.document(of(both, nomad=[node], regions={"gpu01": "global"}, kubernetes=cluster)))
    assert view["nodes"][0]["gpus"][0]["used_by"] == "free in Nomad"
    (tile,) = [tile for tile in view["tiles"] if tile["label"] == "Allocated"]
    assert (tile["value"], tile["note"]) == ("2", "of 2 GPUs, 1 by pods")


def test_pods_with_mig_devices_or_shares_of_gpus_are_not_counted_as_gpus() -> None:
    smi = helper.facts(helper.MIG, 1, 1)
    migs = len(smi["gpus"][0]["mig_devices"])
    answer = {**helper.answer("k1", helper.health(smi)), "kubernetes_name": "k1"}
    for values in (
        {"resource": "nvidia.com/mig-1g.10gb"},
        {"resource": "nvidia.com/gpu", "metadata": {"labels": {"nvidia.com/mig.strategy": "single"}}},
    ):
        node = helper.kubernetes_node("k1", migs, pods={"a": 2}, **values)
        data = helper.document(of(answer, kubernetes=helper.cluster([node], "k1")))
        assert by_name(data, "k1")["problems"] == [], values
        view = report_page.page(data)
        (tile,) = [tile for tile in view["tiles"] if tile["label"] == "Allocated"]
        assert (tile["value"], tile["note"]) == (report_page.UNKNOWN, "pods hold MIG devices or shared GPUs")
        assert f"pods hold 2 of {migs} allocatable devices" in view["nodes"][0]["schedulers"]
        # Which of them is free, nobody knows.
        assert {mig["used_by"] for mig in view["nodes"][0]["gpus"][0]["migs"]} == {report_page.UNKNOWN}
        assert view["mig"]["gpus"][0]["allocated"] == report_page.UNKNOWN
    labels = {"labels": {"nvidia.com/gpu.replicas": "10"}}
    shared = helper.kubernetes_node("k1", 20, pods={"a": 12}, metadata=labels)
    data = helper.document(of(in_kubernetes("k1"), kubernetes=helper.cluster([{**shared, "name": "k1.example"}], "k1")))
    assert data["summary"]["pod_gpus"] is None
    assert "pods hold 12 of 20 allocatable devices" in report_page.page(data)["nodes"][0]["schedulers"]


def test_a_lost_gpu_is_no_reason_to_start_the_plugin_again() -> None:
    smi = helper.facts(helper.H100, 1, 4)
    smi["gpus"][3]["status"] = "lost"
    answer = {**helper.answer("k1", helper.health(smi)), "kubernetes_name": "k1"}
    data = helper.document(of(answer, kubernetes=helper.cluster([helper.kubernetes_node("k1", 4, well=0)], "k1")))
    assert [found["code"] for found in data["nodes"][0]["problems"]] == ["gpu_unhealthy"]


@pytest.mark.parametrize(
    ("severity", "codes"),
    [(None, []), ("warning", ["mig_empty"]), ("critical", ["mig_empty", "count_mismatch"])],
)
def test_kubernetes_lacks_no_gpu_that_is_to_have_no_mig_device(severity: str | None, codes: list[str]) -> None:
    smi = helper.facts(helper.H100, 1, 2)
    smi["gpus"][1].update(mig_mode="Enabled", mig_devices=[])
    found = [helper.problem(smi["gpus"][1], "mig_empty", severity)] if severity else []
    answer = {**helper.answer("k1", helper.health(smi, found)), "kubernetes_name": "k1"}
    data = helper.document(of(answer, kubernetes=helper.cluster([helper.kubernetes_node("k1", 1)], "k1")))
    assert sorted(found["code"] for found in data["nodes"][0]["problems"]) == sorted(codes)


def test_of_a_silent_host_nobody_says_that_kubernetes_lacks_it() -> None:
    silent = {**helper.answer("k1", {"unreachable": True, "msg": "no route"}), "kubernetes_name": "k1"}
    nodes = [helper.kubernetes_node("k1.example", 2, pods={"a": 2})]
    data = helper.document(of(silent, kubernetes=helper.cluster(nodes, "k1")))
    assert (data["nodes"][0]["problems"], data["nodes"][0]["kubernetes"]) == ([], None)
    assert "of a silent host" in data["notices"][0]["action"]
    # Of GPUs that no answer has, none is allocated.
    assert data["summary"]["pod_gpus"] == 0


def test_processes_of_a_silent_cluster_may_be_of_pods() -> None:
    answer = in_kubernetes("k1")
    answer["health"]["nvidia_smi"]["gpus"][0]["processes"] = [
        {"pid": 1, "type": "C", "name": "python3", "memory_used_mib": 10}
    ]
    data = helper.document(of(answer, kubernetes=helper.cluster([], "k1", result={"msg": "x"})))
    assert data["users"]["outside"] == []
    assert report_page.page(data)["nodes"][0]["gpus"][0]["used_by"] == "1 process, perhaps of a pod"


def test_a_host_of_kubernetes_alone_that_nomad_knows_is_one() -> None:
    smi = helper.facts(helper.H100, 1, 2)
    answer = {**helper.answer("k1", helper.health(smi)), "kubernetes_name": "k1"}
    listed = helper.nomad_node("k1", helper.devices(smi))
    data = helper.document(
        of(answer, nomad=[listed], kubernetes=helper.cluster([helper.kubernetes_node("k1", 2)], "k1"))
    )
    assert [(node["name"], node["state"], node["region"]) for node in data["nodes"]] == [("k1", "answered", "global")]


def test_a_node_that_is_not_ready_takes_no_work() -> None:
    node = {**helper.kubernetes_node("k1.example", 2), "status": "not ready"}
    data = helper.document(of(in_kubernetes("k1"), kubernetes=helper.cluster([node], "k1")))
    (view,) = report_page.page(data)["nodes"]
    assert view["schedulers"].startswith("Kubernetes: not ready, pods hold ")
    assert view["closed"] == "not ready in Kubernetes"


def test_regions_are_those_of_nomad() -> None:
    smi = helper.facts(helper.H100, 1, 2)
    servers = [helper.server([helper.nomad_node("east", helper.devices(smi))], region="east", server="a"),
               helper.server([], region="west", server="b")]  # fmt: skip
    arguments = of(in_kubernetes("k1"), helper.answer("east", helper.health(smi)), regions={"east": "east"},
                   kubernetes=helper.cluster([helper.kubernetes_node("k1.example", 2)], "k1"))  # fmt: skip
    view = report_page.page(helper.document({**arguments, "servers": servers}))
    assert sorted(node["versions"].partition(", driver")[0] for node in view["nodes"]) == [
        "linux",
        "region east, linux",
    ]


def test_host_without_an_entry_is_reported() -> None:
    data = helper.document(of(one(), hosts=["gpu01", "gpu02"]))
    assert by_name(data, "gpu02")["state"] == "not_asked"


def test_gpus_of_a_silent_host_are_those_that_nomad_last_knew() -> None:
    smi = helper.facts(helper.T4, 7, 2)
    node = helper.nomad_node("gone", helper.devices(smi, {1: "training"}), status="down")
    silent = helper.answer("gone", {"unreachable": True, "msg": "no route"})
    found = by_name(helper.document(of(silent, nomad=[node])), "gone")
    assert [(gpu["uuid"], gpu["source"], gpu["verdict"], gpu["allocated_share"]) for gpu in found["gpus"]] == [
        (helper.uuid_of(7, 0), "nomad", "unknown", 0.0),
        (helper.uuid_of(7, 1), "nomad", "unknown", 1.0),
    ]
    assert [problem["code"] for problem in found["problems"]] == ["node_down"]
    assert found["verdict"] == "unknown" and found["nomad"]["status"] == "down"


def test_mig_devices_of_a_silent_host_are_put_together_by_their_address() -> None:
    smi = helper.facts(helper.MIG, 7, 2)
    parts = helper.devices(smi)
    silent = helper.answer("gone", {"unreachable": True, "msg": "no route"})
    found = by_name(helper.document(of(silent, nomad=[helper.nomad_node("gone", parts)])), "gone")
    assert [len(gpu["mig_devices"]) for gpu in found["gpus"]] == [4, 4]
    assert {gpu["model"] for gpu in found["gpus"]} == {smi["gpus"][0]["name"]}


def test_node_that_only_nomad_knows_is_reported() -> None:
    smi = helper.facts(helper.T4, 9, 1)
    extra = helper.nomad_node("stranger", helper.devices(smi))
    cpu_only = helper.nomad_node("cpu", [])
    data = helper.document(of(one(), nomad=[extra, cpu_only]))
    assert by_name(data, "stranger")["state"] == "not_in_inventory"
    assert "cpu" not in {node["name"] for node in data["nodes"]}


def test_dead_nomad_is_told_and_nothing_is_guessed() -> None:
    dead = {"server": "control", "result": {"msg": "control: refused. Expected: an agent. Next step: start it."}}
    data = helper.document(of(one(), servers=[dead]))
    assert data["nomad"] == {
        "answered": False,
        "regions": [{"region": "global", "server": None, "asked_at": None}],
        "failures": [{"server": "control", "region": "global", "reason": dead["result"]["msg"]}],
        "certificates": [],
    }
    assert data["notices"] == [
        {
            "found": "Nomad could not be asked on control: control: refused",
            "expected": "an agent",
            "action": "start it",
        }
    ]
    assert data["summary"]["allocated_gpus"] is None and data["cost"]["total"]["idle_cost_per_hour"] is None
    assert {gpu["in_nomad"] for gpu in data["nodes"][0]["gpus"]} == {None}
    assert by_name(data, "gpu01")["verdict"] == "ok"


def two_regions(**west: Any) -> dict[str, Any]:
    """Two regions with a node each, which has the same name in Nomad."""
    answers = [
        helper.answer(host, helper.health(helper.facts(helper.H100, number, 1)), nomad_name="gpu")
        for number, host in enumerate(("east-gpu", "west-gpu"))
    ]
    servers = [
        helper.server(
            [helper.nomad_node("gpu", helper.devices(helper.facts(helper.H100, number, 1), {0: f"job-{region}"}))],
            server=f"{region}-control", region=region,
        )
        for number, region in enumerate(("east", "west"))
    ]  # fmt: skip
    servers[1].update(west)
    return of(*answers, servers=servers, regions={"east-gpu": "east", "west-gpu": "west"})


NAMESPACES = [
    {"namespace": "default", "gpus": 1, "budget": None},
    {"namespace": "idle", "gpus": 0, "budget": None},
    {"namespace": "inference", "gpus": 0, "budget": 2},
    {"namespace": "research", "gpus": 3, "budget": 2},
]


def test_who_is_over_budget_is_told_first_and_in_the_headline() -> None:
    arguments = two_regions()
    arguments["servers"][0]["result"]["usage"] = {"namespaces": NAMESPACES}
    arguments["servers"][1]["result"]["usage"] = {"namespaces": [{"namespace": "inference", "gpus": 2, "budget": 2}]}
    data = helper.document(arguments)
    told = [(use["namespace"], use["region"], use["gpus"], use["budget"]) for use in data["users"]["namespaces"]]
    assert told == [
        ("research", "east", 3, 2), ("default", "east", 1, None),
        ("inference", "east", 0, 2), ("inference", "west", 2, 2),
    ]  # fmt: skip
    page = report_page.page(data)
    assert page["headline"] == {"level": "warning", "text": "1 namespace over budget"}
    assert page["users"]["namespaces"][0] == {"namespace": "east, research", "gpus": "3", "budget": "2", "over": True}
    assert [use["over"] for use in page["users"]["namespaces"]] == [True, None, False, False]
    # Where nobody has a budget the list of jobs says it all.
    arguments["servers"][0]["result"]["usage"] = {"namespaces": NAMESPACES[:2]}
    del arguments["servers"][1]["result"]["usage"]
    data = helper.document(arguments)
    assert [use["namespace"] for use in data["users"]["namespaces"]] == ["default"]
    assert report_page.page(data)["users"]["namespaces"] == []


def test_each_region_has_a_server_that_speaks_for_it() -> None:
    data = helper.document(two_regions())
    assert [(each["region"], each["server"]) for each in data["nomad"]["regions"]] == [
        ("east", "east-control"), ("west", "west-control")
    ]  # fmt: skip
    assert [(node["name"], node["region"], node["verdict"], node["problems"]) for node in data["nodes"]] == [
        ("east-gpu", "east", "ok", []), ("west-gpu", "west", "ok", [])
    ]  # fmt: skip
    held = {node["name"]: node["gpus"][0]["allocations"][0]["job_id"] for node in data["nodes"]}
    assert held == {"east-gpu": "job-east", "west-gpu": "job-west"}
    view = report_page.page(data)
    assert [node["versions"].split(",")[0] for node in view["nodes"]] == ["region east", "region west"]
    assert view["headline"]["text"].startswith("All 2")
    assert "east-control, asked" in view["nomad"] and "west-control, asked" in view["nomad"]


def test_a_region_without_an_answer_is_told_and_the_other_goes_on() -> None:
    data = helper.document(two_regions(result={"msg": "west-control: refused"}))
    assert data["nomad"]["answered"] is False
    assert [each["server"] for each in data["nomad"]["regions"]] == ["east-control", None]
    # Nobody knows of the other half, so of the whole nothing is told.
    assert data["summary"]["allocated_gpus"] is None and data["cost"]["total"]["idle_cost_per_hour"] is None
    assert data["history"]["points"][-1]["allocated_gpus"] is None
    assert [(job["region"], job["job_id"], job["gpus"]) for job in data["users"]["jobs"]] == [("east", "job-east", 1.0)]
    assert [notice["found"] for notice in data["notices"]] == [
        "Nomad could not be asked on west-control: west-control: refused"
    ]
    east, west = by_name(data, "east-gpu"), by_name(data, "west-gpu")
    assert (east["gpus"][0]["in_nomad"], east["allocated_gpus"]) == (True, 1.0)
    assert (west["gpus"][0]["in_nomad"], west["allocated_gpus"], west["problems"]) == (None, None, [])
    view = report_page.page(data)
    assert "Nomad in west without an answer" in view["headline"]["text"]
    assert [node["schedulers"] for node in view["nodes"]] == [
        "Nomad: ready, eligible", "Nomad: no answer"
    ]  # fmt: skip


def test_a_region_that_was_not_asked_or_has_no_host_is_told() -> None:
    arguments = two_regions()
    del arguments["servers"][1]
    data = helper.document(arguments)
    assert [notice["found"] for notice in data["notices"]] == ["No Nomad server was asked in region west"]
    # A region of servers alone.
    dead = {"server": "north-control", "region": "north", "result": {"msg": "refused"}}
    arguments = two_regions()
    arguments["servers"].append(dead)
    view = report_page.page(helper.document(arguments))
    assert "Nomad in north without an answer" in view["headline"]["text"]


def test_what_has_one_name_in_two_regions_is_two() -> None:
    arguments = two_regions()
    for entry in arguments["servers"]:
        for gpu in entry["result"]["nodes"][0]["gpus"]:
            gpu["allocation"] = helper.allocation("same")
    strange = helper.nomad_node("stranger", helper.devices(helper.facts(helper.H100, 7, 1)))
    arguments["servers"][1]["result"]["nodes"].append(strange)
    data = helper.document(arguments)
    assert [(job["region"], job["job_id"], job["nodes"]) for job in data["users"]["jobs"]] == [
        ("east", "same", ["east-gpu"]), ("west", "same", ["west-gpu"])
    ]  # fmt: skip
    assert [job["namespace"] for job in report_page.page(data)["users"]["jobs"]] == ["east, default", "west, default"]
    found = by_name(data, "stranger")
    assert (found["region"], found["reason"]) == (
        "west", "Nomad lists it with GPUs, and no host of the group gpu_nodes in region west has this name"
    )  # fmt: skip


def test_a_region_without_a_name_is_nomads_own() -> None:
    data = helper.document({**of(one(), nomad=[]), "regions": {}})
    assert data["nodes"][0]["region"] == data["nomad"]["regions"][0]["region"] == "global"
    assert not report_page.page(data)["nodes"][0]["versions"].startswith("region")


def test_the_second_server_speaks_when_the_first_is_dead() -> None:
    dead = {"server": "control-a", "result": {"unreachable": True, "msg": "no route"}}
    smi = helper.facts(helper.H100, 1, 2)
    alive = helper.server([helper.nomad_node("gpu01", helper.devices(smi))], server="control-b")
    data = helper.document(of(one(), servers=[dead, alive]))
    assert data["nomad"]["answered"] and data["nomad"]["regions"][0]["server"] == "control-b"
    assert [failure["server"] for failure in data["nomad"]["failures"]] == ["control-a"] and len(data["notices"]) == 1


def test_no_server_at_all_is_told() -> None:
    assert helper.document(of(one()))["notices"][0]["found"] == "No Nomad server was asked"


# GPUs and their health


def test_verdicts_are_those_of_the_health_check() -> None:
    smi = helper.facts(helper.H100, 1, 3)
    sick = [helper.problem(smi["gpus"][1]), helper.problem(smi["gpus"][2], "pcie_width", "warning")]
    data = helper.document(of(helper.answer("gpu01", helper.health(smi, sick))))
    assert [gpu["verdict"] for gpu in data["nodes"][0]["gpus"]] == ["ok", "critical", "warning"]
    assert data["summary"]["verdicts"] == {"critical": 1, "unknown": 0, "warning": 1, "ok": 1}
    assert [problem["source"] for problem in data["nodes"][0]["problems"]] == ["node", "node"]


def test_gpu_that_only_the_health_check_knows_does_not_vanish() -> None:
    smi = helper.facts(helper.H100, 1, 2)
    result = helper.health(smi)
    lost = {"index": None, "uuid": None, "name": "H100", "pci_bus_id": "0000:09:00.0", "verdict": "critical"}
    result["gpus"].append({**lost, "problems": []})
    result["gpus"][0]["pci_bus_id"] = "0000:01:00.0"
    gpus = helper.document(of(helper.answer("gpu01", result)))["nodes"][0]["gpus"]
    assert [gpu["verdict"] for gpu in gpus] == ["ok", "ok", "critical"] and gpus[2]["pci_bus_id"] == "0000:09:00.0"


def test_gpu_that_the_health_check_does_not_know_is_judged_by_its_status() -> None:
    smi = helper.facts(helper.H100, 1, 3)
    result = helper.health(smi)
    result["gpus"] = []
    result["nvidia_smi"]["gpus"][1]["status"] = "error"
    del result["nvidia_smi"]["gpus"][2]["status"]
    gpus = helper.document(of(helper.answer("gpu01", result)))["nodes"][0]["gpus"]
    assert [gpu["verdict"] for gpu in gpus] == ["ok", "critical", "ok"]


def test_a_gpu_that_does_not_answer_is_not_missed_in_nomad() -> None:
    smi = helper.facts(helper.H100, 1, 2)
    result = helper.health(smi)
    node = helper.nomad_node("gpu01", helper.devices(smi)[:1])
    for status, uuid in (("error", smi["gpus"][1]["uuid"]), ("ok", None)):
        result["nvidia_smi"]["gpus"][1].update(status=status, uuid=uuid)
        found = helper.document(of(helper.answer("gpu01", result), nomad=[node]))["nodes"][0]["problems"]
        assert [problem["code"] for problem in found if problem["source"] == "nomad"] == []


def test_sick_nodes_come_first_and_names_sort_by_number() -> None:
    smi = helper.facts(helper.H100, 3, 1)
    sick = helper.answer("gpu30", helper.health(smi, [helper.problem(smi["gpus"][0])]))
    warned = helper.answer("gpu1", helper.health(smi, [helper.problem(smi["gpus"][0], "pcie_width", "warning")]))
    silent = helper.answer("gpu20", {"unreachable": True, "msg": "x"})
    data = helper.document(of(one("gpu10"), one("gpu9"), warned, silent, sick))
    assert [node["name"] for node in data["nodes"]] == ["gpu30", "gpu20", "gpu1", "gpu9", "gpu10"]


@pytest.mark.parametrize("recording", [helper.H100, helper.T4, helper.RTX4090, helper.MIG])
def test_every_recording_makes_a_page(recording: str) -> None:
    data = helper.document(of(one(recording=recording)))
    assert json.loads(json.dumps(data)) == data
    assert recording == helper.MIG or data["nodes"][0]["gpus"][0]["model"] in helper.render(data)


def test_a_gpu_that_tells_nothing_of_itself_is_on_the_page() -> None:
    answer = one(gpus=1)
    (gpu,) = answer["health"]["nvidia_smi"]["gpus"]
    gpu.update(name=None, uuid=None, index=None, pci_bus_id=None)
    page = helper.render(helper.document(of(answer)))
    assert "no UUID told" in page and re.search(r"<span>. &nbsp;unknown model<br>", page), page


def test_unknown_values_stay_null() -> None:
    data = helper.document(of(one(utilization_gpu_percent=None, power_draw_w=None)))
    summary = data["summary"]
    assert summary["utilization_percent"] is None and summary["utilization_gpus"] == 0
    assert summary["power_draw_w"] is None and summary["power_gpus"] == 0
    assert data["cost"]["models"][0]["utilized_gpus"] is None


# Nomad against the nodes


def with_nomad(change: Any, recording: str = helper.H100) -> dict[str, Any]:
    """A node of two GPUs whose Nomad node was changed."""
    smi = helper.facts(recording, 1, 2)
    node = helper.nomad_node("gpu01", helper.devices(smi))
    change(node)
    return by_name(helper.document(of(helper.answer("gpu01", helper.health(smi)), nomad=[node])), "gpu01")


@pytest.mark.parametrize("recording", [helper.H100, helper.MIG])
def test_nomad_that_agrees_is_no_problem(recording: str) -> None:
    node = with_nomad(lambda _node: None, recording)
    assert node["problems"] == [] and node["verdict"] == "ok"
    assert all(gpu["in_nomad"] for gpu in node["gpus"])


def test_gpu_that_nomad_lost_is_a_warning_at_that_gpu() -> None:
    node = with_nomad(lambda node: node["gpus"].pop(1))
    assert [problem["code"] for problem in node["problems"]] == ["gpu_missing"]
    assert node["problems"][0]["uuid"] == helper.uuid_of(1, 1) and node["problems"][0]["source"] == "nomad"
    assert [gpu["verdict"] for gpu in node["gpus"]] == ["ok", "warning"] and node["verdict"] == "warning"
    assert node["gpus"][1]["in_nomad"] is False
    message = node["problems"][0]["message"]
    assert message.startswith("Node gpu01: found") and "Expected: " in message and "Next step: " in message


def hiding(recording: str, ignored: list[str], has: slice, held: dict[int, str], **more: Any) -> dict[str, Any]:
    """A node of two GPUs whose device plugin hides some devices."""
    smi = helper.facts(recording, 1, 2, **more)
    node = helper.nomad_node("gpu01", helper.devices(smi, held)[has])
    return of(helper.answer("gpu01", helper.health(smi), ignored=ignored), nomad=[node])


def test_a_hidden_gpu_is_neither_missing_nor_idle() -> None:
    arguments = hiding(helper.H100, [helper.uuid_of(1, 0).upper()], slice(1, None), {1: "training"})
    data = helper.document(arguments, models={"NVIDIA H100 80GB HBM3": {"relative_throughput": 2, "price_per_hour": 4}})
    (node,) = data["nodes"]
    assert (node["problems"], node["verdict"], node["allocated_gpus"]) == ([], "ok", 1)
    assert [(gpu["in_nomad"], gpu["hidden"], gpu["allocated_share"], gpu["verdict"]) for gpu in node["gpus"]] == [
        (False, True, None, "ok"), (True, False, 1.0, "ok"),
    ]  # fmt: skip
    summary = data["summary"]
    assert (summary["gpus"], summary["allocatable_gpus"], summary["allocated_gpus"]) == (2, 1, 1)
    keys = ("gpus", "allocatable_gpus", "allocated_gpus", "cost_per_hour", "idle_cost_per_hour", "return_allocated")
    for cost in (data["cost"]["total"], *data["cost"]["models"]):
        assert [cost[key] for key in keys] == [2, 1, 1, 8, 0, 0.5]
    page = report_page.page(data)
    assert [gpu["used_by"] for gpu in page["nodes"][0]["gpus"]] == ["hidden from Nomad", "training"]
    assert page["nodes"][0]["allocated"] == "1 of 1 allocated" and page["cost"]["rows"][0]["allocated"] == "1 of 1"
    assert [(tile["value"], tile["note"], tile["bar"]) for tile in page["tiles"] if tile["label"] == "Allocated"] == [
        ("1", "of 1 GPU, 1 hidden from Nomad", 100)
    ]
    # An answer that does not tell what is hidden.
    del arguments["answers"][0]["ignored"]
    data = helper.document(arguments)
    assert [problem["code"] for problem in data["nodes"][0]["problems"]] == ["gpu_missing"]
    assert data["summary"]["allocatable_gpus"] == 2


def test_a_model_of_which_all_are_hidden_is_in_no_return_of_what_is_allocated() -> None:
    arguments = hiding(helper.H100, [helper.uuid_of(1, 1)], slice(1), {0: "training"})
    arguments["answers"][0]["health"]["nvidia_smi"]["gpus"][1]["name"] = "Tesla T4"
    prices = {"relative_throughput": 2, "price_per_hour": 4}
    cost = helper.document(arguments, models={"Tesla T4": prices, "NVIDIA H100 80GB HBM3": prices})["cost"]
    assert [(row["model"], row["idle_cost_per_hour"], row["return_allocated"]) for row in cost["models"]] == [
        ("NVIDIA H100 80GB HBM3", 0, 0.5), ("Tesla T4", 0, None),
    ]  # fmt: skip
    assert (cost["total"]["cost_per_hour"], cost["total"]["return_allocated"]) == (8, 0.5)


def test_a_node_whose_gpus_are_all_hidden_has_nothing_to_allocate() -> None:
    arguments = hiding(helper.H100, [helper.uuid_of(1, 0), helper.uuid_of(1, 1)], slice(0), {})
    data = helper.document(arguments)
    assert data["nodes"][0]["problems"] == [] and data["nodes"][0]["allocated_gpus"] is None
    assert report_page.page(data)["nodes"][0]["allocated"] == ""
    # Pods of Kubernetes may have what is hidden from Nomad.
    arguments["kubernetes"] = helper.cluster([helper.kubernetes_node("gpu01", 2)], "gpu01")
    arguments |= {"regions": {"gpu01": "global"}}
    assert (data["summary"]["allocatable_gpus"], helper.document(arguments)["summary"]["allocatable_gpus"]) == (0, 2)


def test_hidden_mig_devices_are_not_missing() -> None:
    hidden = [helper.uuid_of(1, number, "MIG") for number in (0, 16, 17, 18, 19)]
    arguments = hiding(helper.MIG, hidden, slice(1, 4), {1: "inference"})
    data = helper.document(arguments)
    first, second = data["nodes"][0]["gpus"]
    assert data["nodes"][0]["problems"] == [] and data["summary"]["allocatable_gpus"] == 1
    assert [device["hidden"] for device in first["mig_devices"]] == [True, False, False, False]
    assert (first["hidden"], second["hidden"], second["allocated_share"]) == (False, True, None)
    # Of the three that Nomad has.
    assert first["allocated_share"] == 0.3333
    page = report_page.page(data)
    assert [[mig["used_by"] for mig in gpu["migs"]] for gpu in page["nodes"][0]["gpus"]] == [
        ["hidden from Nomad", "inference", "free", "free"],
        ["hidden from Nomad"] * 4,
    ]
    assert [gpu["allocated"] for gpu in page["mig"]["gpus"]] == ["1 of 3", "0 of 0"]


def test_what_nomad_has_though_it_should_be_hidden_counts() -> None:
    data = helper.document(hiding(helper.H100, [helper.uuid_of(1, 1)], slice(2), {1: "training"}))
    assert [(gpu["hidden"], gpu["allocated_share"]) for gpu in data["nodes"][0]["gpus"]] == [(False, 0), (False, 1)]
    assert [(found["code"], found["uuid"]) for found in data["nodes"][0]["problems"]] == [
        ("gpu_unexpected", helper.uuid_of(1, 1))
    ]


def test_a_sick_gpu_that_nomad_lost_is_told_by_both() -> None:
    smi = helper.facts(helper.H100, 1, 2)
    node = helper.nomad_node("gpu01", helper.devices(smi)[:1])
    answer = helper.answer("gpu01", helper.health(smi, [helper.problem(smi["gpus"][1])]))
    (found,) = helper.document(of(answer, nomad=[node]))["nodes"]
    assert [(problem["code"], problem["uuid"]) for problem in found["problems"]] == [
        ("xid_79", helper.uuid_of(1, 1)),
        ("gpu_missing", helper.uuid_of(1, 1)),
    ]


def test_stale_driver_in_nomad_is_a_warning() -> None:
    node = with_nomad(lambda node: [gpu.update(driver_version="570.1") for gpu in node["gpus"]])
    assert [problem["code"] for problem in node["problems"]] == ["driver_version_stale"]


@pytest.mark.parametrize("lost", [True, False])
def test_mig_devices_of_old_drivers_have_their_gpu_in_their_uuid(lost: bool) -> None:
    smi = helper.facts(helper.MIG, 1, 1)
    gpu = smi["gpus"][0]
    for number, device in enumerate(gpu["mig_devices"]):
        device["uuid"] = f"MIG-{gpu['uuid']}/{number + 7}/0"
    devices = helper.devices(smi)
    if lost:
        gpu.update(status="lost")
    else:
        devices.pop()
    result = helper.health(smi, [helper.problem(gpu, "gpu_lost")] if lost else [])
    found = helper.document(of(helper.answer("gpu01", result), nomad=[helper.nomad_node("gpu01", devices)]))["nodes"][0]
    assert [(problem["code"], problem["uuid"]) for problem in found["problems"]] == [
        ("gpu_lost" if lost else "gpu_missing", gpu["uuid"])
    ]
    assert found["gpus"][0]["verdict"] == ("critical" if lost else "warning")


def test_mig_devices_without_uuid_are_not_taken_for_missing() -> None:
    smi = helper.facts(helper.MIG, 1, 1)
    node = helper.nomad_node("gpu01", helper.devices(smi))
    smi["gpus"][0]["mig_devices"][0]["uuid"] = None
    document = helper.document(of(helper.answer("gpu01", helper.health(smi)), nomad=[node]))
    assert document["nodes"][0]["problems"] == []
    assert "no UUID told" in helper.render(document)


@pytest.mark.parametrize("gpus", [1, 2])
def test_mig_devices_that_nobody_tells_are_not_taken_for_unexpected(gpus: int) -> None:
    smi = helper.facts(helper.MIG, 1, gpus)
    node = helper.nomad_node("gpu01", helper.devices(smi))
    smi["gpus"][0]["mig_devices"] = None
    answer = helper.answer("gpu01", helper.health(smi))
    found = helper.document(of(answer, nomad=[node]))["nodes"][0]
    assert (found["problems"], found["verdict"]) == ([], "ok")
    # What Nomad has is compared all the same, of which there must be something.
    for gpu in node["gpus"]:
        gpu["driver_version"] = "570.1"
    found = helper.document(of(answer, nomad=[node]))["nodes"][0]
    assert [problem["code"] for problem in found["problems"]] == ["driver_version_stale"]
    found = helper.document(of(answer, nomad=[helper.nomad_node("gpu01", [])]))["nodes"][0]
    assert [problem["code"] for problem in found["problems"]] == ["no_devices"]


def test_lost_gpu_that_nomad_still_lists_is_told_once() -> None:
    smi = helper.facts(helper.H100, 1, 2)
    smi["gpus"][1].update(status="lost")
    node = helper.nomad_node("gpu01", helper.devices(smi))
    result = helper.health(smi, [helper.problem(smi["gpus"][1], "gpu_lost")])
    found = helper.document(of(helper.answer("gpu01", result), nomad=[node]))["nodes"][0]
    assert [problem["code"] for problem in found["problems"]] == ["gpu_lost"]


def test_reason_of_a_closed_node() -> None:
    smi = helper.facts(helper.H100, 1, 2)
    node = helper.nomad_node("gpu01", helper.devices(smi), eligibility="ineligible", closed_for="xid_79 GPU-1")
    arguments = of(helper.answer("gpu01", helper.health(smi)), nomad=[node])
    assert helper.document(arguments)["nodes"][0]["nomad"]["reason"] == "xid_79 GPU-1"


def test_nomad_name_is_what_joins_host_and_node() -> None:
    smi = helper.facts(helper.H100, 1, 2)
    arguments = of(
        helper.answer("gpu01", helper.health(smi), nomad_name="rack1-a"),
        nomad=[helper.nomad_node("rack1-a", helper.devices(smi, {0: "training"}))],
    )
    data = helper.document(arguments)
    assert len(data["nodes"]) == 1 and data["nodes"][0]["allocated_gpus"] == 1


# Who uses what


def test_jobs_and_their_gpus() -> None:
    smi = helper.facts(helper.H100, 1, 4, utilization_gpu_percent=50, power_draw_w=400.0)
    node = helper.nomad_node("gpu01", helper.devices(smi, {0: "b", 1: "a", 2: "a"}))
    data = helper.document(of(helper.answer("gpu01", helper.health(smi)), nomad=[node]))
    jobs = [
        (job["job_id"], job["gpus"], job["utilization_percent"], job["power_draw_w"]) for job in data["users"]["jobs"]
    ]
    assert jobs == [("a", 2, 50.0, 800.0), ("b", 1, 50.0, 400.0)]
    assert data["summary"]["allocated_gpus"] == 3


def test_mig_devices_count_by_their_memory() -> None:
    smi = helper.facts(helper.MIG, 1, 1)
    for device, size in zip(smi["gpus"][0]["mig_devices"], (40000, 20000, 10000, 10000), strict=True):
        device["memory_total_mib"] = size
    node = helper.nomad_node("gpu01", helper.devices(smi, {0: "big", 3: "small"}))
    data = helper.document(of(helper.answer("gpu01", helper.health(smi)), nomad=[node]))
    assert data["nodes"][0]["gpus"][0]["allocated_share"] == 0.625
    assert [(job["job_id"], job["gpus"]) for job in data["users"]["jobs"]] == [("big", 0.5), ("small", 0.12)]
    assert data["mig"]["profiles"] == [
        {"model": smi["gpus"][0]["name"], "profile": "1g.10gb", "devices": 4, "allocated": 2}
    ]


def test_compute_instances_share_the_memory_of_their_gpu_instance() -> None:
    """Each is told with all of it."""
    smi = helper.facts(helper.MIG, 1, 1)
    devices = smi["gpus"][0]["mig_devices"]
    devices.append({**devices[0], "uuid": helper.uuid_of(1, 4, "MIG")})
    layout = [(1, "1c.3g.71gb", 71424), (1, "2c.3g.71gb", 71424), (3, "2g.35gb", 35712), (9, "1g.18gb", 17856)]
    layout.append((10, "1g.18gb", 17856))
    for device, (instance, profile, size) in zip(devices, layout, strict=True):
        device.update(gpu_instance_id=instance, profile=profile, memory_total_mib=size)

    def shares(**values: Any) -> tuple[Any, ...]:
        for device in devices:
            device.update(values)
        node = helper.nomad_node("gpu01", helper.devices(smi, {0: "small", 1: "large", 3: "other"}))
        data = helper.document(of(helper.answer("gpu01", helper.health(smi)), nomad=[node]))
        (gpu,) = data["nodes"][0]["gpus"]
        jobs = {job["job_id"]: job["gpus"] for job in data["users"]["jobs"]}
        return gpu["allocated_share"], jobs["small"], jobs["large"], jobs["other"]

    # 71424 MiB of 142848, in three slices, and 17856.
    assert shares() == (0.625, 0.17, 0.33, 0.12)
    # Whose GPU instances are not known are one each.
    assert shares(gpu_instance_id=None) == (0.75, 0.33, 0.33, 0.08)
    # What has no slices told, or no profile, shares evenly.
    assert shares(gpu_instance_id=1, memory_total_mib=142848, profile=None) == (0.6, 0.2, 0.2, 0.2)


@pytest.mark.parametrize("sizes", [(40000, 20000, 10000, 10000), (None,) * 4])
def test_mig_switched_on_while_nomad_still_lists_the_whole_gpu(sizes: tuple[int | None, ...]) -> None:
    smi = helper.facts(helper.MIG, 1, 1)
    for device, size in zip(smi["gpus"][0]["mig_devices"], sizes, strict=True):
        device["memory_total_mib"] = size
    whole = helper.nomad_gpu(smi["gpus"][0], smi["driver_version"], helper.allocation("old"))
    data = helper.document(of(helper.answer("gpu01", helper.health(smi)), nomad=[helper.nomad_node("gpu01", [whole])]))
    (gpu,) = data["nodes"][0]["gpus"]
    assert (gpu["allocated_share"], gpu["in_nomad"], len(gpu["mig_devices"])) == (1.0, True, 4)
    assert [(job["job_id"], job["gpus"], job["devices"]) for job in data["users"]["jobs"]] == [("old", 1.0, 1)]
    assert data["summary"]["allocated_gpus"] == 1
    assert {problem["code"] for problem in data["nodes"][0]["problems"]} == {"gpu_missing", "gpu_unexpected"}
    assert data["nodes"][0]["verdict"] == "warning"
    assert "old" in helper.render(data)


def test_mig_devices_whose_memory_is_unknown_count_by_their_number() -> None:
    smi = helper.facts(helper.MIG, 1, 1)
    smi["gpus"][0]["mig_devices"][2]["memory_total_mib"] = None
    node = helper.nomad_node("gpu01", helper.devices(smi, {0: "one", 3: "other"}))
    data = helper.document(of(helper.answer("gpu01", helper.health(smi)), nomad=[node]))
    assert data["nodes"][0]["gpus"][0]["allocated_share"] == 0.5
    assert [(job["job_id"], job["gpus"]) for job in data["users"]["jobs"]] == [("one", 0.25), ("other", 0.25)]


def test_shares_are_rounded_where_people_read_them() -> None:
    smi = helper.facts(helper.MIG, 1, 1)
    smi["gpus"][0]["mig_devices"].pop()
    node = helper.nomad_node("gpu01", helper.devices(smi, {0: "one"}))
    data = helper.document(of(helper.answer("gpu01", helper.health(smi)), nomad=[node]))
    assert data["nodes"][0]["gpus"][0]["allocated_share"] == data["nodes"][0]["allocated_gpus"] == 0.3333
    assert data["summary"]["allocated_gpus"] == 0.33 == data["users"]["jobs"][0]["gpus"]


def test_sums_and_means_of_what_is_known() -> None:
    values = [None, True, 1, 2.0, 2, "7"]
    assert sums.known_numbers(values) == [1, 2.0, 2]
    assert (report.mean(values), report.total([0.123456]), report.total([0.123456], 4)) == (1.7, 0.12, 0.1235)
    assert (report.mean([None]), report.total([])) == (None, None)


@pytest.mark.parametrize(
    "names",
    [["gpu2", "gpu10"], ["570.9", "570.86"], ["1a", "a"], ["a", "a1", "b"], ["a9", "a" + "1" * 19], ["gpu1²", "①"]],
)
def test_names_sort_by_their_numbers(names: list[str]) -> None:
    assert sorted(reversed(names), key=sums.natural_key) == names


def test_two_mig_devices_of_one_task() -> None:
    smi = helper.facts(helper.MIG, 1, 1)
    parts = helper.devices(smi, {0: "job"})
    parts[1]["allocation"] = parts[0]["allocation"]
    data = helper.document(of(helper.answer("gpu01", helper.health(smi)), nomad=[helper.nomad_node("gpu01", parts)]))
    assert data["users"]["jobs"][0]["devices"] == 2 and data["users"]["jobs"][0]["gpus"] == 0.5


def test_processes_outside_of_nomad() -> None:
    compute = {"pid": 1, "type": "C", "name": "C:\\tools\\miner.exe", "memory_used_mib": 2048}
    display = {"pid": 2, "type": "G", "name": "/usr/bin/Xorg", "memory_used_mib": 10}
    browser = {"pid": 3, "type": "C+G", "name": "/usr/lib/chromium/chromium", "memory_used_mib": 100}
    server = {"pid": 4, "type": "C", "name": "nvidia-cuda-mps-server", "memory_used_mib": 30}
    client = {"pid": 5, "type": "M+C", "name": "python3", "memory_used_mib": 1024}
    data = helper.document(of(one(processes=[compute, display, browser, server, client])))
    assert data["users"]["outside"] == [
        {"program": "miner.exe", "gpus": 2, "memory_used_mib": 4096, "nodes": ["gpu01"]},
        {"program": "python3", "gpus": 2, "memory_used_mib": 2048, "nodes": ["gpu01"]},
    ]


# Drift and MIG


def drift_of(data: dict[str, Any], field: str) -> dict[str, Any]:
    found: dict[str, Any] = next(entry for entry in data["drift"][0]["fields"] if entry["field"] == field)
    return found


def test_drift_names_the_majority_and_who_deviates() -> None:
    answers = [one(f"gpu{number}", gpus=1) for number in range(3)]
    answers[1]["health"]["nvidia_smi"].update(driver_version="570.1")
    data = helper.document(of(*answers))
    assert len(data["drift"]) == 1 and data["drift"][0]["gpus"] == 3
    driver = drift_of(data, "driver_version")
    assert driver["agrees"] is False and driver["majority"] == "580.159.04"
    assert driver["values"][1] == {"value": "570.1", "gpus": 1, "nodes": ["gpu1"]}
    assert drift_of(data, "cuda_version")["agrees"] is True


def test_of_two_equal_halves_the_newer_is_the_majority() -> None:
    answers = [one("gpu0", gpus=1), one("gpu1", gpus=1)]
    answers[0]["health"]["nvidia_smi"].update(driver_version="580.9")
    answers[1]["health"]["nvidia_smi"].update(driver_version="580.86")
    assert drift_of(helper.document(of(*answers)), "driver_version")["majority"] == "580.86"


def test_other_models_and_platforms_are_no_drift() -> None:
    wsl = one("pc", helper.RTX4090, gpus=1)
    wsl["health"]["nvidia_smi"]["platform"] = "wsl"
    data = helper.document(of(one("a", gpus=1), one("b", helper.T4, gpus=1), wsl, one("c", helper.RTX4090, gpus=1)))
    assert len(data["drift"]) == 4
    assert all(field["agrees"] for group in data["drift"] for field in group["fields"])


def test_drift_among_gpus_that_do_not_tell_what_they_are() -> None:
    answers = [one("gpu0", gpus=1), one("gpu1", gpus=1)]
    for answer in answers:
        answer["health"]["nvidia_smi"]["platform"] = None
        answer["health"]["nvidia_smi"]["gpus"][0]["name"] = None
    data = helper.document(of(*answers))
    (group,) = data["drift"]
    assert (group["platform"], group["model"], group["gpus"]) == ("unknown", "unknown", 2)
    assert [row["model"] for row in data["cost"]["models"]] == ["unknown"]


def test_what_was_not_told_is_no_drift() -> None:
    answers = [one("gpu0", gpus=1), one("gpu1", gpus=1, vbios_version=None)]
    vbios = drift_of(helper.document(of(*answers)), "vbios_version")
    assert vbios["agrees"] is True and vbios["unknown_gpus"] == 1


def test_pending_mig_mode() -> None:
    data = helper.document(of(one(mig_mode="Disabled", mig_mode_pending="Enabled", gpus=1)))
    assert [(gpu["mode"], gpu["pending"]) for gpu in data["mig"]["gpus"]] == [("Disabled", "Enabled")]


# Money


def costs(**options: Any) -> dict[str, Any]:
    """Four H100, two of them allocated, at 100, 50, 0 and 50 percent, and one RTX 4090 without a price."""
    smi = helper.facts(helper.H100, 1, 4)
    for gpu, percent in zip(smi["gpus"], (100, 50, 0, 50), strict=True):
        gpu["utilization_gpu_percent"] = percent
    nodes = [helper.nomad_node("gpu01", helper.devices(smi, {0: "a", 1: "a"}))]
    pc = helper.answer("pc", helper.health(helper.facts(helper.RTX4090, 2, 1)))
    arguments = of(helper.answer("gpu01", helper.health(smi)), pc, nomad=nodes)
    cost: dict[str, Any] = helper.document(arguments, **options)["cost"]
    return cost


def test_return_is_throughput_times_productivity_by_cost() -> None:
    row = costs(productivity=1.5)["models"][0]
    assert (row["throughput"], row["cost_per_hour"]) == (9.6, 12.0)
    assert row["return"] == pytest.approx(9.6 * 1.5 / 12)
    assert row["return_allocated"] == pytest.approx(9.6 * 1.5 / 12 / 2)
    assert row["allocated_gpus"] == 2 and row["idle_cost_per_hour"] == 6.0
    assert row["utilized_gpus"] == 2 and row["utilization_gpus"] == 4 and row["unused_cost_per_hour"] == 6.0


def test_model_without_numbers_is_named_and_not_guessed() -> None:
    cost = costs()
    assert cost["unpriced"] == ["NVIDIA GeForce RTX 4090"]
    row = cost["models"][1]
    assert {row[key] for key in ("throughput", "cost_per_hour", "return", "idle_cost_per_hour")} == {None}
    assert cost["total"]["gpus"] == 4 and cost["total"]["cost_per_hour"] == 12.0


def test_price_of_a_model_that_is_not_there() -> None:
    assert costs(models={"Tesla X": {"price_per_hour": 1}})["unmatched"] == ["Tesla X"]


def test_total_weights_models_by_their_throughput() -> None:
    fast = helper.facts(helper.H100, 1, 1, utilization_gpu_percent=0)
    slow = helper.facts(helper.T4, 2, 1, utilization_gpu_percent=100)
    nodes = [helper.nomad_node("a", helper.devices(fast)), helper.nomad_node("b", helper.devices(slow, {0: "job"}))]
    arguments = of(helper.answer("a", helper.health(fast)), helper.answer("b", helper.health(slow)), nomad=nodes)
    total = helper.document(arguments)["cost"]["total"]
    assert total["return"] == pytest.approx((2.4 + 0.2) / 3.5, abs=1e-4)
    assert total["return_allocated"] == pytest.approx(0.2 / 3.5, abs=1e-4) == total["return_utilized"]
    assert total["idle_cost_per_hour"] == 3.0


@pytest.mark.parametrize("price", [{"relative_throughput": 1}, {"price_per_hour": 1}])
def test_half_a_price_is_none(price: dict[str, float]) -> None:
    cost = costs(models={"NVIDIA H100 80GB HBM3": price})
    assert (cost["total"], cost["unpriced"][0]) == (None, "NVIDIA H100 80GB HBM3")


def test_free_gpus_have_no_return_instead_of_an_infinite_one() -> None:
    row = costs(models={"NVIDIA H100 80GB HBM3": {"relative_throughput": 1, "price_per_hour": 0}})["models"][0]
    assert row["cost_per_hour"] == 0 and row["return"] is None


@pytest.mark.parametrize("value", ["abc", True, -1, float("nan"), float("inf"), [1], {"a": 1}])
def test_numbers_that_are_none_are_told(value: Any) -> None:
    models = {"NVIDIA H100 80GB HBM3": {"relative_throughput": 1, "price_per_hour": value}}
    data = helper.document(of(one()), models=models)
    assert any("price_per_hour of NVIDIA H100 80GB HBM3" in notice["found"] for notice in data["notices"])
    assert data["cost"]["unpriced"] == ["NVIDIA H100 80GB HBM3"]
    assert not math.isnan(data["productivity"])


@pytest.mark.parametrize("models", [["Tesla T4"], "Tesla T4", 5, {"Tesla T4": 5}, {"Tesla T4": {"price": 5}}])
def test_prices_of_another_shape_are_told(models: Any) -> None:
    assert helper.document(of(one()), models=models)["notices"][1]["found"].startswith("report_gpu_models")


def test_numbers_as_text_are_numbers() -> None:
    models = {"NVIDIA H100 80GB HBM3": {"relative_throughput": "2", "price_per_hour": "4"}}
    data = helper.document(of(one()), models=models, productivity="1.5")
    assert data["cost"]["total"]["return"] == 0.75


def test_productivity_that_is_no_number_is_told() -> None:
    data = helper.document(of(one()), productivity="much")
    assert data["productivity"] == 1.0 and "report_productivity" in data["notices"][1]["found"]


# History


def test_history_grows_by_one_line_and_is_plotted() -> None:
    data, text = helper.build(of(one(utilization_gpu_percent=40, power_draw_w=100.0)), "")
    assert text is not None and len(text.splitlines()) == 1
    assert report_page.page(data)["plots"] == []
    line = json.loads(text)
    sums = {
        "gpus": 2,
        "utilization_sum_percent": 80,
        "utilization_gpus": 2,
        "power_draw_w": 200.0,
        "power_gpus": 2,
    }
    assert line == {"made_at": helper.MADE_AT, **sums, "allocated_gpus": None, "nodes": {"gpu01": sums}}
    later = "2026-03-01T13:00:10Z"
    data, text = helper.build(of(one(utilization_gpu_percent=60, power_draw_w=300.0)), text, made_at=later)
    assert text is not None and len(text.splitlines()) == 2
    assert [point["utilization_percent"] for point in data["history"]["points"]] == [40.0, 60.0]
    plots = report_page.page(data)["plots"]
    assert plots[0]["line"] == "0.00,24.00 100.00,16.00" and plots[0]["now"] == "60 %"
    assert plots[1]["now"] == "600 W" and plots[1]["top"] == "1.0 kW"


def test_history_is_bounded_in_lines() -> None:
    text: str | None = ""
    data, text = helper.build(of(one()), "")
    assert text is not None
    data, text = helper.build(of(one()), text * (history.HISTORY_LINES + 20))
    assert text is not None
    assert len(text.splitlines()) == history.HISTORY_LINES == len(data["history"]["points"])


def test_history_is_bounded_in_bytes_and_keeps_the_totals(monkeypatch: pytest.MonkeyPatch) -> None:
    _data, text = helper.build(of(one()), "")
    assert text is not None
    monkeypatch.setattr(history, "HISTORY_BYTES", 3 * len(text))
    data, text = helper.build(of(one()), text * 9)
    assert text is not None
    lines = [json.loads(line) for line in text.splitlines()]
    assert len(lines) == 10 and ["nodes" in line for line in lines][-4:] == [False, True, True, True]
    assert not any("nodes" in line for line in lines[:6]) and lines[0]["gpus"] == 2
    assert len(data["history"]["points"]) == 10


@pytest.mark.parametrize("key", ["gpus", "utilization_sum_percent", "utilization_gpus", "power_draw_w", "power_gpus"])
@pytest.mark.parametrize("value", ["5", None, True, -1, float("nan"), float("inf"), [1]])
def test_a_history_whose_sums_are_no_numbers_is_somebody_elses(key: str, value: Any) -> None:
    _data, text = helper.build(of(one()), "")
    damaged = json.dumps({**json.loads(text or ""), key: value})
    data, after = helper.build(of(one()), f"{text}\n{damaged}\n", history_path="/var/history")
    assert after is None
    assert data["notices"][-1] == {
        "found": "line 3 of /var/history is not one of a report's history",
        "expected": "a file of JSON lines that only reports wrote, or no file; nothing was written to it",
        "action": "move the file away, or give another report_history",
    }


@pytest.mark.parametrize("made_at", [5, "yesterday", None])
def test_a_history_without_times_is_somebody_elses(made_at: Any) -> None:
    _data, text = helper.build(of(one()), "")
    damaged = json.dumps({**json.loads(text or ""), "made_at": made_at})
    assert helper.build(of(one()), damaged)[1] is None


@pytest.mark.parametrize(
    "text", ["not json\n", "[]\n", "{}\n", '{"made_at": 5}\n', '{"gpus": 1, "made_at": "yesterday"}\n', "[" * 100000]
)
def test_file_of_somebody_else_is_not_written_over(text: str) -> None:
    good = helper.build(of(one()), "")[1]
    assert good is not None
    data, written = helper.build(of(one()), good + text, history_path="/home/me/notes.txt")
    assert written is None
    notice = data["notices"][-1]
    assert notice["found"].startswith("line 2 of /home/me/notes.txt") and notice["action"].startswith("move the file")
    assert len(data["history"]["points"]) == 1


def test_runs_out_of_order_are_plotted_in_order() -> None:
    _data, text = helper.build(of(one()), "", made_at="2026-03-02T00:00:00Z")
    data, _text = helper.build(of(one()), text or "")
    assert [point["made_at"][:10] for point in data["history"]["points"]] == ["2026-03-01", "2026-03-02"]


def test_plot_of_one_moment_is_no_division_by_zero() -> None:
    assert report_page.plot([(5.0, 10.0), (5.0, 20.0)], 20.0) == "0.00,20.00 0.00,0.00"


# The page's words


@pytest.mark.parametrize(
    ("gpu", "text"),
    [
        ({"allocations": [{"job_id": "train", "namespace": "default"}, {"job_id": "train"}]}, "2 x train"),
        ({"allocations": [{"job_id": "train", "namespace": "lab"}, {"job_id": "web"}]}, "lab/train, web"),
        ({"processes": [{"type": "C"}]}, "1 process, no allocation"),
        ({"processes": [{"type": "C"}, {"type": "G"}, {"type": "M+C"}, {}]}, "2 processes, no allocation"),
        ({"processes": [{"type": "C", "name": "/usr/bin/nvidia-cuda-mps-server"}, {}]}, "free"),
        ({"processes": [{"type": "C+G"}, {"type": "G"}]}, "free, 1 process computes and draws"),
        ({"processes": [{"type": "C+G"}] * 2, "in_nomad": False}, "not in Nomad, 2 processes compute and draw"),
        ({"processes": [{"type": "G"}]}, "free"),
        ({"processes": None}, "free"),
        ({"in_nomad": False}, "not in Nomad"),
        ({"in_nomad": False, "hidden": True}, "hidden from Nomad"),
        ({"in_nomad": None}, report_page.UNKNOWN),
        (
            {"allocations": [{"job_id": "train"}], "far_cpus": ["32-63", "48"]},
            "train; on CPUs of another NUMA node than the GPU's (32-63, 48)",
        ),
    ],
)
def test_who_uses_a_gpu(gpu: dict[str, Any], text: str) -> None:
    known = {"allocations": [], "processes": [], "in_nomad": True, "hidden": False, "far_cpus": [], **gpu}
    assert report_page._used_by(known, False) == text


@pytest.mark.parametrize(
    ("near", "processes", "far"),
    [
        ("0-31,64-95", ["32-63"], ["32-63"]),
        ("0-31,64-95", ["96-127", "32-63", "32-63"], ["32-63", "96-127"]),
        # It may run next to the GPU, too.
        ("0-31,64-95", ["0-127", "31", "95-96"], []),
        ("0-31", [None], []),
        (None, ["32-63"], []),
    ],
)
def test_whose_job_runs_on_the_far_side(near: str | None, processes: list[str | None], far: list[str]) -> None:
    listed = [{"type": "C", "pid": 7, "cpu_affinity": cpus} for cpus in processes]
    gpu = helper.document(of(one(cpu_affinity=near, numa_node=0, processes=listed)))["nodes"][0]["gpus"][0]
    assert (gpu["far_cpus"], gpu["numa_node"]) == (far, 0)


@pytest.mark.parametrize(
    ("value", "text"), [(None, "\N{EN DASH}"), (0, "0 W"), (999.4, "999 W"), (4187, "4.2 kW"), (28e6, "28.00 MW")]
)
def test_power_text(value: float | None, text: str) -> None:
    assert report_page.power_text(value) == text


@pytest.mark.parametrize(
    ("value", "ceiling"),
    [(-1, 1), (0, 1), (0.03, 0.05), (1, 1), (1.01, 2), (2, 2), (4.9, 5), (5.1, 10), (600, 1000), (999_999, 1_000_000)],
)
def test_end_of_an_axis(value: float, ceiling: float) -> None:
    assert report_page._nice_ceiling(value) == pytest.approx(ceiling)


@pytest.mark.parametrize("expected", [None, 1, 2, 3])
def test_how_many_gpus_were_expected_is_told_where_they_differ(expected: int | None) -> None:
    answers = [helper.answer("gpu01", helper.health(helper.facts(helper.H100, 1, 2)), gpus_expected=expected)]
    page = report_page.page(helper.document(of(*answers)))
    note = "2 healthy" if expected in (None, 2) else f"{expected} expected, 2 healthy"
    assert page["tiles"][0]["note"] == note
    counts = {None: "2 GPUs", 1: "2 of 1 expected GPU", 2: "2 GPUs", 3: "2 of 3 expected GPUs"}
    assert page["nodes"][0]["count"] == counts[expected]
    # Of part of the nodes only, the sum says nothing.
    two = of(*answers, helper.answer("b", helper.health(helper.facts(helper.H100, 2, 1))))
    assert report_page.page(helper.document(two))["tiles"][0]["note"] == "3 healthy"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (119, "119 s"), (120, "2 min"), (179, "2 min"), (7199, "119 min"), (7200, "2 h"), (10799, "2 h")],
)
def test_ages_at_their_boundaries(seconds: int, text: str) -> None:
    made_at = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC)
    asked_at = made_at - datetime.timedelta(seconds=seconds)
    assert report_page.age_text(asked_at.isoformat(), made_at.isoformat()) == text


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "\N{EN DASH}"), (0, "0 GPUs"), (1, "1 GPU"), (1.5, "1.5 GPUs"), (2, "2 GPUs"), (12345, "12,345 GPUs")],
)
def test_counts(value: float | None, words: str) -> None:
    assert report_page.count_text(value, "GPU") == words
    assert report_page.count_text(value) == words.partition(" GPU")[0]


@pytest.mark.parametrize(
    ("used", "total", "text"),
    [
        (None, None, "\N{EN DASH}"),
        (5, None, "\N{EN DASH}"),
        (None, 2048, "of 2 GiB"),
        (1536, 81920, "1.5 of 80 GiB"),
        (0, 2_097_152, "0.0 of 2,048 GiB"),
    ],
)
def test_memory_text(used: float | None, total: float | None, text: str) -> None:
    assert report_page.memory_text(used, total) == text


@pytest.mark.parametrize(
    ("value", "text"), [(999_999, "1,000.0 kW"), (1_000_000, "1.00 MW"), (999.6, "1,000 W"), (1000, "1.0 kW")]
)
def test_power_text_at_its_boundaries(value: float, text: str) -> None:
    assert report_page.power_text(value) == text


@pytest.mark.parametrize(
    ("part", "whole", "percent"),
    [(None, 5, None), (1, None, None), (1, 0, None), (0, 5, 0), (5, 5, 100), (9, 5, 100), (-1, 5, 0), (1, 3, 33)],
)
def test_bars_stay_inside(part: float | None, whole: float | None, percent: int | None) -> None:
    assert report_page._share(part, whole) == percent


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (None, 2, "\N{EN DASH}"),
        (1.0, 2, "1"),
        (100.0, 0, "100"),
        (1.25, 2, "1.25"),
        (0.9395, 3, "0.94"),
        (1e4, 2, "10,000"),
    ],
)
def test_plain_numbers(value: float | None, digits: int, text: str) -> None:
    assert report_page._plain(value, digits) == text


def test_names_are_cut() -> None:
    names = [f"n{number}" for number in range(1010)]
    assert report_page._names(names[:8]) == "n0, n1, n2, n3, n4, n5, n6, n7"
    assert report_page._names(names[:9], 8) == "n0, n1, n2, n3, n4, n5, n6, n7 and 1 more"
    assert report_page._names(names, 4) == "n0, n1, n2, n3 and 1,006 more"


@pytest.mark.parametrize(("text", "shown"), [(None, "never"), ("2026-03-01T13:00:00+01:00", "2026-03-01 12:00:00 UTC")])
def test_time_text(text: str | None, shown: str) -> None:
    assert report_page.time_text(text) == shown


@pytest.mark.parametrize(
    ("asked_at", "text"),
    [(None, "\N{EN DASH}"), ("2026-03-01T12:00:00Z", "10 s"), ("2026-03-01T11:40:00Z", "20 min"),
     ("2026-03-01T07:00:00+00:00", "5 h"), ("2026-03-01T12:30:00Z", "0 s")],
)  # fmt: skip
def test_age_text(asked_at: str | None, text: str) -> None:
    assert report_page.age_text(asked_at, helper.MADE_AT) == text


def test_headline_says_the_worst_first() -> None:
    assert report_page.page(helper.document(helper.farm(2)))["headline"] == {
        "level": "ok",
        "text": "All 16 GPUs healthy",
    }
    arguments = helper.farm(3, sick=1)
    arguments["answers"][2]["health"] = {"unreachable": True, "msg": "x"}
    arguments["servers"] = []
    headline = report_page.page(helper.document(arguments))["headline"]
    assert headline == {
        "level": "critical",
        "text": "1 GPU critical, 1 node without an answer, Nomad without an answer",
    }


def test_one_cause_on_many_nodes_is_one_entry() -> None:
    groups = report_page.page(helper.document(helper.farm(40, 1, sick=30)))["problems"]
    assert len(groups) == 1 and groups[0]["count"] == "30 nodes"
    assert len(groups[0]["rows"]) == report_page.PROBLEM_ROWS and groups[0]["more"].startswith("22 more")
    assert groups[0]["rows"][0]["action"] == "drain the node and power-cycle it"


def test_same_problem_of_several_gpus_is_one_line() -> None:
    smi = helper.facts(helper.H100, 1, 4)
    found = [helper.problem(gpu, "pcie_width", "warning") for gpu in smi["gpus"][1:]]
    lost = {**found[0], "code": "gpu_lost", "severity": "critical", "uuid": None, "pci_bus_id": "0000:09:00.0"}
    page = report_page.page(helper.document(of(helper.answer("gpu01", helper.health(smi, [*found, lost])))))
    rows = [[(row["node"], row["gpu"]) for row in group["rows"]] for group in page["problems"]]
    assert rows == [[("gpu01", "0000:09:00.0")], [("gpu01", "GPUs 1, 2, 3")]]
    assert page["nodes"][0]["problems"][0] == (
        "warning, GPUs 1, 2, 3: found Xid 79 (the GPU fell off the bus) once. Expected: no Xid 79. "
        "Next step: drain the node and power-cycle it."
    )


@pytest.mark.parametrize(
    ("message", "action", "step"),
    [
        ("found a. Expected: b. Next step: drain the node.", "contact_support", "drain the node"),
        ("found a.", "contact_support", "contact support"),
        (None, None, ""),
    ],
)
def test_the_next_step_is_the_messages_or_the_actions(message: str | None, action: str | None, step: str) -> None:
    problem: Any = {"message": message, "action": action}
    assert report_page._next_step(problem) == step


def test_critical_node_without_a_critical_gpu_is_in_the_headline() -> None:
    smi = helper.facts(helper.H100, 1, 2)
    gone = {**helper.problem(smi["gpus"][0], "gpu_count"), "uuid": None, "pci_bus_id": None}
    data = helper.document(of(helper.answer("gpu01", helper.health(smi, [gone]))))
    headline = report_page.page(data)["headline"]
    assert headline["level"] == "critical" and headline["text"].split(", ")[0] == "1 node critical"


def test_warning_of_a_node_is_in_the_headline() -> None:
    result = helper.health(helper.facts(helper.H100, 1, 1))
    own = {
        **helper.problem(result["nvidia_smi"]["gpus"][0], "check_failed", "warning"),
        "uuid": None,
        "pci_bus_id": None,
    }
    result.update(verdict="warning", problems=[own])
    smi = helper.facts(helper.H100, 1, 1)
    data = helper.document(of(helper.answer("gpu01", result), nomad=[helper.nomad_node("gpu01", helper.devices(smi))]))
    assert report_page.page(data)["headline"] == {"level": "warning", "text": "1 node with a warning"}


def test_large_farm_groups_nodes_that_are_alike() -> None:
    page = report_page.page(helper.document(helper.farm(200, 1)))
    assert len(page["nodes"]) == report_page.DETAILED_NODES and len(page["groups"]) == 1
    group = page["groups"][0]
    assert len(group["nodes"]) == 200 - report_page.DETAILED_NODES
    assert (group["count"], group["gpus"], group["word"]) == ("140 nodes", "140 GPUs", "healthy")
    assert group["nodes"][0]["line"].startswith("1 GPU, ") and helper.uuid_of(60, 0) in group["nodes"][0]["lines"]


def test_arguments_stay_as_they_are() -> None:
    arguments = helper.farm(2, sick=1)
    before = copy.deepcopy(arguments)
    helper.document(arguments)
    assert arguments == before


# Everything at once, word for word


def motley() -> dict[str, Any]:
    """One of everything that a farm can hold."""
    h100 = helper.facts(helper.H100, 1, 4)
    for gpu, percent in zip(h100["gpus"], (100, 26, 0, None), strict=True):
        gpu.update(utilization_gpu_percent=percent, power_draw_w=None if percent is None else 100.0 + 6 * percent)
    h100["gpus"][3].update(status="lost", memory_used_mib=None, temperature_gpu_c=None, index=None)
    h100["gpus"][2]["processes"] = [
        {"pid": 7, "type": "C", "name": "/opt/miner", "memory_used_mib": 2048},
        {"pid": 8, "type": "C+G", "name": None, "memory_used_mib": None},
        {"pid": 9, "type": "G", "name": "Xorg", "memory_used_mib": 5},
    ]
    h100["gpus"][1]["vbios_version"] = "96.00.AB.00.01"
    sick = [
        helper.problem(h100["gpus"][3], "gpu_lost"),
        helper.problem(h100["gpus"][0], "pcie_width", "warning"),
        helper.problem(h100["gpus"][1], "pcie_width", "warning"),
        {
            **helper.problem(h100["gpus"][0], "check_failed", "warning"),
            "uuid": None,
            "pci_bus_id": None,
            "message": None,
        },
    ]
    others = helper.facts(helper.H100, 2, 1, utilization_gpu_percent=51, power_draw_w=250.4)
    others["driver_version"] = "570.1"
    mig = helper.facts(helper.MIG, 3, 2)
    for device, size in zip(mig["gpus"][0]["mig_devices"], (40000, 20000, 10000, 10000), strict=True):
        device["memory_total_mib"] = size
    mig["gpus"][0]["mig_devices"][3]["profile"] = None
    mig["gpus"][1]["mig_mode_pending"] = "Disabled"
    parts = helper.devices(mig, {0: "big", 1: "small", 5: "small"})
    pc = helper.facts(helper.RTX4090, 4, 1, power_draw_w=24.0, utilization_gpu_percent=None)
    pc["platform"] = "wsl"
    bare = helper.facts(helper.T4, 5, 2)
    gone = helper.facts(helper.T4, 6, 2)
    lone = helper.devices(helper.facts(helper.MIG, 7, 1))
    for part in lone:
        part["pci_bus_id"] = None
    held = helper.devices(h100, {0: "training", 1: "training"})
    held[1]["allocation"] = helper.allocation("notebook", 5, namespace="team")
    nodes = [
        helper.nomad_node("gpu1", held),
        helper.nomad_node("gpu2", helper.devices(others), eligibility="ineligible", closed_for="xid_79"),
        helper.nomad_node("mig", parts, drain=True, eligibility="ineligible", closed_for="maintenance"),
        helper.nomad_node("pc-nomad", helper.devices(pc)),
        helper.nomad_node("bare", [], status="down"),
        helper.nomad_node("gone", helper.devices(gone, {1: "training"}), status="down", id="old"),
        helper.nomad_node("gone", helper.devices(gone, {1: "training"}), status="initializing", id="new"),
        helper.nomad_node("stranger", [*lone, *helper.devices(helper.facts(helper.MIG, 8, 1))]),
        helper.nomad_node("dead stranger", helper.devices(gone), status="down"),
        helper.nomad_node("cpu", []),
    ]
    dead = [
        {"server": "a", "result": {"msg": "a: refused. Expected: an agent. Next step: start it."}},
        {"server": "b", "result": {"unreachable": True, "msg": "no route"}},
        {"server": "c"},
    ]
    return {
        "hosts": ["gpu1", "gpu2", "mig", "pc", "bare", "gone", "broken", "never"],
        "answers": [
            helper.answer("gpu1", helper.health(h100, sick), gpus_expected=5),
            helper.answer("gpu2", helper.health(others), gpus_expected=1, asked_at="2026-03-01T09:00:00Z"),
            helper.answer("mig", helper.health(mig)),
            helper.answer("pc", helper.health(pc), nomad_name="pc-nomad"),
            helper.answer("bare", helper.health(bare)),
            helper.answer("gone", {"unreachable": True, "msg": "Connection timed out"}, gpus_expected=2),
            helper.answer("broken", {"module_stderr": "Traceback\nImportError: no x"}),
        ],
        "servers": [
            *dead,
            helper.server(nodes, namespaces=NAMESPACES),
        ],
    }


HISTORY = "".join(
    json.dumps(
        {
            "made_at": made_at,
            "gpus": 10,
            "utilization_sum_percent": percent,
            "utilization_gpus": told,
            "power_draw_w": power,
            "power_gpus": measured,
            "allocated_gpus": 3,
            "nodes": {},
        }
    )
    + "\n"
    for made_at, percent, told, power, measured in (
        ("2026-02-27T12:00:00Z", 300, 10, 1500.0, 10),
        ("2026-02-28T12:00:00+01:00", 0, 0, 0, 0),
        ("2026-02-28T18:30:00", 555, 9, 2100.5, 9),
    )
)
CHOICES = {
    "title": "Motley",
    "currency": "CHF",
    "productivity": 1.25,
    "history_path": "/srv/history.jsonl",
    "models": {
        **helper.PRICES,
        "NVIDIA GeForce RTX 4090": {"relative_throughput": "0.9"},
        "NVIDIA A100-SXM4-80GB": {"relative_throughput": 1.5, "price_per_hour": "2", "colour": "green"},
        "Tesla X": {"price_per_hour": "cheap"},
        "Tesla Y": 5,
    },
}


@pytest.fixture
def _own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """The advice of nomad_gpu_verify in few words, so that these records are of the report alone."""
    compare = report_nodes.nomad.compare

    def compared(*arguments: Any) -> Any:
        return [
            dataclasses.replace(
                verdict,
                problems=[
                    dataclasses.replace(problem, message=f"Found {problem.code}. Next step: see to {problem.code}.")
                    for problem in verdict.problems
                ],
            )
            for verdict in compare(*arguments)
        ]

    monkeypatch.setattr(report_nodes.nomad, "compare", compared)


@pytest.mark.usefixtures("_own_words")
def test_document_and_history_as_recorded() -> None:
    data, history = helper.build(motley(), HISTORY, **CHOICES)
    assert_recorded("report-document", {"data": data, "history": (history or "").splitlines()})


@pytest.mark.usefixtures("_own_words")
def test_page_as_recorded() -> None:
    data = helper.document(motley(), HISTORY, **CHOICES)
    assert_recorded("report-page", report_page.page(data))
    assert_recorded("report-html", [line for line in helper.render(data).split("</style>")[1].splitlines() if line])


@pytest.mark.usefixtures("_own_words")
def test_page_of_a_large_farm_as_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if few rows were many."""
    for name, limit in (("DETAILED_NODES", 2), ("OPEN_NODES", 1), ("PROBLEM_ROWS", 1), ("TABLE_ROWS", 1), ("NAMES", 2)):
        monkeypatch.setattr(report_page, name, limit)
    monkeypatch.setattr(report_page._names, "__defaults__", (2,))
    arguments = motley()
    twin = copy.deepcopy(arguments["answers"][4])
    for name in ("bare2", "bare3"):
        arguments["answers"].append({**twin, "name": name, "nomad_name": name})
        arguments["hosts"].append(name)
    assert_recorded("report-page-large", report_page.page(helper.document(arguments, HISTORY, **CHOICES)))


def test_limits_of_the_page() -> None:
    limits = (report_page.DETAILED_NODES, report_page.OPEN_NODES, report_page.PROBLEM_ROWS, report_page.TABLE_ROWS)
    assert (*limits, report_page.NAMES) == (60, 6, 8, 40, 8)
    assert (history.HISTORY_LINES, history.HISTORY_BYTES, records.SCHEMA) == (500, 4 * 1024 * 1024, 1)


@pytest.mark.usefixtures("_own_words")
def test_reports_of_little_as_recorded() -> None:
    nothing: dict[str, Any] = {"hosts": [], "answers": [], "servers": []}
    healthy = of(one(gpus=1), nomad=[helper.nomad_node("gpu01", helper.devices(helper.facts(helper.H100, 1, 1)))])
    cases = {
        "nothing": nothing,
        "one": healthy,
        "no nomad": of(one(), helper.answer("b", {"msg": ""})),
        "no gpus": of(helper.answer("a", helper.health(helper.facts(helper.H100, 1, 0))), nomad=[]),
    }
    pages = {name: report_page.page(helper.document(arguments)) for name, arguments in cases.items()}
    keys = ("headline", "tiles", "notices", "unanswered", "distribution", "ages", "nomad", "users", "cost", "nodes")
    assert_recorded("report-little", {name: {key: page[key] for key in keys} for name, page in pages.items()})


def test_options_as_recorded() -> None:
    assert dataclasses.asdict(report.Options()) == {
        "title": "GPU farm", "currency": "EUR", "productivity": 1.0, "models": {}, "history_path": None,
        "accepted_path": None,
    }  # fmt: skip


@pytest.mark.parametrize(("more", "told"), [(0, ""), (1, "1 more node"), (2, "2 more nodes")])
def test_nodes_without_an_answer_are_told_up_to_a_number(more: int, told: str) -> None:
    number = report_page.TABLE_ROWS + more
    page = report_page.page(helper.document(of(*(helper.answer(f"gpu{index}", {"rc": 1}) for index in range(number)))))
    assert len(page["unanswered"]) == report_page.TABLE_ROWS and page["more_unanswered"] == told


# What GPUs did at their acceptances


def acceptance(date: str, *gpus: dict[str, Any], **more: Any) -> str:
    record = {"date": date, "node": "gpu01", "verdict": "accepted", "level": "quick", "gpus": gpus, "problems": []}
    return json.dumps({**record, **more}) + "\n"


def measured(uuid: str, memory: float | None = 3140.0, **more: Any) -> dict[str, Any]:
    figures = {"memory_read_gb_per_s": memory, "fp32_tflop_per_s": 64.0, "peer_gb_per_s": 392.0}
    gpu = {"uuid": uuid, "serial": None, "model": "H100", "sm_count": 132, "power_limit_w": 700.0, "verdict": "ok"}
    return {**gpu, "figures": figures, **more}


def test_each_gpu_has_its_newest_acceptance_with_outliers_and_history() -> None:
    first, second = helper.uuid_of(1, 0), helper.uuid_of(1, 1)
    why = "among 7 other GPUs memory read at 2701 GB/s, where their median is 3141"
    problem = {"uuid": second, "code": "slow_among_siblings", "found": why}
    busy = measured(second, None, verdict="busy")
    text = (
        acceptance("2026-01-02T00:00:00Z", measured(first, 3155.0), measured(second, 3150.0))
        + acceptance("2026-01-03T00:00:00Z", measured(first, 3140.0))
        + acceptance("2026-02-01T00:00:00Z", measured(first), measured(second, 2701.0, verdict="failed"),
                     verdict="failed", problems=[problem])
        + acceptance("2026-02-02T00:00:00Z", busy)
        + '{"date":"2026-02-03T'
    )  # fmt: skip
    data = helper.document(of(one()), accepted=text, accepted_path="/srv/accepted.jsonl")
    one_gpu, other = (gpu["benchmark"] for gpu in by_name(data, "gpu01")["gpus"])
    assert (one_gpu["date"], one_gpu["verdict"], one_gpu["outliers"]) == ("2026-02-01T00:00:00Z", "ok", [])
    assert [each["figures"]["memory_read_gb_per_s"] for each in one_gpu["before"]] == [3140.0, 3155.0]
    assert (other["verdict"], other["level"], other["node"]) == ("failed", "quick", "gpu01")
    assert other["outliers"] == [{"code": "slow_among_siblings", "found": why}] and len(other["before"]) == 1
    (told,) = [each["found"] for each in data["notices"] if "acceptance" in each["found"]]
    assert told == "/srv/accepted.jsonl has 1 lines that are no records of an acceptance, the first in line 5"
    rows = report_page.page(data)["benchmarks"]["rows"]
    assert [(row["gpu"], row["word"], row["memory"], row["fp32"], row["nvlink"]) for row in rows] == [
        ("1", "failed", "2,701 GB/s", "64 TFLOP/s", "392 GB/s"),
        ("0", "passed, node not accepted", "3,140 GB/s", "64 TFLOP/s", "392 GB/s"),
    ]  # fmt: skip
    assert [row["level"] for row in rows] == ["critical", "warning"]
    assert rows[0]["outliers"] == f"slow_among_siblings: {why}" and rows[0]["tensor"] == report_page.UNKNOWN
    assert [row["before"] for row in rows] == ["1 time, memory 3,150 GB/s", "2 times, memory 3,140 to 3,155 GB/s"]
    page = helper.render(data)
    assert why in page and "No acceptance of these GPUs is known." not in page


@pytest.mark.parametrize("culprit", [None, 1])
def test_no_gpu_is_accepted_by_an_acceptance_that_failed(culprit: int | None) -> None:
    """The benchmark's own verdict on a GPU knows nothing of copies between GPUs."""
    uuids = [helper.uuid_of(1, number) for number in range(2)]
    code = "peers_failed" if culprit is None else "peer_wrong"
    problem = {"uuid": None if culprit is None else uuids[culprit], "code": code, "found": "at step peers"}
    text = acceptance("2026-01-02T00:00:00Z", *map(measured, uuids))
    text += acceptance("2026-02-01T00:00:00Z", *map(measured, uuids), verdict="failed", problems=[problem])
    data = helper.document(of(one()), accepted=text)
    benchmarks = [gpu["benchmark"] for gpu in by_name(data, "gpu01")["gpus"]]
    failed = [culprit in (None, number) for number in range(2)]
    assert [each["verdict"] == "failed" for each in benchmarks] == failed
    assert [[found["code"] for found in each["outliers"]] for each in benchmarks] == [[code] * each for each in failed]
    for each in benchmarks:
        assert not each["accepted"]
        assert [(before["verdict"], before["accepted"]) for before in each["before"]] == [("ok", True)]
    words = {row["gpu"]: row["word"] for row in report_page.page(data)["benchmarks"]["rows"]}
    assert words == {
        str(number): "failed" if each else "passed, node not accepted" for number, each in enumerate(failed)
    }


def test_an_acceptance_without_figures_is_told_where_older_ones_are_shown() -> None:
    well = measured(helper.uuid_of(1, 0))
    silent = {"uuid": None, "code": "not_measured", "found": "no answer"}
    text = acceptance("2026-01-02T00:00:00Z", well)
    failed = acceptance("2026-02-01T00:00:00Z", verdict="failed", problems=[silent])
    other = acceptance("2026-02-03T00:00:00Z", node="gone", verdict="failed", problems=[silent])

    def told(accepted: str, *names: str) -> list[str]:
        arguments = of(*(one(name) for name in names or ("gpu01",)))
        data = helper.document(arguments, accepted=accepted, accepted_path="/srv/accepted.jsonl")
        notices = [each for each in data["notices"] if "newest acceptance" in each["found"]]
        assert all("/srv/accepted.jsonl" in each["action"] for each in notices)
        return [each["found"] for each in notices]

    rest = "failed and has no figures of GPUs; any that are shown are of an earlier one"
    assert told(text + failed + other) == [f"The newest acceptance of gpu01 (2026-02-01) {rest}"]
    assert told(failed + text + other) == []
    for verdict in ("busy", None):
        left = acceptance("2026-02-01T00:00:00Z", {**well, "verdict": verdict}, verdict="failed", problems=[silent])
        assert told(text + left) == [f"The newest acceptance of gpu01 (2026-02-01) {rest}"]
        (gpu, *_others) = by_name(helper.document(of(one()), accepted=text + left), "gpu01")["gpus"]
        assert (gpu["benchmark"]["verdict"], gpu["benchmark"]["date"]) == ("ok", "2026-01-02T00:00:00Z")
    names = [f"gpu{number}" for number in range(10, 17)]
    many = "".join(acceptance("2026-02-01T00:00:00Z", node=name, verdict="failed") for name in names)
    named = ", ".join(f"{name} (2026-02-01)" for name in names[:5])
    assert told(many, *names) == [f"The newest acceptance of {named} and 2 more {rest}"]


def test_a_gpu_is_known_by_its_serial_number_and_a_mig_device_by_its_uuid() -> None:
    part = helper.uuid_of(1, 0, "MIG")
    text = acceptance("2026-01-02T00:00:00Z", measured(part, serial="77"), measured("GPU-old", 3000.0, serial="42"))
    (divided,) = by_name(helper.document(of(one(recording=helper.MIG, gpus=1, serial="77")), accepted=text), "gpu01")[
        "gpus"
    ]
    assert (
        divided["benchmark"] is None and divided["mig_devices"][0]["benchmark"]["figures"]["fp32_tflop_per_s"] == 64.0
    )
    assert divided["mig_devices"][1]["benchmark"] is None
    (whole,) = by_name(helper.document(of(one(gpus=1, serial="42")), accepted=text), "gpu01")["gpus"]
    assert whole["benchmark"]["figures"]["memory_read_gb_per_s"] == 3000.0


def test_the_figures_of_a_board_with_one_serial_number_are_those_of_one_gpu() -> None:
    """As a K80 has: what was not measured does not have its neighbour's."""
    names = [helper.uuid_of(1, number) for number in range(2)]
    none = {**measured(names[1], serial="42"), "verdict": None, "figures": None}
    for text in (
        acceptance("2026-01-02T00:00:00Z", measured(names[0], 3000.0, serial="42"), none),
        acceptance("2026-01-02T00:00:00Z", measured(names[0], 3000.0, serial="42")),
    ):
        gpus = by_name(helper.document(of(one(gpus=2, serial="42")), accepted=text), "gpu01")["gpus"]
        assert [gpu["benchmark"] is None for gpu in gpus] == [False, True]


def test_a_gpu_that_was_never_accepted_has_no_figures() -> None:
    other = acceptance("2026-01-02T00:00:00Z", measured("GPU-other", figures=["x"]), problems=["x"])
    for text in ("", "\n", other):
        data = helper.document(of(one()), accepted=text, accepted_path="accepted.jsonl")
        assert [gpu["benchmark"] for gpu in by_name(data, "gpu01")["gpus"]] == [None, None]
        assert data["acceptances"] == {"path": "accepted.jsonl", "unread": None}
        assert [each["found"] for each in data["notices"] if "accepted.jsonl" in each["found"]] == []
        assert "<p>No acceptance of these GPUs is known.</p>" in helper.render(data)


NOT_READ = "/srv/accepted.jsonl could not be read: File is not readable"
NO_RECORDS = "/srv/accepted.jsonl holds 1 lines, and none is a record of an acceptance"
SPOILED = "/srv/accepted.jsonl has 1 lines that are no records of an acceptance, the first in line 2"


@pytest.mark.parametrize(
    ("text", "failure", "unread"),
    [
        ("", "File is not readable", NOT_READ),
        ("my notes\n", "", NO_RECORDS),
        ("[]\n", "", NO_RECORDS),
        # Ansible's way with a byte that is no UTF-8.
        ("\udcff\n", "", NO_RECORDS),
        *(
            (acceptance(date, measured(helper.uuid_of(1, 0))), "", NO_RECORDS)
            for date in ("yesterday", "2026-1-2T00:00:00Z", "2026-01-02T00:00:60Z", "2026-01-02t00:00:00z")
        ),
        (acceptance("2026-01-02T00:00:00Z", measured(helper.uuid_of(1, 0), serial=["x"])), "", NO_RECORDS),
        (acceptance("2026-01-02T00:00:00Z", measured(helper.uuid_of(1, 0)), problems=5), "", NO_RECORDS),
        (acceptance("2026-01-02T00:00:00Z", measured(helper.uuid_of(1, 1))) + '{"date":"20', "", SPOILED),
    ],
)
def test_acceptances_that_cannot_be_read_are_unknown(text: str, failure: str, unread: str) -> None:
    data = helper.document(of(one()), accepted=text, accepted_failure=failure, accepted_path="/srv/accepted.jsonl")
    assert data["acceptances"] == {"path": "/srv/accepted.jsonl", "unread": unread}
    assert by_name(data, "gpu01")["gpus"][0]["benchmark"] is None
    (told,) = [each for each in data["notices"] if each["found"] == unread]
    assert told["expected"] and told["action"]
    page = helper.render(data)
    unknown = (
        "which GPU has a newer acceptance or another one" if unread == SPOILED else "whether these GPUs were accepted"
    )
    assert f"<p>Nobody knows {unknown}: {unread}.</p>" in page
    assert "No acceptance of these GPUs is known" not in page


def test_certificates_that_end_are_told_by_those_that_end_first() -> None:
    def agent(*days: int) -> list[dict[str, Any]]:
        states = {True: "expired", False: "ends_soon"}
        return [
            {"of": kind, "path": path, "not_after": f"2026-03-{number + 10:02}T00:00:00Z", "days_left": number,
             "state": "ok" if number > 15 else states[number < 0]}
            for number, (kind, path) in zip(days, (("agent", None), ("ca", "/ca.pem")), strict=False)
        ]  # fmt: skip

    arguments = of(one("good"))
    arguments["certificates"] = {"good": agent(20, 18), "none": [], "s1": agent(3, 20), "t9": agent(-2)}
    arguments["certificates"] |= {f"t{number}": agent(5) for number in (10, 2, 3, 4, 5)}
    data = helper.document(arguments)
    found = data["nomad"]["certificates"]
    assert [each["host"] for each in found] == ["t9", "s1", "t2", "t3", "t4", "t5", "t10", "good"]
    assert found[-1] == {
        "host": "good", "path": "/ca.pem", "not_after": "2026-03-28T00:00:00Z", "days_left": 18, "state": "ok",
    }  # fmt: skip
    told = [each["found"] for each in data["notices"] if each["found"].startswith("Certificates")]
    assert told == [
        "Certificates of Nomad have expired on t9 (2026-03-08)",
        "Certificates of Nomad expire soon on s1 (2026-03-13), t2 (2026-03-15), t3 (2026-03-15), t4 (2026-03-15), "
        "t5 (2026-03-15) and 1 more",
    ]
    assert "have expired on t9" in helper.render(data)
