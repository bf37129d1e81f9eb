"""The gate that a node keeps by itself."""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
import os
import platform
import re
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.plugins.filter.gate_refusal import gate_refusal
from ansible_collections.gpufarm.core.plugins.module_utils import gate_service, health, nomad, text
from ansible_collections.gpufarm.core.plugins.module_utils.health.problems import problem_of
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.facts import empty_facts, empty_gpu
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils.gate_helper import Farm

COLLECTION = Path(__file__).resolve().parents[4]
GPUS = ["GPU-1", "GPU-2"]
LOST = "gpu_lost GPU-1"


@pytest.fixture
def nomads() -> Iterator[Farm]:
    """Two nodes of one name, as cloned images make them; the agent is that of the first."""
    running = Farm(2)
    instances = [{"ID": uuid, "Healthy": True} for uuid in GPUS]
    group = {"Vendor": "nvidia", "Type": "gpu", "Name": "Tesla T4", "Instances": instances,
             "Attributes": {"driver_version": {"String": "580.1"}}}  # fmt: skip
    for node in running.nodes.values():
        node.update(Name="gpu0", NodeResources={"Devices": [group]})
    running.nodes["id-1"]["CreateIndex"] = 20
    yield running
    running.agent.close()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_service, "NOMAD_WAIT_S", 0)


def config_of(nomads: Farm, **changes: Any) -> dict[str, Any]:
    return {
        "connection": {"address": nomads.agent.url, "token": "", "ca_cert": "", "client_cert": "", "client_key": ""},
        "close_on": "critical",
        "drain": False,
        "drain_deadline": 3600,
        "plugin_age_max": 60,
        "open_after": 1,
        "closed_min": 0,
        "textfile_dir": "",
        "check_start": 0,
        "check_quick": 0,
        "ignored": [],
        "health": {},
        **changes,
    }


def probe(verdict: str = "ok", reason: str | None = None, available: bool = True, gpus: Any = GPUS) -> Any:
    """What health.probe returns, with a problem of the first GPU where C(reason) names one."""
    facts = {**empty_facts("linux"), "available": available, "driver_version": "580.1"}
    facts["gpus"] = [
        {**empty_gpu(), "index": index, "uuid": uuid, "pci_bus_id": f"00000000:0{index}:00.0", "name": "Tesla T4"}
        for index, uuid in enumerate(gpus)
    ]
    judged = health.judge(facts, [], [], health.HealthOptions(), host="gpu0")  # type: ignore[arg-type]
    if reason:
        code, *named = reason.split()
        found = Finding(code, "something", severity=verdict)
        address = facts["gpus"][0]["pci_bus_id"] if named else None
        problem = problem_of(found, "gpu0", health.HealthOptions(), *(named or [None]), address)
        assert problem
        judged.update(verdict=verdict, reason=reason, problems=[problem])
        judged["gpus"][0].update(verdict=verdict, problems=[problem])
    result = {**judged, "checks": {"kernel_log": "journal"}, "nvidia_smi": facts}
    return lambda _options: copy.deepcopy(result)


SICK = probe("critical", LOST)


class Gate:
    """The program with a configuration file, a status file and a double of the probe."""

    def __init__(self, folder: Path, nomads: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config, self.status_file = folder / "health.json", folder / "run/health.json"
        self.nomads = nomads
        self.monkeypatch = monkeypatch

    def run(self, found: Any, code: int, **changes: Any) -> dict[str, Any]:
        self.config.write_text(json.dumps(config_of(self.nomads, **changes)))
        self.monkeypatch.setattr(gate_service.run, "__defaults__", (found,))
        assert gate_service.main([str(self.config), str(self.status_file)]) == code, self.status
        return self.status

    @property
    def status(self) -> dict[str, Any]:
        read: dict[str, Any] = json.loads(self.status_file.read_text())
        return read


@pytest.fixture
def program(tmp_path: Path, nomads: Farm, monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(tmp_path, nomads, monkeypatch)


# --- what it does ----------------------------------------------------------------------------


def test_sick_node_closes_itself_and_opens_itself(nomads: Farm, program: Gate) -> None:
    status = program.run(SICK, 3)
    assert (status["action"], status["healthy"], status["reason"]) == ("close", False, LOST)
    node = nomads.nodes["id-0"]
    assert node["SchedulingEligibility"] == "ineligible"
    assert node["Meta"]["gpufarm_gate_closed_by"] == "node"
    status = program.run(SICK, 3)
    assert (status["action"], status["healthy"]) == ("update", False)
    assert "still sick: gpu_lost GPU-1" in status["message"]
    status = program.run(probe(), 0)
    assert (status["action"], status["healthy"], status["reason"]) == ("open", True, None)
    assert node["SchedulingEligibility"] == "eligible"


def test_two_nodes_of_one_name_and_each_acts_on_itself_only(nomads: Farm, program: Gate) -> None:
    program.run(SICK, 3)
    assert nomads.nodes["id-0"]["SchedulingEligibility"] == "ineligible"
    assert nomads.nodes["id-1"]["SchedulingEligibility"] == "eligible"
    nomads.own = "id-1"
    program.run(SICK, 3)
    nomads.own = "id-0"
    program.run(probe(), 0)
    assert nomads.nodes["id-0"]["SchedulingEligibility"] == "eligible"
    assert nomads.nodes["id-1"]["SchedulingEligibility"] == "ineligible"


def test_a_run_that_changes_nothing_asks_its_agent_and_for_its_node_and_the_leader_nothing(
    nomads: Farm, program: Gate
) -> None:
    program.run(probe(), 0)
    own = ["/v1/agent/self", "/v1/node/id-0 stale"]
    assert nomads.asked == [*own, *own, "/v1/client/stats", "/v1/client/metadata"]
    assert nomads.agent.writes == []


def test_what_a_server_behind_the_leader_says_is_asked_again_before_anything_changes(
    nomads: Farm, program: Gate
) -> None:
    nomads.behind = copy.deepcopy(nomads.nodes)
    nomads.nodes["id-0"]["SchedulingEligibility"] = "ineligible"
    assert "somebody else" in program.run(SICK, 3)["message"]
    assert nomads.asked[-2:] == ["/v1/node/id-0", "/v1/client/metadata"]
    assert nomads.agent.writes == []


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (probe(gpus=["GPU-1", "GPU-2", "GPU-3"]), "gpu_missing"),
        (probe(gpus=["GPU-1"]), "gpu_unexpected"),
    ],
)
def test_nomads_view_counts_too(program: Gate, found: Any, code: str) -> None:
    status = program.run(found, 3)
    assert status["reason"] == f"nomad {code}"
    assert [problem["code"] for problem in status["nomad_problems"]] == [code]
    assert "Node gpu0: found " in status["nomad_problems"][0]["message"]


def test_agent_that_just_started_gets_its_time(nomads: Farm, program: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_service, "NOMAD_WAIT_S", 60)
    devices, asked = nomads.nodes["id-0"]["NodeResources"], []
    nomads.nodes["id-0"]["NodeResources"] = {"Devices": None}
    answer = nomads.agent.answer

    def later(request: Any) -> bool:
        asked.append(request.path)
        if "index=10&wait=" in request.path:
            nomads.nodes["id-0"]["NodeResources"] = devices
        return answer(request)

    nomads.agent.answer = later
    assert program.run(probe(), 0)["nomad_problems"] == []
    # The second waits for news of this node.
    assert [path for path in asked if "index" in path] == ["/v1/node/id-0?stale=true&index=10&wait=" + asked[5][39:]]


def test_driver_that_nomad_has_not_noticed_does_not_close(nomads: Farm, program: Gate) -> None:
    found = probe()(None)
    found["nvidia_smi"]["driver_version"] = "590.1"
    status = program.run(lambda _options: found, 0, close_on="warning")
    assert (status["healthy"], status["reason"], status["action"]) == (True, None, "none")
    assert [problem["code"] for problem in status["nomad_problems"]] == ["driver_version_stale"]
    assert nomads.nodes["id-0"]["SchedulingEligibility"] == "eligible"


def test_divided_gpu_whose_devices_nobody_could_list_is_no_defect(program: Gate) -> None:
    found = probe()(None)
    found["nvidia_smi"]["gpus"][0].update(mig_mode="Enabled", mig_devices=None)
    program.run(lambda _options: found, 0)


def test_gpu_without_a_uuid_counts(program: Gate) -> None:
    assert program.run(probe(gpus=[*GPUS, None]), 3)["reason"] == "nomad count_mismatch"


def test_agent_without_statistics_does_not_keep_a_sick_node_open(nomads: Farm, program: Gate) -> None:
    nomads.refuse = "/v1/client/stats"
    status = program.run(SICK, 3)
    assert (status["action"], status["reason"]) == ("close", LOST)


def test_probe_that_began_before_nomad_was_back_closes_and_does_not_open(nomads: Farm, program: Gate) -> None:
    """Nobody knows how the node was when such a probe began."""

    def back(found: Any) -> Any:
        def probing(_options: Any) -> Any:
            nomads.leader = True
            return found(None)

        return probing

    nomads.leader = False
    program.run(back(SICK), 3)
    assert nomads.nodes["id-0"]["SchedulingEligibility"] == "ineligible"
    nomads.leader = False
    assert "may be older" in program.run(back(probe()), 0)["message"]
    assert nomads.nodes["id-0"]["SchedulingEligibility"] == "ineligible"
    assert program.run(probe(), 0)["action"] == "open"


# --- what the kernel log has lost ------------------------------------------------------------

GSP = "NVRM: Xid (PCI:0000:00:06): 119, pid=7, name=python, Timeout after 6s of waiting for RPC response from GPU0 GSP!"
XML = Path(__file__).parent / "nvidia_smi_corpus/580.159.04-h100-queried.xml"


class Log:
    """A node with a healthy GPU, and a kernel that started a day ago, whose log holds what C(write) was given."""

    def __init__(self, root: Path, nomads: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.booted = root, time.time() - 86400
        for name, script in (
            ("nvidia-smi", f'[ "$1" = -q ] && exec cat {XML}\nexit 0'),
            ("journalctl", "exec cat $0.log"),
        ):
            path = root / "bin" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
        (root / "proc/sys/kernel/random").mkdir(parents=True)
        (root / "proc/uptime").write_text("86400.00 5.00\n")
        self.boot("2ea43452-7e0b-4ff6-ac50-855647fa718a")
        monkeypatch.setattr(gate_service.gate_status, "boot_id", lambda: health.kernel_log.boot_id(root))
        facts = self.probe(health.HealthOptions())["nvidia_smi"]
        (group,) = nomads.nodes["id-0"]["NodeResources"]["Devices"]
        group["Instances"] = [{"ID": gpu["uuid"], "Healthy": True} for gpu in facts["gpus"]]
        group["Attributes"]["driver_version"]["String"] = facts["driver_version"]
        self.options = {"acknowledged_file": str(root / "acknowledged")}

    def boot(self, boot_id: str) -> None:
        (self.root / "proc/sys/kernel/random/boot_id").write_text(f"{boot_id}\n")

    def write(self, *records: tuple[float, str]) -> None:
        lines = [
            {"MESSAGE": message, "__REALTIME_TIMESTAMP": str(int((self.booted + after) * 1e6)), "SYSLOG_FACILITY": "0"}
            for after, message in records
        ]
        (self.root / "bin/journalctl.log").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def acknowledge(self, after: float, uuid: str = "") -> None:
        path = Path(self.options["acknowledged_file"] + uuid)
        path.touch()
        os.utime(path, (self.booted + after,) * 2)

    def probe(self, options: health.HealthOptions) -> dict[str, Any]:
        found: dict[str, Any] = health.probe(options, root=str(self.root), search=str(self.root / "bin"))
        return found


@pytest.fixture
def log(tmp_path: Path, nomads: Farm, monkeypatch: pytest.MonkeyPatch) -> Log:
    """A log that has told of a critical Xid."""
    made = Log(tmp_path / "root", nomads, monkeypatch)
    made.write((1, "Linux version 6.12"), (40000, GSP))
    return made


PARTIAL = ((50000, "usb 1-1: new high-speed USB device"),)


def hang(_options: Any) -> Any:
    raise gate_service.TooLateError("found that this run did not end")


@pytest.mark.parametrize("left", [PARTIAL, ()])
def test_an_xid_that_the_log_has_lost_keeps_the_node_closed_until_it_is_acknowledged(
    nomads: Farm, program: Gate, log: Log, left: tuple[tuple[float, str], ...]
) -> None:
    wish = {"health": log.options}
    assert program.run(log.probe, 3, **wish)["reason"].startswith("xid_119 GPU-")
    log.write(*left)
    # A run that ends without a probe forgets nothing either.
    for found, code in ((log.probe, 3), (hang, 2), (log.probe, 3), (log.probe, 3)):
        status = program.run(found, code, **wish)
        assert nomads.nodes["id-0"]["SchedulingEligibility"] == "ineligible"
    assert status["kernel_log"].startswith("journal, partial" if left else "unreadable")
    assert (status["action"], [xid["code"] for xid in status["xids"]]) == ("update", ["xid_119"])
    # What the control node asks on this node says the same.
    found = log.probe(health.HealthOptions(**log.options, status_file=str(program.status_file)))
    assert (found["verdict"], found["reason"]) == ("critical", status["reason"])
    assert found["xids"] == status["remembered"]["xids"]
    log.acknowledge(39000)
    program.run(log.probe, 3, **wish)
    log.acknowledge(41000, "-" + found["gpus"][0]["uuid"])
    assert program.run(log.probe, 0, **wish)["action"] == "open"
    assert nomads.nodes["id-0"]["SchedulingEligibility"] == "eligible"


def test_an_xid_of_an_earlier_start_of_the_kernel_is_not_remembered(program: Gate, log: Log) -> None:
    wish = {"health": log.options}
    program.run(log.probe, 3, **wish)
    log.boot("90a1c2d3-0000-4ff6-ac50-855647fa718a")
    log.write(*PARTIAL)
    assert program.run(log.probe, 0, **wish)["action"] == "open"


def test_a_log_that_is_whole_has_the_last_word(program: Gate, log: Log) -> None:
    wish = {"health": log.options}
    program.run(log.probe, 3, **wish)
    log.write((1, "Linux version 6.12"))
    assert program.run(log.probe, 0, **wish)["action"] == "open"


SWITCH = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): "


@pytest.mark.parametrize(
    ("before", "later", "reason"),
    [
        # The worst counts, of what is judged by its text the last.
        (
            f"{SWITCH}20034, Fatal, Link 30 LTSSM Fault Up",
            f"{SWITCH}20034, Non-fatal, Link 30",
            "sxid_20034 00000000:C1",
        ),
        (f"{SWITCH}20034, Non-fatal, Link 30", f"{SWITCH}20034, Fatal, Link 30 LTSSM", "sxid_20034 00000000:C1"),
        (
            GSP.partition(" 119")[0] + " 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
            GSP.partition(" 119")[0] + " 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
            None,
        ),
    ],
)
def test_an_xid_that_is_remembered_and_told_again(
    program: Gate, log: Log, before: str, later: str, reason: str | None
) -> None:
    log.write((1, "Linux version 6.12"), (40000, before))
    wish = {"health": log.options}
    program.run(log.probe, 0 if "Non-fatal" in before else 3, **wish)
    log.write((50000, later))
    status = program.run(log.probe, 3 if reason else 0, **wish)
    assert (status["reason"] or "").startswith(reason or "")
    assert len(status["xids"]) == 1


# --- its configuration file, one behaviour a key ---------------------------------------------


@pytest.mark.parametrize(("close_on", "code"), [("critical", 0), ("warning", 3)])
def test_close_on(nomads: Farm, program: Gate, close_on: str, code: int) -> None:
    status = program.run(probe("warning", "pcie_width GPU-1"), code, close_on=close_on)
    assert status["verdict"] == "warning"
    assert status["healthy"] is (code == 0)
    assert (nomads.nodes["id-0"]["SchedulingEligibility"] == "eligible") is (code == 0)


def test_drain_and_its_deadline(nomads: Farm, program: Gate) -> None:
    program.run(SICK, 3, drain=True, drain_deadline=7)
    assert nomads.nodes["id-0"]["DrainStrategy"] == {"Deadline": 7_000_000_000, "IgnoreSystemJobs": True}
    assert nomads.nodes["id-0"]["LastDrain"]["Meta"]["gpufarm_gate_reason"] == LOST
    program.run(probe(), 0, drain=True)
    assert nomads.nodes["id-0"]["DrainStrategy"] is None
    assert nomads.nodes["id-0"]["SchedulingEligibility"] == "eligible"


def test_without_drain_nothing_is_moved(nomads: Farm, program: Gate) -> None:
    program.run(SICK, 3)
    assert nomads.nodes["id-0"]["LastDrain"] is None


def test_health_has_the_options_of_the_probe(program: Gate) -> None:
    asked: list[health.HealthOptions] = []

    def probing(options: health.HealthOptions) -> Any:
        asked.append(options)
        return probe()(options)

    program.run(probing, 0, health={"gpus": 4, "timeout": 20})
    assert asked == [health.HealthOptions(gpus=4, timeout=20, status_file=str(program.status_file))]


def test_plugin_age_max(nomads: Farm, program: Gate) -> None:
    """The statistics of the GPU are 93 seconds older than the agent's."""
    instances = {"GPU-1": {"Timestamp": "2026-11-21T15:09:29.461937591Z"}}
    nomads.stats["DeviceStats"] = [{"Type": "gpu", "InstanceStats": instances}]
    assert program.run(probe(), 3, plugin_age_max=60)["reason"] == "nomad plugin_stopped"
    assert program.run(probe(), 0, plugin_age_max=94)["action"] == "open"


def test_ignored_gpus_may_be_missing_in_nomad(program: Gate) -> None:
    found = probe(gpus=[*GPUS, "GPU-3"])
    program.run(found, 3)
    program.run(found, 0, ignored=["GPU-3"])


def test_ignored_gpus_are_known_to_the_probe(program: Gate) -> None:
    asked: list[health.HealthOptions] = []

    def found(options: health.HealthOptions) -> dict[str, Any]:
        asked.append(options)
        told: dict[str, Any] = probe()(options)
        return told

    program.run(found, 0, ignored=["GPU-3"], health={"gpus": 1})
    assert [(options.ignored_gpus, options.gpus) for options in asked] == [(("GPU-3",), 1)]


@pytest.mark.parametrize(("token", "header"), [("", None), ("the-secret", "the-secret")])
def test_token_goes_with_every_request(nomads: Farm, program: Gate, token: str, header: str | None) -> None:
    program.run(SICK, 3, connection={"address": nomads.agent.url, "token": token})
    assert {headers.get("X-Nomad-Token") for _path, _query, headers in nomads.agent.requests} == {header}
    assert token == "" or token not in program.status_file.read_text()


def test_open_after_so_many_clean_probes_in_a_row(nomads: Farm, program: Gate) -> None:
    wish = {"open_after": 3}
    program.run(SICK, 3, **wish)
    assert program.run(probe(), 0, **wish)["action"] == "wait"
    assert "this was number 2" in program.run(probe(), 0, **wish)["message"]
    program.run(SICK, 3, **wish)
    assert [program.run(probe(), 0, **wish)["action"] for _ in range(3)] == ["wait", "wait", "open"]
    assert nomads.nodes["id-0"]["SchedulingEligibility"] == "eligible"


def test_closed_min_by_the_uptime_of_the_node(nomads: Farm, program: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    wish = {"closed_min": 300}
    program.run(SICK, 3, **wish)
    nomads.stats["Uptime"] = 1299
    # Whatever its clock says.
    monkeypatch.setattr(text.time, "gmtime", lambda _seconds: time.struct_time((2038, 1, 1, 0, 0, 0, 0, 1, 0)))
    status = program.run(probe(), 0, **wish)
    assert (status["action"], status["healthy"]) == ("wait", True)
    assert "for 300 s, of which 299 are over" in status["message"]
    nomads.stats["Uptime"] = 1300
    assert program.run(probe(), 0, **wish)["action"] == "open"


def test_uptime_that_is_no_number_is_unknown(nomads: Farm, program: Gate) -> None:
    nomads.stats["Uptime"] = None
    program.run(SICK, 3)
    assert "without the node's uptime" in program.run(probe(), 0, closed_min=1)["message"]


def test_connection_is_asked_for_ten_seconds_unless_it_says_otherwise(
    program: Gate, nomads: Farm, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    client = nomad.Client

    def watched(connection: nomad.Connection) -> nomad.Client:
        seen.append(connection.request_timeout)
        return client(connection)

    monkeypatch.setattr(gate_service.nomad, "Client", watched)
    program.run(probe(), 0)
    program.run(probe(), 0, connection={"address": nomads.agent.url, "request_timeout": 3})
    assert seen == [10, 10, 3, 3]


@pytest.mark.parametrize("key", sorted(gate_service.KEYS))
def test_every_key_is_needed_and_has_a_type(nomads: Farm, tmp_path: Path, key: str) -> None:
    path = tmp_path / "config.json"
    whole = config_of(nomads)
    path.write_text(json.dumps(whole))
    assert gate_service.load(str(path)) == whole
    kind = gate_service.KEYS[key].__name__
    for value in (None, "wrong" if kind != "str" else 7):
        path.write_text(json.dumps({**whole, key: value}))
        with pytest.raises(gate_service.ConfigError, match=rf"{key} is {value!r} and no {kind}\)\. Expected: "):
            gate_service.load(str(path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Expecting value"),
        ("[]", "it holds a list"),
        ("{}", "connection is None and no dict"),
        (None, "No such file"),
    ],
)
def test_configuration_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, words: str
) -> None:
    path, status = tmp_path / "config.json", tmp_path / "status.json"
    if text is not None:
        path.write_text(text)
    assert gate_service.main([str(path), str(status)]) == gate_service.BROKEN
    told = capsys.readouterr().err
    assert told.startswith(f"{platform.node()}: no verdict: {path} cannot be used (")
    assert words in told
    assert told.endswith(
        "). Expected: the configuration that the role gpu_health writes. "
        "Next step: run that role for this host again.\n"
    )
    written = json.loads(status.read_text())
    assert (written["healthy"], written["verdict"], written["action"]) == (None, None, "failed")
    assert words in written["message"]


def test_close_on_is_one_of_two(program: Gate) -> None:
    status = program.run(probe(), 2, close_on="never")
    assert "close_on is 'never' and neither critical nor warning" in status["message"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"dcgm_diag_level": 2, "dcgm_diag_timeout": 30},
            "found dcgm_diag_level is 2, which takes minutes to hours and the GPUs from jobs. Expected: at most 1 for "
            "a timer. Next step: take it out of gpu_health_options, and give it to playbooks/health.yml alone, for "
            "nodes without jobs.",
        ),
        (
            {"dcgm_diag_level": 1},
            "found options (timeout, dcgm_diag_level and dcgm_diag_timeout) with which a probe may take 3961 s. "
            "Expected: at most 400 s. Next step: correct the options of the health check.",
        ),
        (
            {"timeout": 70},
            "found options (timeout) with which a probe may take 401 s. Expected: at most 400 s. Next step: correct "
            "the options of the health check.",
        ),
        ({"gpus": -1}, "found gpus is -1. Expected: 0 or more. Next step: correct the options of the health check."),
    ],
)
def test_options_with_which_a_probe_has_no_end_in_time_are_refused(
    nomads: Farm, program: Gate, options: dict[str, Any], told: str
) -> None:
    status = program.run(SICK, 2, health=options)
    assert status["message"] == told
    assert nomads.agent.requests == []
    assert gate_refusal(options) == status["message"]


def test_options_that_a_timer_takes() -> None:
    for options in ({}, {"timeout": 69}, {"dcgm_diag_level": 1, "dcgm_diag_timeout": 30}):
        assert gate_refusal(options) == ""


# --- what Prometheus gets --------------------------------------------------------------------


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    folder = tmp_path / "textfile"
    folder.mkdir()
    return folder / "gpufarm.prom"


def test_metrics_are_written_where_they_are_asked_for(program: Gate, metrics: Path) -> None:
    program.run(probe(), 0)
    assert list(metrics.parent.iterdir()) == []
    program.run(probe(), 0, textfile_dir=str(metrics.parent), connection=connection(program, "the-secret"))
    told = metrics.read_text()
    assert 'gpufarm_gate_state{state="open"} 1\n' in told and "gpufarm_node_gpus_found 2\n" in told
    assert "the-secret" not in told
    assert stat.S_IMODE(metrics.stat().st_mode) == 0o644
    program.run(probe(gpus=GPUS[:1]), 3, textfile_dir=str(metrics.parent))
    told = metrics.read_text()
    assert re.search(r'gpufarm_gpu_verdict\{uuid="GPU-2",pci_bus_id=".*",verdict="missing"\} 1\n', told)
    assert 'gpufarm_gate_state{state="node"} 1\n' in told
    assert 'gpufarm_problem{uuid="GPU-2",code="gpu_unexpected",severity="critical",source="nomad"} 1\n' in told


def connection(program: Gate, token: str) -> dict[str, str]:
    return {"address": program.nomads.agent.url, "token": token}


def test_metrics_tell_of_a_run_that_failed(nomads: Farm, program: Gate, metrics: Path) -> None:
    wish = {"textfile_dir": str(metrics.parent)}
    program.run(probe(), 0, **wish)
    nomads.leader = False
    program.run(probe(), 2, **wish)
    told = metrics.read_text()
    assert "gpufarm_gate_success 0\n" in told and "gpufarm_gate_state{" not in told
    # The probe could do its work.
    assert "gpufarm_node_gpus_found 2\n" in told

    def broken(_options: Any) -> Any:
        raise KeyError("gpus")

    with pytest.raises(KeyError):
        program.run(broken, 1, **wish)
    assert "gpufarm_node_gpus_found" not in metrics.read_text()
    assert [gpu["verdict"] for gpu in program.status["gpus"]] == [None, None]
    program.run(probe(gpus=GPUS[:1]), 2, **wish)
    assert [gpu["verdict"] for gpu in program.status["gpus"]] == ["ok", "missing"]


def test_metrics_that_cannot_be_written(
    nomads: Farm, program: Gate, metrics: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics.parent.rmdir()
    program.run(SICK, 2, textfile_dir=str(metrics.parent))
    assert nomads.nodes["id-0"]["SchedulingEligibility"] == "ineligible"
    assert program.status["action"] == "close"
    assert re.fullmatch(
        rf"{platform.node()}: {metrics} cannot be written \(.*\)\. Expected: the folder of node_exporter's textfile "
        r"collector, with space\. Next step: have that folder and room there \(`df`\), or correct "
        r"gpu_health_textfile_dir and run the role gpu_health again\.\n",
        capsys.readouterr().err,
    )


def test_state_says_who_keeps_the_node_closed(nomads: Farm, program: Gate) -> None:
    node = nomads.nodes["id-0"]
    assert program.run(probe(), 0)["state"] == "open"
    assert program.run(SICK, 3)["state"] == "node"
    assert program.run(SICK, 3)["state"] == "node"
    assert program.run(probe(), 0, open_after=2)["state"] == "node"
    nomads.clients["id-0"]["gpufarm_gate_closed_by"] = "farm"
    assert program.run(probe(), 0)["state"] == "farm"
    nomads.clients["id-0"].clear()
    assert program.run(probe(), 0)["state"] == "others"
    assert program.run(SICK, 3)["state"] == "others"
    nomads.clients["id-0"]["gpufarm_maintenance"] = "new riser"
    assert program.run(SICK, 3)["state"] == "maintenance"
    node["SchedulingEligibility"] = "eligible"
    nomads.clients["id-0"].clear()
    assert program.run(probe(), 0)["state"] == "open"


# --- when it cannot do its work --------------------------------------------------------------


@pytest.mark.parametrize("away", ["address", "leader", "unknown"])
def test_status_does_not_go_on_saying_healthy_while_nomad_is_away(
    nomads: Farm, program: Gate, capsys: pytest.CaptureFixture[str], away: str
) -> None:
    assert program.run(probe(), 0)["healthy"] is True
    changes: dict[str, Any] = {"connection": {"address": "http://127.0.0.1:1"}} if away == "address" else {}
    if away == "leader":
        nomads.leader = False
    elif away == "unknown":
        del nomads.nodes["id-0"]
    words = {
        "address": "http://127.0.0.1:1/v1/agent/self cannot be reached",
        "leader": "was answered by a server without a leader. Expected: servers with a leader. Next step: check "
        "'nomad server members' and read `journalctl -u nomad` on the servers.",
        "unknown": "Nomad knows no node id-0, which this agent says it is. Expected: a client that its servers know. "
        "Next step: read `journalctl -u nomad` on this host.",
    }[away]
    for found, healthy, reason in (
        (probe(), None, None),
        (probe("warning", "pcie_width GPU-1"), None, None),
        (SICK, False, LOST),
    ):
        status = program.run(found, 2, **changes)
        assert (status["healthy"], status["reason"], status["action"]) == (healthy, reason, "failed")
        assert (status["verdict"], status["nomad_problems"], status["state"]) == (found(None)["verdict"], None, None)
        assert status["problems"] == found(None)["problems"]
        assert words in status["message"] and "Next step: " in status["message"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", status["checked_at"])
        assert f"{status['verdict']}: " in capsys.readouterr().err


def test_agent_that_is_no_client(nomads: Farm, program: Gate) -> None:
    nomads.own = None
    status = program.run(probe(), 2)
    assert status["message"].endswith(
        f"the agent at {nomads.agent.url} is no client. Expected: the Nomad client of this node. Next step: look at "
        "its configuration ('nomad agent-info'), and at nomad_bind_addr of this host."
    )


def test_change_that_nomad_refuses_is_told(nomads: Farm, program: Gate) -> None:
    nomads.refuse = "/eligibility"
    status = program.run(SICK, 2)
    assert (status["healthy"], status["action"]) == (False, "failed")
    assert "HTTP 500: rpc error: no path" in status["message"]


def test_defect_of_the_program_is_no_healthy_node(program: Gate) -> None:
    program.run(probe(), 0)

    def broken(_options: Any) -> Any:
        raise KeyError("gpus")

    with pytest.raises(KeyError):
        program.run(broken, 1)
    assert (program.status["healthy"], program.status["message"]) == (None, "KeyError: 'gpus'")


def test_run_that_hangs_ends_before_systemd_ends_it(program: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_service, "RUN_LIMIT_S", 1)

    def hanging(_options: Any) -> Any:
        while True:
            try:
                time.sleep(600)
            except Exception:
                continue

    status = program.run(hanging, 2)
    assert status["healthy"] is None
    assert status["message"] == (
        "found that this run did not end within 1 s. Expected: an end. Next step: look for what "
        "hangs here (`ps -e -o stat,wchan,args`), and restart the host if it is the driver."
    )
    assert signal.alarm(0) == 0


def test_no_alarm_is_left(program: Gate) -> None:
    program.run(probe(), 0)
    assert signal.alarm(0) == 0


def test_status_that_cannot_be_written(program: Gate, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    program.config.write_text("{}")
    assert gate_service.main([str(program.config), str(tmp_path / "file/status.json")]) == 2
    path = tmp_path / "file/status.json"
    assert re.fullmatch(
        rf"{platform.node()}: {path} cannot be written \(.*\)\. Expected: a folder with space on the node\. "
        r"Next step: make room there \(`df`\)\.\n",
        capsys.readouterr().err,
    )


@pytest.mark.parametrize(
    ("status", "metrics", "written"),
    [("run", "run", True), ("file", "run", False), ("run", "file", False), ("file", "file", False)],
)
def test_all_that_is_asked_for_has_to_be_written(
    program: Gate, tmp_path: Path, status: str, metrics: str, written: bool
) -> None:
    said = program.run(probe(), 0)
    (tmp_path / "file").write_text("")
    told = gate_service.tell(said, str(tmp_path / status / "told.json"), {"textfile_dir": str(tmp_path / metrics)})
    assert told is written


def test_command_writes_the_status_for_everybody_and_tells_by_its_exit_code(
    program: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    program.run(probe(), 0)
    assert capsys.readouterr().out == "ok: healthy and open\n"
    program.run(probe("critical", "xid_79"), 3)
    assert capsys.readouterr().out == "critical: closed: xid_79\n"
    assert stat.S_IMODE(program.status_file.stat().st_mode) == 0o644
    assert program.status_file.read_text().endswith("}\n")
    assert set(program.status) == {
        "verdict", "healthy", "reason", "action", "message", "state", "problems", "nomad_problems", "gpus",
        "gpus_expected", "gpus_found", "xids", "kernel_log", "remembered", "probed_at", "checked_at",
    }  # fmt: skip
    assert sorted(path.name for path in program.status_file.parent.iterdir()) == ["health.json", "health.json.lock"]
    # Who may read a file can lock it.
    assert stat.S_IMODE((program.status_file.parent / "health.json.lock").stat().st_mode) == 0o600


def test_files_are_those_of_the_role() -> None:
    variables = yaml.safe_load((COLLECTION / "roles/gpu_health/vars/main.yml").read_text())
    assert variables["__gpu_health_config"] == gate_service.CONFIG == "/etc/gpufarm/health.json"
    assert gate_service.STATUS == health.HealthOptions().status_file == "/run/gpufarm/health.json"
    assert gate_service.STATUS in (COLLECTION / "roles/gpu_health/tasks/absent.yml").read_text()


# --- its time --------------------------------------------------------------------------------


def test_a_run_ends_well_before_systemd_ends_it(nomads: Farm, program: Gate) -> None:
    unit = (COLLECTION / "roles/gpu_health/templates/gpufarm-health.service.j2").read_text()
    (limit,) = re.findall(r"^TimeoutStartSec=(\d+)$", unit, re.MULTILINE)
    assert int(limit) >= gate_service.RUN_LIMIT_S + 30
    assert health.longest_probe(health.HealthOptions()) <= gate_service.PROBE_LIMIT_S
    # The run with the most requests.
    program.run(SICK, 3, drain=True)
    nomads.agent.requests.clear()
    nomads.agent.writes.clear()
    program.run(probe(), 0)
    requests = len(nomads.agent.requests) + len(nomads.agent.writes)
    assert requests == 10
    waiting = 20 + requests * gate_service.REQUEST_LIMIT_S
    assert gate_service.PROBE_LIMIT_S + waiting <= gate_service.RUN_LIMIT_S


def test_nomad_has_twenty_seconds() -> None:
    assert "NOMAD_WAIT_S = 20\n" in Path(gate_service.__file__).read_text()


# --- what the role installs ------------------------------------------------------------------


def test_role_writes_every_key_that_the_service_reads() -> None:
    content = yaml.safe_load((COLLECTION / "roles/gpu_health/vars/main.yml").read_text())["__gpu_health_content"]
    source = ast.parse((COLLECTION / "plugins/module_utils/gate_service.py").read_text())
    read = {
        node.slice.value
        for node in ast.walk(source)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
        and isinstance(node.value, ast.Name) and node.value.id == "config"
    }  # fmt: skip
    assert read == set(content) == set(gate_service.KEYS)
    connection = yaml.safe_load((COLLECTION / "roles/nomad/vars/main.yml").read_text())["__nomad_api"]
    assert set(connection) <= {field.name for field in dataclasses.fields(nomad.Connection)}
