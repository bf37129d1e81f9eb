# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.plugins.module_utils import health, maintenance, nomad_plugin_log, signals
from ansible_collections.gpufarm.core.plugins.modules import nomad_node_maintenance
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import nomad_helper as farm
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils.gate_helper import Farm
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

UUID = "GPU-3672890b-e127-9850-0c65-415ee8cf8a17"
GPU = {"uuid": UUID, "name": "Tesla T4", "mig_mode": None, "mig_devices": []}
WELL = {
    "verdict": "ok", "reason": None, "problems": [],
    "nvidia_smi": {"available": True, "driver_version": "580.1", "gpus": [GPU]},
}  # fmt: skip
SICK = {
    "verdict": "critical", "reason": "library_mismatch", "problems": [{"message": "Node gpu0: found a mismatch."}],
    "nvidia_smi": {"available": False, "driver_version": None, "gpus": []},
}  # fmt: skip


@pytest.fixture
def nomad() -> Iterator[Farm]:
    running = Farm(2)
    running.nodes["id-0"]["NodeResources"]["Devices"] = [
        {
            "Vendor": "nvidia", "Type": "gpu", "Name": "Tesla T4",
            "Instances": [{"ID": UUID, "Healthy": True}],
            "Attributes": {"driver_version": {"String": "580.1"}},
        }
    ]  # fmt: skip
    yield running
    running.agent.close()


class Node:
    def __init__(self, capsys: pytest.CaptureFixture[str], nomad: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capsys, self.nomad = capsys, nomad
        self.found: Any = WELL
        self.asked: list[health.HealthOptions] = []
        monkeypatch.setattr(nomad_node_maintenance.health, "probe", self.probe)
        monkeypatch.setattr(maintenance, "PAUSE_S", 0.01)
        monkeypatch.setattr(maintenance, "PATIENCE_S", 0)
        # What runs on this machine, as in the nodes of a test farm, is nothing of this node's.
        self.looks = maintenance.Maintenance.__init__.__kwdefaults__
        monkeypatch.setitem(self.looks, "running", dict)
        monkeypatch.setitem(self.looks, "foreign", lambda: ["python3 (process 7 of ada)"])
        self.judged: list[dict[str, Any]] = []
        judge = nomad_node_maintenance.gate_service.judge

        def noted(*given: Any, **options: Any) -> Any:
            self.judged.append({"ignored": given[2], **options})
            return judge(*given, **options)

        monkeypatch.setattr(nomad_node_maintenance.gate_service, "judge", noted)

    def probe(self, options: health.HealthOptions) -> Any:
        self.asked.append(options)
        return self.found

    def run(self, **arguments: Any) -> helper.Outcome:
        given = {"address": self.nomad.agent.url, "timeout": 1, **arguments}
        return helper.run_module(nomad_node_maintenance.main, self.capsys, given)

    @property
    def eligibility(self) -> str:
        told: str = self.nomad.nodes["id-0"]["SchedulingEligibility"]
        return told


@pytest.fixture
def node(capsys: pytest.CaptureFixture[str], nomad: Farm, monkeypatch: pytest.MonkeyPatch) -> Node:
    # It asks the agent of its own host.
    farm.stand_behind_a_proxy(monkeypatch)
    return Node(capsys, nomad, monkeypatch)


def test_out_and_in(node: Node) -> None:
    out = node.run(state="out", change="driver branch 580")
    assert out["changed"] and (out["action"], out["node"], out["maintenance"]) == ("out", "gpu0", "driver branch 580")
    assert node.eligibility == "ineligible" and node.asked == []
    assert not node.run(state="out", change="a reboot")["changed"]
    back = node.run(state="in", health={"gpus": 1})
    assert back["changed"] and back["maintenance"] is None
    assert node.eligibility == "eligible"
    assert [options.gpus for options in node.asked] == [1]
    again = node.run(state="in")
    assert not again["changed"] and again["message"] == "this owner has taken no node out here"
    assert len(node.asked) == 1


def test_options_of_the_probe_arrive(node: Node) -> None:
    node.run(state="out", change="driver branch 580")
    node.run(state="in", ignored_gpu_ids=["GPU-0"], plugin_age_max=5.5, timeout=2, close_on="warning")
    assert [options.ignored_gpus for options in node.asked] == [("GPU-0",)]
    assert node.judged == [{"ignored": ["GPU-0"], "close_on": "warning", "plugin_age_max": 5.5, "wait_s": 2}]


def test_only_the_owner_puts_it_back(node: Node) -> None:
    node.run(state="out", change="new firmware", owner="Firmware")
    assert not node.run(state="in")["changed"] and node.eligibility == "ineligible"
    refused = node.run(state="out", change="driver branch 580")
    assert refused["failed"] and "a node that Firmware took out of work for new firmware" in refused["msg"]
    assert node.run(state="in", owner="Firmware")["changed"] and node.eligibility == "eligible"


def test_who_may_not_look_is_told(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied() -> Any:
        raise PermissionError(13, "Permission denied", "/proc/1/environ")

    monkeypatch.setitem(node.looks, "running", denied)
    result = node.run(state="out", change="driver branch 580")
    assert result["msg"] == (
        f"{platform.node()}: /proc/1/environ cannot be read. Expected: root, who sees what runs on this host. "
        "Next step: set become: true for this task."
    )
    assert node.nomad.agent.writes == []


def test_refused_with_its_allocations(node: Node) -> None:
    node.nomad.run_job("id-0", "train")
    result = node.run(state="out", change="driver branch 580")
    assert result["failed"]
    told = f"{platform.node()}: 1 running allocation, which driver branch 580 would end: train."
    assert result["msg"].startswith(told)
    assert node.nomad.agent.writes == [] and result["closed"] is False


def test_an_owner_whose_jobs_leave_next_arrives(node: Node) -> None:
    node.nomad.run_job("id-0", "agent")["Job"] = {"Meta": {"gpufarm_owner": "an agent"}}
    given = {"state": "out", "change": "driver branch 580", "_ansible_check_mode": True}
    assert node.run(**given)["failed"] and node.run(**given, without_jobs_of="an agent")["action"] == "out"


def test_gpu_work_of_no_scheduler_is_asked_for_where_it_would_end(node: Node) -> None:
    refused = node.run(state="out", change="a reboot", ends_gpu_work=True)
    assert refused["failed"] and "a reboot would end: python3 (process 7 of ada). Expected" in refused["msg"]
    assert node.eligibility == "eligible"
    assert node.run(state="out", change="a new agent")["action"] == "out"


def test_drained_with_consent(node: Node) -> None:
    node.nomad.run_job("id-0", "train")
    result = node.run(state="out", change="driver branch 580", policy="drain", deadline=60)
    assert result["allocations"] == [{"id": "train-0000-1111", "name": "train.group[0]", "job": "train"}]
    (drain,) = [body for path, body in node.nomad.agent.writes if path.endswith("/drain")]
    assert drain["DrainSpec"]["Deadline"] == 60 * 10**9


def test_who_fails_tells_whether_the_node_is_closed(node: Node) -> None:
    node.nomad.refuse = "/v1/client/metadata"
    assert node.run(state="out", change="driver branch 580")["closed"] is False
    node.nomad.refuse = "/eligibility"
    assert node.run(state="out", change="driver branch 580")["closed"] is True
    # It was marked meanwhile. Whose mark it is decides.
    node.nomad.refuse = None
    node.nomad.run_job("id-0", "train")
    assert node.run(state="out", change="driver branch 580")["closed"] is True
    assert node.run(state="out", change="driver branch 580", owner="others")["closed"] is False


def test_who_is_interrupted_closes_nothing_any_more_and_leaves_it_to_the_journal(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(nomad_node_maintenance.AnsibleModule, "log", lambda _module, text, **_more: logged.append(text))
    monkeypatch.setattr(signals, "watch_controller", lambda: lambda: True)
    result = node.run(state="out", change="driver branch 580")
    assert result["failed"] and "nobody waits for the answer of this run any more" in result["msg"]
    assert result["closed"] is True and result["msg"] in logged


def test_another_run_that_may_be_at_it_is_warned_of(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(
        nomad_node_maintenance.AnsibleModule, "warn", lambda _module, text, **_more: warned.append(text)
    )
    node.run(state="out", change="driver branch 580")
    assert warned == []
    node.nomad.run_job("id-0", "train")
    node.run(state="out", change="a reboot", policy="drain")
    (said,) = warned
    assert said.startswith(
        f"{platform.node()}: a node that gpufarm.core has taken out of work for driver branch 580 at "
    )


def test_sick_node_stays_out(node: Node) -> None:
    node.run(state="out", change="driver branch 580")
    node.found = SICK
    result = node.run(state="in")
    assert result["failed"] and node.eligibility == "ineligible"
    assert result["msg"] == (
        f"{platform.node()}: library_mismatch after driver branch 580. Node gpu0: found a mismatch. "
        "Expected: healthy GPUs that Nomad has; the node stays out of work. "
        "Next step: mend what is named and run this again, which puts the node back."
    )
    assert node.nomad.clients["id-0"]["gpufarm_maintenance"] == "driver branch 580"


def test_node_whose_gpus_nomad_lacks_stays_out(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    said = nomad_plugin_log.judged(['unable to initialize Nvidia driver: reason="nvml: Driver Not Loaded"'])
    monkeypatch.setattr(nomad_plugin_log, "read", lambda: said)
    node.run(state="out", change="driver branch 580")
    node.nomad.nodes["id-0"]["NodeResources"]["Devices"] = []
    result = node.run(state="in")
    assert result["failed"] and node.eligibility == "ineligible"
    assert "nomad no_devices after driver branch 580. Node gpu0: found no GPU device at all" in result["msg"]
    assert said.message in result["msg"]


def test_warning_stays_out_where_it_closes(node: Node) -> None:
    node.run(state="out", change="driver branch 580")
    node.found = {**WELL, "verdict": "warning", "reason": "pcie_width"}
    assert node.run(state="in", close_on="warning")["failed"] and node.eligibility == "ineligible"
    assert node.run(state="in")["changed"] and node.eligibility == "eligible"


def test_check_mode_changes_nothing(node: Node) -> None:
    out = node.run(state="out", change="driver branch 580", _ansible_check_mode=True)
    assert out["changed"] and node.nomad.agent.writes == []
    node.run(state="out", change="driver branch 580")
    before = len(node.nomad.agent.writes)
    back = node.run(state="in", _ansible_check_mode=True)
    assert (back["action"], back["node"], back["message"]) == ("in", "gpu0", "would be put back after a clean probe")
    assert len(node.nomad.agent.writes) == before and node.asked == []
    # Nor does it wait for a node that is not ready.
    node.nomad.set_status("id-0", "initializing")
    asked = len(node.nomad.agent.requests)
    assert node.run(state="in", _ansible_check_mode=True)["action"] == "in"
    assert len(node.nomad.agent.requests) - asked < 5


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"deadline": 0}, "deadline is 0. Expected: seconds, 1 or more. Next step: correct the option."),
        ({"timeout": 0}, "timeout is 0. Expected: seconds, 1 or more. Next step: correct the option."),
        (
            {"health": {"gpus": "many"}},
            "found gpus is 'many'. Expected: a whole number. Next step: correct the options of the health check.",
        ),
    ],
)
def test_bad_options_change_nothing(node: Node, options: dict[str, Any], told: str) -> None:
    result = node.run(state="out", change="driver branch 580", **options)
    assert result["msg"] == f"{platform.node()}: {told}"
    assert node.nomad.agent.writes == []


def test_returned_keys_are_the_documented_ones(node: Node) -> None:
    documented = yaml.safe_load(nomad_node_maintenance.RETURN)
    node.nomad.run_job("id-0", "train")
    failed = node.run(state="out", change="driver branch 580")
    result = node.run(state="out", change="driver branch 580", policy="drain")
    assert set(documented) == {*result, *failed} - {"changed", "invocation", "failed", "msg"}
    assert set(documented["allocations"]["contains"]) == set(result["allocations"][0])
