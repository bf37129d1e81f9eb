# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a removal asks of Nomad, against its HTTP API; whole machines leave in molecule's scenarios."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.template import trust_as_template
from ansible_collections.gpufarm.core.tests.unit.patience import PATIENCE_S
from ansible_collections.gpufarm.core.tests.unit.playbooks import playbook_helper
from ansible_collections.gpufarm.core.tests.unit.playbooks.playbook_helper import ADDRESS, LOCAL, ROOT
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import gate_helper, nomad_helper
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

pytestmark = pytest.mark.controller


class Farm(nomad_helper.Agent):
    """A server of a farm, as the modules of a removal ask it."""

    def __init__(self, *servers: str, at: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        super().__init__(at=at)
        self.servers = servers
        self.answer = self.tell

    def tell(self, request: Any) -> bool:
        members = [
            {"Name": f"{name}.global", "Status": "alive", "Addr": name, "Tags": {"region": "global", "port": "4647"}}
            for name in self.servers
        ]
        told: dict[str, Any] = {
            "/v1/status/leader": "127.0.0.1:4647",
            "/v1/status/peers": [f"{name}:4647" for name in self.servers],
            "/v1/agent/members": {"ServerRegion": "global", "Members": members},
            "/v1/agent/self": {"stats": {"nomad": {"leader": "true"}}},
        }
        path = request.path.partition("?")[0]
        if path in told:
            request.reply(200, json.dumps(told[path]).encode(), {})
        return path in told


@pytest.fixture
def farms() -> Iterator[list[Farm]]:
    running = [Farm("a"), Farm("a")]
    yield running
    for farm in running:
        farm.close()


def enter(folder: Path, part: str, **variables: Any) -> tuple[int, str]:
    """Enter a part of the role nomad on server a."""
    task = {"ansible.builtin.include_role": {"name": "gpufarm.core.nomad", "tasks_from": part}}
    play = {"hosts": "a", "gather_facts": False, "tasks": [task]}
    (folder / "enter.yml").write_text(yaml.safe_dump([play]), encoding="utf-8")
    inventory = {"all": {"vars": LOCAL, "children": {"nomad_servers": {"hosts": {name: {} for name in "abcde"}}}}}
    result = playbook_helper.run_playbook(
        folder, inventory, str(folder / "enter.yml"), "--extra-vars", json.dumps(variables)
    )
    return result.returncode, " ".join((result.stdout + result.stderr).split())


def forget(folder: Path, farms: list[Farm], *, asks_only: bool = False) -> tuple[int, str]:
    speakers = [{"host": "a", "api": {"address": farm.url, "token": TOKEN}} for farm in farms]
    return enter(
        folder, "forget.yml", __nomad_speakers=speakers, __nomad_asks_only=asks_only, __nomad_node_id=OWN["ID"],
        nomad_node_name="a", __nomad_is_server=False,
    )  # fmt: skip


TOKEN = "b7a3c1de-2b1f-4c68-9a51-3f0c1d2e4a5b"
OWN = {**nomad_helper.make_node(0, 0), "Name": "a"}
PURGE = f"/v1/node/{OWN['ID']}/purge"


def test_of_two_servers_the_first_forgets_the_node_and_the_other_is_not_asked(
    tmp_path: Path, farms: list[Farm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANSIBLE_VERBOSITY", "3")
    farms[0].nodes = [OWN]
    code, said = forget(tmp_path, farms)
    assert code == 0, said
    assert f"{farms[0].url} on a" in said and TOKEN not in said
    assert [path for path, _body in farms[0].writes] == [PURGE]
    assert farms[1].requests == []


def test_a_server_that_does_not_know_the_node_is_not_the_last_that_is_asked(tmp_path: Path, farms: list[Farm]) -> None:
    farms[1].nodes = [OWN]
    code, said = forget(tmp_path, farms)
    assert code == 0, said
    assert farms[0].writes == []
    assert [path for path, _body in farms[1].writes] == [PURGE]


def test_servers_are_asked_before_anything_changes(tmp_path: Path, farms: list[Farm]) -> None:
    farms[0].nodes = [OWN]
    code, said = forget(tmp_path, farms, asks_only=True)
    assert (code, farms[0].writes) == (0, []), said
    assert "changed=0" in said
    for farm in farms:
        farm.close()
    code, said = forget(tmp_path, farms, asks_only=True)
    assert code == 2
    assert "a: no server could be asked to forget this host (" in said
    assert "Nomad is stopped here" not in said


def test_windows_keeps_what_a_node_that_has_not_left_needs(tmp_path: Path) -> None:
    nodes = {"pc-Debian": {"wsl_host": "pc"}, "other-Debian": {"wsl_host": "other"}}
    groups = {"wsl_hosts": {"hosts": {"pc": {}, "other": {}}}, "gpu_nodes": {"hosts": nodes}}
    inventory = {"all": {"vars": LOCAL, "children": groups}}
    result = playbook_helper.run_playbook(tmp_path, inventory, "remove.yml", "--limit", "pc")
    assert result.returncode == 2
    assert (
        "pc: pc-Debian, of which this machine takes care, has not left the farm in this run. Expected: a machine whose "
        "nodes have all left, because they would be reached no more. Next step: name them with --limit, too, which "
        "changes nothing on one that has left before."
    ) in " ".join((result.stdout + result.stderr).split())


@pytest.mark.parametrize(
    ("limit", "unknown"),
    [
        ("a,b2,c", "b2"),
        ("a:b2:gpu*", "b2, gpu*"),
        # What it was to leave out would go.
        ("nomad_servers:!b2", "b2"),
        ("nomad_servers, !b2, &nomad_*", "b2"),
        ("nomad_servers:!~b2|c2", "~b2|c2"),
        ("nomad_servers:!nomad_servers[5:7]", "nomad_servers[5:7]"),
        # With a comma, Ansible splits at nothing else.
        ("nomad_servers,!a:!b", "a:!b"),
        ("a,!b,nomad_*,~[ab]", None),
        ("nomad_*:!nomad_servers[1:2]:&~a|b", None),
        ("nomad_servers[0:1]", None),
        ("nomad_servers:!nobody", None),
    ],
)
def test_a_machine_that_is_not_there_is_told(tmp_path: Path, limit: str, unknown: str | None) -> None:
    groups = {"nomad_servers": {"hosts": {name: {} for name in "abc"}}, "nobody": {}}
    inventory = {"all": {"vars": LOCAL, "children": groups}}
    result = playbook_helper.run_playbook(tmp_path, inventory, "remove.yml", "--limit", limit)
    said = " ".join((result.stdout + result.stderr).split())
    told = f"--limit {limit}: found no host or group {unknown}. Expected: " if unknown else "found no host or group"
    assert (told in said) is (unknown is not None), said


def test_hosts_are_looked_at_for_all_that_may_go(tmp_path: Path) -> None:
    """The one look comes before the roles that go by it."""
    # What a module was asked is told from ansible-core 2.21 on only where that is wished.
    known = {**LOCAL, "ansible_become": False, "ansible_inject_invocation": True}
    groups = {"nomad_servers": {"hosts": {"a": {}}}, "gpu_nodes": {"hosts": {"a": {}}}}
    inventory = {"all": {"vars": known, "children": groups}}
    result = playbook_helper.run_playbook(tmp_path, inventory, "remove.yml", "--limit", "a", "--check", "-vvv")
    looked = result.stdout.partition("Look at what the roles keep on this host]")[2].partition("TASK [")[0]
    for part in ("containerd.service", "crio.service", "nvidia-fabricmanager.service", "/etc/gpufarm-wandb",
                 "nfs-server.service", "/etc/exports.d/gpufarm-shared-data.exports"):  # fmt: skip
        assert part in looked, result.stdout


def test_an_agent_of_wandb_goes_before_its_node_is_taken_out_and_shared_data_after_that() -> None:
    """Its job would be work on the node, and its key stayed there; a mount may be in use until Nomad is gone.

    What would be refused of the mount is refused before all that.
    """
    plays = yaml.safe_load((ROOT / "playbooks/remove.yml").read_text(encoding="utf-8"))
    for hosts, leaves in (
        ("gpu_nodes:!nomad_servers", "Have no device plugin"),
        ("gpu_nodes:&nomad_servers", "Have no device plugin"),
        ("nomad_servers", "Have no Nomad server"),
    ):
        (play,) = (play for play in plays if play.get("hosts") == hosts)
        tasks = play["tasks"]
        names = [task["name"] for task in tasks]
        agents = [
            number for number, task in enumerate(tasks)
            if task.get("ansible.builtin.import_tasks") == "tasks/launch_agent_goes.yml"
        ]  # fmt: skip
        shared = next(
            number for number, task in enumerate(tasks)
            if "shared_data" in json.dumps(task) and "absent.yml" in json.dumps(task)
        )  # fmt: skip
        asked = next(
            number for number, task in enumerate(tasks)
            if "shared_data" in json.dumps(task) and "absent_check.yml" in json.dumps(task)
        )  # fmt: skip
        assert asked < agents[0] < names.index(leaves) < agents[1] < shared
        # In check mode its job is there still when the node is asked whether it is empty.
        without = trust_as_template(play["vars"]["node_maintenance_without_jobs_of"])
        for checks, owner in ((True, "an agent"), (False, "")):
            given = {"ansible_check_mode": checks, "__wandb_launch_agent_owner": "an agent", "without": without}
            assert role_helper.value("without", given) == owner
        for gone in (True, False):
            conditions = [trust_as_template("{{ " + tasks[number]["when"] + " }}") for number in agents]
            given = {"remove_without_farm": gone, "goes": conditions}
            assert role_helper.value("goes", given) == [not gone, gone]
    loop = plays[2]["tasks"][-1]["loop"]
    for also, first in ((["docker", "shared_data"], ["shared_data", "docker"]), ([], [])):
        given = {**role_helper.variables("_common"), "remove_also": also, "nvidia_repository_unused": False}
        given["parts"] = trust_as_template(loop)
        assert role_helper.value("parts", given) == first


def test_all_that_is_asked_for_is_asked_before_anything_goes() -> None:
    plays = yaml.safe_load((ROOT / "playbooks/remove.yml").read_text(encoding="utf-8"))
    (tasks,) = (play["tasks"] for play in plays if play.get("hosts") == "gpu_nodes:!nomad_servers")
    (asks,) = (task for task in tasks if "absent_check.yml" in json.dumps(task))
    assert tasks.index(asks) == 2
    also = ["shared_data", "container_toolkit", "docker", "cuda", "tuning", "driver", "data"]
    given = {**role_helper.variables("_common"), "remove_also": also, "nvidia_repository_unused": False}
    asked, gone = (
        role_helper.value("parts", {**given, "parts": trust_as_template(task["loop"])}) for task in (asks, tasks[-1])
    )
    assert asked == gone and len(asked) == 6
    assert all((ROOT / f"roles/{role}/tasks/absent_check.yml").exists() for role in asked)


class LaunchFarm(gate_helper.Farm):
    """One node, on which an agent of W&B Launch runs as a job that its host keeps."""

    def __init__(self) -> None:
        super().__init__(1, (ADDRESS, 4646))
        self.job = {
            "ID": "wandb-launch", "Namespace": "default", "Meta": {"gpufarm_owner": "wandb_launch_agent of gpu0"},
        }  # fmt: skip
        self.jobs = [self.job]
        self.run_job("id-0", "wandb-launch")["Job"] = self.job
        self.token = "management"

    def answer(self, request: Any) -> bool:
        path, _mark, query = request.path.partition("?")
        if path == "/v1/jobs":
            seen = self.jobs if self.token == "management" and "prefix" not in query else []
            request.reply(200, json.dumps(seen).encode(), {})
        elif path == "/v1/acl/token/self":
            request.reply(200, json.dumps({"Name": "own", "Type": self.token}).encode(), {})
        elif path.startswith("/v1/acl/policy/"):
            request.reply(404, b"ACL policy not found", {})
        elif request.command == "DELETE":
            if path.startswith("/v1/job/"):
                self.jobs = []
                self.allocations["id-0"][0]["DesiredStatus"] = "stop"
            request.reply(200, b"{}", {})
        else:
            return super().answer(request)
        return True


class LaunchNode:
    """A machine whose agent of W&B Launch is a job of its Nomad, as far as a removal sees it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.inside = folder, folder / "inside"
        self.under = playbook_helper.of_its_own(self.inside)
        self.wandb = {
            f"__wandb_launch_agent_{name}": str(self.inside / f"wandb/{name}") for name in ("etc", "lib", "home")
        }
        for name in (*self.wandb.values(), "data/client", "etc/nomad.d", "run/systemd/system", "wandb/lib/bin"):
            (self.inside / name).mkdir(parents=True)
        (self.inside / "data/client/client-id").write_text("id-0")
        self.program = self.inside / "wandb/lib/agent.py"
        self.program.write_text("import time\ntime.sleep(600)\n")
        self.here = [self.inside / "wandb/lib/bin/docker", self.inside / "etc/nomad.d/nomad.hcl"]
        for path in (*self.here, self.inside / "etc/systemd/system/nomad.service", self.inside / "run/active/nomad"):
            path.touch()
        enabled = self.inside / "etc/systemd/system/multi-user.target.wants"
        enabled.mkdir(exist_ok=True)
        (enabled / "nomad.service").symlink_to("/etc/systemd/system/nomad.service")
        node = {
            **LOCAL, "ansible_become": False, "nomad_bind_addr": ADDRESS, "nomad_client_servers": [ADDRESS],
            "nomad_tls": "off", "nomad_acl_enabled": False, "nomad_bin_dir": str(self.inside / "bin"),
            "nomad_plugin_dir": str(self.inside / "plugins"), "nomad_data_dir": str(self.inside / "data"),
        }  # fmt: skip
        self.inventory = {"all": {"children": {"gpu_nodes": {"hosts": {"gpu0": node}}}}}

    def remove(self, *options: str, agent: bool = False, **variables: Any) -> tuple[int, str]:
        """Remove it, while Nomad's agent there has a process that runs, or not."""
        given = ("--limit", "gpu0", "--extra-vars", json.dumps({**self.wandb, **variables}))
        started = ("sh", "-c", 'NOMAD_ALLOC_ID=5ec2e700-1 "$0" "$1" & shift; exec "$@"', sys.executable, self.program)
        ran = playbook_helper.run_playbook(
            self.folder, self.inventory, "remove.yml", *given, *options, under=(*self.under, *map(str, started * agent))
        )
        return ran.returncode, " ".join((ran.stdout + ran.stderr).split())

    def is_whole(self) -> bool:
        return all(path.exists() for path in self.here)

    def is_left(self) -> bool:
        return not any(path.exists() for path in [*self.here, *map(Path, self.wandb.values())])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has files of its own in /etc")
def test_an_agent_of_wandb_stays_on_a_node_that_does_not_leave(tmp_path: Path) -> None:
    farm, node = LaunchFarm(), LaunchNode(tmp_path)
    try:
        farm.run_job("id-0", "train")
        code, said = node.remove()
        assert code == 2 and "1 running allocation, which its removal from the farm would end: train." in said, said
        assert farm.agent.writes == [] and node.is_whole()
        assert "changed=0" in said
        farm.allocations["id-0"].pop()

        # One that may list no job would find none.
        farm.token = "client"
        code, said = node.remove()
        assert code == 2 and "the token 'own' is of type client. Expected: a management token. Next" in said, said
        assert farm.agent.writes == [] and node.is_whole() and "changed=0" in said
        farm.token = "management"

        (node.inside / "data/host_volumes/b2").mkdir(parents=True)
        code, said = node.remove(remove_also=["data"])
        assert code == 2 and "remove_also would delete volumes that users have created: " in said, said
        assert farm.agent.writes == [] and node.is_whole() and "changed=0" in said
        (node.inside / "data/host_volumes/b2").rmdir()

        code, said = node.remove("--check")
        assert (code, farm.agent.writes) == (0, []) and node.is_whole(), said

        code, said = node.remove()
        assert code == 0, said
        assert [path.partition("?")[0] for path, _body in farm.agent.writes] == [
            "/v1/client/metadata", "/v1/node/id-0/eligibility", "/v1/var/nomad/jobs/wandb-launch",
            "/v1/job/wandb-launch", "/v1/client/metadata", "/v1/node/id-0/purge",
        ]  # fmt: skip
        assert node.is_left()
    finally:
        farm.agent.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has files of its own in /etc")
def test_an_agent_of_wandb_is_no_work_on_a_node_whose_farm_is_gone(tmp_path: Path) -> None:
    """Nobody could stop its job, and it goes on when Nomad has been stopped."""
    node = LaunchNode(tmp_path)
    code, said = node.remove(agent=True, remove_without_farm=True)
    assert code == 0 and node.is_left(), said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has files of its own in /etc")
def test_a_server_that_is_not_in_its_group_does_not_leave_as_a_client(tmp_path: Path) -> None:
    farm, node = LaunchFarm(), LaunchNode(tmp_path)
    server = node.inside / "etc/nomad.d/server.hcl"
    server.touch()
    try:
        code, said = node.remove()
        assert code == 2 and farm.agent.writes == [] and node.is_whole() and "changed=0" in said, said
        assert (
            "gpu0: found /etc/nomad.d/server.hcl, and this host is not in the group nomad_servers. Expected: a server "
            "in it until it has left, because the others count on it. Next step: put it back into the group, and run "
            "this again; or set remove_without_farm where the servers are gone for good. Nothing was changed."
        ) in said
        server.unlink()
        code, said = node.remove()
        assert code == 0 and node.is_left(), said
    finally:
        farm.agent.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has files of its own in /etc")
def test_nomad_leaves_a_node_of_kubernetes_without_its_pods(tmp_path: Path) -> None:
    farm, node = LaunchFarm(), LaunchNode(tmp_path)
    asked, kubectl = tmp_path / "asked", tmp_path / "kubectl"
    kubectl.write_text(f"#!/bin/sh\ntouch {asked}\necho no cluster >&2\nexit 1\n", encoding="utf-8")
    kubectl.chmod(0o755)
    node.inventory["all"]["children"]["kubernetes_nodes"] = {"hosts": {"gpu0": {}}}
    given = {"kubernetes_kubectl": str(kubectl), "kubernetes_kubeconfig": "/none", "docker_managed": False}
    try:
        # Which ends them.
        code, said = node.remove(remove_also=["docker"], **given)
        assert code == 2 and asked.exists() and "the cluster's API does not answer gpu0 (no cluster)" in said, said
        assert farm.agent.writes == [] and node.is_whole()
        asked.unlink()
        code, said = node.remove(**given)
        assert code == 0 and node.is_left() and not asked.exists(), said
    finally:
        farm.agent.close()


def test_a_node_that_stays_cordoned_is_told() -> None:
    (task,) = role_helper.tasks_of("node_maintenance/tasks/stays_out.yml")
    told = trust_as_template(f"{{{{ {task['when']} }}}}")
    for given, check, wanted in (
        ({"__node_maintenance_pods": {"maintenance": "its removal from the farm"}}, False, True),
        ({"__node_maintenance_pods": {"maintenance": "its removal from the farm"}}, True, False),
        ({"__node_maintenance_pods": {"maintenance": None}}, False, False),
        ({}, False, False),
    ):
        assert role_helper.value("told", {"told": told, "ansible_check_mode": check, **given}) is wanted


def test_a_host_with_something_of_an_agent_of_wandb_is_known_by_what_was_looked_at() -> None:
    known = role_helper.variables("wandb_launch_agent")
    for path, here in (("/etc/gpufarm-wandb", True), ("/etc/wandb", False)):
        given = {**known, "_common_paths": [path]}
        assert role_helper.value("__wandb_launch_agent_here", given) is here
    asks = {**known, "wandb_launch_agent_state": "absent", "__wandb_launch_agent_in_nomad": True}
    for gone in (True, False):
        given = {**asks, "remove_without_farm": gone}
        assert role_helper.value("__wandb_launch_agent_asks_nomad", given) is not gone


def test_data_with_volumes_of_users_do_not_go_unsaid(tmp_path: Path) -> None:
    volumes = tmp_path / "data/host_volumes"
    (volumes / "lost+found").mkdir(parents=True)
    given = {"nomad_data_dir": str(tmp_path / "data"), "remove_also": ["data"]}
    assert enter(tmp_path, "leave_volumes.yml", **given)[0] == 0
    (volumes / "a1.ext4").touch()
    (volumes / "b2").mkdir()
    code, said = enter(tmp_path, "leave_volumes.yml", **given)
    assert code == 2
    told = f"a: remove_also would delete volumes that users have created: {volumes}/a1.ext4, {volumes}/b2. Expected: "
    assert told in said and "changed=0" in said
    # A node that has none.
    given["nomad_data_dir"] = str(tmp_path / "none")
    assert enter(tmp_path, "leave_volumes.yml", **given)[0] == 0


def test_volumes_of_users_are_looked_for_unless_they_are_named_as_well() -> None:
    leave, tasks = (
        yaml.safe_load((ROOT / f"roles/nomad/tasks/{name}.yml").read_text(encoding="utf-8"))
        for name in ("leave", "leave_check")
    )
    assert leave[0]["ansible.builtin.import_tasks"] == "leave_check.yml"
    (guarded,) = [task for task in tasks if task.get("ansible.builtin.include_tasks") == "leave_volumes.yml"]
    condition = trust_as_template("{{ " + guarded["when"] + " }}")
    for also, asked in (
        (["data"], True), (["data", "host_volumes"], False), (["host_volumes"], False), ([], False), (None, False),
        ("data", True), ("data, host_volumes", False), ("shared_data", False), ("", False),
    ):  # fmt: skip
        given = {**role_helper.variables("_common", "nomad"), "remove_also": also, "asked": condition}
        assert role_helper.value("asked", given) is asked, also


@pytest.mark.parametrize("also", ["shared_data,wslconfig", ["shared_data", "wslconfig"]])
def test_what_goes_besides_is_whole_words(also: str | list[str]) -> None:
    """A text has no list's elements: each part of a word would be one of them."""
    host = {"nomad_client_host_volumes": [{"path": "/srv/mine"}], "inventory_hostname": "a", "groups": {}}
    given = {**role_helper.variables("_common", "nomad", "farm"), **host, "remove_also": also}
    assert role_helper.value("_common_remove_also", given) == ["shared_data", "wslconfig"]
    assert role_helper.value("__nomad_data_goes", given) is False
    assert role_helper.value("__nomad_volumes_going", given) == []
    assert role_helper.value("__farm_remove_unknown", given) == []
    given["remove_also"] = "dat, shared_data"
    assert role_helper.value("__farm_remove_unknown", given) == ["dat"]
    options = yaml.safe_load((ROOT / "roles/farm/meta/argument_specs.yml").read_text(encoding="utf-8"))
    choices = options["argument_specs"]["remove"]["options"]["remove_also"]["choices"]
    assert role_helper.value("__farm_remove_words", given) == sorted(choices)
    # Everywhere, and not only where this test looks.
    asks = [ROOT / "playbooks/remove.yml", *ROOT.glob("roles/*/tasks/**/*.yml"), *ROOT.glob("roles/*/vars/**/*.yml")]
    raw = re.compile(r"(in'?,? remove_also\b(?!\.| the))|(?<!_common_)remove_also *\|")
    (line,) = (line for path in asks for line in path.read_text(encoding="utf-8").splitlines() if raw.search(line))
    assert "given = remove_also | default" in line


@pytest.mark.parametrize("way", ["files", "generate"])
def test_certificates_that_were_brought_stay(tmp_path: Path, way: str) -> None:
    """Also where the role has its own, and in folders that are emptied of what others have there."""
    etc = tmp_path / "nomad.d"
    (etc / "tls/mine").mkdir(parents=True)
    brought = [etc / "tls/ca.pem", etc / "tls/agent.pem", etc / "tls/mine/key.pem"]
    for path in (*brought, etc / "tls/agent-key.pem", etc / "other.hcl"):
        path.touch()
    names = ("nomad_tls_ca_file", "nomad_tls_cert_file", "nomad_tls_key_file")
    given = {
        **role_helper.variables("_common", "nomad"), **dict(zip(names, map(str, brought), strict=True)),
        "nomad_tls": way, "nomad_config_dir": str(etc), "item": str(etc), "remove_also": "other_files",
    }  # fmt: skip
    empty, files = role_helper.tasks_of("nomad/tasks/absent.yml")[2:4]
    going = role_helper.value("going", {**given, "going": trust_as_template(files["loop"])})
    kept = way == "files"
    assert [str(path) in going for path in brought] == [not kept, not kept, False]
    assert str(etc / "tls/agent-key.pem") in going
    command = trust_as_template(empty["ansible.builtin.command"]["argv"])
    subprocess.run(role_helper.value("command", {**given, "command": command}), check=True, timeout=PATIENCE_S)
    assert sorted(path for path in etc.rglob("*") if path.is_file()) == sorted(brought) * kept
    assert (etc / "tls").exists() is kept


def test_the_plugin_for_volumes_stays_with_them() -> None:
    text = (ROOT / "roles/nomad_client/tasks/absent.yml").read_text(encoding="utf-8")
    assert "client.hcl" in text and "sized_volumes" not in text


def guard(folder: Path, farm: Farm, *leaving: str) -> tuple[int, str]:
    return enter(folder, "leave_server.yml", __nomad_local_url=farm.url, __farm_leaving=leaving)


@pytest.mark.parametrize(
    ("servers", "leaving", "stay"),
    [
        ("abc", "a", None),
        ("abcde", "abc", None),
        ("abc", "abc", None),
        ("a", "a", None),
        # The inventory names three; one has left before.
        ("ab", "a", "b"),
        ("abc", "ab", "c"),
    ],
)
def test_servers_that_stay_have_a_leader(
    tmp_path: Path, farms: list[Farm], servers: str, leaving: str, stay: str | None
) -> None:
    farms[0].servers = tuple(servers)
    farms[0].nodes = []
    code, said = guard(tmp_path, farms[0], *leaving)
    assert code == (2 if stay else 0), said
    if stay:
        assert (
            f"a: of the servers {', '.join(servers)}, {', '.join(leaving)} are to go and {stay} to stay. Expected: "
        ) in said


@pytest.mark.parametrize("servers", [("b", "old-a"), ("b", "c", "old-a")])
def test_a_server_that_was_renamed_in_the_inventory_does_not_leave_unknown(
    tmp_path: Path, farms: list[Farm], servers: tuple[str, ...]
) -> None:
    """It would count as one that stays, and none of them forgot it."""
    farms[0].servers = servers
    code, said = guard(tmp_path, farms[0], "a")
    assert code == 2, said
    assert (
        f"a: nomad_node_name is a, and the servers of its agent's region are {', '.join(servers)}. Expected: its own "
        "name among them, by which they count and forget it. Next step: set nomad_node_name of this host to the name "
        "that it has in `nomad server members`, without the region."
    ) in said


def test_the_last_server_does_not_go_beneath_clients(tmp_path: Path, farms: list[Farm]) -> None:
    farms[0].nodes = [OWN, {**nomad_helper.make_node(1, 0), "Name": "gpu1"}]
    code, said = guard(tmp_path, farms[0], "a")
    assert code == 2
    assert "a: no server is to stay, and gpu1 would go on without one. Expected: " in said
    # Jobs of a client that Nomad has as disconnected may run on.
    assert farms[0].requests[-1][1]["filter"] == '(Status != "down")'


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has files of its own in /etc")
def test_the_last_server_does_not_go_beneath_one_that_this_run_has_lost(tmp_path: Path) -> None:
    """A GPU node that is a server, too, is not leaving because it was named."""
    farm, node = Farm("a", "b", at=(ADDRESS, 4646)), LaunchNode(tmp_path)
    own = node.inventory["all"]["children"]["gpu_nodes"]["hosts"].pop("gpu0")
    # It fails before anything changes.
    groups = {
        "nomad_servers": {"hosts": {"a": own, "b": {**own, "remove_also": ["misspelt"]}}},
        "gpu_nodes": {"hosts": {"b": {}}},
    }
    node.inventory["all"]["children"] = groups
    # No agent of W&B is here.
    shutil.rmtree(node.inside / "wandb")
    configuration = node.inside / "etc/nomad.d/nomad.hcl"
    farm.nodes = [{**OWN, "Name": "b"}]
    try:
        code, said = node.remove("--limit", "a,b")
        assert code == 2 and "b: remove_also has misspelt." in said, said
        assert "a: no server is to stay, and b would go on without one. Expected: " in said, said
        assert farm.writes == [] and configuration.exists()

        # Nomad has it as down, so nothing of it goes on.
        farm.nodes = []
        code, said = node.remove("--limit", "a,b")
        assert code == 2 and not configuration.exists(), said
    finally:
        farm.close()


@pytest.mark.parametrize(
    ("hosts", "of_play", "lost"),
    [
        # Those before it have left, and those after it are to.
        ({"a": {"__nomad_left": True}, "b": {}, "c": {}}, "abc", []),
        # Ansible has them no more.
        ({"a": {"__farm_leaving": []}, "b": {}, "c": {}}, "bc", ["a"]),
        ({"a": {"__nomad_left": True}, "b": {}, "c": {}}, "bc", []),
        # The play is that of servers that are GPU nodes: of the others, one has passed all checks, one has not.
        ({"a": {}, "b": {"__farm_leaving": []}, "c": {}}, "a", ["c"]),
    ],
)
def test_a_server_that_was_lost_is_not_leaving(hosts: dict[str, Any], of_play: str, lost: list[str]) -> None:
    (task,) = (
        task for task in role_helper.tasks_of("nomad/tasks/leave_server.yml")
        if task["name"] == "Require that no client is left without servers"
    )  # fmt: skip
    given = {
        **role_helper.variables("nomad"), "inventory_hostname": "a", "hostvars": hosts, "__nomad_servers": list("abc"),
        "__farm_leaving": list("abc"), "ansible_play_hosts": list(of_play),
        "ansible_play_hosts_all": ["a"] if of_play == "a" else list("abc"),
        "__nomad_nodes": {"nodes": [{"name": name} for name in "abc"]},
        "left": trust_as_template(task["vars"]["__nomad_nodes_left"]),
    }  # fmt: skip
    assert role_helper.value("left", given) == lost
