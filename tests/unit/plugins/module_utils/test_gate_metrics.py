# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the gate tells Prometheus, and the alerts and the dashboard that ask for it."""

from __future__ import annotations

import copy
import json
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.plugins.module_utils import gate, gate_metrics, gate_status, health
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.facts import empty_facts, empty_gpu
from ansible_collections.gpufarm.core.plugins.module_utils.pci import normal_bus_id
from ansible_collections.gpufarm.core.plugins.module_utils.xid_events import Event

COLLECTION = Path(__file__).resolve().parents[4]
RULES = COLLECTION / "examples/prometheus/gpufarm.rules.yml"
DASHBOARD = COLLECTION / "examples/grafana/gpufarm.json"
UUIDS = [f"GPU-0000000{number}-1111-2222-3333-444444444444" for number in range(4)]

MEASURED = ("utilization_ratio", "power_draw_watts", "power_limit_watts")

promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")


def facts(*numbers: int) -> dict[str, Any]:
    """Return what nvidia-smi says of a node with these GPUs."""
    gpus = [
        {**empty_gpu(), "index": index, "uuid": UUIDS[number], "pci_bus_id": f"00000000:0{number}:00.0", "name": "T4"}
        for index, number in enumerate(numbers)
    ]
    gpus = copy.deepcopy(gpus)
    for gpu in gpus:
        gpu["ecc"]["corrected"]["volatile"], gpu["ecc"]["uncorrected"]["volatile"] = 5, 0
        gpu["utilization_gpu_percent"], gpu["power_draw_w"], gpu["power_limit_enforced_w"] = 37, 26.5, 70.0
        held = dict.fromkeys(gpu["clocks_event_reasons_counters"], 0)
        gpu["clocks_event_reasons_counters"] = {**held, "sw_power_cap_us": 31637354094, "sync_boost_us": None}
    return {**empty_facts("linux"), "available": True, "gpus": gpus}


def status(known: dict[str, Any], *, xids: Any = (), checks: Any = None, **more: Any) -> dict[str, Any]:
    """Return what the gate writes of such a node after it could ask Nomad."""
    judged = health.judge(known, xids, [], health.HealthOptions())  # type: ignore[arg-type]
    told = gate_status.of_probe({**judged, "nvidia_smi": known, "checks": {"kernel_log": "journal"}}, checks)
    rest: dict[str, Any] = {"healthy": True, "action": "none", "state": gate.OPEN, "nomad_problems": [], **more}
    return gate_status.status_of(**{**told, **rest})


def sick(number: int, **gpu: Any) -> dict[str, Any]:
    known = facts(0, 1)
    known["gpus"][number].update(gpu)
    return known


def series(told: dict[str, Any]) -> dict[str, float]:
    lines = [line for line in gate_metrics.text_of(told).splitlines() if not line.startswith("#")]
    pairs = [line.rpartition(" ") for line in lines]
    found = {name: float(value) for name, _space, value in pairs}
    assert len(found) == len(lines), "a series twice"
    return found


def of(number: int) -> str:
    return f'uuid="{UUIDS[number]}",pci_bus_id="00000000:0{number}:00.0"'


def check(text: str) -> str:
    """Return what promtool has against metrics."""
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode or done.stdout or done.stderr else ""


CHECKED = {
    level: {"verdict": verdict, "level": level, "checked_at": "2026-01-31T18:00:00Z", "findings": []}
    for level, verdict in (("start", "failed"), ("quick", "ok"))
}
SAMPLES = {
    "healthy": status(facts(0, 1), checks={UUIDS[1]: CHECKED}, gpus_expected=2),
    "sick": status(
        sick(0, ecc={**facts(0)["gpus"][0]["ecc"], "uncorrected": {"volatile": 3, "aggregate": 9}}),
        xids=[Event("xid", 79, normal_bus_id("00000000:01:00.0"), None, 2, 1.0, 2.0, "gone")],
        healthy=False, state=gate.NODE,
        nomad_problems=[{"code": "gpu_unexpected", "uuid": UUIDS[3]}, {"code": "driver_version_stale", "uuid": None}],
    ),
    "gone": gate_status.remember(status(facts(0)), status(facts(0, 1))),
    "failed": gate_status.status_of(message="x"),
    "hung": gate_status.remember(
        status({**empty_facts("linux"), "reason": "timeout", "message": "no answer"}), status(facts(0, 1))
    ),
}  # fmt: skip


# --- what is told ----------------------------------------------------------------------------


def test_a_healthy_node() -> None:
    told = series(SAMPLES["healthy"])
    assert [told[f'gpufarm_gate_state{{state="{state}"}}'] for state in gate.STATES] == [1, 0, 0, 0, 0]
    assert (told["gpufarm_gate_success"], told["gpufarm_node_healthy"]) == (1, 1)
    assert (told["gpufarm_node_gpus_expected"], told["gpufarm_node_gpus_found"]) == (2, 2)
    assert told[f'gpufarm_gpu_info{{{of(1)},index="1",model="T4"}}'] == 1
    verdicts = [told[f'gpufarm_gpu_verdict{{{of(1)},verdict="{verdict}"}}'] for verdict in gate_status.VERDICTS]
    assert verdicts == [1, 0, 0, 0]
    assert told[f'gpufarm_gpu_ecc_errors_total{{{of(0)},kind="corrected"}}'] == 5
    held = "gpufarm_gpu_clocks_event_seconds_total"
    assert told[f'{held}{{{of(0)},reason="sw_power_cap"}}'] == 31637.354094
    assert told[f'{held}{{{of(0)},reason="hw_thermal_slowdown"}}'] == 0
    assert f'{held}{{{of(0)},reason="sync_boost"}}' not in told
    measured = [told[f"gpufarm_gpu_{name}{{{of(1)}}}"] for name in MEASURED]
    assert measured == [0.37, 26.5, 70]
    for level, passed in (("start", 0), ("quick", 1)):
        assert told[f'gpufarm_gpu_check_timestamp_seconds{{{of(1)},level="{level}"}}'] == 1769882400
        assert told[f'gpufarm_gpu_check_success{{{of(1)},level="{level}"}}'] == passed
    assert not [name for name in told if name.startswith(("gpufarm_problem", "gpufarm_gpu_xids"))]


def test_problems_of_gpus_and_of_nomad() -> None:
    told = series(SAMPLES["sick"])
    probe = 'severity="critical",source="probe"'
    assert told[f'gpufarm_problem{{{of(0)},code="ecc_uncorrected",{probe}}}'] == 1
    assert told[f'gpufarm_problem{{{of(1)},code="xid_79",{probe}}}'] == 1
    assert told[f'gpufarm_problem{{uuid="{UUIDS[3]}",code="gpu_unexpected",severity="critical",source="nomad"}}'] == 1
    assert told['gpufarm_problem{code="driver_version_stale",severity="warning",source="nomad"}'] == 1
    assert told[f'gpufarm_gpu_xids{{{of(1)},code="xid_79"}}'] == 2
    assert told[f'gpufarm_gpu_verdict{{{of(0)},verdict="critical"}}'] == 1
    assert told['gpufarm_gate_state{state="node"}'] == 1
    assert (told['gpufarm_node_verdict{verdict="critical"}'], told["gpufarm_node_healthy"]) == (1, 0)


def test_what_a_card_does_not_measure_is_no_number() -> None:
    told = series(status(sick(1, utilization_gpu_percent=None, power_draw_w=None, power_limit_enforced_w=None)))
    for name in MEASURED:
        assert [number for number in (0, 1) if f"gpufarm_gpu_{name}{{{of(number)}}}" in told] == [0]


def test_two_problems_of_one_code_are_one_series() -> None:
    twice = status(facts(0))
    twice["problems"] = [{"code": "check_failed", "severity": "warning", "uuid": None, "pci_bus_id": None}] * 2
    assert series(twice)['gpufarm_problem{code="check_failed",severity="warning",source="probe"}'] == 2


def test_a_gpu_that_vanished_is_missing_until_it_is_back() -> None:
    told = series(SAMPLES["gone"])
    assert told[f'gpufarm_gpu_verdict{{{of(1)},verdict="missing"}}'] == 1
    assert told[f'gpufarm_gpu_verdict{{{of(1)},verdict="ok"}}'] == 0
    assert told[f'gpufarm_gpu_verdict{{{of(0)},verdict="missing"}}'] == 0
    # Nobody asked it.
    assert not [name for name in told if re.match("gpufarm_gpu_(ecc|clocks|util|power)", name) and UUIDS[1] in name]
    assert told["gpufarm_node_gpus_found"] == 1
    later = gate_status.remember(status(facts(0)), SAMPLES["gone"])
    assert series(later)[f'gpufarm_gpu_verdict{{{of(1)},verdict="missing"}}'] == 1
    back = gate_status.remember(status(facts(0, 1)), later)
    assert [gpu["verdict"] for gpu in back["gpus"]] == ["ok", "ok"]


def test_the_last_gpu_that_vanished() -> None:
    none = {**empty_facts("linux"), "reason": "no_devices", "message": "No devices were found"}
    told = series(gate_status.remember(status(none), status(facts(0))))
    assert (told[f'gpufarm_gpu_verdict{{{of(0)},verdict="missing"}}'], told["gpufarm_node_gpus_found"]) == (1, 0)


def test_a_gpu_that_no_more_tells_its_uuid_is_not_missing() -> None:
    lost = sick(1, uuid=None, name=None, status="lost", status_message="GPU is lost")
    told = series(gate_status.remember(status(lost), status(facts(0, 1))))
    assert told['gpufarm_gpu_verdict{pci_bus_id="00000000:01:00.0",verdict="critical"}'] == 1
    assert not [name for name in told if UUIDS[1] in name]
    assert told["gpufarm_node_gpus_found"] == 1


@pytest.mark.parametrize("name", ["failed", "hung"])
def test_what_is_unknown_is_no_number(name: str) -> None:
    unknown = {**SAMPLES[name], "healthy": None, "state": None}
    told = series(unknown)
    for metric in (
        "gate_state", "node_healthy", "node_gpus_found", "node_gpus_expected", "gpu_verdict", "gpu_ecc", "gpu_clocks",
        *(f"gpu_{name}" for name in MEASURED),
    ):  # fmt: skip
        assert not [series for series in told if series.startswith(f"gpufarm_{metric}")], metric
    assert ("gpufarm_probe_timestamp_seconds" in told) is (name == "hung")
    # It is known that they were there.
    assert len([series for series in told if series.startswith("gpufarm_gpu_info")]) == (2 if name == "hung" else 0)
    assert series(gate_status.status_of(message="x"))["gpufarm_gate_success"] == 0


def test_times_are_of_utc() -> None:
    told = series({**SAMPLES["healthy"], "checked_at": "2026-01-31T18:00:00Z", "probed_at": "2026-01-31T17:59:59Z"})
    assert told["gpufarm_gate_run_timestamp_seconds"] == 1769882400
    assert told["gpufarm_probe_timestamp_seconds"] == 1769882399


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"gpus": 3}', '{"gpus": [{}]}', '{"gpus": [{"uuid": null, "pci_bus_id": null}]}']
)
def test_status_of_an_older_gate_or_a_spoilt_one_is_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    assert gate_status.read(str(tmp_path / "status.json")) == {}
    assert gate_status.read(str(tmp_path / "none.json")) == {}


@promtool
@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_promtool_takes_it(name: str) -> None:
    assert check(gate_metrics.text_of(SAMPLES[name])) == ""


@promtool
def test_promtool_takes_names_that_need_an_escape() -> None:
    known = facts(0)
    known["gpus"][0]["name"] = 'a "card" \\ with\na break'
    text = gate_metrics.text_of(status(known))
    assert check(text) == ""
    assert r'model="a \"card\" \\ with\na break"' in text
    # And it would have said so.
    assert check(text.replace(r"\"card\"", '"card"'))
    assert check(text.replace("_total", "_sum"))


# --- how it is written -----------------------------------------------------------------------


def test_file_is_replaced_in_one_step_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / gate_metrics.FILE
    target = tmp_path / "another's"
    target.write_text("kept")
    target.chmod(0o600)
    path.symlink_to(target)
    gate_status.write(str(path), "new\n")
    assert (path.read_text(), path.is_symlink(), stat.S_IMODE(path.stat().st_mode)) == ("new\n", False, 0o644)
    assert (target.read_text(), stat.S_IMODE(target.stat().st_mode)) == ("kept", 0o600)
    before = path.stat().st_ino
    gate_status.write(str(path), "newer\n")
    assert path.stat().st_ino != before
    with pytest.raises(UnicodeEncodeError):
        gate_status.write(str(path), "\ud800")
    assert sorted(tmp_path.iterdir()) == [target, path]
    assert path.read_text() == "newer\n"


# --- alerts and dashboard --------------------------------------------------------------------


def expressions() -> dict[str, str]:
    """Return every query of the alerts and of the dashboard."""
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    asked = {rule["alert"]: rule["expr"] for rule in rules}
    board = json.loads(DASHBOARD.read_text())
    asked |= {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in board["panels"]
        for target in panel["targets"]
    }
    (query,) = [each["query"] for each in board["templating"]["list"] if each["type"] == "query"]
    return {**asked, "instance": re.sub(r"label_values\((.*), instance\)", r"\1", query)}


def labels_of(names: Any) -> dict[str, dict[str, set[str]]]:
    """Return the values of each label of each metric."""
    found: dict[str, dict[str, set[str]]] = {}
    for name in names:
        metric, _brace, rest = name.partition("{")
        for label, value in re.findall(r'(\w+)="([^"]*)"', rest):
            found.setdefault(metric, {}).setdefault(label, set()).add(value)
    return found


def test_alerts_and_dashboard_ask_for_what_is_written() -> None:
    written = labels_of(name for told in SAMPLES.values() for name in series(told))
    metrics = {name.partition("{")[0] for told in SAMPLES.values() for name in series(told)}
    assert metrics == set(gate_metrics.METRICS)
    labels = {"instance", *(label for values in written.values() for label in values)}
    for where, expression in expressions().items():
        grouped = " ".join(re.findall(r"\b(?:by|on|group_left) \(([^)]*)\)", expression))
        assert set(re.findall(r"\w+", grouped)) <= labels, where
        assert set(re.findall(r"\bgpufarm_\w+", expression)) <= metrics, where
        for metric, matchers in re.findall(r"\b(gpufarm_\w+)\{([^}]*)\}", expression):
            for label, operator, value in re.findall(r'(\w+)(=~|=)"([^"]*)"', matchers):
                if label != "instance":
                    values = set(value.split("|") if operator == "=~" else [value])
                    assert values <= written[metric][label], where


def test_panels_of_the_dashboard_are_told_apart() -> None:
    board = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert all(panel["targets"] and panel["datasource"]["uid"] == "${datasource}" for panel in board["panels"])


@promtool
def test_promtool_takes_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    rules = [
        {"record": "dashboard:query", "labels": {"panel": where}, "expr": text.replace("$__rate_interval", "5m")}
        for where, text in expressions().items()
    ]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_the_dashboard_counts_gates_that_fail_and_gates_that_are_silent(tmp_path: Path) -> None:
    (expression,) = [text for where, text in expressions().items() if "Gates that fail or are silent" in where]
    now, old, wrong = "0+60x60", "0x60", "0x60"
    nodes = {"fails": (wrong, now), "silent": ("1x60", old), "both": (wrong, old), "well": ("1x60", now)}
    samples = [
        {"series": f'{name}{{instance="{node}"}}', "values": values}
        for node, both in nodes.items()
        for name, values in zip(("gpufarm_gate_success", "gpufarm_gate_run_timestamp_seconds"), both)
    ]
    told = [{"labels": "{}", "value": 3}]
    asked = {"expr": expression.replace("$instance", ".*"), "eval_time": "50m", "exp_samples": told}
    path = tmp_path / "dashboard.test.yml"
    test = {"interval": "1m", "input_series": samples, "promql_expr_test": [asked]}
    path.write_text(yaml.safe_dump({"rule_files": [], "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
@pytest.mark.parametrize("command", [["check", "rules", RULES.name], ["test", "rules", "gpufarm.rules.test.yml"]])
def test_promtool_takes_the_alerts(command: list[str]) -> None:
    done = subprocess.run(["promtool", *command], cwd=RULES.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested() -> None:
    tested = yaml.safe_load((RULES.parent / "gpufarm.rules.test.yml").read_text())["tests"]
    fired = {rule["alertname"] for test in tested for rule in test["alert_rule_test"] if rule["exp_alerts"]}
    assert fired == {rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
