# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import kubernetes_maintenance, maintenance, signals
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes import client as kubernetes_client
from ansible_collections.gpufarm.core.plugins.modules import kubernetes_gpu_gate, kubernetes_node_maintenance
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import kubernetes_helper as farm
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

NODE = "node00000"
MARK = "gpufarm.core/maintenance"
CHANGE = "another driver"


def owned(kind: str, controller: bool = True) -> dict[str, Any]:
    return {"ownerReferences": [{"kind": kind, "name": "it", "controller": controller}]}


def pod(name: str, gpus: int = 1, **metadata: Any) -> dict[str, Any]:
    made = farm.make_pod(name, NODE, gpus)
    made["metadata"].update(metadata)
    if any(owner["kind"].endswith("Job") for owner in metadata.get("ownerReferences", [])):
        made["spec"]["restartPolicy"] = "OnFailure"
    return made


class Host:
    """The first of three nodes, and a clock that only a pause moves on."""

    def __init__(self, cluster: farm.Cluster, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self.cluster, self.capsys = cluster, capsys
        self.time = 0.0
        self.meanwhile: list[Any] = []
        kept = kubernetes_maintenance.Maintenance.__init__.__kwdefaults__
        patch.setitem(kept, "clock", lambda: self.time)
        patch.setitem(kept, "pause", self.pause)

    def pause(self, seconds: float) -> None:
        self.time += seconds
        if self.meanwhile:
            self.meanwhile.pop(0)()

    def run(self, state: str, *, check_mode: bool = False, **more: Any) -> helper.Outcome:
        given = {**self.cluster.arguments, "node": NODE, "state": state, **more}
        return helper.run_module(kubernetes_node_maintenance.main, self.capsys, given, check_mode=check_mode)

    def out(self, **more: Any) -> helper.Outcome:
        return self.run("out", **{"change": CHANGE, **more})

    def drain(self, **more: Any) -> helper.Outcome:
        return self.out(policy="drain", **more)

    def gate(self, healthy: bool) -> str:
        entry = {"node": NODE, "healthy": healthy, "reason": "gpu_lost on GPU 0"}
        result = helper.run_module(
            kubernetes_gpu_gate.main, self.capsys, {**self.cluster.arguments, "nodes": [entry], "max_closed": "100%"}
        )
        return str(result["nodes"][0]["action"])

    @property
    def object(self) -> dict[str, Any]:
        return self.cluster.nodes[0]

    @property
    def marks(self) -> dict[str, str]:
        annotations: dict[str, str] = self.object["metadata"]["annotations"]
        return {name: value for name, value in annotations.items() if name.startswith(MARK)}

    @property
    def cordoned(self) -> bool:
        return bool(self.object["spec"].get("unschedulable"))

    @property
    def pods(self) -> list[str]:
        return [each["metadata"]["name"] for each in self.cluster.pods]


@pytest.fixture
def host(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(kubernetes_client, "run_commands", farm.kubectl_inside())
    cluster = farm.Cluster(tmp_path)
    cluster.nodes = [farm.make_node(number, 2) for number in range(3)]
    yield Host(cluster, capsys, monkeypatch)
    cluster.close()


def test_an_empty_node_is_taken_out_and_put_back(host: Host) -> None:
    foreign = dict(host.object["metadata"]["annotations"])
    result = host.out()
    assert (result["changed"], result["action"], result["message"]) == (True, "out", "out for another driver")
    assert (result["maintenance"], result["pods"], host.cordoned) == (CHANGE, [], True)
    since = host.marks[f"{MARK}-since"]
    assert host.marks == {
        MARK: CHANGE, f"{MARK}-by": "gpufarm.core", f"{MARK}-since": since, f"{MARK}-opens": "yes", f"{MARK}-gpus": "2",
    }  # fmt: skip
    # Marks and cordon in one change, so that neither is ever without the other.
    assert len(host.cluster.paths("PATCH")) == 1
    # Another change of the same run, or of a later one.
    again = host.out(change="a reboot")
    assert (again["changed"], again["action"], again["maintenance"]) == (False, "none", CHANGE)
    assert again["message"] == "already out for another driver"
    assert host.cordoned and len(host.cluster.paths("PATCH")) == 1
    # Somebody has uncordoned it since.
    del host.object["spec"]["unschedulable"]
    assert host.out(change="a reboot")["changed"] and host.cordoned
    patched = len(host.cluster.paths("PATCH"))
    told = host.run("in", check_mode=True)
    assert (told["changed"], told["action"], told["message"]) == (True, "in", "open again, after another driver")
    assert host.cordoned and len(host.cluster.paths("PATCH")) == patched
    back = host.run("in")
    assert (back["changed"], back["action"], back["message"]) == (True, "in", "open again, after another driver")
    assert (host.cordoned, host.marks) == (False, {}) and told["gpus_before"] == back["gpus_before"] == 2
    assert foreign.items() <= host.object["metadata"]["annotations"].items()
    for check_mode in (False, True):
        none = host.run("in", check_mode=check_mode)
        assert (none["changed"], none["action"], none["maintenance"]) == (False, "none", None)


def test_work_is_named_and_goes_on(host: Host) -> None:
    host.cluster.pods = [pod("train", 2), pod("web", 0, **owned("ReplicaSet"))]
    for check_mode in (False, True):
        result = host.run("out", change=CHANGE, check_mode=check_mode)
        assert result["failed"] and result["closed"] is False
        assert result["msg"].startswith(
            "Node node00000: 2 running pods, which another driver would end: default/train (2 GPUs), default/web. "
            "Expected: a node on which none runs"
        )
        assert (
            "Next step: wait for their end, or set policy (node_maintenance_policy of the roles) to drain"
            in result["msg"]
        )
    assert (host.cordoned, host.marks, host.pods) == (False, {}, ["train", "web"])


def test_pods_that_stay_with_the_node_do_not_count(host: Host) -> None:
    ended = farm.make_pod("done", NODE, 1, phase="Succeeded")
    mirror = pod("etcd", 0, annotations={"kubernetes.io/config.mirror": "x"}, **owned("Node"))
    elsewhere = farm.make_pod("elsewhere", "node00001", 2)
    host.cluster.pods = [pod("plugin", 0, **owned("DaemonSet")), mirror, ended, elsewhere]
    assert host.out()["action"] == "out" and host.cordoned
    assert host.pods == ["plugin", "etcd", "done", "elsewhere"]


def test_a_drain_moves_services_at_once_and_gives_jobs_time(host: Host) -> None:
    host.cluster.pods = [
        pod("web", 0, **owned("ReplicaSet")), pod("train", 2, **owned("Job")), pod("bare"),
        pod("adopted", 0, **owned("ReplicaSet", controller=False)),
    ]  # fmt: skip
    seen: list[list[str]] = []
    host.meanwhile = [lambda: seen.append(host.pods)]
    result = host.drain(deadline=60)
    assert seen == [["train", "bare", "adopted"]]
    assert host.pods == [] and host.cordoned and 60 <= host.time < 60 + maintenance.GRACE_S
    assert result["message"].startswith(
        "out for another driver, after it was drained of default/adopted, default/bare (1 GPU)"
    )
    assert result["pods"][2] == {"namespace": "default", "name": "train", "gpus": 2}
    # Each end was asked for once.
    assert sorted(host.cluster.removed) == ["adopted", "bare", "train", "web"]


def test_a_job_that_ends_in_time_is_not_evicted(host: Host) -> None:
    host.cluster.pods = [pod("train", 2, **owned("Job"))]
    host.meanwhile = [host.cluster.pods.clear]
    assert host.drain()["action"] == "out"
    assert host.cluster.removed == [] and host.time < 60


def test_a_change_whose_answer_was_lost_is_no_earlier_runs(host: Host) -> None:
    """So the node opens again where it was placed on just before."""

    def lose(request: Any) -> bool:
        if request.command != "PATCH" or host.cordoned or host.pods:
            return False
        farm.merge(host.object, request.body)
        host.cluster.pods = [pod("train", 2)]
        request.refuse(503, "ServiceUnavailable", "apiserver is shutting down")
        return True

    host.cluster.answer = lose
    result = host.out()
    assert result["failed"] and result["closed"] is False and "1 running pod, which" in result["msg"]
    assert (host.cordoned, host.marks) == (False, {})


def test_a_node_that_another_run_marks_meanwhile_stays_cordoned(host: Host) -> None:
    def mark(request: Any) -> bool:
        if request.path.startswith("/api/v1/pods") and not host.pods:
            host.object["metadata"]["annotations"].update(
                {MARK: "a reboot", f"{MARK}-by": "gpufarm.core", f"{MARK}-since": "2026-11-22T12:00:00Z"}
            )
            host.object["spec"]["unschedulable"] = True
        elif request.command == "PATCH":
            host.cluster.pods = [pod("train", 2)]
        return False

    host.cluster.answer = mark
    result = host.out()
    assert result["failed"] and result["closed"] is True and "1 running pod, which" in result["msg"]
    assert host.cordoned and host.marks[MARK] == "a reboot"


def test_a_budget_that_allows_no_eviction_keeps_the_node_closed_and_the_pod(host: Host) -> None:
    host.cluster.pods, host.cluster.held = [pod("db", 0, **owned("StatefulSet"))], ["db"]
    result = host.drain(deadline=30)
    assert result["failed"] and result["closed"] is True
    assert (
        "default/db, 330 s after the drain for another driver began; of default/db, Kubernetes answered Too"
        in result["msg"]
    )
    assert (
        "violate the pod's disruption budget. Expected: a node that is empty by then; it stays cordoned."
        in result["msg"]
    )
    assert host.cordoned and host.marks[MARK] == CHANGE and host.pods == ["db"]
    # Where every node is drained at once, they must not keep the apiserver busy.
    assert len(host.cluster.paths("POST")) < 40
    # Once the budget allows it, the next run ends what this one began.
    host.cluster.held = []
    again = host.drain(change="a reboot")
    assert (again["action"], again["maintenance"], host.pods) == ("out", CHANGE, [])
    assert host.marks[f"{MARK}-opens"] == "yes" and host.run("in")["message"].startswith("open again")


def test_a_pod_that_ends_slowly_is_asked_once_and_waited_for(host: Host) -> None:
    host.cluster.pods, host.cluster.undying = [pod("slow", 0, **owned("ReplicaSet"))], True
    host.meanwhile = [lambda: None, lambda: None, host.cluster.pods.clear]
    assert host.drain()["action"] == "out"
    assert host.cluster.removed == ["slow"]


def test_a_later_pod_of_the_same_name_is_not_the_one_that_was_meant(host: Host) -> None:
    host.cluster.pods = [pod("db-0", 0, **owned("StatefulSet"))]
    seen: list[Any] = []

    def exchange(request: Any) -> bool:
        if request.path.endswith("/eviction") and not seen:
            seen.append(request.body["deleteOptions"])
            host.cluster.pods[0]["metadata"]["uid"] = "another"
        return False

    host.cluster.answer = exchange
    assert host.drain()["action"] == "out" and host.pods == []
    assert seen == [{"preconditions": {"uid": "uid-db-0"}}]


def test_a_drain_ends_with_who_waits_for_it(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when somebody interrupts Ansible, and uncordons the node meanwhile."""
    logged: list[str] = []
    monkeypatch.setattr(
        kubernetes_node_maintenance.AnsibleModule, "log", lambda _module, text, **_more: logged.append(text)
    )
    monkeypatch.setattr(signals, "watch_controller", lambda: lambda: host.time > 20)
    host.cluster.pods = [pod("train", 2, **owned("Job"))]

    def uncordon() -> None:
        del host.object["spec"]["unschedulable"]
        host.time += 20

    host.meanwhile = [uncordon]
    result = host.drain()
    assert result["failed"] and result["closed"] is True and result["msg"] in logged
    assert result["msg"] == (
        "Node node00000: nobody waits for the answer of this run any more. Expected: the Ansible that began it; the "
        "node is left as it is, with its mark. Next step: run it again, which goes on from there, or put the node back."
    )
    assert not host.cordoned and host.marks[MARK] == CHANGE and host.pods == ["train"]


def test_a_drain_ends_where_another_run_has_put_the_node_back(host: Host) -> None:
    """Or has taken it out anew since."""
    host.cluster.pods = [pod("train", 2, **owned("Job"))]
    host.meanwhile = [lambda: host.run("in")]
    result = host.drain()
    assert result["failed"] and result["closed"] is False
    assert result["msg"] == (
        "Node node00000: a node that was put back while this run waited to have it empty for another driver. Expected: "
        "one that nobody else works on; it is left as it is. Next step: let the other run end, and run this again if "
        "it is still to be done."
    )
    assert (host.cordoned, host.marks, host.pods) == (False, {}, ["train"])

    def anew() -> None:
        host.object["metadata"]["annotations"].update({f"{MARK}-since": "later", f"{MARK}-by": "others"})
        del host.object["spec"]["unschedulable"]

    host.meanwhile = [anew]
    assert "a node that was taken out anew by others at later while" in host.drain()["msg"]
    assert not host.cordoned


def test_what_may_not_be_evicted_ends_the_drain(host: Host) -> None:
    host.cluster.pods = [pod("web", 0, **owned("ReplicaSet"))]

    def refuse(request: Any) -> bool:
        if request.path.endswith("/eviction"):
            request.refuse(403, "Forbidden", 'pods "web" is forbidden: User "x" cannot create resource "pods/eviction"')
            return True
        return False

    host.cluster.answer = refuse
    result = host.drain()
    assert result["failed"] and result["closed"] is True and 'cannot create resource "pods/eviction"' in result["msg"]
    assert host.time == 0 and host.pods == ["web"]


@pytest.mark.parametrize(
    ("status", "reason", "message"),
    [
        (
            500,
            "InternalError",
            "This pod has more than one PodDisruptionBudget, which the eviction subresource",
        ),
        (403, "Forbidden", "unable to create new content in namespace default because it is being terminated"),
    ],
)
def test_one_pod_that_cannot_be_evicted_is_named_and_keeps_no_other(
    host: Host, status: int, reason: str, message: str
) -> None:
    host.cluster.pods = [pod(name, 0, **owned("ReplicaSet")) for name in ("db", "web")]

    def refuse(request: Any) -> bool:
        if not request.path.endswith("/pods/db/eviction"):
            return False
        request.refuse(status, reason, message)
        return True

    host.cluster.answer = refuse
    result = host.drain(deadline=30)
    assert result["failed"] and host.pods == ["db"]
    assert f"; of default/db, Kubernetes answered {reason}: {message}" in result["msg"]


def test_pods_are_evicted_so_many_at_once_as_programs_may_run(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node may have 110 of them, and each is a program of its own on the control plane."""
    at_once: list[int] = []
    inside = kubernetes_client.run_commands

    def run_commands(argvs: Any, timeout: float) -> Any:
        at_once.append(len(argvs))
        return inside(argvs, timeout)

    monkeypatch.setattr(kubernetes_client, "run_commands", run_commands)
    host.cluster.pods = [pod(f"web-{number}", 0, **owned("ReplicaSet")) for number in range(40)]
    assert host.drain()["action"] == "out" and host.pods == []
    assert max(at_once) == kubernetes_client.AT_ONCE


@pytest.mark.parametrize(
    ("kind", "policy", "ends"),
    [
        ("", "Always", True),
        ("Job", "Never", True),
        ("PyTorchJob", "OnFailure", True),
        ("Workflow", "Never", True),
        ("ReplicaSet", "Always", False),
        ("RayCluster", "Always", False),
        ("VirtualMachineInstance", "Never", False),
    ],
)
def test_what_may_end_by_itself_has_the_time_of_jobs(host: Host, kind: str, policy: str, ends: bool) -> None:
    """Training on Kubernetes is a PyTorchJob or a Workflow's step more often than a Job."""
    item = pod("train", 1, **(owned(kind) if kind else {}))
    item["spec"]["restartPolicy"] = policy
    host.cluster.pods = [item]
    seen: list[list[str]] = []
    host.meanwhile = [lambda: seen.append(host.pods), host.cluster.pods.clear]
    assert host.drain(deadline=60)["action"] == "out"
    assert (host.cluster.removed == []) is ends


def test_what_was_placed_just_before_the_cordon_refuses_and_opens_again(host: Host) -> None:
    def place(request: Any) -> bool:
        if request.command == "PATCH" and not host.pods:
            host.cluster.pods = [pod("train", 2)]
        return False

    host.cluster.answer = place
    result = host.out()
    assert result["failed"] and result["closed"] is False and "1 running pod, which" in result["msg"]
    assert (host.cordoned, host.marks) == (False, {})


def test_who_uncordons_meanwhile_is_not_heard(host: Host) -> None:
    host.cluster.pods = [pod("train", 2, **owned("Job"))]

    def uncordon() -> None:
        del host.object["spec"]["unschedulable"]

    host.meanwhile = [uncordon, lambda: None, host.cluster.pods.clear]
    assert host.drain()["action"] == "out" and host.cordoned
    assert host.marks[f"{MARK}-opens"] == "yes"


def test_who_uncordons_without_end_ends_the_maintenance(host: Host) -> None:
    def uncordon(request: Any) -> bool:
        if request.command == "GET":
            host.object["spec"].pop("unschedulable", None)
        return False

    host.cluster.answer = uncordon
    result = host.out(deadline=30)
    assert result["failed"] and "a node that somebody uncordons, 330 s after the drain" in result["msg"]


def test_what_a_later_run_does_keeps_the_first_reason(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.cluster.pods, host.cluster.held = [pod("db", 0, **owned("StatefulSet"))], ["db"]
    warned: list[str] = []
    monkeypatch.setattr(
        kubernetes_node_maintenance.AnsibleModule, "warn", lambda _module, text, **_more: warned.append(text)
    )
    host.drain(deadline=30)
    first = host.marks
    assert warned == []
    # Once its budget allows it, the drain is over.
    host.cluster.held = []
    host.drain(deadline=30, change="a reboot")
    assert host.marks == first
    assert warned == [
        f"Node node00000: a node that gpufarm.core has taken out of work for {CHANGE} at {first[f'{MARK}-since']}, and "
        "that is not empty and closed. Expected: one run at a time. Next step: where that one still goes on, let it "
        "end before anything is changed here."
    ]


def test_a_node_that_was_cordoned_is_emptied_and_stays_cordoned(host: Host) -> None:
    host.object["spec"]["unschedulable"] = True
    host.cluster.pods = [pod("web", 0, **owned("ReplicaSet"))]
    assert host.drain()["action"] == "out" and host.marks[f"{MARK}-opens"] == "no" and host.pods == []
    back = host.run("in")
    assert back["message"] == "still cordoned, as it was before, after another driver"
    assert (host.cordoned, host.marks) == (True, {})


def test_the_gate_leaves_a_node_alone_that_is_out_and_opens_its_own_afterwards(host: Host) -> None:
    assert host.gate(healthy=False) == "close"
    assert host.out()["action"] == "out" and host.marks[f"{MARK}-opens"] == "no"
    assert host.gate(healthy=True) == "none" and host.cordoned
    assert host.run("in")["message"].startswith("still cordoned") and host.cordoned
    assert host.gate(healthy=True) == "open" and not host.cordoned


def test_a_node_that_somebody_else_has_taken_out_is_theirs(host: Host) -> None:
    host.out(owner="firmware team")
    for state in ("out", "in"):
        before = len(host.cluster.paths("PATCH"))
        result = host.run(state, **({"change": CHANGE} if state == "out" else {}))
        assert len(host.cluster.paths("PATCH")) == before and host.cordoned
        if state == "in":
            assert (result["action"], result["message"]) == ("none", "gpufarm.core has not taken this node out")
    assert "a node that firmware team took out of work for another driver. Expected:" in host.out()["msg"]
    assert host.out()["closed"] is False
    # Who writes the mark by hand, as the documentation of the gate says, is somebody else too.
    host.run("in", owner="firmware team")
    host.object["metadata"]["annotations"][MARK] = "new power supply"
    told = host.out()["msg"]
    assert "a node that somebody else took out of work for new power supply" in told
    assert "'kubectl annotate node node00000 gpufarm.core/maintenance-'" in told


def test_a_change_in_between_is_looked_at_again(host: Host) -> None:
    def touch(request: Any) -> bool:
        if request.command == "PATCH" and len(host.cluster.paths("PATCH")) == 1:
            host.object["metadata"]["resourceVersion"] = "999999"
        return False

    host.cluster.answer = touch
    assert host.out()["action"] == "out"
    assert len(host.cluster.paths("PATCH")) == 2 and host.cordoned


def test_an_apiserver_that_is_away_for_a_moment_is_waited_for(host: Host) -> None:
    away = [True, True]

    def refuse(request: Any) -> bool:
        if request.command == "GET" and host.cordoned and away:
            away.pop()
            request.refuse(503, "ServiceUnavailable", "apiserver is shutting down")
            return True
        return False

    host.cluster.answer = refuse
    assert host.out()["action"] == "out" and away == []


@pytest.mark.parametrize(("code", "reason"), [(429, "TooManyRequests"), (503, "ServiceUnavailable")])
def test_an_apiserver_that_is_too_busy_at_first_is_waited_for(host: Host, code: int, reason: str) -> None:
    away = ["GET", "GET", "PATCH"]

    def refuse(request: Any) -> bool:
        busy = request.command in away
        if busy:
            away.remove(request.command)
            request.refuse(code, reason, "too many requests")
        return busy

    host.cluster.answer = refuse
    assert host.out()["action"] == "out" and away == [] and host.cordoned
    away += ["GET", "PATCH"]
    assert host.run("in")["action"] == "in" and away == [] and not host.cordoned


def test_an_apiserver_that_stays_too_busy_is_told(host: Host) -> None:
    def refuse(request: Any) -> bool:
        request.refuse(429, "TooManyRequests", "too many requests")
        return True

    host.cluster.answer = refuse
    result = host.out()
    assert result["failed"] and "TooManyRequests" in result["msg"] and 180 < host.time < 190


def test_bad_input_changes_nothing(host: Host) -> None:
    cases = [
        ({"node": "gpu99"}, "Node gpu99: no node gpu99 in the cluster. Expected: one of this name. Next step:"),
        ({"deadline": 0}, "Node node00000: deadline is 0. Expected: seconds, 1 or more."),
    ]
    for given, told in cases:
        result = host.out(**given)
        assert result["failed"] and result["msg"].startswith(told) and result["closed"] is False
    assert "change" in host.run("out")["msg"]
    assert host.cluster.paths("PATCH") == []


def test_check_mode_tells_and_changes_nothing(host: Host) -> None:
    host.cluster.pods = [pod("web", 0, **owned("ReplicaSet"))]
    result = host.run("out", change=CHANGE, policy="drain", check_mode=True)
    assert (result["changed"], result["action"]) == (True, "out")
    assert result["message"] == "out for another driver, after it was drained of default/web"
    assert host.cluster.paths("PATCH") == host.cluster.paths("POST") == [] and not host.cordoned
