"""What holds for every task of the roles and playbooks that has to do with Nomad: secrets, services, restarts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from ansible_collections.gpufarm.core.plugins.filter.nomad_hcl import nomad_hcl
from ansible_collections.gpufarm.core.tests.unit.patience import PATIENCE_S
from ansible_collections.gpufarm.core.tests.unit.playbooks import playbook_helper
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

from tests.simulator.preloaded import DRVFS, preloaded

ROOT = Path(__file__).resolve().parents[3]
NAMES = (
    "nomad_token|__nomad_token|__nomad_gate_token|__gpu_health_(connection|content)|__nomad_acl_tokens_to_keep"
    "|__nomad_client_jwt|nomad_server_gossip_key|__nomad_server_gossip_text|_common_repository_texts"
)
SECRETS = re.compile(rf"\b({NAMES})\b")
# Their own options are no_log, which the unit tests of the modules see.
SAFE = ("gpufarm.core.", "ansible.builtin.assert")
# What is shown of a task even where it is no_log, and what is worked out from a secret without holding it.
KEYWORDS = {"name", "when", "register", "loop", "loop_control", "no_log", "changed_when", "failed_when", "until"}


def files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in ROOT.glob(f"{folder}/*.yml"))


def tasks(path: Path) -> Iterator[dict[str, Any]]:
    def walk(items: Any) -> Iterator[dict[str, Any]]:
        for item in items or []:
            yield item
            for part in ("block", "rescue", "always", "tasks", "pre_tasks", "post_tasks", "handlers"):
                yield from walk(item.get(part))

    yield from walk(yaml.safe_load(path.read_text(encoding="utf-8")))


def modules(task: dict[str, Any]) -> list[str]:
    return [key for key in task if "." in key]


def test_no_task_tells_a_secret_that_it_is_given() -> None:
    found = 0
    for path in files("roles/*/tasks", "roles/*/handlers", "playbooks", "playbooks/tasks"):
        for task in tasks(path):
            given = {key: value for key, value in task.items() if key not in KEYWORDS and "block" not in task}
            if SECRETS.search(str(given)) and not any(name.startswith(SAFE) for name in modules(task)):
                found += 1
                hides = str(task.get("no_log", "missing"))
                assert hides == "True" or "token | length > 0" in hides, f"{path}: {task['name']}: no_log is {hides}"
    assert found >= 1, "there are such tasks"


def test_no_file_shows_a_secret_that_was_taken_back() -> None:
    """A difference shows what the file held before, when no_log depends on what it is to hold."""
    hidden = {
        task["name"]: task.get("diff")
        for path in files("roles/*/tasks")
        for task in tasks(path)
        # The module hides the password that it is given, and not the former one.
        if "ansible.builtin.yum_repository" in task
        or ({"ansible.builtin.copy", "ansible.builtin.template"} & set(task) and task.get("no_log", True) is not True)
    }
    assert hidden == {
        "Have the configuration of the gate": False, "Have the repository {{ common_repository.name }}": False
    }  # fmt: skip


def test_no_difference_shows_the_configuration_of_somebody_else() -> None:
    """nomad.hcl is the name that Nomad's packages take; a gossip key or a token of Vault may be in what is there."""
    shown = {
        task["ansible.builtin.template"]["src"]: task.get("diff", True)
        for path in files("roles/nomad/tasks", "roles/nomad_server/tasks", "roles/nomad_client/tasks")
        for task in tasks(path)
        if "ansible.builtin.template" in task and path.name == "configure.yml"
    }
    assert {name: diff for name, diff in shown.items() if name.endswith(".hcl.j2")} == {
        "nomad.hcl.j2": False, "server.hcl.j2": False, "client.hcl.j2": False
    }  # fmt: skip


@pytest.mark.parametrize("role", ["nomad", "nomad_server", "nomad_client", "nomad_device_nvidia"])
def test_services_are_told_of_in_check_mode(role: str) -> None:
    for path in files(f"roles/{role}/tasks", f"roles/{role}/handlers"):
        for task in tasks(path):
            if "ansible.builtin.systemd_service" in task:
                assert "ansible_check_mode" not in str(task.get("when")), f"{path}: {task['name']}"


def test_what_an_agent_reads_at_its_start_is_looked_at_where_a_run_was_cut() -> None:
    """Or it would never read what a run has written that ended before it restarted the agent."""
    roles = ("nomad", "nomad_server", "nomad_client", "nomad_device_nvidia")
    known = {**role_helper.variables("_common", *roles), "__nomad_has_keyring": False}

    def worth(text: Any) -> Any:
        return role_helper.value("text", {**known, "text": trust_as_template(text)})

    looked_at = set(worth("{{ __nomad_files }}"))
    for role in ("nomad_server", "nomad_client"):
        (runs,) = [task for task in tasks(ROOT / f"roles/{role}/tasks/service.yml") if "__nomad_wait_for" in str(task)]
        looked_at.update(worth(runs["vars"]["__nomad_own_files"]))
    written = {
        worth(task[module]["dest"])
        for path in files(*(f"roles/{role}/tasks" for role in roles))
        for task in tasks(path)
        for module in ("ansible.builtin.copy", "ansible.builtin.template")
        if module in task and "Restart Nomad" in str(task.get("notify"))
    }
    assert len(written) > 6
    # The next run has a client that never used its token introduced anew.
    assert written - looked_at == {worth("{{ __nomad_client_jwt_path }}")}


def test_systemd_is_reloaded_for_a_changed_unit_alone() -> None:
    """It takes GPUs from running containers."""
    reloads = {
        task["name"]: (task.get("ansible.builtin.systemd_service") or {}).get("daemon_reload")
        for path in files("roles/nomad*/tasks", "roles/nomad*/handlers", "playbooks", "playbooks/tasks")
        for task in tasks(path)
        if "daemon_reload" in (task.get("ansible.builtin.systemd_service") or {})
        or "daemon-reload" in str([task.get(name) for name in modules(task)])
    }
    assert reloads == {
        "Restart Nomad": "{{ __nomad_unit_unread }}",
        # That was one already.
        "Have Nomad enabled and running": "{{ __nomad_unit_unread and not __nomad_restarted_now }}",
        # By the shell, where the unit has gone with its node.
        "Have systemd know no unit that is gone": None,
    }


@pytest.mark.parametrize(
    ("changed", "lines", "unread"),
    [
        (False, ["NeedDaemonReload=no", "LoadState=loaded"], False),
        (False, ["NeedDaemonReload=yes", "LoadState=loaded"], True),
        # Before version 246 systemd did not look again for a unit that it had missed.
        (False, ["NeedDaemonReload=no", "LoadState=not-found"], True),
        (False, ["NeedDaemonReload=no", "LoadState=loaded", "/etc/nomad.d/nomad.hcl"], False),
        # It replaces the unit of a package, which is what systemd has loaded.
        (True, ["NeedDaemonReload=no", "LoadState=loaded"], True),
        # The plugin's role alone does not ask systemd.
        (True, [], True),
    ],
)
def test_what_systemd_has_not_read(changed: bool, lines: list[str], unread: bool) -> None:
    loader = DataLoader()
    variables = loader.load_from_file(str(ROOT / "roles/nomad/vars/main.yml"), trusted_as_template=True)
    templar = Templar(
        loader, variables={"__nomad_unread": {"stdout_lines": lines}, "__nomad_unit": {"changed": changed}}
    )
    assert templar.template(variables["__nomad_unit_unread"]) is unread


def templated(text: str, role: str, **given: Any) -> Any:
    """Return what a text is worth among the variables of a role and those given."""
    loader = DataLoader()
    variables: dict[str, Any] = {"inventory_hostname": "n1", "ansible_managed": "Ansible managed"}
    for part in ("nomad", role):
        for kind in ("defaults", "vars"):
            variables.update(
                loader.load_from_file(str(ROOT / "roles" / part / kind / "main.yml"), trusted_as_template=True) or {}
            )
    variables.update({"groups": {"nomad_servers": ["s1"]}, "hostvars": {"s1": {}}, **given})
    return Templar(loader, variables=variables).template(trust_as_template(text))


def unit(**given: Any) -> list[str]:
    text = (ROOT / "roles/nomad/templates/nomad.service.j2").read_text(encoding="utf-8")
    return str(templated(text, "nomad", **given)).splitlines()


def config(role: str, **given: Any) -> list[str]:
    """Return the lines of a role's part of Nomad's configuration."""
    (path,) = (ROOT / "roles" / role / "templates").glob("*.hcl.j2")
    # The filters of a collection need its loader, which a process has once.
    (value,) = re.findall(r"{{ (.*) \| gpufarm.core.nomad_hcl -}}", path.read_text(encoding="utf-8"))
    lines: list[str] = nomad_hcl(templated(f"{{{{ {value} }}}}", role, **given)).splitlines()
    return [line for line in lines if line]


OF_A_SERVER = [f"/etc/nomad.d/{name}.hcl" for name in ("nomad", "server", "gossip", "tls-upgrade")]
ALONE: dict[str, Any] = {"inventory_hostname": "s1", "_common_host": role_helper.host()}


@pytest.mark.parametrize(
    ("given", "alone"),
    [
        (ALONE, True),
        ({**ALONE, "groups": {"nomad_servers": ["s1"], "gpu_nodes": ["t4"]}}, True),
        ({**ALONE, "groups": {"nomad_servers": ["s1"], "gpu_nodes": ["s1"]}}, False),
        # Made a client by a play that names no group.
        ({**ALONE, "_common_host": role_helper.host("/etc/nomad.d/client.hcl")}, False),
        ({**ALONE, "__nomad_runs_tasks": True}, False),
        # By options, or by a file of somebody else's, which may have anything in it.
        ({**ALONE, "nomad_server_options": {"client": {"enabled": True}}}, False),
        ({**ALONE, "nomad_agent_options": {"client": {"enabled": True}}}, False),
        ({**ALONE, "nomad_server_options": {"server": {"raft_multiplier": 5}}}, True),
        ({**ALONE, "_common_host": role_helper.host("/etc/nomad.d/cpu.hcl")}, False),
        ({**ALONE, "_common_host": role_helper.host(*OF_A_SERVER)}, True),
        ({**ALONE, "inventory_hostname": "t4"}, False),
    ],
)
def test_only_a_server_alone_is_shut_in(given: dict[str, Any], alone: bool) -> None:
    """Tasks inherit what an agent may not, and Docker sees no mount of a namespace."""
    lines = unit(**given)
    assert ("NoNewPrivileges=true" in lines) is alone
    shut_in = ("Private", "Protect", "Restrict", "ReadWrite", "SystemCall", "NoNew", "Lock", "UMask", "Namespace")
    found = [line for line in lines if line.startswith(shut_in)]
    assert (len(found) > 18) if alone else found == []
    (kept, *_more) = [line for line in lines if line.startswith("CapabilityBoundingSet=")]
    assert kept.startswith("CapabilityBoundingSet=~") is not alone
    # NVIDIA's libraries load their module and make device files, and containers have all of these.
    for needed in ("SYS_ADMIN", "SYS_MODULE", "MKNOD", "NET_ADMIN", "SETUID", "AUDIT_WRITE", "MAC_ADMIN"):
        assert alone or not [line for line in lines if line.startswith("Capability") and needed in line], needed


def test_a_server_may_read_and_write_where_its_files_are() -> None:
    lines = unit(**ALONE, nomad_data_dir="/srv/nomad", nomad_tls="off")
    assert ("ReadWritePaths=-/srv/nomad -/var/log" in lines, "ProtectHome=true" in lines) == (True, True)
    assert "ExecStartPre=+/bin/mkdir -p -m 0700 /srv/nomad" in lines
    elsewhere: list[dict[str, Any]] = [
        {"nomad_server_options": {"server": {"data_dir": "/raft"}}},
        {"nomad_agent_options": {"server": {"data_dir": "/raft"}}},
        {"nomad_agent_options": {"log_file": "/raft/nomad.log"}},
    ]
    for options in elsewhere:
        assert "ReadWritePaths=-/srv/nomad -/var/log -/raft" in unit(**ALONE, nomad_data_dir="/srv/nomad", **options)
    for place in ({"nomad_data_dir": "/home/nomad"}, {"nomad_tls": "files", "nomad_tls_key_file": "/root/key.pem"}):
        assert "ProtectHome=read-only" in unit(**ALONE, **place)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is needed to read a unit")
@pytest.mark.parametrize("host", ["s1", "t4"])
def test_systemd_knows_all_that_the_unit_says(tmp_path: Path, host: str) -> None:
    (tmp_path / "nomad").write_text("#!/bin/sh\n", encoding="ascii")
    (tmp_path / "nomad").chmod(0o755)
    path = tmp_path / "nomad.service"
    lines = unit(**{**ALONE, "inventory_hostname": host, "nomad_bin_dir": str(tmp_path)})
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    told = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", path], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (told.returncode, told.stdout + told.stderr) == (0, "")


def test_unit_starts_as_upstreams_does() -> None:
    lines = unit(nomad_bin_dir="/opt/bin", nomad_config_dir="/etc/n", **ALONE)
    for line in (
        "Type=notify",
        "ExecStart=/opt/bin/nomad agent -config=/etc/n",
        "KillMode=process",
        "KillSignal=SIGINT",
        "LimitNOFILE=65536",
        "LimitNPROC=infinity",
        "TasksMax=infinity",
        "OOMScoreAdjust=-1000",
        "Restart=on-failure",
        "RestartSec=2",
        "StartLimitIntervalSec=0",
        "UnsetEnvironment=AWS_CA_BUNDLE",
        "Wants=network-online.target",
        "After=network-online.target docker.service nvidia-persistenced.service nvidia-fabricmanager.service",
        "WantedBy=multi-user.target",
    ):
        assert lines.count(line) == 1, line
    assert not [line for line in lines if line.startswith(("EnvironmentFile", "PassEnvironment", "Environment"))]


def test_gossip_key_is_in_no_file_that_is_shown() -> None:
    key = "c2VjcmV0LWZvci10aGlzLXNjZW5hcmlvLW9ubHktMTI="
    assert key not in "".join(config("nomad_server", nomad_server_gossip_key=key))


def valued(name: str, **given: Any) -> Any:
    loader = DataLoader()
    looked_at = {"_common_host": role_helper.host(), "inventory_hostname": "gpu1", "groups": {}, "hostvars": {}}
    variables = {**role_helper.variables("_common", "nomad"), **looked_at, **given}
    return Templar(loader, variables=variables).template(trust_as_template("{{ " + name + " }}"))


def test_files_that_an_agent_reads_when_it_starts() -> None:
    assert valued("__nomad_files", nomad_plugin_dir="/p", nomad_config_dir="/etc/nomad.d")[1:] == [
        "/p/nomad-device-nvidia", "/etc/systemd/system/nomad.service", "/etc/nomad.d/nomad.hcl",
        "/etc/nomad.d/server.hcl", "/etc/nomad.d/client.hcl", "/etc/nomad.d/device_nvidia.hcl",
        "/etc/nomad.d/tls/ca.pem", "/etc/nomad.d/tls/agent.pem", "/etc/nomad.d/tls/agent-key.pem",
    ]  # fmt: skip


GPUS = [{"uuid": "GPU-1"}, {"uuid": "GPU-2"}]
FACTS = {"nvidia_smi": {"available": True, "driver_version": "580.1", "gpus": GPUS}}
KNOWN = {
    "ansible_play_name": "GPU nodes",
    "__nomad_device_nvidia_release": {},
    "nomad_device_nvidia_ignored_gpu_ids": [],
    "ansible_facts": FACTS,
}


@pytest.mark.parametrize(
    ("known", "given", "new"),
    [
        (["580.1"], {}, False),
        (["570.1"], {}, True),
        (["570.1", "580.1"], {}, True),
        # The plugin found no driver when the agent started, and looks for none again.
        ([], {}, True),
        ([], {"nomad_device_nvidia_ignored_gpu_ids": ["GPU-1", "GPU-2"]}, False),
        ([], {"ansible_facts": {}}, False),
        (["570.1"], {"ansible_facts": {"nvidia_smi": {"available": False}}}, False),
        (None, {}, False),
        # This run has started it, and its plugin may not have told yet.
        (["570.1"], {"__nomad_restarted_in": "GPU nodes"}, False),
        (["570.1"], {"__nomad_restarted_in": "Nomad servers"}, True),
        ([], {"__nomad_running": {"changed": True}}, False),
    ],
)
def test_agent_that_knows_another_driver(known: list[str] | None, given: dict[str, Any], new: bool) -> None:
    ready = {"driver_versions": known}
    assert valued("__nomad_driver_is_new", **{**KNOWN, "__nomad_ready": ready, **given}) is new


@pytest.mark.parametrize(
    ("given", "back"),
    [
        # Tags have left the agent out, which may have a mark.
        ({}, True),
        ({"__nomad_ready": {"state": "ok", "maintenance": None}}, False),
        ({"__nomad_ready": {"state": "ok", "maintenance": "a reboot"}}, True),
        ({"__nomad_ready": {"state": "ok", "maintenance": None}, "__node_maintenance_out": {"maintenance": "a"}}, True),
        ({"ansible_check_mode": True}, False),
        # Kubernetes tells it itself.
        (
            {
                "__nomad_ready": {"state": "ok", "maintenance": None},
                "groups": {"kubernetes_nodes": ["gpu1"]},
                "inventory_hostname": "gpu1",
            },
            True,
        ),
    ],
)
def test_node_that_is_out_is_put_back(given: dict[str, Any], back: bool) -> None:
    (condition,) = [
        task["when"]
        for path in files("playbooks/tasks")
        if path.name == "gpu_node.yml"
        for task in tasks(path)
        if "put_back.yml" in str(task.get("ansible.builtin.include_role"))
    ]
    assert valued(f"({condition})", **{"ansible_check_mode": False, **given}) is back


def test_agent_without_the_plugins_role_needs_no_driver() -> None:
    given = {"ansible_play_name": "GPU nodes", "ansible_facts": FACTS, "__nomad_ready": {"driver_versions": []}}
    assert valued("__nomad_driver_is_new", **given) is False
    assert valued("__nomad_driver_is_new", **KNOWN) is False


@pytest.mark.parametrize(
    ("host", "before", "key", "waits"),
    [
        ("s1", {"leader": "192.0.2.1:4647", "encrypted": False}, "", True),
        ("s1", {"leader": "192.0.2.1:4647", "encrypted": True}, "secret", True),
        # Those that encrypt and those that do not have no common leader.
        ("s1", {"leader": "192.0.2.1:4647", "encrypted": False}, "secret", False),
        ("s1", {"leader": "192.0.2.1:4647", "encrypted": True}, "", False),
        # A token that may not ask.
        ("s1", {"leader": "192.0.2.1:4647", "encrypted": None}, "", True),
        ("s1", {"leader": None, "encrypted": None}, "", False),
        ("s1", {}, "", False),
        ("gpu1", {"leader": "192.0.2.1:4647", "encrypted": False}, "", False),
    ],
)
def test_server_waits_for_its_turn(host: str, before: dict[str, Any], key: str, waits: bool) -> None:
    groups = {"nomad_servers": ["s1", "s2"]}
    given = {"inventory_hostname": host, "__nomad_before": before, "nomad_server_gossip_key": key}
    assert (valued("__nomad_may_wait", groups=groups, **given) and valued("__nomad_waits", **given)) is waits
    assert valued("__nomad_may_wait", groups={"nomad_servers": ["s1"]}, **given) is False


def test_keyring_of_somebody_elses_encrypts_too() -> None:
    given = {"__nomad_before": {"leader": "192.0.2.1:4647", "encrypted": True}, "nomad_server_gossip_key": ""}
    assert valued("__nomad_waits", **given) is False
    given["_common_host"] = role_helper.host("/opt/nomad/data/server/serf.keyring")
    assert valued("__nomad_waits", **given) is True
    # This run has taken it away.
    assert valued("__nomad_waits", **given, __nomad_keyring_gone={"changed": True}) is False


def test_leader_has_the_last_turn() -> None:
    hosts = {
        name: {
            "inventory_hostname": name,
            "__nomad_due": due,
            "__nomad_stops": name != "s4",
            "__nomad_before": {"leads": leads},
        }
        for name, due, leads in (("s1", True, True), ("s2", True, False), ("s3", False, False), ("s4", True, None))
    }
    hosts["new"] = {"inventory_hostname": "new"}
    given = {"groups": {"nomad_servers": list(hosts)}, "ansible_play_hosts_all": list(hosts), "hostvars": hosts}
    assert valued("__nomad_turns", ansible_play_hosts=list(hosts), **given) == ["s2", "s4", "s1"]
    assert valued("__nomad_turns_failed", ansible_play_hosts=list(hosts), **given) == []
    # A host that failed in its turn is not in the play any more; the agent of s4 did not stop for it.
    assert valued("__nomad_turns", ansible_play_hosts=["new", "s1"], **given) == ["s1"]
    assert valued("__nomad_turns_failed", ansible_play_hosts=["new", "s1"], **given) == ["s2"]
    assert valued("__nomad_turns", ansible_play_hosts=["new"], **{**given, "groups": {}}) == []


def test_a_host_volume_on_a_drive_of_windows_takes_no_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = tmp_path / "mnt/c"
    drive.mkdir(parents=True)
    monkeypatch.setenv("LD_PRELOAD", str(preloaded(DRVFS)))
    monkeypatch.setenv("DRVFS", str(drive))
    volumes = [
        {"name": "results", "path": str(drive / "temp")}, {"name": "scratch", "path": str(tmp_path / "srv/scratch")},
    ]  # fmt: skip
    entered = {"name": "gpufarm.core.nomad_client", "tasks_from": "host_volumes.yml", "rolespec_validate": False}
    play = {"hosts": "all", "gather_facts": False, "tasks": [{"ansible.builtin.include_role": entered}]}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))

    def enter(*options: str, there: list[str], **more: Any) -> tuple[dict[str, int], str]:
        """How many tasks of it changed and failed, and what was said."""
        known = {"_common_host": {"files": [{"path": path, "isdir": True} for path in there]}}
        chosen = {"nomad_client_host_volumes": [{**volumes[0], **more}] if more else volumes}
        done = playbook_helper.run_playbook(
            tmp_path, {"all": {"hosts": {"wsl": {**playbook_helper.LOCAL, **known, **chosen}}}},
            str(tmp_path / "play.yml"), *options,
        )  # fmt: skip
        recap = re.findall(r"wsl +: ok=\d+ +(changed)=(\d+) .*(failed)=(\d+)", done.stdout)[0]
        return {recap[0]: int(recap[1]), recap[2]: int(recap[3])}, " ".join((done.stdout + done.stderr).split())

    before = os.umask(0o077)
    try:
        assert enter("--check", there=[])[0] == {"changed": 1, "failed": 0}
        assert list(drive.iterdir()) == []
        assert enter(there=[])[0] == {"changed": 1, "failed": 0}
        modes = [oct(Path(volume["path"]).stat().st_mode & 0o7777) for volume in volumes]
        assert modes == ["0o777", "0o755"]
        # Whether it was looked at before or not.
        assert enter(there=[volumes[1]["path"]])[0] == {"changed": 0, "failed": 0}
        counts, said = enter(there=[], mode="0770")
    finally:
        os.umask(before)
    assert counts == {"changed": 0, "failed": 1}
    assert f"wsl: {drive}/temp of nomad_client_host_volumes does not take the mode 0770 (" in said
    assert (
        "). Expected: a file system that keeps permissions. Next step: take the mode out; or, where it is a drive of "
        "Windows, mount it with them by `automount: {options: metadata}` in wsl_conf."
    ) in said


def test_configuration_of_a_client() -> None:
    given = {
        "nomad_client_meta": {"rack": "r1", "slots": 8},
        "nomad_client_host_volumes": [{"name": "results", "path": "/srv/results"}],
        "nomad_client_reserved": {"cpu": 500, "memory": 2048},
        "nomad_client_options": {
            "client": {"max_kill_timeout": "10m", "node_pool": None, "meta": {"rack": "r2"}},
            "plugin": {"docker": {"config": {"volumes": {"enabled": True}}}, "exec2": {"config": {}}},
        },
    }
    assert config("nomad_client", **given) == [
        "client {",
        "  enabled          = true",
        '  servers          = ["s1"]',
        '  node_class       = "gpu"',
        '  max_kill_timeout = "10m"',
        "  reserved {", "    cpu    = 500", "    memory = 2048", "  }",
        "  meta {", '    rack  = "r2"', '    slots = "8"', "  }",
        '  host_volume "results" {', '    path      = "/srv/results"', "    read_only = false", "  }",
        "}",
        'plugin "docker" {', "  config {",
        '    allow_runtimes = ["runc", "nvidia"]',
        "    volumes {", "      enabled = true", "    }",
        "    gc {", "      image = true", "    }",
        "  }", "}",
        'plugin "raw_exec" {', "  config {", "    enabled = false", "  }", "}",
        'plugin "exec2" {', "  config {", "  }", "}",
    ]  # fmt: skip


def test_configuration_that_every_agent_shares() -> None:
    opened = {"nomad_tls": "off", "nomad_acl_enabled": False}
    plain = config("nomad", nomad_agent_options={"ui": {"enabled": False}, "log_level": "DEBUG"}, **opened)
    assert 'log_level            = "DEBUG"' in plain and "leave_on_interrupt   = false" in plain
    assert plain[-3:] == ["ui {", "  enabled = false", "}"]
    assert not [line for line in plain if line.startswith(("advertise", "tls", "acl", "telemetry"))]
    files = {f"nomad_tls_{name}_file": f"/{name}.pem" for name in ("ca", "cert", "key")}
    full = config(
        "nomad", nomad_advertise_addr="192.0.2.1", nomad_acl_enabled=True, nomad_tls="files",
        nomad_telemetry={"prometheus_metrics": True}, **files,
    )  # fmt: skip
    closed = "\n".join(config("nomad"))
    assert '  key_file               = "/etc/nomad.d/tls/agent-key.pem"' in closed
    assert "acl {\n  enabled = true\n}" in closed
    for block in (
        ["advertise {", '  http = "192.0.2.1"', '  rpc  = "192.0.2.1"', '  serf = "192.0.2.1"', "}"],
        ["  verify_server_hostname = true", "  verify_https_client    = true", "}"],
        ["acl {", "  enabled = true", "}"],
        ["telemetry {", "  prometheus_metrics = true", "}"],
    ):
        assert "\n".join(block) in "\n".join(full)


REGIONS = {
    "e1": {"nomad_region": "east", "ansible_host": "192.0.2.1"},
    "w1": {"nomad_region": "west", "ansible_host": "192.0.2.11"},
    "w2": {"nomad_region": "west", "nomad_advertise_addr": "192.0.2.12"},
}


@pytest.mark.parametrize(
    ("host", "hosts", "servers"),
    [
        ("w1", REGIONS, ["w1", "w2"]),
        ("e1", REGIONS, ["e1"]),
        ("gpu", {**REGIONS, "gpu": {"nomad_region": "west"}}, ["w1", "w2"]),
        # Who names none is in Nomad's own,
        ("x", {**REGIONS, "x": {}}, ["x"]),
        ("w1", {**REGIONS, "x": {}}, ["w1", "w2"]),
        # but where a play names it for all of its hosts.
        ("x", {"x": {}, "y": {}}, ["x", "y"]),
    ],
)
def test_servers_are_those_of_the_region(host: str, hosts: dict[str, Any], servers: list[str]) -> None:
    own = hosts[host].get("nomad_region", "global" if "e1" in hosts else "lab")
    group = [name for name in hosts if name != "gpu"]
    given = {"inventory_hostname": host, "nomad_region": own, "hostvars": hosts, "groups": {"nomad_servers": group}}
    assert valued("__nomad_servers", **given) == servers
    assert valued("__nomad_is_server", **given) is (host in servers)


@pytest.mark.parametrize(
    ("hosts", "bind", "address"),
    [
        ({"s": {}, "gpu1": {"nomad_bind_addr": "192.0.2.21"}}, "192.0.2.21", "127.0.0.1"),
        ({"s": {"nomad_bind_addr": "192.0.2.1"}, "gpu1": {}}, "0.0.0.0", "192.0.2.1"),
        # A play names it for all of its hosts.
        ({"s": {}, "gpu1": {}}, "192.0.2.1", "192.0.2.1"),
    ],
)
def test_a_server_is_asked_where_it_listens(hosts: dict[str, Any], bind: str, address: str) -> None:
    given = {"nomad_bind_addr": bind, "hostvars": hosts, "groups": {"nomad_servers": ["s"]}, "nomad_tls": "off"}
    (speaker,) = valued("__nomad_speakers", **given)
    assert (speaker["host"], speaker["api"]["address"]) == ("s", f"http://{address}:4646")


@pytest.mark.parametrize(
    ("servers", "wanted", "older"),
    [
        ("1.11.3", "1.11.3", False),
        ("1.11.2", "1.11.3", True),
        ("1.11.3+ent", "1.11.3+ent", False),
        ("1.11.2+ent", "1.11.3+ent", True),
        ("1.12.0-beta.1", "1.12.0", True),
        (None, "1.11.3", False),
    ],
)
def test_servers_of_the_same_release_are_not_older(servers: str | None, wanted: str, older: bool) -> None:
    given = {"nomad_version": wanted, "__nomad_servers_ran": servers}
    assert valued("__nomad_servers_are_older", **given) is older


def test_a_release_that_does_not_fit_is_refused_with_what_the_node_is_left_in() -> None:
    given: dict[str, Any] = {"nomad_version": "1.11.3", "__nomad_ran": None, "__nomad_servers_ran": "1.11.2"}
    told = valued("__nomad_exchange_refusal", **given)
    assert told.startswith("a server of it runs Nomad 1.11.2") and told.endswith("or set nomad_version to theirs.")
    for unmarked in ({"maintenance": None}, {"failed": True}):
        assert valued("__nomad_exchange_refusal", **given, __node_maintenance_out=unmarked) == told
    left = " The node stays out of work until a run has come to its end."
    taken = {"__node_maintenance_out": {"maintenance": "gpufarm.core: driver"}}
    assert valued("__nomad_exchange_refusal", **given, **taken) == told + left
    newer = valued("__nomad_exchange_refusal", **{**given, "__nomad_ran": "1.12.0"}, **taken)
    assert "1.12.0" in newer and newer.endswith(left)
    assert valued("__nomad_exchange_refusal", **{**given, "__nomad_servers_ran": "1.11.3"}, **taken) == ""


def region_server(host: str, tmp_path: Path, **given: Any) -> dict[str, Any]:
    return {
        "inventory_hostname": host, "hostvars": REGIONS, "groups": {"nomad_servers": list(REGIONS)},
        "nomad_secrets_dir": str(tmp_path), "nomad_server_authoritative_region": "east", "_common_paths": [],
        "ansible_play_hosts_all": list(REGIONS), **REGIONS[host], **given,
    }  # fmt: skip


def test_configuration_of_servers_of_two_regions(tmp_path: Path) -> None:
    (tmp_path / "nomad-management-token.txt").write_text("management", encoding="ascii")
    cases = [
        region_server("e1", tmp_path),
        region_server("w1", tmp_path, nomad_server_federation_servers=["198.51.100.1"]),
        region_server("w1", tmp_path, nomad_server_replication_token="given"),
        region_server("w1", tmp_path, nomad_acl_enabled=False),
    ]
    found = role_helper.values("__nomad_server_config", ["_common", "nomad", "nomad_server"], cases)
    assert [each["server"]["server_join"]["retry_join"] for each in found[:2]] == [
        ["192.0.2.11", "192.0.2.12"], ["192.0.2.12", "192.0.2.1", "198.51.100.1"],
    ]  # fmt: skip
    assert [each["server"]["bootstrap_expect"] for each in found[:2]] == [1, 2]
    assert [each["server"]["authoritative_region"] for each in found] == ["east", "east", "east", None]
    assert [each["acl"] for each in found] == [
        None, {"replication_token": "management"}, {"replication_token": "given"}, None
    ]  # fmt: skip


def test_clients_are_introduced_from_nomad_1_11_on(tmp_path: Path) -> None:
    strict = {"nomad_client_introduction": "strict"}
    cases = [region_server("e1", tmp_path, nomad_tls="off", **given) for given in ({}, strict)]
    found = role_helper.values("__nomad_server_config", ["_common", "nomad", "nomad_server"], cases)
    assert [each["server"]["client_introduction"] for each in found] == [None, {"enforcement": "strict"}]
    old = {"nomad_version": "1.10.5"}
    cases = [region_server("e1", tmp_path, nomad_tls="off", **given) for given in (strict, old, {**strict, **old})]
    *rest, told = role_helper.values("__nomad_refusal", ["nomad", "_common"], cases)
    assert rest == ["", ""]
    assert told.startswith(
        "nomad_client_introduction is strict, and nomad_version is 1.10.5. Expected: 1.11.0 or newer"
    )


def test_versions_that_never_report_devices_are_refused(tmp_path: Path) -> None:
    versions = ("1.4.3", "1.6.10", "1.7.0", "1.7.7", "1.8.0")
    cases = [region_server("e1", tmp_path, nomad_tls="off", nomad_version=version) for version in versions]
    *old, first, second, third = role_helper.values("__nomad_refusal", ["nomad", "_common"], cases)
    assert [told.split(" Expected: ")[0] for told in old] == ["nomad_version is 1.4.3.", "nomad_version is 1.6.10."]
    assert "Next step: set a newer nomad_version." in old[0] and [first, second, third] == ["", "", ""]


@pytest.mark.parametrize(
    ("version", "kind"),
    [("1.7.0", "exec"), ("1.7.7", "exec"), ("1.8.0", "notify"), ("1.9.7", "notify"), ("1.11.3", "notify")],
)
def test_systemd_waits_for_an_agent_that_says_when_it_is_ready(version: str, kind: str) -> None:
    assert [line for line in unit(nomad_version=version) if line.startswith("Type=")] == [f"Type={kind}"]


# All that the roles write by themselves and Nomad 1.7 knows, by its CHANGELOG.
SINCE_1_7 = {
    "name", "region", "datacenter", "data_dir", "plugin_dir", "bind_addr", "log_level", "disable_update_check",
    "leave_on_interrupt", "leave_on_terminate", "advertise", "tls", "acl", "telemetry",
}  # fmt: skip
CLIENT_SINCE_1_7 = {
    "enabled", "servers", "node_class", "node_pool", "reserved", "meta", "cni_path", "host_volume",
}  # fmt: skip
SERVER_SINCE_1_7 = {"enabled", "authoritative_region", "bootstrap_expect", "server_join"}


@pytest.mark.parametrize("version", ["1.7.0", "1.9.7", "1.10.5", "1.11.3"])
def test_an_agent_is_told_nothing_that_its_version_does_not_know(version: str, tmp_path: Path) -> None:
    case = region_server("e1", tmp_path, nomad_tls="off", nomad_version=version)
    roles = ["_common", "nomad", "nomad_server", "nomad_client"]

    def written(name: str, part: str | None = None) -> set[str]:
        (found,) = role_helper.values(name, roles, [case])
        return {key for key, value in (found[part] if part else found).items() if value is not None}

    assert written("__nomad_config") <= SINCE_1_7
    assert written("__nomad_client_config", "client") <= CLIENT_SINCE_1_7
    assert written("__nomad_server_config", "server") <= SERVER_SINCE_1_7


def test_volumes_that_users_create_need_nomad_1_10(tmp_path: Path) -> None:
    cases = [
        region_server("e1", tmp_path, nomad_tls="off", nomad_version=version, nomad_client_sized_volumes=asked)
        for version, asked in (("1.9.7", False), ("1.10.0", True), ("1.9.7", True))
    ]
    *rest, told = role_helper.values("__nomad_client_refusal", ["_common", "nomad", "nomad_client"], cases)
    assert rest == ["", ""]
    assert told.startswith("nomad_client_sized_volumes is true, and nomad_version is 1.9.7. Expected: 1.10.0 or newer")


def test_a_drain_that_would_never_come_is_refused(tmp_path: Path) -> None:
    """An inventory that asks for it would be taken for one whose nodes are drained by a shutdown."""
    options = {"client": {"drain_on_shutdown": {"deadline": "10m"}}}
    cases = [
        region_server("e1", tmp_path, nomad_tls="off", **given)
        for given in (
            {}, {"nomad_client_drain_on_shutdown": {}}, {"nomad_client_options": options},
            {"nomad_client_drain_on_shutdown": {"deadline": "10m"}},
        )
    ]  # fmt: skip
    *rest, told = role_helper.values("__nomad_client_refusal", ["_common", "nomad", "nomad_client"], cases)
    assert rest == ["", "", ""]
    assert told.startswith("nomad_client_drain_on_shutdown is set, which does nothing:")
    assert "Next step: take it out, drain a node before its machine is shut down" in told
    assert told.endswith("let it work again after the boot by `nomad node eligibility -enable -self`.")


def test_a_data_folder_that_options_name_is_refused(tmp_path: Path) -> None:
    """The roles look for the node's identity and the keyring of the gossip in nomad_data_dir."""
    names = [f"nomad_{part}_options" for part in ("agent", "server", "client")]
    given = [{name: options} for name in names for options in ({"data_dir": "/mnt/n"}, {"data_dir": None}, {"ui": {}})]
    cases = [region_server("e1", tmp_path, nomad_tls="off", **each) for each in given]
    found = role_helper.values("__nomad_refusal", ["nomad", "_common"], cases)
    for told, each in zip(found, given, strict=True):
        ((name, options),) = each.items()
        assert told.startswith(f"{name} has data_dir. Expected: ") is ("data_dir" in options), told
        assert told == "" or told.endswith(
            " Next step: set nomad_data_dir to that folder, and take data_dir out of it."
        )


def test_nomad_1_9_7_with_the_plugins_release_1_1_0(tmp_path: Path) -> None:
    """What a blog of Nomad on WSL installs."""
    given = {
        "nomad_version": "1.9.7", "nomad_device_nvidia_version": "1.1.0", "ansible_check_mode": False,
        "ansible_facts": {"architecture": "x86_64", "nvidia_smi": {"available": True}},
    }  # fmt: skip
    cases = [region_server("e1", tmp_path, nomad_tls="off", **given)]
    for name in ("__nomad_refusal", "__nomad_device_nvidia_refusal"):
        assert role_helper.values(name, ["_common", "nomad", "nomad_device_nvidia"], cases) == [""], name


def test_another_data_folder_than_that_with_the_agents_state_is_refused(tmp_path: Path) -> None:
    """It would be another node, whose jobs go on beside those of the old one, or a server of an empty farm."""
    given = {"nomad_tls": "off", "nomad_acl_enabled": False, "groups": {}, "hostvars": {}}
    known = {**role_helper.variables("_common", "nomad"), **given, "inventory_hostname": "h"}
    # What was kept where; whose the file is; where the agent is to keep it.
    cases: dict[str, tuple[str, str, str]] = {
        "client": ("client/client-id", "# Ansible managed", "new"),
        "server": ("server/raft/raft.db", "# Ansible managed", "new"),
        "neither": ("client/state.db", "# Ansible managed", "new"),
        "same": ("client/client-id", "# Ansible managed", "old"),
        "theirs": ("client/client-id", "# by hand", "new"),
    }
    hosts = {}
    for name, (kept, heading, place) in cases.items():
        folder = tmp_path / name
        (folder / "old" / kept).parent.mkdir(parents=True)
        (folder / "old" / kept).touch()
        text = nomad_hcl(role_helper.value("__nomad_config", {**known, "nomad_data_dir": str(folder / "old")}))
        (folder / "nomad.hcl").write_text(f"{heading}\n{text}", encoding="utf-8")
        hosts[name] = {
            **playbook_helper.LOCAL, **given, "nomad_replace_config": True, "nomad_config_dir": str(folder),
            "nomad_data_dir": str(folder / place),
        }  # fmt: skip
    told = "told: {{ inventory_hostname }}: {{ __nomad_refusal }} :end"
    tasks = [
        {"ansible.builtin.import_role": {"name": "gpufarm.core.nomad", "tasks_from": "variables.yml"}},
        {"gpufarm.core.host_info": {}, "register": "_common_host",
         "module_defaults": {"gpufarm.core.host_info": "{{ __nomad_looks_at }}"}},
        {"ansible.builtin.debug": {"msg": told}},
    ]  # fmt: skip
    (tmp_path / "play.yml").write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "tasks": tasks}]))
    done = playbook_helper.run_playbook(tmp_path, {"all": {"hosts": hosts}}, str(tmp_path / "play.yml"))
    said = dict(re.findall(r"told: (\w+): (.*?) ?:end", " ".join((done.stdout + done.stderr).split())))
    assert {name for name, why in said.items() if why} == {"client", "server"}, done.stdout
    for name, left in (("client", "client/client-id"), ("server", "server")):
        new, old = tmp_path / name / "new", tmp_path / name / "old"
        assert said[name] == (
            f"nomad_data_dir is {new}, and the agent has kept {old}/{left}. Expected: the folder of its state, because "
            "in another it is a new node or an empty server. Next step: set nomad_data_dir back; or, while no jobs are "
            f"on the node, run `systemctl stop nomad`, move the folder with all that it holds to {new}, and run this "
            "again."
        )
    assert set(said) == set(cases)


def test_a_package_that_restarts_the_agent_is_refused(tmp_path: Path) -> None:
    """What apt has left of one that was removed does nothing."""
    told = [["installed nomad=1.9.7-1"], ["config-files nomad=1.9.7-1"], ["installed nomad-autoscaler=0.4.6-1"]]
    hosts = [{"_common_host": {"packages": packages}} for packages in told]
    red_hat = {**hosts[0], "_common_family": {"packages": "dnf"}}
    cases = [region_server("e1", tmp_path, nomad_tls="off", **host) for host in [*hosts, red_hat]]
    debian, *rest, other = role_helper.values("__nomad_refusal", ["nomad", "_common"], cases)
    assert debian.startswith("found the package nomad 1.9.7, which restarts the agent") and rest == ["", ""]
    assert "Next step: `apt-get remove nomad`, which" in debian and "Next step: `dnf remove nomad`, which" in other
    # The configuration stays, and would be refused next.
    assert debian.endswith("lets the running agent and its jobs be, and run this again.")
    theirs = role_helper.host("/etc/nomad.d/nomad.hcl", packages=told[0])
    theirs["files"][0]["managed"] = False
    both = region_server("e1", tmp_path, nomad_tls="off", _common_host=theirs)
    (more,) = role_helper.values("__nomad_refusal", ["nomad", "_common"], [both])
    assert more.endswith(
        "jobs be, take what is in /etc/nomad.d/nomad.hcl over into the variables of these roles and move it out of the "
        "folder, and run this again."
    )


def test_a_package_that_is_newer_is_followed_by_no_older_nomad(tmp_path: Path) -> None:
    """When it has been removed, no agent may run any more that could be asked."""
    data = "/opt/nomad/data"
    ours, theirs = (role_helper.host(data, "/etc/nomad.d/nomad.hcl") for _ in "12")
    theirs["files"][1]["managed"] = False
    hosts = [
        {**host, "packages": [f"{state} nomad={version}-1"]} for state, version, host in (
            ("installed", "1.12.0", theirs), ("config-files", "1.12.0", theirs), ("config-files", "1.12.0", ours),
            ("config-files", "1.12.0", role_helper.host()), ("config-files", "1.11.3", theirs),
        )
    ]  # fmt: skip
    given = {"nomad_tls": "off", "nomad_version": "1.11.3", "nomad_replace_config": True}
    cases = [
        region_server(
            "e1", tmp_path, **given, _common_host=host, _common_paths=[file["path"] for file in host["files"]]
        ) for host in hosts
    ]  # fmt: skip
    there, removed, *rest = role_helper.values("__nomad_refusal", ["nomad", "_common"], cases)
    assert there.startswith("found the package nomad 1.12.0, which restarts the agent")
    assert (
        "Next step: set nomad_version to 1.12.0 or newer, because Nomad does not read what a newer one has written, "
        "then `apt-get remove nomad`, which"
    ) in there
    assert removed.startswith(
        "the package nomad 1.12.0 has been here, and nomad_version is 1.11.3. Expected: a version"
    )
    assert removed.endswith(
        f" Next step: set nomad_version to 1.12.0 or newer; or move {data} away if nobody needs it."
    )
    # What the role has been through since, and a host that has no data.
    assert rest == ["", "", ""]


AS_SERVER: dict[str, Any] = {"inventory_hostname": "h", "groups": {"nomad_servers": ["h"]}, "hostvars": {"h": {}}}
AS_CLIENT: dict[str, Any] = {**AS_SERVER, "groups": {"nomad_servers": []}}


def test_a_server_that_was_taken_out_of_its_group_is_refused() -> None:
    """It would go on as a server, with a certificate of a client, and without a turn."""
    host = role_helper.host("/etc/nomad.d/nomad.hcl", "/etc/nomad.d/server.hcl")
    theirs = {**host, "files": [{**file, "managed": False} for file in host["files"]]}
    node = role_helper.host("/etc/nomad.d/nomad.hcl", "/etc/nomad.d/client.hcl")
    given = {"nomad_tls": "off", "nomad_acl_enabled": False, "nomad_replace_config": True}
    cases = [
        {**kind, **given, "_common_host": looked_at} for kind, looked_at in (
            (AS_SERVER, host), (AS_CLIENT, theirs), (AS_CLIENT, node), ({**AS_CLIENT, "groups": {}}, host),
            (AS_CLIENT, host),
        )
    ]  # fmt: skip
    *rest, told = role_helper.values("__nomad_refusal", ["nomad", "_common"], cases)
    assert rest == [""] * 4
    assert told == (
        "found /etc/nomad.d/server.hcl, and this host is not in the group nomad_servers. Expected: a server in it "
        "until it has left, because the others count on it. Next step: put it back into the group, run "
        "gpufarm.core.remove with `--limit h`, take it out of the group then, and run this again, which has "
        "it as a client."
    )


def test_a_configuration_of_somebody_elses_is_replaced_only_where_that_is_asked_for(tmp_path: Path) -> None:
    """What apt-get remove nomad has left, or somebody has written, may be all that tells of volumes and keys."""
    names = ("nomad", "server", "client", "gossip", "volumes")
    host = role_helper.host(*(f"/etc/nomad.d/{name}.hcl" for name in names))
    theirs = {**host, "files": [{**file, "managed": file["path"].endswith("client.hcl")} for file in host["files"]]}
    cases = [
        region_server("e1", tmp_path, nomad_tls="off", **given)
        for given in (
            {"_common_host": host},
            {"_common_host": theirs, "nomad_replace_config": True},
            {"_common_host": theirs, "nomad_replace_config": "true"},
            {"_common_host": theirs},
        )
    ]
    *rest, told = role_helper.values("__nomad_refusal", ["nomad", "_common"], cases)
    assert rest == ["", "", ""]
    assert told.startswith("found /etc/nomad.d/nomad.hcl, /etc/nomad.d/server.hcl, which these roles have not written.")
    assert "nomad_client_host_volumes" in told and "set `nomad_replace_config: true`" in told
    # What no role writes on this host is its owner's.
    alone = {**host, "files": [{**file, "managed": not file["path"].endswith("client.hcl")} for file in host["files"]]}
    assert templated("{{ __nomad_foreign }}", "nomad", _common_host=alone, **AS_SERVER) == []
    assert templated("{{ __nomad_foreign }}", "nomad", _common_host=alone, **AS_CLIENT) == ["/etc/nomad.d/client.hcl"]
    both = {**AS_SERVER, "groups": {"nomad_servers": ["h"], "gpu_nodes": ["h"]}}
    assert templated("{{ __nomad_foreign }}", "nomad", _common_host=alone, **both) == ["/etc/nomad.d/client.hcl"]
    kept = {}
    for path in files("roles/nomad/tasks", "roles/nomad_server/tasks", "roles/nomad_client/tasks"):
        for task in tasks(path):
            options = task.get("ansible.builtin.template", {})
            if options.get("src", "").endswith(".hcl.j2"):
                kept[options["src"]] = templated(options["backup"], "nomad", _common_host=theirs, **AS_SERVER)
    assert kept == {"nomad.hcl.j2": True, "server.hcl.j2": True, "client.hcl.j2": False}


@pytest.mark.parametrize("role", ["nomad", "nomad_server", "nomad_client"])
def test_a_configuration_is_known_again_whatever_ansible_is_told_to_write_above_files(role: str) -> None:
    (path,) = (ROOT / "roles" / role / "templates").glob("*.hcl.j2")
    heading = path.read_text(encoding="utf-8").splitlines()[0]
    assert templated(heading, role, ansible_managed="by us") == "# Ansible managed"


@pytest.mark.parametrize(
    ("given", "there", "introduces"),
    [
        ({}, [], False),
        ({"nomad_client_introduction": "none"}, [], False),
        ({"nomad_client_introduction": "warn"}, ["client-id"], True),
        ({"nomad_client_introduction": "strict", "__nomad_client_introduction": {}}, [], False),
        ({"nomad_client_introduction_token": "given"}, [], True),
        ({"nomad_client_introduction_token": "given"}, ["client-id", "intro_token.jwt"], True),
        ({"nomad_client_introduction": "strict", "nomad_client_introduction_token": "given"}, ["client-id"], False),
    ],
)
def test_who_is_introduced(given: dict[str, Any], there: list[str], introduces: bool) -> None:
    files = [{"path": f"/opt/nomad/data/client/{name}"} for name in there]
    case = {"_common_host": {"files": files}, "inventory_hostname": "gpu01", **given}
    (found,) = role_helper.values("__nomad_client_introduces", ["_common", "nomad", "nomad_client"], [case])
    assert found is introduces


def test_a_token_of_introduction_holds_until_the_last_agent_of_a_large_run_starts() -> None:
    """Nomad has bounded it so; 5 minutes, its own default, may be over by then."""
    asks = [task for task in role_helper.tasks_of("nomad_client/tasks/introduce.yml") if "register" in task]
    assert asks[0]["gpufarm.core.nomad_client_introduction"]["ttl"] == 30 * 60


def test_meta_of_a_node_tells_of_its_gpus() -> None:
    """What is not known is empty, and a GPU that the plugin hides is none of the node's."""
    gpus = [
        {"uuid": f"GPU-{number}", "name": "NVIDIA H200", "memory_total_mib": size, "mig_mode": mode, "numa_node": numa}
        for number, (size, mode, numa) in enumerate([(143771, "Enabled", 1), (143770, "Disabled", 0), (9, None, None)])
    ]
    facts = {"nvidia_smi": {"gpus": gpus, "driver_version": "580.95.05"}}
    case = {"ansible_facts": facts, "nomad_device_nvidia_ignored_gpu_ids": ["GPU-2"], "_common_is_wsl": False}
    unknown = {**case, "ansible_facts": {"nvidia_smi": {"gpus": gpus[2:], "driver_version": None}}}
    unknown["nomad_device_nvidia_ignored_gpu_ids"] = []
    found = role_helper.values("__nomad_client_gpu_meta", ["_common", "nomad", "nomad_client"], [case, unknown])
    assert found[0] == {
        "gpu_model": "NVIDIA H200", "gpu_count": "2", "gpu_memory_mib": "143770", "gpu_mig": "true",
        "gpu_numa_nodes": "0,1", "gpu_driver_branch": "580", "wsl": "false",
    }  # fmt: skip
    assert found[1] == {
        "gpu_model": "NVIDIA H200", "gpu_count": "1", "gpu_memory_mib": "9", "gpu_mig": "false",
        "gpu_numa_nodes": "", "gpu_driver_branch": "", "wsl": "false",
    }  # fmt: skip


def test_acls_are_kept_by_one_server_of_the_region_whose_acls_count(tmp_path: Path) -> None:
    kept = "{{ __nomad_server_keeps_acls }} {{ __nomad_server_replicates }}"
    both = {"ansible_play_hosts": list(REGIONS)}
    found = {host: templated(kept, "nomad_server", **region_server(host, tmp_path, **both)) for host in REGIONS}
    assert found == {"e1": "True False", "w1": "False True", "w2": "False True"}
    west = {"ansible_play_hosts": ["w2"], "nomad_server_authoritative_region": "west"}
    assert templated(kept, "nomad_server", **region_server("w2", tmp_path, **west)) == "True False"


GOSSIP = (
    "nomad_server_gossip_key has {} characters or others than base64 has. Expected: `generate`, nothing, or 16, 24 or "
    "32 bytes in base64. Next step: make one by `nomad operator gossip keyring generate`."
)
ELSEWHERE = {"nomad_server_authoritative_region": "north", "nomad_server_federation_servers": ["198.51.100.1"]}
OF_ANOTHER = {"nomad_tls": "off", "nomad_server_replication_token": "given"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, ""),
        *(
            ({"nomad_server_gossip_key": key}, told)
            for key, told in {
                "": "",
                "generate": "",
                "c2l4dGVlbiBieXRlcyBvaw==": "",
                "YW5vdGhlci1zZWNyZXQtZm9yLXRoaXMtc2NlbmFyaW8=": "",
                # 15 bytes, and a sentence of the right length.
                "ZmlmdGVlbiBieXRlcyEh": GOSSIP.format(20),
                "not a key, but as long as a!": GOSSIP.format(28),
            }.items()
        ),
        ({"nomad_acl_enabled": False, "nomad_server_authoritative_region": ""}, ""),
        (
            {"nomad_server_authoritative_region": ""},
            "the servers are in the regions east, west, and nomad_server_authoritative_region is empty. Expected: ",
        ),
        (
            {"nomad_server_authoritative_region": "north"},
            "nomad_server_authoritative_region is north, which is no region of the servers here (east, west), and ",
        ),
        # A token that nobody has bootstrapped is not made up.
        (
            {"ansible_play_hosts_all": ["w1", "w2"]},
            "the ACLs are those of region east, and there is no management token to ",
        ),
        (
            {"nomad_token": "of my own"},
            "the ACLs are those of region east, and there is no management token to fetch them ",
        ),
        (
            ELSEWHERE,
            "the ACLs are those of region north, and there is no management token to fetch them with: nomad_ser",
        ),
        ({**ELSEWHERE, **OF_ANOTHER}, ""),
        (
            {**ELSEWHERE, **OF_ANOTHER, "nomad_tls": "generate"},
            "the farm is that of another inventory, which has region north, and nomad-ca.pem, nomad-gossip-key.txt is ",
        ),
    ],
)
def test_what_is_refused_of_regions(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    (found,) = role_helper.values(
        "__nomad_server_refusal", ["_common", "nomad", "nomad_server"], [region_server("w1", tmp_path, **given)]
    )
    assert found.startswith(said) and bool(found) is bool(said)
    assert not said or found.count("Next step: ") == 1


def test_a_farm_with_acls_gets_no_other_first_token(tmp_path: Path) -> None:
    """Nomad would not take it, and the servers of other regions would fetch no ACLs with it."""
    asked, west = ["_common", "nomad", "nomad_server"], {"nomad_server_replication_token": "given"}

    def seen(host: str, *names: str, acl: bool | None = True, **given: Any) -> dict[str, Any]:
        paths = [f"/etc/nomad.d/{name}.hcl" for name in names]
        looked = {"_common_host": role_helper.host(*paths, agent_acl={"/etc/nomad.d/nomad.hcl": acl})}
        hosts = {**REGIONS, "e1": {**REGIONS["e1"], **looked}}
        return region_server(host, tmp_path, hostvars=hosts, nomad_server_gossip_key="", **given)

    cases = [
        seen("e1", "nomad", "server"),
        # Who fetches the ACLs would be configured with the other token.
        seen("w1", "nomad", "server"),
        seen("e1", "nomad", "server", ansible_play_hosts=["e1"], **west),
        seen("w1", "nomad", "server", **west),
        seen("e1", "nomad", "server", nomad_token="own"),
        seen("e1", "nomad", "server", nomad_acl_enabled=False),
        # A new server, one that a run was cut at before it made the token, and an open farm that gets ACLs.
        seen("e1", acl=None),
        seen("e1", "nomad"),
        seen("e1", "nomad", "server", acl=False),
        region_server("e1", tmp_path, hostvars={**REGIONS, "e1": {}}, nomad_server_gossip_key=""),
    ]
    found = role_helper.values("__nomad_server_refusal", asked, cases)
    path = f"{tmp_path}/nomad-management-token.txt"
    for text in found[:3]:
        assert text.startswith(f"found ACLs on the servers e1, and no {path} on the control machine. Expected: ")
        assert text.count("Next step: ") == 1
    assert found[3:] == [""] * 7
    # A run that was cut before it gave the token to Nomad is gone on with.
    Path(path).write_text("made", encoding="ascii")
    assert role_helper.values("__nomad_server_refusal", asked, cases[:2]) == ["", ""]


def test_configuration_of_a_server() -> None:
    given = {"nomad_server_options": {"server": {"node_gc_threshold": "72h"}}, "nomad_server_join": ["192.0.2.2"]}
    assert config("nomad_server", **given) == [
        "server {", "  enabled           = true", "  bootstrap_expect  = 1", '  node_gc_threshold = "72h"',
        "  server_join {", '    retry_join     = ["192.0.2.2"]', '    retry_interval = "5s"', "  }", "}",
    ]  # fmt: skip


@pytest.mark.parametrize("group", [True, False])
def test_a_server_with_an_ipv6_address_gets_its_port(group: bool) -> None:
    servers = [
        "2001:db8::1",
        "[2001:db8::2]",
        "[::1]:4747",
        "::ffff:192.0.2.1",
        "192.0.2.1",
        "192.0.2.1:47",
        "fe.example:1",
    ]
    known = role_helper.variables("nomad_client")
    known |= (
        {
            "__nomad_servers": ["s", *servers],
            "__nomad_addresses": {"s": "s.example", **{each: each for each in servers}},
        }
        if group
        else {"nomad_client_servers": ["s.example", *servers]}
    )
    assert role_helper.value("__nomad_client_servers", known) == [
        "s.example", "[2001:db8::1]:4647", "[2001:db8::2]:4647", "[::1]:4747", "[::ffff:192.0.2.1]:4647", *servers[4:],
    ]  # fmt: skip


def test_a_machine_that_leaves_keeps_no_login_of_a_run_that_was_killed() -> None:
    """bundle.yml has one in its folder for as long as it collects."""
    absent = {task["name"]: task for task in tasks(role_helper.ROLES / "nomad/tasks/absent.yml")}
    gone = valued(absent["Have nothing of the agent"]["loop"].strip().strip("{}"))
    assert {"/var/lib/gpufarm/collect", "/var/lib/gpufarm/bundle", "/var/lib/gpufarm/handed"} <= set(gone)


# What an agent of Nomad 1.7 takes in the blocks that the roles write, by HashiCorp's documentation of that version. It
# refuses a file that has another key.
KEYS_OF_1_7 = {
    "": "name region datacenter data_dir plugin_dir bind_addr log_level disable_update_check leave_on_interrupt "
    "leave_on_terminate advertise tls acl telemetry server client plugin",
    "advertise": "http rpc serf",
    "tls": "http rpc ca_file cert_file key_file verify_server_hostname verify_https_client rpc_upgrade_mode",
    "acl": "enabled replication_token",
    "server": "enabled authoritative_region bootstrap_expect server_join encrypt",
    "client": "enabled servers node_class node_pool reserved meta cni_path host_volume",
    "plugin": "docker raw_exec nvidia-gpu",
}


@pytest.mark.parametrize("version", ["1.7.0", "1.8.4", "1.9.7", "1.10.5", "1.11.3"])
def test_an_older_nomad_knows_all_that_is_written(version: str) -> None:
    """Among them the pair Nomad 1.9.7 and nomad-device-nvidia 1.1.0, whose source is not served here."""
    given = {
        "nomad_version": version, "nomad_device_nvidia_version": "1.1.0", "nomad_acl_enabled": True,
        "nomad_client_bridge": True, "nomad_client_node_pool": "gpu", "nomad_advertise_addr": "192.0.2.1",
    }  # fmt: skip
    (refusal,) = role_helper.values("__nomad_refusal", ["nomad", "_common"], [{**ALONE, "groups": {}, "hostvars": {},
        "nomad_version": version, "nomad_tls": "off", "nomad_acl_enabled": False}])  # fmt: skip
    assert refusal == ""
    for role, name in (
        ("nomad", "__nomad_config"),
        ("nomad_server", "__nomad_server_config"),
        ("nomad_client", "__nomad_client_config"),
    ):
        whole = templated(f"{{{{ {name} }}}}", role, **given, inventory_hostname="s1", _common_host=role_helper.host())
        for block, known in KEYS_OF_1_7.items():
            part = (whole.get(block) or {}) if block else whole
            written = {key for key, value in part.items() if value is not None}
            assert written <= set(known.split()), (role, block)


@pytest.mark.parametrize(
    ("told", "comes"),
    [
        ("/opt/cni/bin/bridge\n/opt/cni/bin/loopback\n/usr/sbin/iptables", []),
        ("/opt/cni/bin/bridge\n/opt/cni/bin/loopback\nmissing iptables", ["iptables"]),
        ("missing bridge\nmissing loopback\n/usr/sbin/iptables", ["containernetworking-plugins"]),
        ("/opt/cni/bin/bridge\nmissing loopback\nmissing iptables", ["containernetworking-plugins", "iptables"]),
    ],
)
def test_of_what_networks_of_groups_need_what_is_missing_comes(told: str, comes: list[str]) -> None:
    known = {**role_helper.variables("nomad_client"), "__nomad_client_cni": {"stdout": told}}
    assert role_helper.value("__nomad_client_cni_missing", known) == comes


def test_networks_of_groups_that_cannot_be_had_are_told_by_the_role() -> None:
    path = role_helper.ROLES / "nomad_client/tasks/bridge.yml"
    names, failed = role_helper.begun(
        yaml.safe_load(path.read_text(encoding="utf-8")), "Have the distribution's CNI plugins"
    )
    assert failed and names[-1] == "Require what networks of groups need"
