# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils.commands import Command
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes import client as kubernetes_client
from ansible_collections.gpufarm.core.plugins.modules import kubernetes_gpu_labels
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import kubernetes_helper as farm
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

MARK = "gpufarm.core/gpu-labels"
SAYS = "nvidia.com/gpu.product=Tesla-T4\nnvidia.com/gpu.count=4\nnvidia.com/vgpu.present=false\n"
LABELS = {"nvidia.com/gpu.product": "Tesla-T4", "nvidia.com/gpu.count": "4", "nvidia.com/vgpu.present": "false"}
NAMES = "nvidia.com/gpu.count,nvidia.com/gpu.product,nvidia.com/vgpu.present"


class Labels:
    """Two nodes with a pod of the plugin each, a third without, and what GPU feature discovery answers in a pod."""

    def __init__(self, cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
        self.cluster, self.capsys = cluster, capsys
        self.says: dict[str, Command] = {}
        self.asked: list[list[str]] = []
        cluster.nodes = [farm.make_node(number, 4, labels={"nvidia.com/gpu.present": "true"}) for number in range(3)]
        cluster.pods = [farm.plugin_pod(f"node{number:05d}") for number in range(2)]
        for each in cluster.pods:
            each["metadata"]["labels"] = {"name": "nvidia-device-plugin-ds"}

    def run_commands(self, argvs: Any, timeout: float) -> list[Command]:
        done = []
        for argv in argvs:
            if "exec" in argv:
                self.asked.append(list(argv[argv.index("exec") :]))
                done.append(self.says.get(argv[argv.index("exec") + 2], Command(tuple(argv), 0, SAYS, "I1126 log\n")))
            else:
                done += farm.kubectl_inside()([argv], timeout)
        return done

    def run(self, *, check_mode: bool = False, **more: Any) -> helper.Outcome:
        given = {**self.cluster.arguments, "namespace": farm.PLUGIN, **more}
        return helper.run_module(kubernetes_gpu_labels.main, self.capsys, given, check_mode=check_mode)

    def actions(self, outcome: helper.Outcome) -> list[str]:
        return [each["action"] for each in outcome["nodes"]]

    def metadata(self, number: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.nodes[number]["metadata"]
        return found


@pytest.fixture
def labels(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Labels]:
    cluster = farm.Cluster(tmp_path)
    made = Labels(cluster, capsys)
    monkeypatch.setattr(kubernetes_client, "run_commands", made.run_commands)
    yield made
    cluster.close()


def test_nodes_get_what_gpu_feature_discovery_says_in_the_plugins_pod(labels: Labels) -> None:
    checked = labels.run(check_mode=True)
    assert checked["changed"] and MARK not in labels.metadata()["annotations"]
    outcome = labels.run()
    assert outcome["changed"] and labels.actions(outcome) == ["labelled", "labelled"]
    assert outcome["nodes"][0] == {
        "name": "node00000", "action": "labelled", "message": "3 labels", "labels": LABELS
    }  # fmt: skip
    assert labels.metadata()["labels"] == {"nvidia.com/gpu.present": "true", **LABELS}
    assert labels.metadata()["annotations"][MARK] == NAMES
    assert labels.metadata(2)["labels"] == {"nvidia.com/gpu.present": "true"}
    assert labels.asked[0] == [
        "exec", "--namespace=nvidia-device-plugin", "nvidia-device-plugin-node00000", "--",
        "gpu-feature-discovery", "--oneshot", "--no-timestamp", "--output-file=",
    ]  # fmt: skip
    again = labels.run()
    assert not again["changed"] and labels.actions(again) == ["none", "none"]


def test_what_no_longer_holds_goes_and_what_others_have_set_stays(labels: Labels) -> None:
    labels.run()
    labels.metadata()["labels"]["nvidia.com/by.hand"] = "kept"
    labels.says["nvidia-device-plugin-node00000"] = Command((), 0, "nvidia.com/gpu.product=Tesla-T4\n")
    outcome = labels.run()
    assert labels.actions(outcome) == ["labelled", "none"]
    assert labels.metadata()["labels"] == {
        "nvidia.com/gpu.present": "true", "nvidia.com/gpu.product": "Tesla-T4", "nvidia.com/by.hand": "kept"
    }  # fmt: skip
    assert labels.metadata()["annotations"][MARK] == "nvidia.com/gpu.product"


def test_a_node_without_the_plugin_loses_them_and_one_whose_pod_only_waits_keeps_them(labels: Labels) -> None:
    labels.run()
    labels.cluster.pods[0]["status"]["phase"] = "Pending"
    del labels.cluster.pods[1]
    outcome = labels.run()
    assert [(each["name"], each["action"]) for each in outcome["nodes"]] == [("node00001", "cleared")]
    assert labels.metadata()["labels"]["nvidia.com/gpu.count"] == "4"
    assert labels.metadata(1)["labels"] == {"nvidia.com/gpu.present": "true"}
    assert MARK not in labels.metadata(1)["annotations"]


def test_absent_takes_them_from_all(labels: Labels) -> None:
    labels.run()
    checked = labels.run(state="absent", check_mode=True)
    assert checked["changed"] and "nvidia.com/gpu.count" in labels.metadata()["labels"]
    outcome = labels.run(state="absent")
    assert labels.actions(outcome) == ["cleared", "cleared"] and outcome["changed"]
    assert labels.metadata()["labels"] == labels.metadata(1)["labels"] == {"nvidia.com/gpu.present": "true"}
    assert not labels.run(state="absent")["changed"]


def test_one_that_labels_itself_is_left(labels: Labels) -> None:
    labels.metadata()["labels"]["nvidia.com/gfd.timestamp"] = "1764165911"
    outcome = labels.run()
    assert labels.actions(outcome) == ["left", "labelled"] and len(labels.asked) == 1
    assert MARK not in labels.metadata()["annotations"]


def test_refreshed_asks_those_alone_that_it_has_labelled_before(labels: Labels) -> None:
    labels.run()
    for number in range(2):
        labels.says[f"nvidia-device-plugin-node{number:05d}"] = Command((), 0, "nvidia.com/gpu.product=Tesla-T4\n")
    given: dict[str, Any] = {"state": "refreshed", "nodes": ["node00000", "node00001", "node00002", "gone"]}
    # Wherever the plugin is.
    labels.cluster.pods[1]["metadata"]["namespace"] = "gpu-operator"
    labels.cluster.pods += [farm.make_pod("train", "node00000", 2), farm.plugin_pod("node00002")]
    checked = labels.run(**given, check_mode=True)
    assert checked["changed"] and "nvidia.com/gpu.count" in labels.metadata()["labels"]
    labels.asked.clear()
    outcome = labels.run(**given)
    assert [(each["name"], each["action"]) for each in outcome["nodes"]] == [
        ("node00000", "labelled"), ("node00001", "labelled")
    ]  # fmt: skip
    assert [call[1:3] for call in labels.asked] == [
        ["--namespace=nvidia-device-plugin", "nvidia-device-plugin-node00000"],
        ["--namespace=gpu-operator", "nvidia-device-plugin-node00001"],
    ]
    assert labels.metadata()["labels"] == {"nvidia.com/gpu.present": "true", "nvidia.com/gpu.product": "Tesla-T4"}
    assert not labels.run(**given)["changed"]


def test_refreshed_leaves_one_that_has_come_to_label_itself(labels: Labels) -> None:
    labels.run()
    labels.asked.clear()
    labels.metadata()["labels"]["nvidia.com/gfd.timestamp"] = "1764165911"
    outcome = labels.run(state="refreshed", nodes=["node00000"])
    assert (outcome["nodes"], labels.asked, outcome["changed"]) == ([], [], False)


def test_refreshed_fails_for_a_node_whose_pod_does_not_run_yet(labels: Labels) -> None:
    labels.run()
    labels.asked.clear()
    labels.metadata(1)["labels"]["nvidia.com/gpu.count"] = "1"
    labels.cluster.pods[0]["status"]["phase"] = "Pending"
    given: dict[str, Any] = {"state": "refreshed", "nodes": ["node00000", "node00001"]}
    outcome = labels.run(**given)
    assert outcome["failed"] and labels.actions(outcome) == ["waiting", "labelled"] and outcome["changed"]
    assert outcome["msg"] == (
        "node00000: the device plugin's pod nvidia-device-plugin/nvidia-device-plugin-node00000 is Pending. Expected: "
        "one that runs, to be asked for the labels. Next step: read 'kubectl -n nvidia-device-plugin describe pod "
        "nvidia-device-plugin-node00000' and its log."
    )
    del labels.cluster.pods[0]
    assert "node00000: no pod of the device plugin. Expected: " in labels.run(**given)["msg"]
    assert labels.metadata()["labels"]["nvidia.com/gpu.count"] == "4"


def test_refreshed_is_told_which_nodes(labels: Labels) -> None:
    outcome = labels.run(state="refreshed")
    assert outcome["failed"] and "nodes" in outcome["msg"] and labels.asked == []


NO_PROGRAM = (
    "OCI runtime exec failed: exec failed: unable to start container process: exec: "
    '"gpu-feature-discovery": executable file not found in $PATH: unknown'
)


@pytest.mark.parametrize(
    ("says", "found", "next_step"),
    [
        (
            Command(("kubectl",), 1, stderr=NO_PROGRAM),
            "not found in $PATH",
            "kubernetes_device_plugin_gpu_labels=false",
        ),
        (Command((), 0, "gpu.product=x\n"), "gpu-feature-discovery printed 'gpu.product=x'", "in the pod of the"),
        (Command((), 0, "nvidia.com/gpu.product=a b\n"), "printed 'nvidia.com/gpu.product=a b'", "try '"),
        (Command(("kubectl",), None, timed_out=True, limit=45), "no answer of kubectl within 45 s", "check the"),
    ],
)
def test_a_node_that_cannot_be_asked_is_named_and_the_others_are_labelled(
    labels: Labels, says: Command, found: str, next_step: str
) -> None:
    labels.says["nvidia-device-plugin-node00000"] = says
    outcome = labels.run()
    assert outcome["failed"] and outcome["msg"].startswith("node00000: ")
    assert found in outcome["msg"] and next_step in outcome["msg"]
    assert labels.actions(outcome) == ["failed", "labelled"] and outcome["changed"]


@pytest.mark.parametrize(
    "refused",
    [
        # What many boards call themselves, as plugin 0.18.0 prints it, and QEMU as older ones do.
        "nvidia.com/gpu.machine=To-Be-Filled-By-O.E.M.",
        "nvidia.com/gpu.machine=Standard-PC-(Q35-+-ICH9,-2009)",
        "nvidia.com/mig.product=NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Workstation-Edition-MIG-1g.24gb",
    ],
)
def test_a_label_that_kubernetes_does_not_take_keeps_no_other_from_the_node(labels: Labels, refused: str) -> None:
    labels.says["nvidia-device-plugin-node00000"] = Command((), 0, f"{SAYS}{refused}\nnvidia.com/empty=\n")
    outcome = labels.run()
    assert labels.actions(outcome) == ["labelled", "labelled"] and not outcome.get("failed")
    given = {**LABELS, "nvidia.com/empty": ""}
    assert labels.metadata()["labels"] == {"nvidia.com/gpu.present": "true", **given}
    assert outcome["nodes"][0]["labels"] == given
    assert outcome["nodes"][0]["message"] == f"4 labels, without {refused}, which Kubernetes does not take"
    assert labels.actions(labels.run()) == ["none", "none"]


def test_a_node_without_gpus_has_none(labels: Labels) -> None:
    labels.says["nvidia-device-plugin-node00000"] = Command((), 0, "")
    outcome = labels.run()
    assert outcome["nodes"][0]["message"] == "gpu-feature-discovery finds no GPU"
    assert labels.metadata()["labels"] == {"nvidia.com/gpu.present": "true"}


def test_a_change_meanwhile_is_looked_at_again(labels: Labels) -> None:
    def changed(request: Any) -> bool:
        if (
            request.command == "PATCH"
            and labels.metadata()["resourceVersion"] == request.body["metadata"]["resourceVersion"]
        ):
            labels.metadata()["resourceVersion"] = str(int(labels.metadata()["resourceVersion"]) + 1)
            labels.cluster.answer = lambda _request: False
        return False

    labels.cluster.answer = changed
    assert labels.actions(labels.run()) == ["labelled", "labelled"]
    assert labels.metadata()["labels"]["nvidia.com/gpu.count"] == "4"
