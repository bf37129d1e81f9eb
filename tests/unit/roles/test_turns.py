# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Servers of Nomad whose agents stop, for whatever reason, one at a time; what stops them is replaced by a note.

Nomad's answers come from a double that knows which of its servers are away.
"""

from __future__ import annotations

import http.server
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.tests.unit.playbooks import playbook_helper
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper
from ansible_collections.gpufarm.core.tests.unit.roles.role_helper import ROLES

SERVERS = ["s1", "s2", "s3"]
LEADER = "s1"
# The tasks of roles that enter the room, and what each hands it.
ENTER = {
    "node_tuning/tasks/main.yml": "Boot with the settings",
    "nvidia_driver/tasks/load.yml": "Boot with the installed driver",
    "nvidia_mig/tasks/main.yml": "Change what differs",
    "wsl/tasks/main.yml": "Have the distribution run by its settings",
}
STOPS = {
    "node_tuning/tasks/reboot.yml": "__node_tuning_unit",
    "nvidia_driver/tasks/reboot.yml": "__nvidia_driver_modules_path",
    "nvidia_mig/tasks/change.yml": "__nvidia_mig_unit",
    "wsl/tasks/terminate.yml": "__wsl_lib",
    "nomad/tasks/restart_agent.yml": "__nomad_unit_path",
}
DUE = {
    "__node_tuning_due": True,
    "nvidia_driver_reboot": True,
    "__nvidia_driver_reboot_needed": True,
    "__nvidia_driver_reboot_helps": True,
    "__nvidia_mig_changes": ["GPU 0: enable MIG"],
    "__node_tuning_differs_until_boot": ["mitigations is auto"],
    "wsl_terminate": True,
    "__wsl_terminate_needed": True,
    # What the handler asks of a host that was looked at.
    "_common_paths": [],
}


def stops_the_agent(task: dict[str, Any]) -> bool:
    service = task.get("ansible.builtin.systemd_service", {})
    named = service.get("name") == "nomad" or "__nvidia_mig_running" in str(service.get("name")) + str(task.get("loop"))
    # start_again.yml ends a distribution of WSL.
    ends = "ansible.builtin.reboot" in task or "start_again.yml" in role_helper.included(task)
    return ends or (named and service.get("state") in ("restarted", "stopped"))


def test_nothing_stops_an_agent_outside_of_its_turn() -> None:
    paths = [*ROLES.glob("*/tasks/*.yml"), *ROLES.glob("*/handlers/*.yml")]
    names = sorted(str(path.relative_to(ROLES)) for path in paths)
    stop = {name for name in names for task in role_helper.tasks_of(name) if "name" in task and stops_the_agent(task)}
    # A server that leaves for good is judged there.
    assert stop - {"nomad/tasks/leave.yml"} == set(STOPS)
    handed, entered = set(), set()
    for name in names:
        for task in role_helper.tasks_of(name):
            if "__nomad_turn_tasks" in task.get("vars", {}):
                given = Path(name).parent / task["vars"]["__nomad_turn_tasks"]
                handed.add(str((ROLES / given).resolve().relative_to(ROLES)))
                assert "turns.yml" in role_helper.included(task), name
            entered |= {stop for stop in STOPS if f"'{Path(stop).name}'" in role_helper.included(task)}
    assert handed == set(STOPS)
    assert not entered, "nobody enters them by another door"


@pytest.mark.parametrize("name", STOPS)
def test_what_stops_an_agent_asks_for_the_servers_when_the_node_is_out_of_work(name: str) -> None:
    told = role_helper.tasks_of(name)
    out = [number for number, task in enumerate(told) if "take_out.yml" in role_helper.included(task)]
    (asks,) = [number for number, task in enumerate(told) if "turn_stop.yml" in role_helper.included(task)]
    assert max(out, default=-1) < asks < min(number for number, task in enumerate(told) if stops_the_agent(task))


class Farm:
    """Agents of three servers, by the paths of which each has its own."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.away: dict[str, int] = {}
        """Servers that are not back, and how often they are still seen so once they have been started."""
        self.most_away = 0
        self.dies: dict[str, str] = {}
        """Servers that die while another one is taken out of work, by this one."""
        self.leader: Any = "192.0.2.1:4647"
        """What servers say of it; None is nothing."""
        self.thinks_s = 0.0
        """How long they take to say so."""
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                _empty, name, path = self.path.split("?")[0].split("/", 2)
                if path == "v1/status/leader":
                    time.sleep(outer.thinks_s)
                answer = outer.answer(name, path)
                text = json.dumps(answer).encode()
                self.send_response(404 if answer is None else 200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._lock = threading.Lock()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, name: str, path: str) -> Any:
        with self._lock:
            if path.startswith("note/"):
                _note, what, did = path.split("/")
                if did == "drains":
                    self.away |= {dead: 10**6 for other, dead in self.dies.items() if other == name}
                    return {}
                self.happened.append(f"{what} {did} {name}")
                if name in SERVERS:
                    self.away[name] = 10**6 if did == "stops" else 2
                self.most_away = max(self.most_away, len(self.away))
                return {}
            if path == "v1/agent/members":
                states = [{"Name": each, "Status": "failed" if each in self.away else "alive"} for each in SERVERS]
                self.away = {each: left - 1 for each, left in self.away.items() if left > 1}
                members = [{**each, "Tags": {"region": "global"}} for each in states]
                return {"ServerRegion": "global", "Members": members}
            stats = {"nomad": {"leader": str(name == LEADER).lower()}, "serf": {"encrypted": "false"}}
            return {
                "v1/agent/health": {"server": {"ok": True}},
                "v1/status/leader": self.leader,
                "v1/status/peers": [f"{each}:4647" for each in SERVERS],
                "v1/agent/self": {"stats": stats, "config": {"Version": {"Version": "1.11.3"}}},
            }.get(path)


@pytest.fixture
def farm() -> Iterator[Farm]:
    farm = Farm()
    yield farm
    farm.close()


@pytest.fixture
def collection(tmp_path: Path, farm: Farm, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The collection, of whose roles only those tasks are left that have to do with turns; all agents run."""
    systemctl = tmp_path / "bin/systemctl"
    systemctl.parent.mkdir()
    systemctl.write_text(f"#!/bin/sh\n[ ! -e {tmp_path}/stopped ] || exit 3\n", encoding="utf-8")
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{systemctl.parent}:{os.environ['PATH']}")
    core = tmp_path / "ansible_collections/gpufarm/core"
    shutil.copytree(ROLES, core / "roles")
    for name in ("plugins", "meta", "galaxy.yml"):
        (core / name).symlink_to(ROLES.parent / name)
    for name, title in ENTER.items():
        (task,) = [task for task in role_helper.tasks_of(name) if task.get("name") == title]
        (core / "roles" / name).write_text(json.dumps([task]), encoding="utf-8")
    program = "import sys, urllib.request as web; [web.urlopen(address).read() for address in sys.argv[1:]]"
    note = f"{farm.url}/{{{{ inventory_hostname }}}}/note"
    drains = [
        {"ansible.builtin.command": {"argv": [sys.executable, "-c", program, f"{note}/node_maintenance/drains"]}},
        {"ansible.builtin.fail": {"msg": "a job runs"}, "when": "busy"},
    ]
    (core / "roles/node_maintenance/tasks/take_out.yml").write_text(json.dumps(drains), encoding="utf-8")
    for name, variable in STOPS.items():
        what = name.partition("/")[0]
        address = f"{note}/{what}"
        before = yaml.safe_load((ROLES / name).read_text(encoding="utf-8"))
        asks = next(
            (number for number, task in enumerate(before, 1) if "turn_stop.yml" in role_helper.included(task)), 0
        )
        kept = next((number for number, task in enumerate(before) if stops_the_agent(task)), asks)
        notes: list[dict[str, Any]] = [
            *before[:kept],
            {"ansible.builtin.command": {"argv": [sys.executable, "-c", program, f"{address}/stops"]}},
            # Its own variables and files are known there.
            {"ansible.builtin.include_tasks": f"note_{what}.yml", "when": f"{variable} | length > 0"},
            {"ansible.builtin.fail": {"msg": "the disk is full"}, "when": "fails"},
        ]
        (core / "roles" / name).write_text(json.dumps(notes), encoding="utf-8")
        starts = [{"ansible.builtin.command": {"argv": [sys.executable, "-c", program, f"{address}/starts"]}}]
        (core / "roles" / name).with_name(f"note_{what}.yml").write_text(json.dumps(starts), encoding="utf-8")
    notifies = [{"ansible.builtin.command": "true", "notify": "Restart Nomad"}]
    (core / "roles/nomad/tasks/main.yml").write_text(json.dumps(notifies), encoding="utf-8")
    (core / "roles/nomad/tasks/validate.yml").write_text("[]", encoding="utf-8")
    return tmp_path


def run(
    farm: Farm,
    collection: Path,
    entries: dict[str, str],
    *,
    patience_s: int = 300,
    failing: tuple[str, ...] = (),
    busy: tuple[str, ...] = (),
    given: dict[str, Any] | None = None,
) -> tuple[int, str, list[str]]:
    """Return how a play of hosts of which three are servers ended, what it told and what happened."""
    hosts = {name: {"fails": name in failing, "busy": name in busy} for name in [*SERVERS, "gpu1"]}
    servers = {"hosts": dict.fromkeys(SERVERS)}
    inventory = {"all": {"vars": playbook_helper.LOCAL, "hosts": hosts, "children": {"nomad_servers": servers}}}
    includes = [
        {
            "ansible.builtin.include_role": {
                "name": f"gpufarm.core.{role}",
                "tasks_from": entry,
                "rolespec_validate": False,
            }
        }
        for role, entry in entries.items()
    ]
    defaults = {"gpufarm.core.nomad_agent_info": {"timeout": patience_s}}
    play = [{"name": "Nodes", "hosts": "all", "gather_facts": False, "module_defaults": defaults, "tasks": includes}]
    (collection / "play.yml").write_text(json.dumps(play), encoding="utf-8")
    api = {"address": farm.url + "/{{ inventory_hostname }}"}
    options = (
        "--extra-vars", json.dumps({**DUE, "__nomad_api": api, "__nomad_unit_path": __file__, **(given or {})})
    )  # fmt: skip
    ran = playbook_helper.run_playbook(collection, inventory, str(collection / "play.yml"), *options, before=collection)
    return ran.returncode, ran.stdout + ran.stderr, farm.happened


def test_servers_go_one_after_the_other_and_the_leader_last(farm: Farm, collection: Path) -> None:
    entries = {name.split("/")[0]: name.split("/")[-1] for name in [*ENTER, "nomad/tasks/main.yml"]}
    code, told, happened = run(farm, collection, entries)
    assert code == 0, told
    for role in entries:
        of_role = [line.removeprefix(f"{role} ") for line in happened if line.startswith(f"{role} ")]
        assert of_role == [f"{did} {name}" for name in ("gpu1", "s2", "s3", "s1") for did in ("stops", "starts")], role
    assert farm.most_away == 1


def test_no_server_goes_where_one_has_failed_in_its_turn(farm: Farm, collection: Path) -> None:
    code, told, happened = run(farm, collection, {"nvidia_driver": "load.yml"}, failing=("s2", "gpu1"))
    assert code == 2
    assert [line for line in happened if " gpu" not in line] == ["nvidia_driver stops s2", "nvidia_driver starts s2"]
    assert "s3: found that the turn of s2 failed. Expected: every server back" in " ".join(told.split())
    assert "s1: found that the turn of s2 failed" in " ".join(told.split())


def test_a_server_that_is_away_already_is_the_only_one(farm: Farm, collection: Path) -> None:
    farm.away = {"s3": 10**6}
    code, told, happened = run(farm, collection, {"nvidia_driver": "load.yml"}, patience_s=1)
    assert code == 2 and "s3 is failed" in told
    assert happened == ["nvidia_driver stops gpu1", "nvidia_driver starts gpu1"]


@pytest.mark.parametrize("name", ENTER)
def test_no_server_goes_where_another_has_died_during_the_drain(farm: Farm, collection: Path, name: str) -> None:
    farm.dies = {"s2": "s3"}
    role, _tasks, entry = name.split("/")
    code, told, happened = run(farm, collection, {role: entry}, patience_s=1)
    assert code == 2 and "s3 is failed" in told
    assert happened == [f"{role} stops gpu1", f"{role} starts gpu1"]


def test_a_server_that_is_busy_keeps_no_other_from_its_turn(farm: Farm, collection: Path) -> None:
    code, told, happened = run(farm, collection, {"nvidia_driver": "load.yml"}, busy=("s2",))
    assert code == 2 and "a job runs" in told
    turns = [f"nvidia_driver {did} {name}" for name in ("gpu1", "s3", "s1") for did in ("stops", "starts")]
    assert happened == turns, told


def test_no_server_goes_where_none_sees_who_waits(
    farm: Farm, collection: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANSIBLE_STRATEGY", "free")
    code, told, happened = run(farm, collection, {"nvidia_driver": "load.yml"})
    assert code == 2
    assert happened == ["nvidia_driver stops gpu1", "nvidia_driver starts gpu1"]
    for name in SERVERS:
        assert f"{name}: found the strategy free in Ansible's configuration" in " ".join(told.split())


RESTART = {"nomad": "main.yml"}


def test_a_server_that_answers_late_is_restarted_in_its_turn(farm: Farm, collection: Path) -> None:
    farm.thinks_s = 1.6
    code, told, _happened = run(farm, collection, RESTART)
    assert (code, farm.most_away) == (0, 1), told


def test_servers_that_say_nothing_are_not_restarted(farm: Farm, collection: Path) -> None:
    """As where an agent listens elsewhere than it is to listen from now on."""
    farm.leader = None
    code, told, happened = run(farm, collection, RESTART, given={"__nomad_word_wait": 1})
    assert (code, happened) == (2, ["nomad stops gpu1", "nomad starts gpu1"]), told
    told = " ".join(told.split())
    assert "no word on a leader in 1 s" in told and "Expected: an agent that tells whether its servers have a" in told


@pytest.mark.parametrize("stopped", [True, False])
def test_servers_that_have_no_leader_or_do_not_run_wait_for_nobody(
    farm: Farm, collection: Path, *, stopped: bool
) -> None:
    farm.leader = None if stopped else ""
    if stopped:
        (collection / "stopped").touch()
    code, told, _happened = run(farm, collection, RESTART)
    assert (code, farm.most_away) == (0, 3), told


def test_a_server_is_told_to_understand_tls_alone_in_its_own_turn(farm: Farm, collection: Path) -> None:
    """The file is all by which the next run knows of one that had none."""
    service = collection / "ansible_collections/gpufarm/core/roles/nomad_server/tasks/service.yml"
    variables = {"name": "gpufarm.core.nomad", "tasks_from": "variables.yml"}
    service.write_text(
        json.dumps([{"ansible.builtin.import_role": variables}, {"ansible.builtin.meta": "flush_handlers"}]),
        encoding="utf-8",
    )
    files = {name: collection / name / "tls-upgrade.hcl" for name in SERVERS}
    for path in files.values():
        path.parent.mkdir()
        path.touch()
    given = {"nomad_config_dir": f"{collection}/{{{{ inventory_hostname }}}}", "__nomad_open_hosts": []}
    entries = {"nomad": "variables.yml", "nomad_server": "tls.yml"}
    code, told, happened = run(farm, collection, entries, failing=("s3",), given=given)
    turns = [f"nomad {did} {name}" for name in ("s2", "s3") for did in ("stops", "starts")]
    assert (code, [line for line in happened if " gpu" not in line]) == (2, turns), told
    assert {name for name, path in files.items() if path.exists()} == {"s1"}, told
    code, told, happened = run(farm, collection, entries, given=given)
    assert (code, [path for path in files.values() if path.exists()]) == (0, []), told
    assert happened[-2:] == ["nomad stops s1", "nomad starts s1"]


def test_servers_that_go_on_understanding_both_are_not_restarted_for_it(farm: Farm, collection: Path) -> None:
    service = collection / "ansible_collections/gpufarm/core/roles/nomad_server/tasks/service.yml"
    service.write_text(json.dumps([{"ansible.builtin.meta": "flush_handlers"}]), encoding="utf-8")
    given = {"__nomad_open_hosts": ["gpu1"]}
    code, told, happened = run(farm, collection, {"nomad": "variables.yml", "nomad_server": "tls.yml"}, given=given)
    assert (code, happened) == (0, []), told
    assert "s1 goes on understanding agents without TLS, because of gpu1." in " ".join(told.split())
