# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""site.yml on hosts of which some have lost their GPU, or fail; what the roles do is replaced by a word of it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.tests.unit.playbooks import playbook_helper
from ansible_collections.gpufarm.core.tests.unit.playbooks.playbook_helper import LOCAL
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

GPU = {"address": "0000:18:00.0", "vendor": "10de", "device": "2330", "class": "030200", "nvswitch_bridge": False}
# What each part says that it has done; the others do nothing.
SAYS = {
    "nomad_server/tasks/main.yml": "is a server",
    "nomad_server/tasks/tls.yml": "understands TLS alone",
    "node_tuning/tasks/main.yml": "is tuned",
    "nvidia_driver/tasks/main.yml": "has a driver",
    "nomad_client/tasks/main.yml": "is a client",
}
SILENT = (
    *(f"{role}/tasks/main.yml" for role in ("container_toolkit", "nomad_device_nvidia")),
    *(f"{role}/tasks/preflight.yml" for role in ("container_toolkit", "nomad_client", "node_tuning")),
    "wsl/tasks/outside.yml",
)


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    core = tmp_path / "ansible_collections/gpufarm/core"
    shutil.copytree(role_helper.ROLES, core / "roles")
    for name in ("plugins", "meta", "galaxy.yml"):
        (core / name).symlink_to(role_helper.ROLES.parent / name)
    for name, says in SAYS.items():
        task = {"ansible.builtin.debug": {"msg": f"note: {{{{ inventory_hostname }}}} {says}"}}
        (core / "roles" / name).write_text(json.dumps([task]), encoding="utf-8")
    for name in SILENT:
        (core / "roles" / name).write_text("[]", encoding="utf-8")
    return tmp_path


def run_site(
    collection: Path, hosts: dict[str, Any], groups: dict[str, Any], given: dict[str, Any], *options: str
) -> tuple[int, str, dict[str, set[str]]]:
    """Run it and return its exit code, what it said, and what each host has said that it has done."""
    inventory = {"all": {"vars": {**LOCAL, "ansible_become": False}, "hosts": hosts, "children": groups}}
    # Check mode leaves the verification out, for which there is no farm here.
    line = ("--check", "--extra-vars", json.dumps(given), *options)
    ran = playbook_helper.run_playbook(collection, inventory, "site.yml", *line, before=collection)
    said = " ".join((ran.stdout + ran.stderr).split())
    found = {name: set[str]() for name in hosts}
    for name, says in re.findall(r"note: (\S+) ([a-zA-Z ]+)", said):
        found[name].add(says)
    return ran.returncode, said, found


@pytest.mark.parametrize("tags", [(), ("--tags", "nomad")])
def test_a_server_whose_gpu_is_dead_is_a_server_all_the_same(collection: Path, tags: tuple[str, ...]) -> None:
    hosts = {name: {"looked_at": role_helper.host(pci_devices=[GPU])} for name in ("both", "node", "server")}
    hosts |= {f"{name}-dead": {"looked_at": role_helper.host(pci_devices=[])} for name in ("both", "node")}
    groups = {
        "nomad_servers": {"hosts": dict.fromkeys(["both", "both-dead", "server"])},
        "gpu_nodes": {"hosts": dict.fromkeys(["both", "both-dead", "node", "node-dead"])},
    }
    given = {
        "_common_host": "{{ looked_at }}", "_common_refusal": "", "_common_is_wsl": False, "_common_bundle": "",
        "__nvidia_repository_refusal": "", "__nomad_refusal": "", "__nomad_server_refusal": "",
        "__nomad_understands_both": True, "gpu_node_tuning": True,
    }  # fmt: skip
    code, said, found = run_site(collection, hosts, groups, given, *tags)
    as_server, as_node = {"is a server", "understands TLS alone"}, {"is a client"}
    as_node |= set() if tags else {"has a driver", "is tuned"}
    assert found == {
        "both": as_server | as_node, "both-dead": as_server, "server": as_server,
        "node": as_node, "node-dead": set(),
    }, said  # fmt: skip
    failed = dict(re.findall(r"(\S+) : ok=\d+ .*?failed=(\d)", said))
    assert failed == {"both": "0", "both-dead": "1", "node": "0", "node-dead": "1", "server": "0"}
    assert code == 2
    # A host with nothing else to do is refused before anything changes.
    first, refused = (said.index(f"{name}: no NVIDIA GPU is on the PCI bus") for name in ("node-dead", "both-dead"))
    assert first < said.index("note: ") < said.rindex("note: ") < refused


def run_to_tls(collection: Path, *options: str, servers: str, failing: str = "", away: str = "") -> dict[str, set[str]]:
    """Run it on a farm with servers that were configured with TLS, or ``open``, and a node of each kind.

    Return what each host has said that it has done, or that it is refused.
    """
    says = [
        {"ansible.builtin.fail": {"msg": "the disk is full"}, "when": "inventory_hostname == failing"},
        {"ansible.builtin.debug": {"msg": "note: {{ inventory_hostname }} is a server"}},
        {"ansible.builtin.set_fact": {"__nomad_started_anew": True}},
    ]
    (collection / "ansible_collections/gpufarm/core/roles/nomad_server/tasks/main.yml").write_text(json.dumps(says))
    hosts: dict[str, dict[str, Any]] = {}
    for name, kind in {"s1": servers, "s2": servers, "s3": servers, "node-open": "open", "node-tls": "tls"}.items():
        folder = collection / name
        folder.mkdir()
        block = "" if kind == "open" else "tls {\n}\n"
        (folder / "nomad.hcl").write_text(f'# Ansible managed\nname = "{name}"\n\n{block}', encoding="utf-8")
        if name.startswith("s"):
            (folder / "server.hcl").write_text("# Ansible managed\nserver {\n}\n", encoding="utf-8")
        hosts[name] = {"nomad_config_dir": str(folder)}
    if away:
        hosts[away] |= {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
    groups = {
        "nomad_servers": {"hosts": dict.fromkeys(["s1", "s2", "s3"])},
        "gpu_nodes": {"hosts": dict.fromkeys(["node-open", "node-tls"])},
    }
    given = {
        "_common_refusal": "", "_common_bundle": "", "__nvidia_repository_refusal": "",
        "__nvidia_driver_gpu_lost": False, "__nvidia_driver_speaks": False, "__nomad_understands_both": False,
        # Which asks for a collection that a control machine may lack.
        "__nomad_tls_refusal": "", "failing": failing,
    }  # fmt: skip
    _code, said, found = run_site(collection, hosts, groups, given, *options)
    for name in hosts:
        found[name] |= {text for text in (UNSEEN, BEHIND) if f"{name}: {text}" in said}
    return found


UNSEEN = (
    "found an agent without TLS, nomad_tls is generate, and this run has not seen s3. Expected: every server in the "
    "run that changes how agents speak"
)
BEHIND = (
    "nothing is changed here, because s2 failed above and does not speak with TLS yet. Expected: every Nomad server "
    "restarted before its nodes"
)
NODE = {"has a driver", "is a client"}


def test_a_farm_begins_tls_only_with_all_of_its_servers(collection: Path) -> None:
    """Those that are there wait for the one that is not, and nodes with TLS would lose them all."""
    assert run_to_tls(collection, servers="open", away="s3") == {
        "s1": {UNSEEN}, "s2": {UNSEEN}, "s3": set(), "node-open": {UNSEEN}, "node-tls": NODE,
    }  # fmt: skip


def test_no_node_begins_tls_where_a_server_has_failed(collection: Path) -> None:
    assert run_to_tls(collection, servers="open", failing="s2") == {
        "s1": {"is a server"}, "s2": set(), "s3": {"is a server"}, "node-open": {BEHIND}, "node-tls": NODE,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "farm", "nodes"),
    [
        ((), {"servers": "tls", "failing": "s2"}, [NODE, NODE]),
        # Nothing changes in how they speak.
        (("--limit", "all:!node-open"), {"servers": "tls", "away": "s3"}, [set[str](), NODE]),
        # The agents stay as they are.
        (("--tags", "driver"), {"servers": "open"}, [{"has a driver"}, {"has a driver"}]),
    ],
)
def test_nodes_go_on_without_a_server_that_keeps_nobody_from_understanding_them(
    collection: Path, options: tuple[str, ...], farm: dict[str, str], nodes: list[set[str]]
) -> None:
    found = run_to_tls(collection, *options, **farm)
    assert [found["node-open"], found["node-tls"]] == nodes
