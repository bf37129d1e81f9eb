# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What upgrade.yml does with hosts that are lost on the way, by the parts of the role farm that it enters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.tests.unit.playbooks import playbook_helper
from ansible_collections.gpufarm.core.tests.unit.playbooks.playbook_helper import LOCAL
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import nomad_helper
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

Hosts = Mapping[str, Mapping[str, Any]]
OK = {"state": "ok"}
GPU = {"address": "0000:18:00.0", "vendor": "10de", "device": "2330", "class": "030200", "nvswitch_bridge": False}


def part(name: str) -> dict[str, Any]:
    return {"ansible.builtin.import_role": {"name": "gpufarm.core.farm", "tasks_from": name}}


def say(text: str) -> dict[str, Any]:
    return {"ansible.builtin.debug": {"msg": text}}


def run(folder: Path, hosts: Hosts, *plays: dict[str, Any]) -> tuple[int, str]:
    """Run plays on GPU nodes, and on servers of names that begin so, that are all this machine."""
    (folder / "parts.yml").write_text(
        yaml.safe_dump([{"gather_facts": False, **play} for play in plays], sort_keys=False), encoding="utf-8"
    )
    groups: dict[str, Any] = {
        "gpu_nodes": {"hosts": {name: dict(given) for name, given in hosts.items() if not name.startswith("server")}},
        "nomad_servers": {"hosts": {name: dict(given) for name, given in hosts.items() if name.startswith("server")}},
    }
    inventory = {"all": {"vars": {**LOCAL, "_common_host": role_helper.host(pci_devices=[GPU])}, "children": groups}}
    # Variables of roles, which no inventory has a say in; hosts that have an agent of their own say where.
    extra = {
        "__farm_upgrade_path": f"{folder}/{{{{ inventory_hostname }}}}/upgrade.json",
        "__nomad_local_url": "{{ agent_url | default('http://127.0.0.1:9') }}",
        "__nomad_speakers": "{{ [{'host': 'server1', 'api': {'address': server_url}}] * (server_url is defined) }}",
        "_common_is_wsl": False,
    }
    options = ["--extra-vars", json.dumps(extra)]
    result = playbook_helper.run_playbook(folder, inventory, str(folder / "parts.yml"), *options)
    return result.returncode, " ".join((result.stdout + result.stderr).split())


def test_each_wave_has_its_own_speaker(tmp_path: Path) -> None:
    """Who is in another wave does not get to the question, and nothing would be compared with Nomad."""
    hosts = {"a": {"__nomad_agent": OK}, "b": {"__nomad_agent": OK}, "c": {"__nomad_agent": OK}}
    chosen = say("{{ inventory_hostname }} hears {{ __farm_speakers.global }}.")
    code, output = run(
        tmp_path, hosts, {"hosts": "gpu_nodes", "serial": [1, 2], "tasks": [part("speaker.yml"), chosen]}
    )
    assert code == 0, output
    for told in ("a hears a.", "b hears b.", "c hears b."):
        assert told in output


def test_each_region_has_its_own_speaker(tmp_path: Path) -> None:
    hosts = {"a": {"__nomad_agent": OK, "nomad_region": "east"}, "b": {"__nomad_agent": OK, "nomad_region": "west"},
             "c": {"__nomad_agent": OK, "nomad_region": "west"}, "d": {"__nomad_agent": OK}}  # fmt: skip
    chosen = say("they hear {{ __farm_speakers | to_json }}.")
    code, output = run(tmp_path, hosts, {"hosts": "gpu_nodes", "tasks": [part("speaker.yml"), chosen]})
    assert code == 0, output
    assert '"east": "a"' in output and '"west": "b"' in output and '"global": "d"' in output
    # One that a play names for all.
    named = {"hosts": "gpu_nodes", "vars": {"nomad_region": "lab"}, "tasks": [part("speaker.yml"), chosen]}
    code, output = run(tmp_path, {"a": {"__nomad_agent": OK}, "b": {"__nomad_agent": OK}}, named)
    assert (code, '"lab": "a"' in output) == (0, True), output


def test_a_wave_without_a_speaker_names_its_own_hosts(tmp_path: Path) -> None:
    stopped = {"__nomad_agent": {"state": "stopped", "message": "gone"}}
    hosts = {"a": {"__nomad_agent": OK}, "b": stopped}
    code, output = run(tmp_path, hosts, {"hosts": "gpu_nodes", "serial": [1, 1], "tasks": [part("speaker.yml")]})
    assert code != 0
    said = 'b: no Nomad agent of b in the region global answers as healthy; here http://127.0.0.1:9 said "gone".'
    assert said in output


# --- hosts that are lost on the way ----------------------------------------------------------

PLAN = {"hosts": "nomad_servers:gpu_nodes", "tasks": [part("upgrade_plan.yml")]}
# As the play of servers ends in upgrade.yml, whose role nothing here stands in for.
SERVERS = {
    "hosts": "nomad_servers", "any_errors_fatal": True,
    "tasks": [
        {"ansible.builtin.fail": {"msg": "broken"}, "when": "broken | default(false)"},
        {"ansible.builtin.set_fact": {"__farm_upgrade_server": True}},
    ],
}  # fmt: skip
PLAYS = yaml.safe_load((playbook_helper.ROOT / "playbooks/upgrade.yml").read_text(encoding="utf-8"))
(GPU_NODES,) = [play for play in PLAYS if play.get("name") == "GPU nodes"]
WAVES = {
    **{key: GPU_NODES[key] for key in ("hosts", "serial", "vars")},
    "tasks": [
        part("upgrade_begin.yml"),
        say("{{ inventory_hostname }} is changed."),
        {"ansible.builtin.fail": {"msg": "broken"}, "when": "broken | default(false)"},
        part("upgrade_done.yml"),
    ],
}  # fmt: skip
AWAY = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}


def node(name: str, **given: Any) -> dict[str, Any]:
    known = {"host": name, "models": [], "gpus": [f"GPU-{name}"], "turn": 2, "sick": "", "server": False}
    return {"__farm_upgrade_node": known, **given}


def changed(output: str) -> list[str]:
    """Return who was changed; hosts of one wave come to their end in any order."""
    return sorted(re.findall(r"(\w+) is changed[.]", output))


def test_the_last_that_a_server_does_is_noted() -> None:
    servers, _ = [play for play in PLAYS if play.get("hosts") == "nomad_servers"]
    noted = servers["tasks"][-1]
    assert (noted["ansible.builtin.set_fact"], noted["tags"]) == ({"__farm_upgrade_server": True}, ["always"])


def test_servers_that_are_well_let_all_waves_begin(tmp_path: Path) -> None:
    """In the order of their turns."""
    hosts = {"server1": {}, "a": node("a"), "b": node("b")}
    hosts["b"]["__farm_upgrade_node"]["turn"] = 0
    code, output = run(tmp_path, hosts, PLAN, SERVERS, WAVES)
    assert code == 0, output
    assert changed(output) == ["a", "b"] and output.index("b is changed.") < output.index("a is changed.")


@pytest.mark.parametrize(
    ("first", "second", "lost"), [({"broken": True}, AWAY, "server1, server2"), ({}, AWAY, "server2")]
)
def test_a_server_that_is_lost_stops_every_node(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], lost: str
) -> None:
    """Where one was lost before, any_errors_fatal does not end the run."""
    hosts = {"server1": first, "server2": second, "a": node("a"), "b": node("b")}
    reached = {"hosts": "all", "tasks": [{"ansible.builtin.command": "true"}]}
    code, output = run(tmp_path, hosts, reached, PLAN, SERVERS, WAVES)
    assert code != 0 and changed(output) == []
    assert f"a: nothing is changed here, because {lost} failed above. Expected: every Nomad server" in output
    assert not (tmp_path / "a/upgrade.json").exists()


def test_a_wave_that_is_not_well_is_the_last(tmp_path: Path) -> None:
    hosts = {"a": node("a"), "b": node("b", broken=True), "c": node("c"), "d": node("d")}
    code, output = run(tmp_path, hosts, {**PLAN, "vars": {"upgrade_waves": ["1", "2"]}}, WAVES)
    assert code != 0 and changed(output) == ["a", "b", "c"]
    # One task for each node has Ansible go through its inventory each time.
    assert "(item=" not in output
    assert "c: the upgrade stops after this wave, because b failed above." in output
    assert [(tmp_path / name).exists() and bool(list((tmp_path / name).iterdir())) for name in "abcd"] == [
        False, True, True, False,
    ]  # fmt: skip


def test_a_node_that_was_lost_before_its_wave_stops_the_others(tmp_path: Path) -> None:
    """Ansible counts it as one of its wave that has not failed there, and begins the next."""
    lose = {"hosts": "gpu_nodes", "tasks": [SERVERS["tasks"][0]]}
    hosts = {"a": node("a", broken=True), "b": node("b"), "c": node("c")}
    code, output = run(tmp_path, hosts, {**PLAN, "vars": {"upgrade_waves": ["2", "1"]}}, lose, WAVES)
    assert code != 0 and changed(output) == []
    assert "b: nothing is changed here, because a failed above. Expected: every node of the waves" in output
    assert "c: nothing is changed here, because a, b failed above." in output


@pytest.mark.parametrize("sick", [["b"], ["a", "b"]])
def test_a_sick_node_is_left_out_and_named(tmp_path: Path, sick: list[str]) -> None:
    hosts = {name: node(name) for name in "abc"[: len(sick) + 1]}
    for name in sick:
        hosts[name]["__farm_upgrade_node"]["sick"] = "GPUs did not answer."
    end = {"hosts": "gpu_nodes", "tasks": [part("upgrade_sick.yml")]}
    code, output = run(tmp_path, hosts, PLAN, WAVES, end)
    assert code != 0 and changed(output) == sorted(hosts.keys() - sick)
    assert f"left out, because their GPUs are not well: {', '.join(sick)}" in output
    for name in hosts:
        assert (f"{name}: was not upgraded, because before it GPUs did not answer. Next step" in output) == (
            name in sick
        )


def test_a_server_with_a_dead_gpu_is_told_what_was_upgraded(tmp_path: Path) -> None:
    """Its Nomad is one of the servers, which go before all nodes."""
    hosts = {"a": node("a")}
    hosts["a"]["__farm_upgrade_node"].update(sick="no NVIDIA GPU was on the PCI bus.", server=True)
    code, output = run(tmp_path, hosts, {"hosts": "gpu_nodes", "tasks": [part("upgrade_sick.yml")]})
    assert code != 0
    assert (
        "a: as a GPU node it was not upgraded, because before it no NVIDIA GPU was on the PCI bus. Its server went "
        "through the upgrade with all servers. Next step: read"
    ) in output


SMI: dict[str, Any] = {
    "available": True,
    "gpus": [{"status": "ok", "uuid": "GPU-1", "status_message": None, "mig_mode": None, "mig_devices": []}],
}
DRIVER = {"ansible.builtin.import_role": {"name": "gpufarm.core.nvidia_driver", "tasks_from": "variables.yml"}}
DEAD = {"_common_host": role_helper.host(pci_devices=[])}
LOST = {**SMI["gpus"][0], "status": "gpu_lost", "uuid": None, "status_message": "GPU 1 is lost."}


@pytest.mark.parametrize(
    ("facts", "given", "left", "sick"),
    [
        (SMI, {}, 1, ""),
        (SMI, {"gpu_node_gpus": 1}, 1, ""),
        (SMI, {"gpu_node_gpus": "2"}, 1, "nvidia-smi listed 1 GPU(s), and gpu_node_gpus is 2."),
        (SMI | {"gpus": [*SMI["gpus"], LOST]}, {}, 1, "GPUs did not answer: GPU 1 is lost."),
        # One that an earlier run has begun with was well then.
        (SMI | {"gpus": [*SMI["gpus"], LOST]}, {}, 0, ""),
        ({"available": False, "gpus": []}, {"gpu_node_gpus": 2}, 1, ""),
        # Of a server, which goes on as one.
        ({"available": False, "gpus": []}, DEAD, 1, "no NVIDIA GPU was on the PCI bus."),
        ({"available": False, "gpus": []}, DEAD, 0, "no NVIDIA GPU was on the PCI bus."),
        (SMI, {**DEAD, "nvidia_driver_managed": False}, 1, ""),
    ],
)
def test_who_is_sick(tmp_path: Path, facts: dict[str, Any], given: dict[str, Any], left: int, sick: str) -> None:
    hosts = {"a": {"__farm_upgrade_left": {"rc": left}, **given}}
    known = {"ansible.builtin.set_fact": {"nvidia_smi": facts, "cacheable": True}}
    told = say("it is <{{ __farm_upgrade_sick }}>.")
    role = {"ansible.builtin.import_role": {"name": "gpufarm.core.farm", "tasks_from": "upgrade_sick.yml"}}
    code, output = run(tmp_path, hosts, {"hosts": "all", "tasks": [known, DRIVER, role, told]})
    assert code == 0, output
    assert f"it is <{sick}>." in output


def test_a_gpu_that_stays_without_its_mig_devices_is_sick() -> None:
    """It would end its wave, and so the upgrade, unless a layout divides it there."""
    gpu = {**SMI["gpus"][0], "index": 1, "name": "NVIDIA H100", "mig_mode": "Enabled"}
    known = {
        **role_helper.variables("farm"), "__nvidia_driver_gpu_lost": False, "__farm_upgrade_left": {"rc": 1},
        "ansible_facts": {"nvidia_smi": SMI | {"gpus": [{**gpu, "uuid": "GPU-2", "mig_mode": "Disabled"}, gpu]}},
    }  # fmt: skip

    def sick(**given: Any) -> str:
        told: str = role_helper.value("__farm_upgrade_sick", {**known, **given})
        return told

    assert sick() == "MIG mode was on and there was no MIG device (mig_empty) on GPU-1."
    assert sick(nvidia_mig_gpus=[{"index": 0, "layout": {}}, {"uuid": "GPU-2", "layout": {}}]) == sick()
    for layout in (
        {"nvidia_mig_layout": {"1g.10gb": 7}}, {"nvidia_mig_layout": "disabled"},
        *({"nvidia_mig_gpus": [{**which, "layout": "disabled"}]}
          for which in ({"index": 1}, {"index": "1"}, {"uuid": "GPU-1"}, {"model": "NVIDIA H100"})),
        {"gpu_health_options": {"severities": {"mig_empty": "ignore"}}}, {"__farm_upgrade_left": {"rc": 0}},
    ):  # fmt: skip
        assert sick(**layout) == "", layout


# --- what is there before --------------------------------------------------------------------

BEFORE = {
    "hosts": "nomad_servers:gpu_nodes", "gather_facts": True, "gather_subset": ["!all", "min"],
    "tasks": [DRIVER, part("upgrade_before.yml")],
}  # fmt: skip


@pytest.fixture
def agents() -> Iterator[Callable[..., str]]:
    """Starts agents that run a version and know servers of versions, and returns their addresses."""
    running = []

    def start(version: str, *servers: str) -> str:
        running.append(nomad_helper.agent_of(version, *servers))
        return running[-1].url

    yield start
    for agent in running:
        agent.close()


def test_no_agent_goes_back_to_an_older_nomad(tmp_path: Path, agents: Callable[..., str]) -> None:
    """What the receipts say is no matter: the program may be replaced already, or be somebody else's."""
    hosts = {
        name: {"agent_url": agents(version), "nomad_version": "1.10.5"}
        for name, version in {"server1": "1.11.0", "a": "1.10.10", "b": "1.10.5", "c": "1.9.9"}.items()
    }
    seen = {"hosts": "all", "tasks": [say("{{ inventory_hostname }} goes on.")]}
    code, output = run(tmp_path, hosts, BEFORE, seen)
    assert code != 0
    assert sorted(re.findall(r"(\w+) goes on[.]", output)) == ["b", "c"], output
    for host, version in (("server1", "1.11.0"), ("a", "1.10.10")):
        assert f"{host}: Nomad {version} runs, and nomad_version is 1.10.5. Expected: a version that is not" in output
        assert f"Next step: set nomad_version to {version} or newer." in output


def test_no_node_becomes_newer_than_its_servers(tmp_path: Path, agents: Callable[..., str]) -> None:
    """The servers are not in this run."""
    hosts = {
        name: node(name, agent_url=agents("1.10.0", *servers), nomad_version="1.11.3")
        for name, servers in {"a": ["1.11.3+ent", "1.12.0"], "b": ["1.11.3", "1.10.9"], "c": ["1.11.3"]}.items()
    }
    begin = {**WAVES, "serial": [1, 2], "tasks": WAVES["tasks"][:2]}
    code, output = run(tmp_path, hosts, PLAN, begin)
    assert code != 0
    assert changed(output) == ["a", "c"]
    assert (
        "b: nothing is changed here, because a server of it runs Nomad 1.10.9, and nomad_version is 1.11.3." in output
    )
    assert not (tmp_path / "b/upgrade.json").exists()


def test_site_exchanges_a_release_only_for_one_that_fits(tmp_path: Path, agents: Callable[..., str]) -> None:
    """As with --limit, a server that could not be reached, or somebody's collection that is older."""
    entered = [
        {"ansible.builtin.include_role": {
            "name": "gpufarm.core.nomad", "tasks_from": f"{entry}.yml", "rolespec_validate": False,
        }, "when": f"entry == '{entry}'"} for entry in ("install", "exchange")
    ]  # fmt: skip
    known = {"ansible.builtin.set_fact": {"_common_host": role_helper.host("/n/etc", "/n/data")}}
    for file, mode in zip(known["ansible.builtin.set_fact"]["_common_host"]["files"], ("0750", "0700"), strict=True):
        file.update(isdir=True, mode=mode)
    shared = {
        "nomad_config_dir": "/n/etc", "nomad_data_dir": "/n/data", "nomad_bin_dir": str(tmp_path / "bin"),
        "nomad_release_url": "/nowhere", "nomad_release_key_url": "/nowhere/key", "_common_verifiers_missing": False,
        "_common_bundle": "", "_common_download_environment": {}, "entry": "install",
    }  # fmt: skip
    new = {"server_url": agents("1.11.3", "1.11.3", "1.12.0")}
    left = {"entry": "exchange", "__nomad_installed": {"binary_changed": True, "previous_version": "1.11.2"}}
    told = {
        # What runs there, and the servers that it knows.
        "a": (
            {"agent_url": agents("1.10.0", "1.11.3", "1.10.9")},
            "a server of it runs Nomad 1.10.9, and nomad_version",
        ),
        "b": ({"agent_url": agents("1.10.0", "1.11.3+ent", "1.12.0")}, ""),
        "c": ({"agent_url": agents("1.12.1", "1.12.1")}, "Nomad 1.12.1 runs, and nomad_version is 1.11.3."),
        "d": ({"agent_url": agents("1.11.3-beta.1", "1.11.3-rc.1")}, "a server of it runs Nomad 1.11.3-rc.1, and"),
        "e": ({"agent_url": agents("1.11.3+ent", "1.11.3+ent")}, ""),
        # New ones, who hear of the servers from one of them, or from nobody.
        "f": (
            {**new, "nomad_version": "1.12.0"},
            "a server of it runs Nomad 1.11.3, and nomad_version is 1.12.0.",
        ),
        "g": (new, ""),
        "h": ({}, ""),
        # Its agent is stopped.
        "i": (
            {**left, "nomad_version": "1.11.1"},
            "Nomad 1.11.2 is installed, and nomad_version is 1.11.1. Expected: a",
        ),
        "j": (left, ""),
        # A server becomes newer than the others.
        "server1": ({"agent_url": agents("1.10.0", "1.10.0")}, ""),
        # One that no receipt tells of, as of a package that was removed, which its running agent outlives.
        "server2": ({"agent_url": agents("1.12.0", "1.12.0")}, "Nomad 1.12.0 runs, and nomad_version is 1.11.3."),
        "server3": ({}, ""),
    }
    hosts = {name: node(name, **{**shared, "nomad_version": "1.11.3", **given}) for name, (given, _) in told.items()}
    code, output = run(tmp_path, hosts, {"hosts": "all", "gather_facts": True, "tasks": [known, *entered]})
    assert code != 0
    refused = {name: why for name, (_given, why) in told.items() if why}
    assert set(re.findall(r"(\w+): (?:a server of it|Nomad [0-9.]+) ", output)) == set(refused), output
    for name, why in refused.items():
        assert f"{name}: {why}" in output
    # The others have come to the download, which is the first that would change something.
    loading = re.findall(r"fatal: \[(\w+)\]: FAILED! => changed: false msg: '\S+ /nowhere/key cannot be read", output)
    assert set(loading) == set(told) - set(refused), output
    assert not (tmp_path / "bin").exists()


def test_servers_are_upgraded_with_their_tag() -> None:
    servers, _ = [play for play in PLAYS if play.get("hosts") == "nomad_servers"]
    assert [task.get("tags") for task in servers["tasks"]] == [["nomad"], ["always"]]
