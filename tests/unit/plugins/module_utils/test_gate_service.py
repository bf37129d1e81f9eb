"""The gate that a node keeps by itself."""

from __future__ import annotations

import ast
import json
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.plugins.module_utils import gate_service, nomad
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils.gate_helper import Farm

COLLECTION = Path(__file__).resolve().parents[4]
GPUS = ["GPU-1", "GPU-2"]


@pytest.fixture
def nomads() -> Iterator[Farm]:
    running = Farm(1)
    instances = [{"ID": uuid, "Healthy": True} for uuid in GPUS]
    group = {"Vendor": "nvidia", "Type": "gpu", "Name": "Tesla T4", "Instances": instances,
             "Attributes": {"driver_version": {"String": "580.1"}}}  # fmt: skip
    running.nodes["id-0"]["NodeResources"] = {"Devices": [group]}
    yield running
    running.agent.close()


def config_of(nomads: Farm, folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "node": "gpu0",
        "connection": {"address": nomads.agent.url, "token": "", "ca_cert": "", "client_cert": "", "client_key": ""},
        "close_on": "critical",
        "drain": False,
        "drain_deadline": 3600,
        "plugin_age_max": 60,
        "ignored": [],
        "nomad_timeout": 0,
        "status_file": str(folder / "run/health.json"),
        "health": {},
        **changes,
    }


def config_of_types() -> dict[str, Any]:
    return {key: kind() for key, kind in gate_service.KEYS.items()}


def probe(verdict: str = "ok", reason: str | None = None, available: bool = True, gpus: Any = GPUS) -> Any:
    found = [{"uuid": uuid, "name": "Tesla T4", "mig_mode": None, "mig_devices": []} for uuid in gpus]
    facts = {"available": available, "driver_version": "580.1", "gpus": found}
    result = {"verdict": verdict, "reason": reason, "problems": [], "nvidia_smi": facts}
    return lambda _options: result


def test_sick_node_closes_itself_and_opens_itself(nomads: Farm, tmp_path: Path) -> None:
    config = config_of(nomads, tmp_path)
    status = gate_service.run(config, probe("critical", "gpu_lost GPU-1"))
    assert (status["action"], status["healthy"]) == ("close", False)
    node = nomads.nodes["id-0"]
    assert node["SchedulingEligibility"] == "ineligible"
    assert node["Meta"]["gpufarm_gate_closed_by"] == "node"
    assert gate_service.run(config, probe("critical", "gpu_lost GPU-1"))["action"] == "none"
    assert gate_service.run(config, probe())["action"] == "open"
    assert node["SchedulingEligibility"] == "eligible"


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (probe(gpus=["GPU-1", "GPU-2", "GPU-3"]), "gpu_missing"),
        (probe(gpus=["GPU-1"]), "gpu_unexpected"),
    ],
)
def test_nomads_view_counts_too(nomads: Farm, tmp_path: Path, found: Any, code: str) -> None:
    status = gate_service.run(config_of(nomads, tmp_path), found)
    assert status["reason"] == f"nomad {code}"
    assert [problem["code"] for problem in status["nomad_problems"]] == [code]


def test_gpu_without_a_uuid_and_hidden_gpus(nomads: Farm, tmp_path: Path) -> None:
    assert gate_service.run(config_of(nomads, tmp_path), probe(gpus=[*GPUS, None]))["reason"] == "nomad count_mismatch"
    hidden = config_of(nomads, tmp_path, ignored=["GPU-3"])
    assert gate_service.run(hidden, probe(gpus=[*GPUS, "GPU-3"]))["healthy"]


def test_divided_gpu_whose_devices_nobody_could_list_is_no_defect(nomads: Farm, tmp_path: Path) -> None:
    found = probe()
    found(None)["nvidia_smi"]["gpus"][0].update(mig_mode="Enabled", mig_devices=None)
    assert gate_service.run(config_of(nomads, tmp_path), found)["healthy"]


def test_agent_without_statistics_does_not_keep_a_sick_node_open(nomads: Farm, tmp_path: Path) -> None:
    nomads.refuse = "/v1/client/stats"
    status = gate_service.run(config_of(nomads, tmp_path), probe("critical", "gpu_lost GPU-1"))
    assert (status["action"], status["reason"]) == ("close", "gpu_lost GPU-1")


def test_stopped_plugin_closes_the_node(nomads: Farm, tmp_path: Path) -> None:
    instances = {"GPU-1": {"Timestamp": "2026-11-21T15:09:29.461937591Z"}}
    nomads.stats["DeviceStats"] = [{"Type": "gpu", "InstanceStats": instances}]
    assert gate_service.run(config_of(nomads, tmp_path), probe())["reason"] == "nomad plugin_stopped"


def test_node_that_nomad_does_not_know_is_an_error(nomads: Farm, tmp_path: Path) -> None:
    with pytest.raises(nomad.NomadError, match=r"no node nobody.*Expected: .*Next step: "):
        gate_service.run(config_of(nomads, tmp_path, node="nobody"), probe())


def test_command_writes_the_status_for_everybody_and_tells_by_its_exit_code(
    nomads: Farm, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    config = config_of(nomads, tmp_path)
    path.write_text(json.dumps(config))
    for found, code in ((probe(), 0), (probe("critical", "xid_79"), 3)):
        monkeypatch.setattr(gate_service.health, "probe", found)
        monkeypatch.setattr(gate_service.run, "__defaults__", (found,))
        assert gate_service.main([str(path)]) == code
        status = Path(config["status_file"])
        assert json.loads(status.read_text())["healthy"] is (code == 0)
        assert stat.S_IMODE(status.stat().st_mode) == 0o644
    assert list(status.parent.iterdir()) == [status]
    assert "closed: xid_79" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"node": "a"}', json.dumps({**config_of_types(), "drain": "false"})])
def test_configuration_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    assert gate_service.main([str(path)]) == gate_service.BROKEN
    told = capsys.readouterr().err
    assert str(path) in told and "Expected: " in told and "Next step: " in told


def test_nomad_that_cannot_be_reached_is_no_verdict(
    nomads: Farm, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_service.run, "__defaults__", (probe(),))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of(nomads, tmp_path, connection={"address": "http://127.0.0.1:1"})))
    assert gate_service.main([str(path)]) == gate_service.BROKEN
    assert "cannot be reached" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_role_installs_all_that_the_service_needs_and_nothing_of_ansible(tmp_path: Path) -> None:
    """The files of the role alone, under a Python that has no Ansible in its path."""
    files = yaml.safe_load((COLLECTION / "roles/gpu_health/vars/main.yml").read_text())["__gpu_health_files"]
    folder = tmp_path / "ansible_collections/gpufarm/core/plugins/module_utils"
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).write_bytes((COLLECTION / "plugins/module_utils" / name).read_bytes())
    name = "ansible_collections.gpufarm.core.plugins.module_utils.gate_service"
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from {name} import main; sys.exit(main(['/nowhere']))"
    result = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == gate_service.BROKEN, result.stderr
    assert "/nowhere cannot be used" in result.stderr


def test_role_writes_every_key_that_the_service_reads() -> None:
    content = yaml.safe_load((COLLECTION / "roles/gpu_health/vars/main.yml").read_text())["__gpu_health_content"]
    source = ast.parse((COLLECTION / "plugins/module_utils/gate_service.py").read_text())
    read = {
        node.slice.value
        for node in ast.walk(source)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
        and isinstance(node.value, ast.Name) and node.value.id == "config"
    }  # fmt: skip
    assert read == set(content)
