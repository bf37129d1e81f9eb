# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes import changing
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes import client as kubernetes_client
from ansible_collections.gpufarm.core.plugins.modules import kubernetes_gpu_gate, kubernetes_gpu_info
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import kubernetes_helper as farm
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

MARK = "gpufarm.core/gate"
SICK = {"node": "node00000", "healthy": False, "reason": "xid_79 on 0000:3B:00.0"}
WELL = {"node": "node00000", "healthy": True}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[farm.Cluster]:
    monkeypatch.setattr(kubernetes_client, "run_commands", farm.kubectl_inside())
    running = farm.Cluster(tmp_path)
    running.nodes = [farm.make_node(number, 2) for number in range(3)]
    yield running
    running.close()


def run(
    capsys: pytest.CaptureFixture[str],
    cluster: farm.Cluster,
    *nodes: dict[str, Any],
    check_mode: bool = False,
    **more: Any,
) -> helper.Outcome:
    given = {**cluster.arguments, "nodes": list(nodes), **more}
    return helper.run_module(kubernetes_gpu_gate.main, capsys, given, check_mode=check_mode)


def action(result: helper.Outcome) -> str:
    (node,) = result["nodes"]
    return str(node["action"])


def cordoned(cluster: farm.Cluster, number: int = 0) -> bool:
    return bool(cluster.nodes[number]["spec"].get("unschedulable"))


def mark(cluster: farm.Cluster, name: str = "") -> str | None:
    value: str | None = cluster.nodes[0]["metadata"]["annotations"].get(f"{MARK}{name}")
    return value


def test_a_sick_node_is_cordoned_and_comes_back(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = dict(cluster.nodes[0]["metadata"]["annotations"])
    result = run(capsys, cluster, SICK)
    assert (action(result), result["changed"], cordoned(cluster)) == ("close", True, True)
    assert result["nodes"][0]["eligible"] is False
    heading, row = result["table"].splitlines()
    assert heading.split() == ["NODE", "STATUS", "ELIGIBLE", "ACTION", "WHY"]
    assert row.split()[:4] == ["node00000", "ready", "no", "close"] and "xid_79 on 0000:3B:00.0" in row
    assert (mark(cluster), mark(cluster, "-reason")) == ("closed", "xid_79 on 0000:3B:00.0")
    assert mark(cluster, "-closed-by") == "farm" and mark(cluster, "-since")
    # One change, so that marks and cordon never part.
    assert len(cluster.paths("PATCH")) == 1
    again = run(capsys, cluster, SICK)
    assert (action(again), again["changed"]) == ("none", False) and len(cluster.paths("PATCH")) == 1
    back = run(capsys, cluster, WELL)
    assert (action(back), back["changed"], cordoned(cluster), mark(cluster)) == ("open", True, False, "open")
    assert "it was closed for xid_79" in back["nodes"][0]["message"] and mark(cluster, "-reason") is None
    assert foreign.items() <= cluster.nodes[0]["metadata"]["annotations"].items()
    assert run(capsys, cluster, WELL)["changed"] is False


def test_a_cluster_behind_rancher(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.serve_under("/k8s/clusters/c-m-abc")
    assert action(run(capsys, cluster, SICK)) == "close" and cordoned(cluster)


def test_what_somebody_else_has_cordoned_stays_so(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.nodes[0]["spec"]["unschedulable"] = True
    for entry in (SICK, WELL):
        result = run(capsys, cluster, entry)
        assert (action(result), result["changed"], cordoned(cluster)) == ("none", False, True)
        assert "by somebody else" in result["nodes"][0]["message"]
    assert cluster.paths("PATCH") == []


def test_who_uncordons_by_hand_is_heard_until_the_next_sick_probe(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, cluster, SICK)
    del cluster.nodes[0]["spec"]["unschedulable"]
    assert action(run(capsys, cluster, WELL)) == "update" and mark(cluster) == "open"
    assert action(run(capsys, cluster, SICK)) == "close"


def test_maintenance_is_left_alone(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, cluster, SICK)
    cluster.nodes[0]["metadata"]["annotations"]["gpufarm.core/maintenance"] = "driver branch 580"
    result = run(capsys, cluster, WELL)
    assert action(result) == "none" and cordoned(cluster) and "driver branch 580" in result["nodes"][0]["message"]


def pod(name: str, kind: str, gpus: int = 1) -> dict[str, Any]:
    made: dict[str, Any] = farm.make_pod(name, "node00000", gpus)
    if kind:
        made["metadata"]["ownerReferences"] = [{"kind": kind, "name": "it", "controller": True}]
        made["spec"]["restartPolicy"] = "Never" if kind == "Job" else "Always"
    return made


def names(cluster: farm.Cluster) -> list[str]:
    return [each["metadata"]["name"] for each in cluster.pods]


def test_a_sick_node_is_drained_where_that_is_asked_for(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.pods = [pod("web", "ReplicaSet"), pod("train", "Job"), pod("plugin", "DaemonSet", 0)]
    assert names(cluster) == ["web", "train", "plugin"] and "evicting" not in str(run(capsys, cluster, SICK)["nodes"])
    sick = {**SICK, "drain": True}
    told = run(capsys, cluster, sick, check_mode=True)
    assert (action(told), told["changed"], len(names(cluster))) == ("drain", True, 3)
    result = run(capsys, cluster, sick)
    assert (action(result), result["changed"], names(cluster)) == ("drain", True, ["train", "plugin"])
    assert result["nodes"][0]["message"].endswith("; evicting default/web (1 GPU)")
    # A job has its time, and without a limit all of it.
    assert run(capsys, cluster, sick)["changed"] is False
    cluster.nodes[0]["metadata"]["annotations"][f"{MARK}-since"] = "2026-01-01T00:00:00Z"
    assert run(capsys, cluster, {**sick, "drain_deadline": 0})["changed"] is False and "train" in names(cluster)
    assert run(capsys, cluster, SICK, drain=True)["changed"] is True and names(cluster) == ["plugin"]
    assert run(capsys, cluster, SICK, drain=True)["changed"] is False


def test_only_what_this_gate_has_cordoned_is_drained(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.pods, cluster.nodes[0]["spec"]["unschedulable"] = [pod("web", "ReplicaSet")], True
    assert run(capsys, cluster, SICK, drain=True)["changed"] is False and names(cluster) == ["web"]
    del cluster.nodes[0]["spec"]["unschedulable"]
    held = run(capsys, cluster, SICK, {**SICK, "node": "node00001"}, drain=True)
    assert [node["action"] for node in held["nodes"]] == ["held", "held"] and names(cluster) == ["web"]
    assert action(run(capsys, cluster, SICK)) == "close"
    cluster.nodes[0]["metadata"]["annotations"]["gpufarm.core/maintenance"] = "driver branch 580"
    assert run(capsys, cluster, SICK, drain=True)["changed"] is False and names(cluster) == ["web"]


def test_what_holds_a_pod_is_told_and_what_may_not_be_evicted_fails(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.pods, cluster.held = [pod("db", "StatefulSet")], ["db"]
    result = run(capsys, cluster, SICK, drain=True)
    assert (action(result), cordoned(cluster), names(cluster)) == ("close", True, ["db"])
    assert "evicting default/db (1 GPU); of default/db (1 GPU), " in result["nodes"][0]["message"]
    run(capsys, cluster, WELL)

    def forbid(request: Any) -> bool:
        refused: bool = request.path.endswith("/eviction")
        if refused:
            request.refuse(403, "Forbidden", "cannot create resource pods/eviction")
        return refused

    cluster.answer = forbid
    result = run(capsys, cluster, SICK, drain=True)
    node = result["nodes"][0]
    assert result["failed"] and (node["action"], node["eligible"], cordoned(cluster)) == ("failed", False, True)
    assert result["changed"] is True and "cannot create resource pods/eviction" in result["msg"]


def test_a_node_that_is_down_is_cordoned_and_not_opened(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.nodes[0]["status"]["conditions"][-1]["status"] = "Unknown"
    assert action(run(capsys, cluster, SICK)) == "close" and cordoned(cluster)
    result = run(capsys, cluster, WELL)
    assert action(result) == "none" and "its status is unknown" in result["nodes"][0]["message"]


def test_an_older_clean_probe_opens_nothing(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    before = int(cluster.nodes[0]["metadata"]["resourceVersion"])
    run(capsys, cluster, SICK)
    assert action(run(capsys, cluster, {**WELL, "index": before})) == "none"
    now = int(cluster.nodes[0]["metadata"]["resourceVersion"])
    assert action(run(capsys, cluster, {**WELL, "index": now})) == "open"


def test_the_index_is_what_the_info_tells(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    def version() -> str:
        given = {**cluster.arguments, "node_name": ["node00000"], "gather_pods": False}
        (node,) = helper.run_module(kubernetes_gpu_info.main, capsys, given)["nodes"]
        return str(node["resource_version"])

    before = version()
    run(capsys, cluster, SICK)
    assert action(run(capsys, cluster, {**WELL, "index": before})) == "none"
    assert action(run(capsys, cluster, {**WELL, "index": version()})) == "open"


def test_another_cordon_on_top_is_not_seen(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """As the documentation says, with what to do about it."""
    run(capsys, cluster, SICK)
    # 'kubectl cordon' of a node that is cordoned asks for nothing.
    assert cordoned(cluster) and action(run(capsys, cluster, WELL)) == "open"
    run(capsys, cluster, SICK)
    # Nor is that of a node that was uncordoned in between.
    del cluster.nodes[0]["spec"]["unschedulable"]
    cluster.nodes[0]["spec"]["unschedulable"] = True
    assert action(run(capsys, cluster, WELL)) == "open"
    said = " ".join(yaml.safe_load(kubernetes_gpu_gate.DOCUMENTATION)["description"])
    (key, value) = re.search(r"kubectl annotate node gpu01\s+([a-z./]+)=([a-z-]+)", said).groups()  # type: ignore[union-attr]
    run(capsys, cluster, SICK)
    cluster.nodes[0]["metadata"]["annotations"][key] = value
    assert action(run(capsys, cluster, WELL)) == "none" and cordoned(cluster)


def test_clean_probes_are_counted(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, cluster, SICK)
    assert [action(run(capsys, cluster, WELL, open_after=2)) for _time in range(2)] == ["wait", "open"]
    run(capsys, cluster, {**SICK, "uptime": 100})
    assert action(run(capsys, cluster, {**WELL, "uptime": 150}, closed_min=100)) == "wait"
    assert action(run(capsys, cluster, {**WELL, "uptime": 250}, closed_min=100)) == "open"


def test_somebody_else_changes_the_node_meanwhile(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever cordons it between our look and our change has cordoned it."""

    def cordon(request: Any) -> bool:
        if request.command == "PATCH" and not cordoned(cluster):
            node = cluster.nodes[0]
            node["spec"]["unschedulable"] = True
            node["metadata"]["resourceVersion"] = str(int(node["metadata"]["resourceVersion"]) + 1)
        return False

    cluster.answer = cordon
    result = run(capsys, cluster, SICK)
    assert action(result) == "none" and "by somebody else" in result["nodes"][0]["message"] and mark(cluster) is None
    assert len(cluster.paths("PATCH")) == 1


@pytest.mark.parametrize("conflicts", [7, 99])
def test_a_node_that_others_change_all_the_time(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, conflicts: int
) -> None:
    """A conflict is tried again for a while, each time with a longer pause; one without end is told."""
    pauses: list[float] = []
    monkeypatch.setattr(changing, "time", types.SimpleNamespace(sleep=pauses.append))

    def conflict(request: Any) -> bool:
        refused = request.command == "PATCH" and len(cluster.paths("PATCH")) <= conflicts
        if refused:
            request.refuse(409, "Conflict", "the object has been modified")
        return refused

    cluster.answer = conflict
    result = run(capsys, cluster, SICK)
    if conflicts < changing.ATTEMPTS:
        assert action(result) == "close" and cordoned(cluster) and len(pauses) == conflicts
    else:
        assert action(result) == "failed" and "the object has been modified" in result["msg"]
        assert len(cluster.paths("PATCH")) == changing.ATTEMPTS and 10 < sum(pauses) < 30
    assert pauses == sorted(pauses) and pauses[0] < pauses[-1]


def test_the_brake(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, cluster, {**SICK, "node": "node00002"})
    sick = [{**SICK, "node": f"node0000{number}"} for number in (0, 1)]
    result = run(capsys, cluster, *sick, {"node": "node00002", "healthy": True}, max_closed="1")
    assert [node["action"] for node in result["nodes"]] == ["held", "held", "open"]
    assert "2 to close beside 0 that the gate has closed, of 3 nodes; none is closed" in result["msg"]
    assert [cordoned(cluster, number) for number in range(3)] == [False, False, False]
    assert not run(capsys, cluster, *sick, max_closed="2").get("failed")


def test_check_mode_and_diff(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, cluster, SICK, check_mode=True)
    assert (action(result), result["changed"]) == ("close", True) and cluster.paths("PATCH") == []
    assert result["diff"]["before"] == "node00000: schedulable\n"
    assert result["diff"]["after"].splitlines()[:3] == [
        "node00000: cordoned",
        "  gpufarm.core/gate = closed",
        "  gpufarm.core/gate-reason = xid_79 on 0000:3B:00.0",
    ]


def test_most_nodes_cost_no_request(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, cluster, *({"node": f"node0000{number}", "healthy": True} for number in range(3)))
    assert {node["message"] for node in result["nodes"]} == {"healthy and open"} and len(cluster.requests) == 1


def test_where_no_host_was_probed_nothing_is_done(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, cluster)
    assert not result.get("failed") and result["nodes"] == [] and result["changed"] is False
    assert cluster.paths("PATCH") == []


def test_a_node_that_is_not_there(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, cluster, {**SICK, "node": "lost"}, {**SICK})
    assert [node["action"] for node in result["nodes"]] == ["failed", "close"]
    assert "Node lost: Kubernetes knows no such node. Next step: " in result["msg"]


@pytest.mark.parametrize(
    ("nodes", "options", "words"),
    [
        ([WELL, WELL], {}, "node node00000 is twice"),
        ([{**SICK, "reason": " "}], {}, "is not healthy and no reason is given"),
        ([WELL], {"open_after": 0}, "open_after is 0"),
        ([WELL], {"closed_min": -1}, "closed_min is -1"),
        ([WELL], {"max_closed": "some"}, "max_closed is 'some'"),
    ],
)
def test_wrong_options(
    cluster: farm.Cluster,
    capsys: pytest.CaptureFixture[str],
    nodes: list[dict[str, Any]],
    options: dict[str, Any],
    words: str,
) -> None:
    assert words in run(capsys, cluster, *nodes, **options)["msg"] and cluster.requests == []


def test_returned_keys_are_the_documented_ones(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    documented = yaml.safe_load(kubernetes_gpu_gate.RETURN)
    result = run(capsys, cluster, SICK)
    assert set(documented) == set(result) - {"changed", "failed", "msg", "invocation", "diff", "warnings"}
    assert set(documented["nodes"]["contains"]) == set(result["nodes"][0])
