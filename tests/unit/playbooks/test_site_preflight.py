"""site.yml refuses what a role would refuse later before it has asked a single node."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]

# One wrong argument of every role that has one; cuda and kubernetes take any text, and refuse it themselves, and farm's
# are of a run.
WRONG: dict[str, dict[str, Any]] = {
    "container_toolkit": {"container_toolkit_default_runtime": "perhaps"},
    "docker": {"docker_managed": "perhaps"},
    "gpu_health": {"gpu_health_state": "gone"},
    "kubernetes_device_plugin": {"kubernetes_device_plugin_mig_strategy": "double"},
    "kubernetes_node": {"kubernetes_node_distribution": "minikube"},
    "minikube": {"minikube_state": "stopped"},
    "nomad": {"nomad_log_level": "LOUD"},
    "nomad_client": {"nomad_client_host_volumes": [{"name": "results"}]},
    "nomad_device_nvidia": {"nomad_device_nvidia_ignored_gpu_ids": {"a": 1}},
    "nomad_server": {"nomad_server_bootstrap_expect": "three"},
    "nomad_tenancy": {"nomad_tenancy_namespaces": {"name": "research"}},
    "node_maintenance": {"node_maintenance_policy": "ask"},
    "node_tuning": {"node_tuning_huge_pages": "many"},
    "nvidia_driver": {"nvidia_driver_kernel_modules": "closed"},
    "nvidia_mig": {"nvidia_mig_gpus": {"index": 0}},
    "nvidia_repository": {"nvidia_repository_key_fingerprints": {"a": 1}},
    "shared_data": {"shared_data_version": "3"},
    "wandb_launch_agent": {"wandb_launch_agent_way": "cron"},
    "wsl": {"wsl_terminate": "perhaps"},
}


def run_site(folder: Path, hosts: dict[str, dict[str, Any]], *options: str) -> tuple[str, dict[str, dict[str, int]]]:
    """Run it over hosts that nobody can reach: what fails failed before a node was asked. The recap by host."""
    nowhere = {"ansible_host": "127.0.0.1", "ansible_port": 1, "ansible_connection": "ssh"}
    inventory = folder / "inventory.yml"
    groups = {
        "nomad_servers": {"hosts": {name: None for name in hosts if name.startswith("server")}},
        "gpu_nodes": {"hosts": {name: None for name in hosts if not name.startswith("server")}},
    }
    inventory.write_text(yaml.safe_dump({"all": {"hosts": hosts, "vars": nowhere, "children": groups}}))
    done = subprocess.run(
        [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(inventory), "playbooks/site.yml", *options],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "COLUMNS": "1000"},
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.findall(r"^(\S+) +: (ok=.*)$", done.stdout, re.M)
    recap = {host: {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", line)} for host, line in found}
    return done.stdout + done.stderr, recap


def test_a_wrong_argument_of_any_role_is_refused_before_a_node_is_asked(tmp_path: Path) -> None:
    public = {path.parent.parent.name for path in ROOT.glob("roles/*/meta/argument_specs.yml")}
    assert {*WRONG, "cuda", "farm", "kubernetes"} == public, "add a wrong argument of the new role"
    # Tags leave nothing of it out: a later role would otherwise meet what was never checked.
    right: dict[str, dict[str, Any]] = {"server": {}, "right": {"cuda_version": "13.0"}}
    output, recap = run_site(tmp_path, {**WRONG, **right}, "--tags", "driver")
    assert set(recap) == {*WRONG, *right}
    for host, counts in recap.items():
        assert (counts["failed"], counts["unreachable"]) == ((0, 1) if host in right else (1, 0)), output
    for values in WRONG.values():
        assert next(iter(values)) in output or "missing required arguments: path found in" in output


def test_what_cuda_looks_at_is_known_where_it_is_entered_later(tmp_path: Path) -> None:
    shown = {"name": "Show", "ansible.builtin.debug": {"var": "_common_look"}}
    preflight = {"ansible.builtin.import_tasks": str(ROOT / "playbooks/tasks/preflight.yml")}
    play = {"hosts": "localhost", "gather_facts": False, "tasks": [shown, preflight]}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]), encoding="utf-8")
    given = {"cuda_packages": ["cuda-nvcc", "libcublas-dev"], "ansible_facts": {"kernel": "6.12.0"}}
    done = subprocess.run(
        [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "localhost,", str(tmp_path / "play.yml"),
         "--extra-vars", json.dumps(given)],
        cwd=ROOT, env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert "/var/lib/gpufarm/cuda/13.0-untried" in done.stdout and "libcublas-dev-13-0" in done.stdout, done.stdout


def test_the_variable_at_fault_is_named(tmp_path: Path) -> None:
    output, _recap = run_site(tmp_path, {"server": WRONG["nomad_server"], "node": {}})
    assert "nomad_server_bootstrap_expect" in output


def options(**kind: str) -> dict[str, dict[str, Any]]:
    """Return what the specifications of the roles of site.yml have of this kind."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(ROOT.glob("roles/*/meta/argument_specs.yml")):
        if path.parent.parent.name != "farm":
            of_role = yaml.safe_load(path.read_text(encoding="utf-8"))["argument_specs"]["main"]["options"]
            found |= {name: option for name, option in of_role.items() if kind.items() <= option.items()}
    return {name: found[name] for name in sorted(found)}


TEXTS = {name: option.get("choices", ["a"])[0] for name, option in options(type="list", elements="str").items()}
# Ansible itself refuses nothing for all other types.
BLANK = dict.fromkeys(name for name, option in options(type="str").items() if "choices" not in option)
# GPUs are named by text as well.
BY_TEXT = "nomad_device_nvidia_ignored_gpu_ids"
TOLD_TEXTS = (
    f"{', '.join(name for name in TEXTS if name != BY_TEXT)} is a text, as INI files and `-e name=value` give it. "
    "Expected: a list such as [a, b]. Next step: write it so in a YAML file, or give it to -e as JSON."
)
TOLD_BLANK = (
    f'{", ".join(BLANK)} is blank. Expected: a value, or "" or [] for none. Next step: give it one, or take it out.'
)


def test_a_text_for_a_list_and_nothing_for_a_value_are_refused_before_a_node_is_asked(tmp_path: Path) -> None:
    """Ansible takes the first for a list, of whose letters each would be an address, and nothing for the text None."""
    # A text that is empty is a value, and what the hosts of Windows have is nothing of a node's.
    right = {
        BY_TEXT: "GPU-1,GPU-2",
        "wsl_ports": "22",
        "wsl_version_min": None,
        "nomad_server_gossip_key": "",
        "cuda_packages": [],
    }
    output, recap = run_site(tmp_path, {"texts": TEXTS, "blank": BLANK, "right": right})
    flat = " ".join(output.split())
    assert f"texts: {TOLD_TEXTS}" in flat and f"blank: {TOLD_BLANK}" in flat, output
    found = {host: (counts["failed"], counts["unreachable"]) for host, counts in recap.items()}
    assert found == {"texts": (1, 0), "blank": (1, 0), "right": (0, 1)}, output


def test_a_role_alone_refuses_them_of_the_roles_that_it_brings(tmp_path: Path) -> None:
    """And looks at nothing of others, whose variables may be such as this run cannot work out."""
    inventory = tmp_path / "inventory.ini"
    inventory.write_text(
        "a nomad_client_servers=10.0.0.5\nb nomad_advertise_addr=\nc node_tuning_services=docker\n[all:vars]\n"
        "ansible_host=127.0.0.1\nansible_port=1\ndocker_packages={{ nowhere }}\n"
    )
    (tmp_path / "host_vars").mkdir()
    (tmp_path / "host_vars/b.yml").write_text(yaml.safe_dump({"nomad_advertise_addr": None}))
    roles = ["gpufarm.core.nomad_device_nvidia", "gpufarm.core.nomad_client"]
    (tmp_path / "play.yml").write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "roles": roles}]))
    done = subprocess.run(
        [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(inventory), str(tmp_path / "play.yml")],
        cwd=ROOT, env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "COLUMNS": "1000"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    flat = " ".join(done.stdout.split())
    assert "a: nomad_client_servers is a text, as INI files" in flat, done.stdout + done.stderr
    assert "b: nomad_advertise_addr is blank. Expected: a value" in flat, done.stdout
    assert dict(re.findall(r"^(\S+) +: .*unreachable=(\d)", done.stdout, re.M)) == {"a": "0", "b": "0", "c": "1"}


def test_what_is_made_of_facts_that_come_later_keeps_nobody_from_the_rest(tmp_path: Path) -> None:
    address = {"nomad_advertise_addr": "{{ ansible_facts['default_ipv4']['address'] }}"}
    away = {"ansible_host": "127.0.0.1", "ansible_port": 1, **address}
    inventory = tmp_path / "hosts.yml"
    hosts = {"a": {**away, "nomad_client_servers": "10.0.0.5"}, "b": away}
    inventory.write_text(yaml.safe_dump({"all": {"hosts": hosts, "vars": {"common_scope": "site"}}}))
    task = {"ansible.builtin.import_role": {"name": "gpufarm.core._common", "tasks_from": "requirements.yml"}}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "tasks": [task]}]))
    done = subprocess.run(
        [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(inventory), str(tmp_path / "play.yml")],
        cwd=ROOT, env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "COLUMNS": "1000"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "a: nomad_client_servers is a text, as INI files" in done.stdout, done.stdout + done.stderr
    assert dict(re.findall(r"^(\S+) +: .*unreachable=(\d)", done.stdout, re.M)) == {"a": "0", "b": "1"}, done.stdout


def test_a_distribution_that_did_not_answer_the_inventory_is_refused_alone(tmp_path: Path) -> None:
    """A task in it would have no end, and all hosts would wait for it."""
    late = {"wsl_host": "pc", "wsl_distribution": "Debian", "wsl_error": "it did not answer in time"}
    hung = {**late, "ansible_connection": "gpufarm.core.wsl"}
    # Of another machine, by SSH to its Windows.
    far = {**late, "wsl_host": "far", "ansible_connection": "community.general.wsl"}
    # By its own SSH server a task needs no wsl.exe.
    output, recap = run_site(tmp_path, {"server": {}, "hung": hung, "far": far, "node": {**late, "wsl_host": "other"}})
    assert {host: (counts["failed"], counts["unreachable"]) for host, counts in recap.items()} == {
        "server": (0, 1), "hung": (1, 0), "far": (1, 0), "node": (0, 1)
    }, output  # fmt: skip
    assert "far: the inventory had no answer of Debian" in " ".join(output.split())
    assert (
        "hung: the inventory had no answer of Debian: it did not answer in time. Expected: one, because a task in what "
        "hangs there has no end. Next step: run `wsl.exe -d Debian` in Windows, end it by `wsl.exe --terminate Debian` "
        "where that hangs, too, and run this again."
    ) in " ".join(output.split())


@pytest.mark.parametrize("length", [22, 32, 43])
def test_gossip_keys(length: int) -> None:
    variables = yaml.safe_load((ROOT / "roles/nomad_server/vars/main.yml").read_text(encoding="utf-8"))
    pattern = variables["__nomad_server_gossip_pattern"]
    end = {22: "==", 32: "", 43: "="}[length]
    assert re.match(pattern, "A" * length + end)
    assert not re.match(pattern, "A" * (length - 1) + end)
    assert not re.match(pattern, "A" * (length + 1) + end)
    assert not re.match(pattern, "A" * (length - 1) + "-" + end)
    assert not re.match(pattern, "")
