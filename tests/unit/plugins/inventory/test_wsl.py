"""The inventory, as ansible-inventory prints it, of Windows machines that are asked for real."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.plugins.inventory import wsl
from ansible_collections.gpufarm.core.plugins.plugin_utils import wsl as asking
from ansible_collections.gpufarm.core.tests.unit.playbooks import playbook_helper

from tests.simulator import community_general
from tests.simulator.tools import BuildError
from tests.simulator.windows import PACKAGES, powershell
from tests.simulator.windows.host import POWERSHELL, PROGRAM_FILES, SYSTEM32, Distribution, Machine, Windows
from tests.simulator.windows.sshd import PATIENCE, Sshd, can_have_users

pytestmark = pytest.mark.controller
ROOT = Path(__file__).resolve().parents[4]
ME = {"me": os.geteuid()}
SSH = shutil.which("ssh")


def ansible_inventory(path: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("ansible-inventory"), "-i", path, *options],
        cwd=ROOT, capture_output=True, text=True, check=False,
        # What has more than one word would be broken into lines, and asserted in vain.
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"), "COLUMNS": "10000", **environment},
    )  # fmt: skip


def listed(path: Path, config: dict[str, Any], **environment: str) -> tuple[dict[str, Any], str]:
    """Return an inventory and what was warned of."""
    source = path / "test.wsl.yml"
    full = {"plugin": "gpufarm.core.wsl", "timeout": PATIENCE, **config}
    source.write_text(yaml.safe_dump(full), encoding="utf-8")
    done = ansible_inventory(source, "--list", **environment)
    assert done.returncode == 0, done.stderr
    return loaded(done.stdout), done.stderr


def loaded(text: str) -> dict[str, Any]:
    """Return what --list printed; ansible-core before 2.21 marks what is no template."""
    found: dict[str, Any] = json.loads(text, object_hook=lambda each: each.get("__ansible_unsafe", each))
    return found


def failed(path: Path, config: dict[str, Any]) -> str:
    source = path / "test.wsl.yml"
    source.write_text(yaml.safe_dump({"plugin": "gpufarm.core.wsl", **config}), encoding="utf-8")
    done = ansible_inventory(source, "--list", ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED="true")
    assert done.returncode != 0, done.stdout
    return done.stderr


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Windows:
    monkeypatch.delenv("WSL_UTF8", raising=False)
    distributions = [
        Distribution("Debian", default=True, users=ME),
        Distribution("Old", "Stopped", 1, users=ME),
        Distribution("docker-desktop", users=ME),
        Distribution("podman-machine-default", "Stopped", users=ME),
        Distribution("rancher-desktop-data", "Stopped", users=ME),
    ]
    return Windows.create(tmp_path / "windows", Machine("PC1", distributions))


def local(windows: Windows, name: str = "pc", **options: Any) -> dict[str, Any]:
    return {"name": name, "connection": "local", "wsl_exe": str(windows.mounted(SYSTEM32)), **options}


def test_a_machine_and_its_distributions(here: Windows, tmp_path: Path) -> None:
    inventory, warnings = listed(tmp_path, {"windows_hosts": [local(here, distribution_user="me")]})
    assert inventory["wsl_hosts"] == {"hosts": ["pc"]}
    assert inventory["wsl_instances"] == {"hosts": ["pc-Debian", "pc-Old"]}
    variables = inventory["_meta"]["hostvars"]
    program = str(here.mounted(SYSTEM32))
    assert variables["pc"] == {
        "ansible_become": False,
        "ansible_connection": "gpufarm.core.wsl_windows",
        "wsl_connection": "local",
        "wsl_distributions": [
            "Debian", "Old", "docker-desktop", "podman-machine-default", "rancher-desktop-data",
        ],
        "wsl_exe": program,
        "wsl_reachable": True,
    }  # fmt: skip
    assert variables["pc-Old"] == {
        "ansible_connection": "gpufarm.core.wsl",
        "ansible_user": "me",
        "ansible_wsl_exe": program,
        "wsl_default": False,
        "wsl_distribution": "Old",
        "wsl_host": "pc",
        "wsl_running": False,
        "wsl_state": "Stopped",
        "wsl_user": "me",
        "wsl_version": 1,
    }
    debian = variables["pc-Debian"]
    assert (debian["wsl_default"], debian["wsl_running"], debian["wsl_version"]) == (True, True, 2)
    assert debian["wsl_kernel"] == Path("/proc/sys/kernel/osrelease").read_text(encoding="ascii").strip()
    assert {"wsl_release", "wsl_release_id", "wsl_release_version", "wsl_ip", "wsl_systemd", "wsl_gpus"} <= set(debian)
    # What is known of a host is none of the options that somebody sets for it.
    specs = yaml.safe_load((ROOT / "roles/wsl/meta/argument_specs.yml").read_text(encoding="utf-8"))["argument_specs"]
    assert not {name for spec in specs.values() for name in spec["options"]} & (debian.keys() | variables["pc"].keys())
    assert here.machine.distributions[1].state == "Stopped"
    assert "WARNING" not in warnings


def test_tasks_run_through_what_was_filled_in(here: Windows, tmp_path: Path) -> None:
    listed(tmp_path, {"windows_hosts": [local(here)]})
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible"), "-i", tmp_path / "test.wsl.yml", "wsl_instances", "-m", "raw",
         "-a", "echo it is $0 {{ wsl_distribution }}"],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "it is /bin/sh Debian" in done.stdout
    assert "it is /bin/sh Old" in done.stdout


def test_tasks_run_in_windows_itself(here: Windows, tmp_path: Path) -> None:
    listed(tmp_path, {"windows_hosts": [local(here)]})
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible"), "-i", tmp_path / "test.wsl.yml", "wsl_hosts", "-m", "raw",
         "-a", "$env:USERPROFILE"],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert r"C:\Users\alice" in done.stdout


def test_groups_compose_filters_and_names(here: Windows, tmp_path: Path) -> None:
    config = {
        "windows_hosts": [local(here)],
        "strict": True,
        "exclude_distributions": ["podman*"],
        "hostname": "{{ wsl_distribution | lower }}.{{ wsl_host }}",
        "groups": {"old": "wsl_version == 1"},
        "keyed_groups": [{"key": "wsl_state", "prefix": "state"}],
        "compose": {"both": "wsl_host ~ '/' ~ wsl_distribution"},
        "filters": [{"include": "wsl_default"}, {"exclude": "wsl_distribution is match('rancher')"}],
    }
    inventory, _warnings = listed(tmp_path, config)
    assert inventory["wsl_instances"]["hosts"] == ["debian.pc", "old.pc", "docker-desktop.pc"]
    assert inventory["old"]["hosts"] == ["old.pc"]
    assert inventory["state_Running"]["hosts"] == ["debian.pc", "docker-desktop.pc"]
    assert inventory["_meta"]["hostvars"]["debian.pc"]["both"] == "pc/Debian"


@pytest.mark.parametrize(
    "config",
    [
        {"compose": {"x": "no_such_variable.y"}},
        {"groups": {"x": "no_such_variable.y"}},
        {"keyed_groups": [{"key": "no_such_variable.y"}]},
        {"filters": [{"exclude": "no_such_variable.y"}]},
    ],
    ids=lambda config: next(iter(config)),
)
def test_strict_is_honoured_everywhere(here: Windows, tmp_path: Path, config: dict[str, Any]) -> None:
    hosts = {"windows_hosts": [local(here)], **config}
    assert "no_such_variable" in failed(tmp_path, {**hosts, "strict": True})
    inventory, _warnings = listed(tmp_path, {**hosts, "strict": False})
    assert inventory["wsl_instances"]["hosts"] == ["pc-Debian", "pc-Old"]


def test_the_same_name_on_two_machines_is_two_hosts(here: Windows, tmp_path: Path) -> None:
    hosts = [local(here, "a"), local(here, "b")]
    inventory, _warnings = listed(tmp_path, {"windows_hosts": hosts, "details": "none"})
    assert inventory["wsl_instances"]["hosts"] == ["a-Debian", "a-Old", "b-Debian", "b-Old"]
    error = failed(tmp_path, {"windows_hosts": hosts, "details": "none", "hostname": "{{ wsl_distribution }}"})
    assert (
        "Two hosts are named Debian. Expected: a name for each. Next step: give another hostname, or other names."
    ) in error
    error = failed(tmp_path, {"windows_hosts": hosts, "details": "none", "hostname": "{{ nothing }}"})
    assert (
        "hostname cannot be made for a-Debian: 'nothing' is undefined. Expected: a template of variables that every "
        "distribution has. Next step: correct the option hostname."
    ) in error


@pytest.mark.parametrize(
    ("described", "error"),
    [
        ("x", "each of windows_hosts needs a name, found no dictionary"),
        ({"password": "s3cret"}, "each of windows_hosts needs a name, found password"),
        ({"connection": "ssh"}, "each of windows_hosts needs a name, found connection"),
        ({"name": "a", "adress": "b"}, "a has unknown options: adress"),
        ({"name": "a", "port": "x"}, "port of a is no number: 'x'"),
        ({"name": "a", "list_addresses": "x"}, "list_addresses of a is 'x'. Expected: true or false"),
        ({"name": "a", "connection": "winrm"}, "connection of a is 'winrm'. Expected: one of local, ssh, psrp"),
        (
            {"name": "a", "distribution_connection": "x"},
            "distribution_connection of a is 'x'. Expected: one of wsl, ssh",
        ),
        ({"name": "a", "ssh_arguments": "-4"}, "ssh_arguments of a must be a list, psrp a dictionary"),
        ({"name": "a", "psrp": "-4"}, "ssh_arguments of a must be a list, psrp a dictionary"),
        ({"name": "a", "address": "-oProxyCommand=x"}, "address of a begins with a dash: '-oProxyCommand=x'"),
        ({"name": "-a"}, "address of -a begins with a dash: '-a'"),
    ],
)
def test_a_machine_that_cannot_be_meant(described: Any, error: str) -> None:
    with pytest.raises(ValueError) as failure:
        wsl.host_of(described)
    assert str(failure.value) == error


THERE = "Next step: correct windows_hosts there."


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"windows_hosts": [{"name": "a", "port": "x"}]}, f"port of a is no number: 'x'. {THERE}"),
        ({"windows_hosts": [{"name": "a"}, {"name": "a"}]}, f"two of windows_hosts have the same name: a. {THERE}"),
        ({"windows_hosts": [], "workers": 0}, "workers is 0. Expected: 1 or more. Next step: correct it there."),
        ({"windows_hosts": [], "timeout": 0}, "timeout is 0. Expected: 1 or more. Next step: correct it there."),
    ],
)
def test_a_configuration_that_cannot_be_meant(tmp_path: Path, config: dict[str, Any], error: str) -> None:
    assert f"{tmp_path}/test.wsl.yml: {error}" in failed(tmp_path, config)


def test_a_filter_that_cannot_be_meant(here: Windows, tmp_path: Path) -> None:
    config = {"windows_hosts": [local(here)], "filters": [{"only": "x"}]}
    assert (
        "One of filters is {'only': 'x'}. Expected: either include or exclude, with a condition. Next step: correct it."
    ) in failed(tmp_path, config)
    config = {"windows_hosts": [local(here)], "filters": [{"exclude": "no_such_variable.y"}], "strict": True}
    # Between are words of Ansible.
    assert re.search(
        r"The filter 'no_such_variable\.y' fails for pc, Debian: .*'no_such_variable' is undefined\. Expected: a "
        r"condition of variables that every distribution has\. Next step: correct it, or set strict: false, which goes "
        r"on without it\.",
        failed(tmp_path, config),
    )


@pytest.mark.parametrize("name", ["wsl.yml", "lab.yml", "lab.wsl.yml.bak", "labwsl.yml"])
def test_other_files_are_left_to_others(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("plugin: gpufarm.core.wsl\nwindows_hosts: []\n", encoding="utf-8")
    assert not wsl.InventoryModule().verify_file(str(tmp_path / name))


@pytest.mark.parametrize("name", ["lab.wsl.yml", "lab.wsl.yaml", ".wsl.yml"])
def test_its_files(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert wsl.InventoryModule().verify_file(str(tmp_path / name))
    assert not wsl.InventoryModule().verify_file(str(tmp_path / "missing.wsl.yml"))


# --------------------------------------------------------------------------------------------------------------------
# Templates


def test_nothing_that_is_named_like_a_template_is_evaluated(here: Windows, tmp_path: Path) -> None:
    if not can_have_users():
        pytest.skip("a container without CAP_SYS_ADMIN mounts nothing")
    touched = tmp_path / "touched"
    evil = f"{{{{ lookup('ansible.builtin.pipe', 'touch {touched}') }}}}{{{{ 7 * 7 }}}}"
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / "etc/os-release").write_text(f"PRETTY_NAME={evil}\nID={evil}\n", encoding="utf-8")
    with here.changed() as machine:
        machine.distributions = [Distribution("Evil", default=True, root=str(root), users={"root": 0})]
    config = {
        "windows_hosts": [local(here, "{{ 7 * 7 }}")],
        "strict": True,
        "hostname": "{{ wsl_host }}/{{ wsl_release }}",
        "compose": {"again": "wsl_release", "joined": "wsl_host ~ wsl_release_id"},
        "keyed_groups": [{"key": "wsl_release_id", "prefix": "id"}],
        "filters": [{"exclude": "wsl_release == '49'"}],
    }
    inventory, _warnings = listed(tmp_path, config)
    name = "{{ 7 * 7 }}/" + evil
    assert inventory["wsl_hosts"]["hosts"] == ["{{ 7 * 7 }}"]
    assert inventory["wsl_instances"]["hosts"] == [name]
    assert not any(group.endswith("49") for group in inventory)
    # What a playbook makes of the variables is the same text.
    said_variables = ("wsl_host", "wsl_release", "again", "joined", "inventory_hostname")
    play = [
        {
            "hosts": "wsl_instances",
            "gather_facts": False,
            "connection": "local",
            "tasks": [
                {
                    "ansible.builtin.copy": {
                        "content": "".join(f"{{{{ {name} }}}}\n" for name in said_variables),
                        "dest": str(tmp_path / "said"),
                        "mode": "0600",
                    },
                    "delegate_to": "localhost",
                }
            ],
        }
    ]
    (tmp_path / "play.yml").write_text(yaml.safe_dump(play), encoding="utf-8")
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), "-i", tmp_path / "test.wsl.yml", tmp_path / "play.yml"],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    said = (tmp_path / "said").read_text(encoding="utf-8").splitlines()
    assert said == ["{{ 7 * 7 }}", evil, evil, "{{ 7 * 7 }}" + evil, name]
    assert not touched.exists()


def test_values_of_a_machine_may_be_templates(here: Windows, tmp_path: Path) -> None:
    described = local(here) | {
        "wsl_exe": "{{ lookup('ansible.builtin.env', 'WHERE') }}",
        "distribution_user": "{{ 'm' ~ 'e' }}",
    }
    inventory, _warnings = listed(tmp_path, {"windows_hosts": [described]}, WHERE=str(here.mounted(SYSTEM32)))
    assert inventory["_meta"]["hostvars"]["pc-Old"]["ansible_user"] == "me"


# --------------------------------------------------------------------------------------------------------------------
# Machines that fail, caches, many machines


def test_a_machine_that_fails_is_a_warning_and_marked(here: Windows, tmp_path: Path) -> None:
    broken = {"name": "gone", "connection": "local", "wsl_exe": "/no/wsl.exe"}
    inventory, warnings = listed(tmp_path, {"windows_hosts": [broken, local(here)]})
    assert inventory["wsl_hosts"]["hosts"] == ["gone", "pc"]
    assert inventory["wsl_instances"]["hosts"] == ["pc-Debian", "pc-Old"]
    gone = inventory["_meta"]["hostvars"]["gone"]
    assert not gone["wsl_reachable"]
    assert gone["wsl_error"].startswith("gone: no wsl.exe answered (/no/wsl.exe: [Errno 2] No such file or directory")
    assert "[WARNING]: gone: no wsl.exe answered (/no/wsl.exe: " in warnings


def test_a_distribution_that_fails_is_a_warning_and_marked(here: Windows, tmp_path: Path) -> None:
    with here.changed() as machine:
        machine.distributions[0].broken = "Wsl/Service/CreateInstance/E_FAIL"
    inventory, warnings = listed(tmp_path, {"windows_hosts": [local(here)]})
    assert inventory["_meta"]["hostvars"]["pc-Debian"]["wsl_error"].endswith("Wsl/Service/CreateInstance/E_FAIL")
    assert "[WARNING]: pc-Debian: nothing is known from inside: The system cannot find" in warnings


def cached(tmp_path: Path) -> dict[str, Any]:
    return {"cache": True, "cache_plugin": "ansible.builtin.jsonfile", "cache_connection": str(tmp_path / "cache")}


def test_a_cached_second_run_asks_nobody(here: Windows, tmp_path: Path) -> None:
    config = {"windows_hosts": [local(here, password="s3cret")], **cached(tmp_path)}
    first, _warnings = listed(tmp_path, config)
    asked = len(here.calls())
    assert asked == 3
    assert listed(tmp_path, config)[0] == first
    assert len(here.calls()) == asked
    assert not any(b"s3cret" in path.read_bytes() for path in (tmp_path / "cache").iterdir())
    # Who is asked for something else is asked, and so is whoever is asked anew.
    listed(tmp_path, {**config, "details": "none"})
    assert len(here.calls()) == asked + 2
    ansible_inventory(tmp_path / "test.wsl.yml", "--list", "--flush-cache")
    assert len(here.calls()) == asked + 4


def test_a_password_is_no_part_of_what_a_cache_goes_by() -> None:
    question = asking.Question()
    first, second, other = (
        wsl.fingerprint(wsl.host_of({"name": name, "password": password, "psrp": {"secret": password}}), question)
        for name, password in (("a", "x"), ("a", "y"), ("b", "x"))
    )
    assert first == second != other


def test_what_failed_is_not_cached(here: Windows, tmp_path: Path) -> None:
    other = Windows.create(tmp_path / "other", dataclasses.replace(here.machine, installed=True))
    program = other.mounted(SYSTEM32)
    program.chmod(0o600)
    config = {"windows_hosts": [local(here, "a"), local(other, "b")], **cached(tmp_path)}
    assert not listed(tmp_path, config)[0]["_meta"]["hostvars"]["b"]["wsl_reachable"]
    asked = len(here.calls())
    program.chmod(0o755)
    assert listed(tmp_path, config)[0]["_meta"]["hostvars"]["b"]["wsl_reachable"]
    assert (len(here.calls()), len(other.calls())) == (asked, 3)
    listed(tmp_path, config)
    assert (len(here.calls()), len(other.calls())) == (asked, 3)


def test_what_could_not_be_asked_is_not_cached(here: Windows, tmp_path: Path) -> None:
    """Neither of a distribution nor the addresses; a warning says so, and a variable."""
    with here.changed() as machine:
        machine.distributions[0].broken = "Wsl/Service/CreateInstance/E_FAIL"
    config = {"windows_hosts": [local(here, list_addresses=True)], **cached(tmp_path)}
    assert "wsl_error" in listed(tmp_path, config)[0]["_meta"]["hostvars"]["pc-Debian"]
    with here.changed() as machine:
        machine.distributions[0].broken = None
    program = here.mounted(POWERSHELL)
    real = program.read_bytes()
    program.write_text("#!/bin/sh\necho refused >&2\nexit 1\n", encoding="utf-8")
    inventory, warnings = listed(tmp_path, config)
    variables = inventory["_meta"]["hostvars"]
    assert "wsl_error" not in variables["pc-Debian"]
    assert "wsl_addresses" not in variables["pc"]
    assert variables["pc"]["wsl_addresses_error"] == (
        f"the addresses of Windows are not known ({program}: refused). Expected: an answer of powershell.exe, because "
        "list_addresses is true. Next step: run `powershell.exe -NoProfile -Command 1` here and mend what it says, or "
        "raise the option timeout."
    )
    assert f"[WARNING]: pc: {variables['pc']['wsl_addresses_error']}" in " ".join(warnings.split())
    program.write_bytes(real)
    variables = listed(tmp_path, config)[0]["_meta"]["hostvars"]["pc"]
    assert variables["wsl_addresses"]
    assert "wsl_addresses_error" not in variables
    asked = len(here.calls())
    listed(tmp_path, config)
    assert len(here.calls()) == asked


# An ssh whose machine answers when so many connections are there at the same time; it notes how many it saw.
CROWD = """\
#!/bin/sh
case " $* " in *" -G "*) exit 0 ;; esac
echo x >>"{folder}/started"
: >"{folder}/in.$$"
set -- "{folder}"/in.*
echo $# >>"{folder}/seen"
[ $# -lt {crowd} ] || : >"{folder}/go"
while [ ! -e "{folder}/go" ]; do sleep 0.2; done
sleep 0.5
rm "{folder}/in.$$"
cat "{folder}/answer"
"""


def many(here: Windows, tmp_path: Path, count: int, crowd: int, **config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = tmp_path / "crowd"
    folder.mkdir()
    answer = powershell.run(here, asking.script(asking.Host("x"), asking.Question(exclude=("docker-desktop*",))))
    (folder / "answer").write_text(answer, encoding="utf-8")
    (folder / "ssh").write_text(CROWD.format(folder=folder, crowd=crowd), encoding="utf-8")
    (folder / "ssh").chmod(0o755)
    full = {"windows_hosts": [{"name": f"pc{n}"} for n in range(count)], **config}
    inventory, _warnings = listed(tmp_path, full, PATH=f"{folder}:{os.environ['PATH']}")
    return inventory, full


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="ascii").split()


def test_a_hundred_machines_are_asked_at_the_same_time_and_once(here: Windows, tmp_path: Path) -> None:
    inventory, config = many(here, tmp_path, 100, 100, **cached(tmp_path))
    assert len(inventory["wsl_hosts"]["hosts"]) == 100
    assert len(inventory["wsl_instances"]["hosts"]) == 200
    assert all(inventory["_meta"]["hostvars"][f"pc{n}"]["wsl_reachable"] for n in range(100))
    assert len(lines(tmp_path / "crowd/started")) == 100
    again, _warnings = listed(tmp_path, config, PATH=f"{tmp_path / 'crowd'}:{os.environ['PATH']}")
    assert again == inventory
    assert len(lines(tmp_path / "crowd/started")) == 100


def test_no_more_machines_than_workers_are_asked_at_the_same_time(here: Windows, tmp_path: Path) -> None:
    inventory, _config = many(here, tmp_path, 12, 4, workers=4)
    assert len(inventory["wsl_hosts"]["hosts"]) == 12
    assert max(int(seen) for seen in lines(tmp_path / "crowd/seen")) == 4


# --------------------------------------------------------------------------------------------------------------------
# What connects


ANSWER: dict[str, Any] = {
    "program": "wsl.exe",
    "computer_name": "PC1",
    "shell": "powershell",
    "addresses": None,
    "ssh": {"hostname": "192.0.2.7", "port": "2222", "user": "alice", "identityfiles": ["~/.ssh/pc"]},
    "distributions": [{"name": "Debian", "state": "Running", "running": True, "version": 2, "default": True}],
}


def test_over_ssh_a_distribution_gets_what_ssh_makes_of_its_machine() -> None:
    host = wsl.host_of({"name": "pc", "distribution_user": "root"})
    assert wsl.connection_variables(host, ANSWER, ANSWER["distributions"][0]) == {
        "ansible_connection": "community.general.wsl",
        "ansible_remote_tmp": "$HOME/.ansible/tmp",
        "ansible_host": "192.0.2.7",
        "ansible_port": 2222,
        "ansible_user": "alice",
        "ansible_ssh_private_key_file": "~/.ssh/pc",
        "wsl_remote_ssh_shell_type": "powershell",
        "wsl_user": "root",
    }


@pytest.mark.parametrize(
    ("ssh", "command"),
    [
        ({}, None),
        ({"proxyjump": "jump"}, "exec ssh -W '[%h]:%p' -F config -- ssh://jump"),
        ({"proxyjump": "a,me@jump:2200"}, "exec ssh -W '[%h]:%p' -F config -J a -- ssh://me@jump:2200"),
        ({"proxycommand": "nc %h %p | tee x"}, "exec nc %h %p | tee x"),
    ],
)
def test_jump_hosts_are_a_command(ssh: dict[str, str], command: str | None) -> None:
    jumps = ["-J", "a", "-Ja", "-o", "ProxyJump=a", "-oProxyCommand=a"]
    host = wsl.host_of({"name": "pc", "ssh_arguments": [*jumps, "-F", "config"]})
    found = wsl.proxy_command(host, ssh)
    # The connection takes it apart as a shell does, and has none.
    assert (shlex.split(found) if found else None) == (["sh", "-c", command] if command else None)


def test_over_ssh_the_machine_itself_gets_what_was_configured() -> None:
    described = {"name": "pc", "address": "win", "port": 22, "user": "alice", "ssh_arguments": ["-J", "a b"]}
    assert wsl.windows_variables(wsl.host_of(described), ANSWER) == {
        "ansible_become": False,
        "ansible_connection": "ssh",
        "ansible_host": "win",
        "ansible_port": 22,
        "ansible_shell_type": "powershell",
        "ansible_ssh_common_args": "-J 'a b'",
        "ansible_user": "alice",
        "wsl_computer_name": "PC1",
        "wsl_connection": "ssh",
        "wsl_distributions": ["Debian"],
        "wsl_exe": "wsl.exe",
    }


def test_a_distributions_own_ssh_server_is_behind_its_machine() -> None:
    described = {
        "name": "pc", "user": "alice", "distribution_connection": "ssh", "distribution_user": "me",
        "distribution_ssh_port": 2022,
    }  # fmt: skip
    running = {**ANSWER["distributions"][0], "ip": "172.28.112.5"}
    found = wsl.connection_variables(wsl.host_of(described), ANSWER, running)
    assert found == {
        "ansible_connection": "ssh",
        "ansible_host": "172.28.112.5",
        "ansible_port": 2022,
        "ansible_user": "me",
        "ansible_ssh_common_args": "-o ProxyCommand='ssh -W '\"'\"'[%h]:%p'\"'\"' -l alice -- pc'",
        "wsl_user": "me",
    }
    beside = wsl.connection_variables(wsl.host_of({**described, "connection": "local"}), ANSWER, running)
    assert beside["ansible_host"] == "172.28.112.5"
    assert "ansible_ssh_common_args" not in beside


def test_over_psrp() -> None:
    psrp = {"ssl": False, "auth": "ntlm", "cert_validation": False, "path": "x", "read_timeout": 5}
    described = {"name": "pc", "connection": "psrp", "user": "bob", "password": "x", "port": "5985", "psrp": psrp}
    host = wsl.host_of(described)
    found = wsl.windows_variables(host, ANSWER)
    assert {key: value for key, value in found.items() if key.startswith("ansible_")} == {
        "ansible_become": False,
        "ansible_connection": "psrp",
        "ansible_host": "pc",
        "ansible_password": "x",
        "ansible_port": 5985,
        "ansible_psrp_auth": "ntlm",
        "ansible_psrp_cert_validation": "ignore",
        "ansible_psrp_path": "x",
        "ansible_psrp_read_timeout": 5,
        "ansible_psrp_protocol": "http",
        "ansible_user": "bob",
    }
    assert wsl.connection_variables(host, ANSWER, ANSWER["distributions"][0]) == {
        "ansible_connection": "ssh", "ansible_host": "pc", "ansible_port": 22,
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------------------------
# The lab of docs/wsl.md

LAB = ROOT / "examples/inventories/lab.wsl.yml"
# ssh and wsl.exe are the programs of the one who types the command; here they lead to the simulated lab.
LAB_SSH = '#!/bin/sh\nexec {ssh} -F {config} "$@"\n'


def lab_machines() -> dict[str, Sequence[Distribution]]:
    return {
        "gaming-pc": [
            Distribution("Ubuntu-24.04", default=True, users=ME),
            Distribution("docker-desktop", users=ME),
        ],
        "workstation": [
            Distribution("Debian", default=True, users=ME | {"root": 0}),
            Distribution("Ubuntu-22.04", "Stopped", users=ME | {"root": 0}),
            Distribution("legacy", version=1, users=ME | {"root": 0}),
        ],
        "here": [Distribution("Debian", default=True, users=ME)],
    }


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Windows]]:
    if not can_have_users():
        pytest.skip("a container without CAP_SYS_ADMIN mounts nothing")
    machines = {
        name: Windows.create(tmp_path / name, Machine(name.upper(), list(distributions)))
        for name, distributions in lab_machines().items()
    }
    with machines["workstation"].changed() as machine:
        machine.default_shell, machine.language = r"C:\Windows\System32\WindowsPowerShell\v1.0\powershell.exe", "de"
    with ExitStack() as stack:
        try:
            gaming_pc = stack.enter_context(Sshd(machines["gaming-pc"], ["alice"]))
            workstation = stack.enter_context(Sshd(machines["workstation"], ["bob"]))
        except BuildError as error:
            pytest.skip(str(error))
        lines_of_config = gaming_pc.client_configuration("gaming-pc") + workstation.client_configuration("192.0.2.32")
        (tmp_path / "ssh_config").write_text(lines_of_config, encoding="utf-8")
        (tmp_path / "ssh").write_text(LAB_SSH.format(ssh=SSH, config=tmp_path / "ssh_config"), encoding="utf-8")
        (tmp_path / "ssh").chmod(0o755)
        folders = [str(tmp_path), str(machines["here"].mounted(SYSTEM32).parent)]
        monkeypatch.setenv("PATH", ":".join(folders), prepend=":")
        monkeypatch.setenv("HOME", str(tmp_path))
        yield machines


def test_the_lab_is_what_the_docs_show(lab: dict[str, Windows]) -> None:
    done = ansible_inventory(LAB, "--graph")
    assert done.returncode == 0, done.stderr
    # Of community.general before 12.2.0, or of none.
    warnings = [line for line in done.stderr.splitlines() if "WARN" in line]
    told = (
        "the installed community.general does not know wsl_remote_ssh_shell_type",
        "community.general is not installed",
    )
    assert all(any(text in line for text in told) for line in warnings), warnings
    text = (ROOT / "docs/wsl.md").read_text(encoding="utf-8")
    assert f"```text\n{done.stdout}```" in text
    for name in ("gaming-pc", "workstation"):
        assert [program for program, _line in lab[name].calls()].count("ssh") == 1
    assert lab["workstation"].machine.distributions[1].state == "Stopped"
    # What the example itself caches answers the second time.
    assert ansible_inventory(LAB, "--graph").stdout == done.stdout
    assert [program for program, _line in lab["gaming-pc"].calls()].count("ssh") == 1


def test_site_makes_nodes_of_the_labs_distributions(lab: dict[str, Windows], tmp_path: Path) -> None:
    """Of that inventory as it is; molecule's scenario farm runs site for distributions of both ways."""
    assert lab
    inventory = tmp_path / "inventory"
    inventory.mkdir()
    (inventory / "servers.yml").write_text("nomad_servers: {hosts: {server: {ansible_host: 192.0.2.10}}}\n")
    # This machine may be slower than those of a lab.
    (inventory / LAB.name).write_text(f"{LAB.read_text(encoding='utf-8')}\ntimeout: {PATIENCE}\n", encoding="utf-8")
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), "-i", inventory, ROOT / "playbooks/site.yml",
         "--list-hosts"],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    hosts = playbook_helper.plays(done.stdout)
    nodes = ["gaming-pc-Ubuntu-24.04", "here-Debian", "workstation-Debian"]
    assert sorted(hosts["GPU nodes"]) == nodes
    assert hosts["Nomad servers"] == ["server"]
    # Neither Windows itself, nor WSL 1, nor what would have to be started first.
    assert hosts.keys() >= {"What the roles refuse", "Nomad's view of the GPUs", "Windows around the nodes"}
    del hosts["Hosts of this run"]
    assert {host for play in hosts.values() for host in play} == {*nodes, "server"}


def test_each_host_of_the_lab_is_reached_in_its_way(lab: dict[str, Windows]) -> None:
    assert lab
    variables = loaded(ansible_inventory(LAB, "--list").stdout)["_meta"]["hostvars"]
    ways = {
        name: (each["ansible_connection"], each.get("wsl_remote_ssh_shell_type")) for name, each in variables.items()
    }
    assert ways == {
        "gaming-pc": ("ssh", None),
        "gaming-pc-Ubuntu-24.04": ("community.general.wsl", None),
        "here": ("gpufarm.core.wsl_windows", None),
        "here-Debian": ("gpufarm.core.wsl", None),
        "workstation": ("ssh", None),
        "workstation-Debian": ("community.general.wsl", "powershell"),
        "workstation-Ubuntu-22.04": ("community.general.wsl", "powershell"),
        "workstation-legacy": ("community.general.wsl", "powershell"),
    }
    assert variables["workstation-Debian"]["ansible_user"] == "bob"
    assert variables["workstation-Debian"]["wsl_user"] == "root"
    assert variables["gaming-pc"]["wsl_addresses"] == [
        {"address": "192.0.2.31", "prefix": 24, "interface": "Ethernet", "default_route": True},
        {
            "address": "172.20.0.1", "prefix": 20, "interface": "vEthernet (WSL (Hyper-V firewall))",
            "default_route": False,
        },
    ]  # fmt: skip


def test_tasks_run_in_the_distributions_of_machines_of_either_shell_and_any_language(lab: dict[str, Windows]) -> None:
    with lab["gaming-pc"].changed() as machine:
        machine.language = "zh"
    said = 'it is {{ wsl_distribution }} with "quotes", <&> and 100 %PATH%'
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible"), "-i", LAB, "gaming-pc-Ubuntu-24.04:workstation-Debian",
         "-m", "ansible.builtin.command", "-a", json.dumps({"argv": ["echo", said]})],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={
            **os.environ, "ANSIBLE_COLLECTIONS_PATH": f"{ROOT / '.collections'}:{community_general.newer()}",
            "PYTHONPATH": str(PACKAGES),
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("Ubuntu-24.04", "Debian"):
        assert said.replace("{{ wsl_distribution }}", name) in done.stdout
    assert "no task will run" not in done.stderr


def ping(pattern: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("ansible"), "-i", LAB, pattern, "-m", "raw", "-a", "echo it is $0"],
        cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        env={
            **os.environ, "ANSIBLE_COLLECTIONS_PATH": f"{ROOT / '.collections'}:{community_general.newer()}",
            "PYTHONPATH": str(PACKAGES),
        },
    )  # fmt: skip


def configured(path: Path, *changes: tuple[str, str]) -> None:
    """Have ~/.ssh/config say something else of all machines, or more than it did."""
    text = path.read_text(encoding="utf-8")
    for pattern, line in changes:
        text = re.sub(pattern, line, text)
    path.write_text(text, encoding="utf-8")


def test_tasks_go_by_what_people_have_ssh_do(
    lab: dict[str, Windows], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lab
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    configured(
        tmp_path / "ssh_config", ("UserKnownHostsFile .*", "UserKnownHostsFile /dev/null"),
        ("(  IdentityFile .*)", rf"  IdentityFile {tmp_path}/missing\n\1\n  HostKeyAlias some-pc"),
    )  # fmt: skip
    done = ping("gaming-pc-Ubuntu-24.04")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no task will run" not in done.stderr
    # Who is not known is not let in, unless ssh does so.
    configured(tmp_path / "ssh_config", ("StrictHostKeyChecking no", "StrictHostKeyChecking accept-new"))
    assert ping("gaming-pc-Ubuntu-24.04").returncode == 0


def test_a_host_key_that_tasks_will_not_find_is_said(lab: dict[str, Windows], tmp_path: Path) -> None:
    assert lab
    configured(
        tmp_path / "ssh_config", ("UserKnownHostsFile .*", rf"UserKnownHostsFile {tmp_path}/known"),
        ("StrictHostKeyChecking no", "StrictHostKeyChecking accept-new"),
        ("Host gaming-pc", "Host gaming-pc\n  HostKeyAlias some-pc\n  HashKnownHosts yes"),
    )  # fmt: skip
    collections = f"{ROOT / '.collections'}:{community_general.newer()}"
    done = ansible_inventory(LAB, "--list", ANSIBLE_COLLECTIONS_PATH=collections)
    variables = loaded(done.stdout)["_meta"]["hostvars"]["gaming-pc-Ubuntu-24.04"]
    name = f"[127.0.0.1]:{variables['ansible_port']}"
    assert variables["wsl_connection_error"] == (
        f"community.general.wsl looks for the host key of {name} in {tmp_path}/known and ~/.ssh/known_hosts, where "
        "there is none. Expected: the key that ssh knows as some-pc (HostKeyAlias). Next step: copy its line from "
        f"{tmp_path}/known to ~/.ssh/known_hosts, for {name}, or set distribution_connection: ssh."
    )
    done = ping("gaming-pc-Ubuntu-24.04")
    assert done.returncode != 0
    # The next step helps.
    (tmp_path / ".ssh").mkdir(exist_ok=True)
    key = Path(f"{lab['gaming-pc'].folder}/ssh/host_key.pub").read_text(encoding="utf-8")
    (tmp_path / ".ssh/known_hosts").write_text(f"{name} {key}", encoding="utf-8")
    done = ping("gaming-pc-Ubuntu-24.04")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gaming-pc-Ubuntu-24.04: no task will run" not in done.stderr


KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGJ6dW5vdGFrZXlhdGFsbHRoaXNpc25vdGFrZXkx"


def test_an_ssh_keygen_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "ssh-keygen"
    program.write_text("#!/bin/sh\nexec sleep 600\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(wsl, "ANSWER_S", 0.2)
    # As where there is no such program: paramiko finds out.
    assert wsl.has_key("pc", str(tmp_path / "known"))


def test_a_shared_file_of_host_keys_hides_the_one_that_is_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    own, shared = tmp_path / "own", tmp_path / "shared"
    host = wsl.host_of({"name": "pc"})
    ssh = {"userknownhostsfile": f"{own} x", "stricthostkeychecking": "true", "identityfiles": []}

    def obstacle(**more: str) -> tuple[str, str, str] | None:
        variables = {"ansible_host": "PC.example", "ansible_port": 22}
        return wsl.key_obstacle(host, ssh | more, variables)

    monkeypatch.setattr(wsl, "SHARED_KNOWN_HOSTS", (str(tmp_path / "none"), str(shared)))
    own.write_text(f"pc.example {KEY}\n", encoding="utf-8")
    assert obstacle() is None
    shared.write_text(f"other {KEY}\n@cert-authority *.example {KEY}\n", encoding="utf-8")
    why = obstacle()
    assert why
    assert why[0] == (
        f"community.general.wsl looks for the host key of pc.example in {shared} and ~/.ssh/known_hosts, "
        "where there is none"
    )
    assert why[1:] == (
        "the key that ssh knows",
        f"copy its line from {own} to ~/.ssh/known_hosts, for pc.example, or set distribution_connection: ssh",
    )
    assert obstacle(stricthostkeychecking="false") is None
    assert obstacle(userknownhostsfile=f"{tmp_path}/.ssh/known_hosts x") is None
    assert obstacle(userknownhostsfile=f"{tmp_path}/.ssh/known_hosts x", hostkeyalias="pc")
    shared.write_text(f"pc.example {KEY}\n", encoding="utf-8")
    assert obstacle() is None


@pytest.mark.parametrize(
    ("ssh", "checking", "known"),
    [
        ({}, None, None),
        ({"stricthostkeychecking": "ask", "userknownhostsfile": "/a /b"}, None, "/a"),
        ({"stricthostkeychecking": "accept-new", "userknownhostsfile": "/a"}, None, "/a"),
        ({"stricthostkeychecking": "accept-new", "userknownhostsfile": "/dev/null"}, False, None),
        ({"stricthostkeychecking": "true", "userknownhostsfile": "none"}, None, None),
        ({"stricthostkeychecking": "false", "userknownhostsfile": "/a"}, False, "/a"),
    ],
)
def test_whether_host_keys_are_checked_is_sshs_to_say(ssh: dict[str, str], checking: bool | None, known: str) -> None:
    found = wsl.connection_variables(wsl.host_of({"name": "pc"}), {**ANSWER, "ssh": ssh}, ANSWER["distributions"][0])
    assert found.get("ansible_paramiko_host_key_checking") == checking
    assert found.get("ansible_paramiko_user_known_hosts_file") == known


def test_of_several_keys_tasks_take_the_first_and_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    (tmp_path / ".ssh").mkdir()
    for name in ("id_rsa", "id_ed25519", "a", "b"):
        (tmp_path / ".ssh" / name).touch()
    usual = ["~/.ssh/id_rsa", "~/.ssh/id_ecdsa", "~/.ssh/id_ed25519"]

    def key_and_obstacle(keys: list[str], **more: str) -> tuple[str | None, tuple[str, str, str] | None]:
        host, ssh = wsl.host_of({"name": "pc", **more}), {"identityfiles": keys}
        found = wsl.connection_variables(host, {**ANSWER, "ssh": ssh}, ANSWER["distributions"][0])
        why = wsl.key_obstacle(host, ssh, found)
        return found.get("ansible_ssh_private_key_file"), why

    assert key_and_obstacle(usual) == (None, None)
    assert key_and_obstacle(["~/.ssh/id_rsa"]) == ("~/.ssh/id_rsa", None)
    assert key_and_obstacle(["~/.ssh/missing", *usual, "~/.ssh/b"]) == ("~/.ssh/b", None)
    several = (
        "ssh has several keys for pc (~/.ssh/a, ~/.ssh/b), and community.general.wsl takes one",
        "the one that is let in",
        "set private_key of pc, or start ssh-agent and add the keys",
    )
    assert key_and_obstacle(["~/.ssh/a", "~/.ssh/b"]) == ("~/.ssh/a", several)
    assert key_and_obstacle(["~/.ssh/a", "~/.ssh/b"], private_key="/k") == ("/k", None)
    monkeypatch.setenv("SSH_AUTH_SOCK", "/agent")
    assert key_and_obstacle(["~/.ssh/a", "~/.ssh/b"]) == ("~/.ssh/a", None)


def test_a_wsl_exe_that_tasks_will_not_reach_is_said(lab: dict[str, Windows]) -> None:
    with lab["workstation"].changed() as machine:
        machine.session_zero_fails = True
    done = ansible_inventory(LAB, "--list")
    variables = loaded(done.stdout)["_meta"]["hostvars"]
    assert variables["workstation"]["wsl_exe"] == PROGRAM_FILES
    said = (
        f"{PROGRAM_FILES} is what answers on workstation, and community.general.wsl starts the wsl.exe of PATH. "
        "Expected: that works in a session of SSH, too. Next step: update WSL on workstation and leave wsl_exe out, or "
        "set distribution_connection: ssh."
    )
    assert variables["workstation-Debian"]["wsl_connection_error"] == said
    assert f"[WARNING]: workstation-Debian: no task will run in it: {said}" in done.stderr
    assert "wsl_connection_error" not in variables["here-Debian"]


KNOWN = """\
import json, sys
from ansible.plugins.loader import init_plugin_loader, inventory_loader
init_plugin_loader([sys.argv[1]])
plugin = inventory_loader.get("gpufarm.core.wsl")
print(json.dumps(sorted(sys.modules[type(plugin).__module__].known_variables(sys.argv[2]))))
"""


def known_to(connection: str) -> set[str]:
    """Return the variables that an installed connection documents, by the plugin loader of a process of its own."""
    argv = [sys.executable, "-c", KNOWN, str(ROOT / ".collections"), connection]
    return set(json.loads(subprocess.run(argv, capture_output=True, check=True).stdout))


def test_what_is_filled_in_is_what_the_connection_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    known = known_to("community.general.wsl")
    monkeypatch.setattr(wsl, "known_variables", lambda: known)
    host = wsl.host_of({"name": "pc", "distribution_user": "root", "private_key": "/k"})
    ssh = {**ANSWER["ssh"], "proxycommand": "x", "userknownhostsfile": "/known /known2"}
    found = wsl.connection_variables(host, {**ANSWER, "ssh": ssh}, ANSWER["distributions"][0])
    assert found["ansible_paramiko_user_known_hosts_file"] == "/known"
    unknown = set(found) - known
    if "wsl_user" in unknown:
        # The environment of the other generation has no community.general.
        obstacle = wsl.obstacle(host, ANSWER, found)
        assert obstacle and obstacle[0] == "community.general is not installed"
        return
    assert unknown <= wsl.OF_EVERY_CONNECTION | {"wsl_remote_ssh_shell_type"}
    why = wsl.obstacle(host, ANSWER, found)
    if "wsl_remote_ssh_shell_type" in unknown:
        assert why
        assert why[:2] == (
            "the installed community.general does not know wsl_remote_ssh_shell_type",
            "community.general 12.2.0 or newer",
        )
    else:
        assert why is None
    cmd = wsl.connection_variables(host, {**ANSWER, "shell": "cmd"}, ANSWER["distributions"][0])
    assert wsl.obstacle(host, ANSWER, cmd) is None


def test_what_psrp_is_given_is_what_its_connection_reads() -> None:
    known = known_to("ansible.builtin.psrp")
    given = dict.fromkeys([*wsl.PSRP_VARIABLES, "ssl"], "x") | {"cert_validation": "/ca.pem"}
    found = wsl.machine_variables(wsl.host_of({"name": "pc", "connection": "psrp", "psrp": given}), None)
    assert {key for key in found if key.startswith("ansible_psrp_")} <= known
    assert found["ansible_psrp_message_encryption"] == found["ansible_psrp_ignore_proxy"] == "x"
    assert (found["ansible_psrp_cert_validation"], found["ansible_psrp_ca_cert"]) == ("validate", "/ca.pem")


def test_a_distributions_own_ssh_server_without_an_address_is_said() -> None:
    host = wsl.host_of({"name": "pc", "distribution_connection": "ssh"})
    for stopped in (ANSWER["distributions"][0], {**ANSWER["distributions"][0], "ip": ""}):
        found = wsl.connection_variables(host, ANSWER, stopped)
        assert "ansible_host" not in found
        why = wsl.obstacle(host, ANSWER, found)
        assert why
        assert why == ("its address is not known", "it runs and tells it", "start it, or set details: all")


def test_a_pattern_that_no_name_can_match_is_refused(here: Windows, tmp_path: Path) -> None:
    error = failed(tmp_path, {"windows_hosts": [local(here)], "exclude_distributions": ["[dp]ocker*"]})
    assert (
        "exclude_distributions has '[dp]ocker*', which no name can match. Expected: letters, digits, dots, "
        "underscores, dashes, * and ?. Next step: write each name out."
    ) in error
    assert not here.calls()


def test_a_machine_that_fails_in_an_unforeseen_way_is_that_machine_alone(
    here: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(host: asking.Host, question: asking.Question) -> dict[str, Any]:
        if host.name == "odd":
            raise RecursionError("too deep.")
        return asking.ask_local(host, question)

    monkeypatch.setattr(asking, "ASK", {"local": ask})
    plugin = wsl.InventoryModule()
    options = {"cache": False, "workers": 2}
    monkeypatch.setattr(plugin, "get_option", options.__getitem__)
    hosts = [wsl.host_of(local(here, name)) for name in ("odd", "pc")]
    answers = plugin._answers(hosts, asking.Question(timeout_s=PATIENCE), str(tmp_path), False)
    assert str(answers["odd"]).startswith("odd: asking it failed with RecursionError: too deep. Expected: ")
    assert isinstance(answers["pc"], dict)
