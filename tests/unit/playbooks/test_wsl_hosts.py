# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The Windows side of the role wsl against doubles of Windows: what it changes there, refuses and says."""

from __future__ import annotations

import atexit
import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from ansible_collections.gpufarm.core.tests.unit.playbooks import playbook_helper
from ansible_collections.gpufarm.core.tests.unit.playbooks.playbook_helper import ADDRESS, ALONE, LOCAL
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import gate_helper

from tests.simulator.tools import BuildError
from tests.simulator.windows import life, modules, programs
from tests.simulator.windows.host import HANGS, POWERSHELL, PROGRAM_FILES, USER_SID, Distribution, Machine, Windows
from tests.simulator.windows.sshd import Sshd

pytestmark = pytest.mark.controller
GPU = {"name": "NVIDIA GeForce RTX 4090", "driver_version": "581.42", "driver_model": "WDDM"}
TEN_TIMEOUTS_S = 10 * 15
OWNER = "GAMING-PC.alice"
KEEP = rf"\gpufarm\{OWNER}\keep Debian"
RULE = f"gpufarm-wsl-{OWNER}"
# From a distribution of the machine itself.
BELOW = {"ansible_connection": "gpufarm.core.wsl_windows"}


# What the role itself says of them.
OURS = {"node_maintenance_owner", "node_maintenance_change"}
# The agents of these tests are asked by everybody.
OPEN = {"nomad_tls": "off", "nomad_acl_enabled": False}
SU = {"ansible_become_method": "ansible.builtin.su"}


def words(text: str) -> str:
    return " ".join(text.split())


@functools.cache
def doubles_of(without: tuple[str, ...]) -> Path:
    """Return the folder of collections with the doubles of Windows' modules, but for those of these collections."""
    folder = Path(tempfile.mkdtemp(prefix="gpufarm-doubles-"))
    atexit.register(shutil.rmtree, folder)
    return modules.install(folder, without)


class Lab:
    """One Windows machine with one distribution, a node of the farm."""

    def __init__(self, folder: Path, **machine: Any) -> None:
        self.folder = folder
        known: dict[str, Any] = {"gpus": [GPU], "distributions": [Distribution("Debian", default=True)], **machine}
        for each in known["distributions"]:
            each.users = {"root": os.geteuid()}
        self.windows = Windows.create(folder / "windows", Machine("gaming-pc", **known))
        self.config = self.windows.mounted(r"C:\Users\alice\.wslconfig")
        self.config.parent.mkdir(parents=True)
        self.playbook = "wsl_hosts.yml"
        self.without: tuple[str, ...] = ()
        self.under = playbook_helper.alone()
        # Variables of the distributions that are nodes of the farm: of all, or of each.
        self.node: dict[str, Any] | None = None
        self.nodes: dict[str, dict[str, Any]] | None = None
        self.unlisted: tuple[str, ...] = ()
        self.of_kubernetes: tuple[str, ...] = ()
        # Other hosts of the inventory; those with a wsl_host are nodes.
        self.others: dict[str, dict[str, Any]] = {}

    def run(
        self, *options: str, of_instances: Mapping[str, Any] | None = None, **variables: Any
    ) -> subprocess.CompletedProcess[str]:
        doubles = doubles_of(self.without)
        machine: dict[str, Any] = {
            "ansible_connection": "ssh",
            "windows_double": str(self.windows.folder),
            "wsl_exe": "wsl.exe",
        }
        machine["__wsl_windows_delay"] = 0
        names = [each.name for each in self.windows.machine.distributions if each.name not in self.unlisted]
        nodes = {f"gaming-pc-{name}": {"wsl_host": "gaming-pc", "wsl_distribution": name} for name in names}
        given = dict.fromkeys(names, self.node) if self.nodes is None else self.nodes
        members = {f"gaming-pc-{name}": of_it for name, of_it in given.items() if of_it is not None}
        members |= {name: {} for name, of_it in self.others.items() if "wsl_host" in of_it}
        inventory = {
            "all": {
                "hosts": self.others,
                "children": {
                    "wsl_hosts": {"hosts": {"gaming-pc": {**machine, **variables}}},
                    "wsl_instances": {"hosts": nodes, "vars": {**LOCAL, **OPEN, **(of_instances or {})}},
                    "gpu_nodes": {"hosts": members},
                    "kubernetes_nodes": {"hosts": {f"gaming-pc-{name}": {} for name in self.of_kubernetes}},
                },
            }
        }
        return playbook_helper.run_playbook(
            self.folder, inventory, self.playbook, *options, before=doubles, under=self.under
        )

    def good(self, *options: str, **variables: Any) -> str:
        result = self.run(*options, **variables)
        assert result.returncode == 0, result.stdout + result.stderr
        return words(result.stdout)

    def bad(self, *options: str, **variables: Any) -> str:
        result = self.run(*options, **variables)
        assert result.returncode == 2, result.stdout + result.stderr
        return words(result.stdout + result.stderr)

    @property
    def state(self) -> str:
        return self.windows.machine.distributions[0].state

    def called(self, pattern: str) -> int:
        return sum(bool(re.search(pattern, f"{program} {line}")) for program, line in self.windows.calls())


def changed(output: str) -> int:
    found = re.search(r"gaming-pc : ok=\d+ changed=(\d+)", output)
    assert found, output
    return int(found.group(1))


@pytest.mark.parametrize("language", ["en", "de", "zh"])
def test_what_it_does_and_a_second_run_changes_nothing(tmp_path: Path, language: str) -> None:
    lab = Lab(tmp_path, language=language)
    before = "# mine\r\n[wsl2]\r\nmemory=8GB # half\r\nswap=0\r\n"
    lab.config.write_bytes(before.encode())
    settings = {"wsl_config": {"wsl2": {"memory": "16GB"}}, "wsl_shutdown": True}
    before_it = lab.windows.machine
    lab.good(**settings)

    assert lab.config.read_bytes().decode() == (
        "# mine\r\n[wsl2]\r\nmemory=16GB # half\r\nswap=0\r\nvmIdleTimeout=-1\r\n"
        "\r\n[general]\r\ninstanceIdleTimeout=-1\r\n"
    )
    backups = [path for path in lab.config.parent.iterdir() if path.name.endswith(".bak")]
    assert [path.read_bytes().decode() for path in backups] == [before]
    assert not lab.config.with_name(".wslconfig.waits").exists()
    machine = lab.windows.machine
    assert machine.running is not None
    assert (machine.running["wsl2.memory"], machine.running["general.instanceidletimeout"]) == ("16GB", "-1")
    assert machine.rights == before_it.rights
    held = machine.tasks[KEEP]
    assert (held["command"], held["arguments"]) == (
        r"C:\Program Files\WSL\wsl.exe", "-d Debian --exec /bin/sleep infinity",
    )  # fmt: skip
    assert (held["user"], held["logon_type"], held["password"]) == (r"GAMING-PC\alice", "S4U", None)
    # A time limit of its own would end it after three days, and one on battery would not begin.
    assert held["settings"] == {
        "MultipleInstancesPolicy": "IgnoreNew", "DisallowStartIfOnBatteries": "false",
        "StopIfGoingOnBatteries": "false", "ExecutionTimeLimit": "PT0S",
    }  # fmt: skip
    assert machine.holds == {KEEP: "Debian"}
    assert lab.called("--shutdown") == 1

    assert changed(lab.good(**settings)) == 0
    assert lab.called("--shutdown") == 1
    assert lab.windows.machine.starts == machine.starts


def test_without_it_an_idle_distribution_ends(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    life.wait(lab.windows, 14)
    assert lab.state == "Running"
    life.wait(lab.windows, 2)
    assert lab.state == "Stopped"


@pytest.mark.parametrize("release", ["2.6.3", "2.3.26"])
def test_with_it_a_distribution_is_there_after_ten_idle_timeouts(tmp_path: Path, release: str) -> None:
    """Also with a WSL whose timer cannot be set."""
    lab = Lab(tmp_path, release=release)
    lab.good(wsl_shutdown=True)
    assert ("instanceIdleTimeout" in lab.config.read_text()) is (release == "2.6.3")
    life.wait(lab.windows, TEN_TIMEOUTS_S)
    assert lab.state == "Running"

    # Somebody ends all of it, before any boot.
    with lab.windows.changed() as machine:
        life.shut_down(machine)
    assert lab.state == "Stopped"
    life.wait(lab.windows, 300)
    assert lab.state == "Running"

    # Nobody logs on.
    life.boot(lab.windows)
    assert lab.state == "Running"
    life.wait(lab.windows, TEN_TIMEOUTS_S)
    assert lab.state == "Running"

    # Somebody ends all of it.
    with lab.windows.changed() as machine:
        life.shut_down(machine)
    life.wait(lab.windows, 300)
    assert lab.state == "Running"


def test_the_timers_alone_hold_what_was_started(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.good(wsl_shutdown=True)
    with lab.windows.changed() as machine:
        machine.tasks, machine.holds = {}, {}
    life.wait(lab.windows, TEN_TIMEOUTS_S)
    assert lab.state == "Running"


AGAIN = [
    {"ansible.builtin.import_role": {"name": "gpufarm.core._common", "tasks_from": "variables.yml"}},
    {"ansible.builtin.import_role": {"name": "gpufarm.core.wsl", "tasks_from": "start_again.yml"}},
]


@pytest.mark.parametrize(
    ("shell", "user", "held"),
    [("cmd", "alice", True), ("cmd", "alice", False), ("powershell", "Jürgen Groß", True)],
)
def test_what_is_ended_for_its_settings_is_held_again_where_it_was(
    tmp_path: Path, shell: str, user: str, held: bool
) -> None:
    """Idle, it would end 15 s after Ansible has left, and its task begins by itself within five minutes only."""
    lab = Lab(tmp_path, banner="Welcome\r\n", user=user, default_shell=POWERSHELL if shell == "powershell" else None)
    lab.windows.mounted(rf"C:\Users\{user}").mkdir(exist_ok=True)
    lab.good()
    holds = lab.windows.machine.holds
    assert holds == {rf"\gpufarm\GAMING-PC.{user.replace(' ', '.')}\keep Debian": "Debian"}
    if not held:
        with lab.windows.changed() as machine:
            machine.tasks, machine.holds = {}, {}
    try:
        server = Sshd(lab.windows)
    except BuildError as error:
        pytest.skip(str(error))
    (tmp_path / "client").write_text(server.client_configuration("gaming-pc"), encoding="utf-8")
    windows = {
        # No connection of another test's machine of that name.
        "ansible_connection": "ssh", "ansible_ssh_args": f"-F {tmp_path / 'client'} -o ControlPath=none",
        "ansible_shell_type": shell, "wsl_connection": "ssh", "wsl_exe": PROGRAM_FILES,
    }  # fmt: skip
    known = {**LOCAL, "wsl_host": "gaming-pc", "wsl_distribution": "Debian"}
    # What this machine answers is nothing of a distribution's.
    past = {"__wsl_refusal": "", "__wsl_asked": {"stdout_lines": ["systemd", *(["held"] if held else [])]}}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([{"hosts": "gaming-pc-Debian", "tasks": AGAIN}]))
    with server:
        done = playbook_helper.run_playbook(
            tmp_path, {"all": {"hosts": {"gaming-pc": windows, "gaming-pc-Debian": known}}},
            str(tmp_path / "play.yml"), "-e", json.dumps(past), under=lab.under,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert lab.called("--terminate Debian") == 1
    assert (lab.state, lab.windows.machine.holds) == ("Running", holds if held else {})
    assert lab.called(r"^powershell\.exe") == held


def test_a_password_is_stored_where_one_is_given(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.good(wsl_shutdown=True)
    lab.good(wsl_shutdown=True, wsl_keep_alive_password="of-alice")
    held = lab.windows.machine.tasks[KEEP]
    assert (held["logon_type"], held["password"]) == ("Password", "of-alice")
    assert changed(lab.good(wsl_shutdown=True, wsl_keep_alive_password="of-alice")) == 0


def test_where_no_group_of_the_user_may_run_tasks_the_user_may(tmp_path: Path) -> None:
    lab = Lab(tmp_path, rights={"SeBatchLogonRight": ["S-1-5-32-551"]})
    lab.good(wsl_shutdown=True)
    assert lab.windows.machine.rights == {"SeBatchLogonRight": ["S-1-5-32-551", USER_SID]}
    life.boot(lab.windows)
    assert lab.state == "Running"


def test_what_another_user_of_the_machine_has_stays(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    mirrored = {"wsl_shutdown": True, "wsl_config": {"wsl2": {"networkingMode": "mirrored"}}}
    with lab.windows.changed() as machine:
        machine.user = "bob"
    lab.config = lab.windows.mounted(r"C:\Users\bob\.wslconfig")
    lab.config.parent.mkdir()
    lab.good(**mirrored, wsl_ports=[4646])
    before = lab.windows.machine
    with lab.windows.changed() as machine:
        machine.user = "alice"
    lab.good(**mirrored, wsl_ports=[8080])
    lab.good(**mirrored, wsl_keep_alive=False)
    after = lab.windows.machine
    assert (after.tasks.keys(), after.hyper_v_firewall) == (before.tasks.keys(), before.hyper_v_firewall)


def test_a_distribution_may_end_again(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.good(wsl_shutdown=True)
    back = {"wsl2": {"vmIdleTimeout": 60000}, "general": {"instanceIdleTimeout": 15000}}
    lab.good(wsl_shutdown=True, wsl_keep_alive=False, wsl_config=back)
    assert lab.windows.machine.tasks == {}
    life.wait(lab.windows, TEN_TIMEOUTS_S)
    assert lab.state == "Stopped"


def test_a_configuration_in_utf_16_counts_as_wsl_reads_it(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    timers = "[wsl2]\r\nvmIdleTimeout=-1\r\n[general]\r\ninstanceIdleTimeout=-1\r\n"
    lab.config.write_bytes(timers.encode("utf-16"))
    lab.good(wsl_shutdown=True)
    assert lab.config.read_bytes() == timers.encode("utf-16")
    lab.good(wsl_shutdown=True, wsl_config={"wsl2": {"memory": "16GB"}})
    assert (lab.windows.machine.running or {})["wsl2.memory"] == "16GB"


def test_no_shutdown_without_consent(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    said = lab.good("-e", "wsl_shutdown=no", wsl_config={"wsl2": {"processors": 4}})
    assert (
        "gaming-pc: .wslconfig has changed, and WSL has not read it. Running: Debian. "
        "Expected: wsl_shutdown: true, because `wsl.exe --shutdown` ends every distribution. "
        "Next step: set it and run again, or run that command there."
    ) in said
    assert lab.called("--shutdown") == 0
    # The next run knows of it, though nothing is left to change.
    lab.good(wsl_config={"wsl2": {"processors": 4}}, wsl_shutdown=True)
    assert lab.called("--shutdown") == 1
    assert (lab.windows.machine.running or {})["wsl2.processors"] == "4"
    # Somebody has run that command there.
    assert ".wslconfig has changed" in lab.good(wsl_config={"wsl2": {"processors": 2}})
    with lab.windows.changed() as machine:
        life.shut_down(machine)
    life.wait(lab.windows, 300)
    assert ".wslconfig has changed" not in lab.good(wsl_config={"wsl2": {"processors": 2}})


def test_what_is_being_installed_is_not_shut_down_without_consent(tmp_path: Path) -> None:
    lab = Lab(tmp_path, distributions=[
        Distribution("Debian", state="Stopped", default=True), Distribution("Ubuntu", state="Installing")
    ])  # fmt: skip
    said = lab.good(wsl_keep_alive=False, wsl_config={"wsl2": {"processors": 4}})
    assert "WSL has not read it. Running: Ubuntu." in said
    assert lab.called("--shutdown") == 0


WITH_WORK = ("sh", "-c", 'NOMAD_ALLOC_ID=6b1f0c0a sleep 3600 & exec "$@"', "sh")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has processes of its own")
def test_nothing_ends_where_the_tasks_are_refused(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.node = SU
    assert (
        r"gaming-pc: Windows does not take the tasks as GAMING-PC\alice (Unhandled exception while executing script: "
        "The user name or password is incorrect.). Expected: keep Debian. Next step: mend what it says, and set "
        "wsl_keep_alive_password to the present one."
    ) in lab.bad(wsl_shutdown=True, wsl_keep_alive_password="wrong")
    assert (lab.state, lab.called("--shutdown"), lab.config.exists()) == ("Running", 0, False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has processes of its own")
def test_nodes_work_again_also_after_a_failure(tmp_path: Path) -> None:
    """Also those of a run that was cut off between the two."""
    lab = Lab(tmp_path)
    note = lab.config.with_name(".wslconfig.out")
    lab.node = SU
    back = "Look whether the GPUs are well, and let the node work again"
    with lab.windows.changed() as machine:
        # Its rules are refused, which comes after the shutdown.
        machine.hyper_v_firewall[f"{RULE}-4646"] = {"VMCreatorId": "of another", "Name": f"{RULE}-4646"}
    mirrored = {"wsl_config": {"wsl2": {"networkingMode": "mirrored"}}, "wsl_ports": [4646]}
    said = lab.bad(wsl_shutdown=True, **mirrored)
    assert (lab.called("--shutdown"), lab.state) == (1, "Running")
    assert back in said
    assert not note.exists()

    assert back not in lab.good()
    note.write_text("Ansible has taken these nodes out of work:\r\ngaming-pc-Debian\r\n")
    with lab.windows.changed() as machine:
        machine.tasks = {}
        life.shut_down(machine)
    # It is not started again, so nobody can put it back, and the next run still knows.
    assert (
        "gaming-pc: gaming-pc-Debian was taken out of work and is still out; gaming-pc-Debian does not run, or is not "
        "in this inventory. Expected: nodes that work again. Next step: start it there (`wsl.exe -d NAME`), and run "
        "this again, which puts it back."
    ) in lab.bad(wsl_keep_alive=False)
    assert back in lab.good()
    assert not note.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has processes of its own")
def test_a_run_completes_what_others_have_begun_whose_connection_was_cut(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.node = SU
    settings = {"wsl_shutdown": True, "wsl_ports": [4646]}
    notes = [lab.config.with_name(f".wslconfig.{name}") for name in ("waits", "out")]
    found = []
    # The tasks are there alone; what waits is noted and not written; all has ended, and nothing starts it; and at last
    # all is there, and nobody has put the node back.
    for cut in ("Register-ScheduledTask", r"win_copy .*[.]wslconfig[.]waits", "--shutdown", "win_firewall_rule"):
        with lab.windows.changed() as machine:
            machine.cut = cut
        result = lab.run(**settings)
        assert result.returncode == 4, result.stdout + result.stderr
        found.append(
            (len(lab.windows.machine.tasks), lab.config.exists(), lab.state, *(each.exists() for each in notes))
        )
    assert found == [
        (2, False, "Running", False, False),
        (2, False, "Running", True, False),
        (2, True, "Stopped", True, True),
        (2, True, "Running", False, True),
    ]  # fmt: skip

    assert "Look whether the GPUs are well, and let the node work again" in lab.good(**settings)
    assert lab.windows.machine.holds == {KEEP: "Debian"}
    assert list(lab.windows.machine.portproxy) == ["0.0.0.0/4646"]
    assert [each for each in notes if each.exists()] == []
    assert changed(lab.good(**settings)) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has processes of its own")
def test_a_node_whose_agent_is_gone_stays_out_and_is_said(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.node = SU
    note = lab.config.with_name(".wslconfig.out")
    note.write_text("Ansible has taken these nodes out of work:\r\ngaming-pc-Debian\r\n")
    said = lab.bad("-e", '{"__wsl_windows_marked": {"gaming-pc-Debian": true}}', wsl_keep_alive=False)
    assert (
        "gaming-pc-Debian: this run took the node out of work, and no Nomad agent runs that could take it back ("
        in said
    )
    assert (
        "). Expected: one that runs again after the distribution's start. Next step: run `systemctl enable --now "
        "nomad` there, and this again."
    ) in said
    assert (
        "gaming-pc: gaming-pc-Debian was taken out of work and is still out. Expected: nodes that work again. Next "
        "step: mend what is named above, and run this again, which puts it back."
    ) in said
    assert note.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has processes of its own")
def test_a_node_with_work_is_not_shut_down(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.node = SU
    lab.under = (*ALONE, *WITH_WORK)
    said = lab.bad(wsl_shutdown=True)
    assert "6b1f0c0a" in said
    assert "a shutdown of WSL on gaming-pc" in said
    assert lab.called("--shutdown") == 0
    assert lab.state == "Running"

    lab.under = ALONE
    assert "noop" not in lab.good(wsl_shutdown=True)
    assert lab.called("--shutdown") == 1
    assert lab.state == "Running"


@contextmanager
def agent(address: str) -> Iterator[list[str]]:
    """Refuse one question, and be gone then; who had asked is noted by the token. Each test has its own address."""
    tokens: list[str] = []

    class Agent(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            tokens.append(self.headers["X-Nomad-Token"])
            self.send_error(403)

        def log_message(self, *_given: Any) -> None:
            pass

    with http.server.HTTPServer((address, 4646), Agent) as server:
        server.timeout = 600

        def once() -> None:
            server.handle_request()
            server.server_close()

        threading.Thread(target=once, daemon=True).start()
        yield tokens


def test_a_nodes_own_agent_is_asked_with_its_own_token(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    with agent(ADDRESS) as tokens:
        lab.node = {**SU, "nomad_bind_addr": ADDRESS, "nomad_token": "of-the-node"}
        lab.bad(wsl_shutdown=True)
    assert tokens == ["of-the-node"]
    assert lab.called("--shutdown") == 0


def test_from_a_distribution_of_the_machine_itself(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    said = lab.good(**BELOW, wsl_shutdown=True)
    # It would end Ansible, too.
    assert lab.called("--shutdown") == 0
    assert (
        "gaming-pc: .wslconfig has changed, and WSL has not read it. Running: Debian. Expected: a start of WSL, which "
        "reads it. Next step: run `wsl.exe --shutdown` in a terminal of Windows, which ends every distribution and "
        "this one with it, start this one and run this again."
    ) in said
    assert lab.windows.machine.holds == {KEEP: "Debian"}
    again = lab.good(**BELOW)
    assert ".wslconfig has changed" in again
    assert changed(again) == 0

    # What runs now was started later.
    note = lab.config.with_name(".wslconfig.waits")
    with lab.windows.changed() as machine:
        life.shut_down(machine)
    life.wait(lab.windows, 300)
    assert ".wslconfig has changed" not in lab.good(**BELOW)
    assert not note.exists()
    assert changed(lab.good(**BELOW)) == 0


def test_without_an_administrators_rights_the_configuration_is_possible(tmp_path: Path) -> None:
    lab = Lab(tmp_path, administrator=False)
    # What the command line says is text.
    lab.good("-e", "wsl_keep_alive=false", **BELOW, wsl_config={"wsl2": {"memory": "16GB"}})
    assert "memory=16GB" in lab.config.read_text()


def test_tasks_of_an_administrator_are_not_left_unsaid(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.good(wsl_shutdown=True)
    with lab.windows.changed() as machine:
        machine.administrator, machine.shows_tasks = False, True
    assert (
        "Expected: them, to take away keep Debian. Next step: connect as a user who is an administrator and owns the "
        "distributions."
    ) in lab.bad(wsl_keep_alive=False)
    assert list(lab.windows.machine.tasks) == [KEEP]


@pytest.mark.parametrize("administrator", [True, False])
def test_no_farm_is_made_on_a_machine_that_windows_does_not_hold(tmp_path: Path, administrator: bool) -> None:
    lab = Lab(tmp_path, administrator=administrator)
    lab.playbook = "wsl.yml"
    # Without what it begins with, for here nothing is a node.
    result = lab.run("--skip-tags", "always", **BELOW)
    said = words(result.stdout + result.stderr)
    assert ("PLAY [GPU nodes]" in said) is administrator
    assert ("without an administrator's rights" in said) is not administrator


def test_no_node_is_made_on_the_one_of_two_machines_that_has_refused(tmp_path: Path) -> None:
    labs = {"held": Lab(tmp_path / "held"), "refused": Lab(tmp_path / "refused", administrator=False)}
    # Nobody reaches them, so none becomes a node here.
    nowhere = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1, **OPEN}
    machines = {
        name: {"ansible_connection": "ssh", "windows_double": str(lab.windows.folder), "__wsl_windows_delay": 0}
        for name, lab in labs.items()
    }
    nodes = {f"{name}-Debian": {"wsl_host": name, "wsl_distribution": "Debian", **nowhere} for name in labs}
    inventory = {
        "wsl_hosts": {"hosts": machines},
        "wsl_instances": {"hosts": nodes},
        "gpu_nodes": {"hosts": dict.fromkeys(nodes)},
    }

    def run(*options: str) -> tuple[str, set[str]]:
        """Return what is said, and which hosts went on as GPU nodes, of which nothing is known here."""
        done = playbook_helper.run_playbook(
            tmp_path, inventory, "wsl.yml", "--skip-tags", "always", *options,
            before=doubles_of(()), under=playbook_helper.alone(),
        )  # fmt: skip
        said = words(done.stdout + done.stderr)
        return said, set(re.findall(r"fatal: \[(\S+)\]", said.partition("PLAY [GPU nodes]")[2]))

    said, begun = run()
    text = (
        "refused-Debian: its Windows machine refused failed above, or its batch did not begin. Expected: a machine "
        "that holds the distribution before it is made a node, which would end otherwise. Next step: mend what is said "
        "of refused, and run this again, or leave both out by --limit."
    )
    assert (text in said, "held-Debian: its Windows machine" in said) == (True, False)
    assert begun == {"held-Debian"}
    # An earlier run has had the machine that this one leaves out.
    assert run("--limit", "refused-Debian")[1] == {"refused-Debian"}


def test_windows_stays_as_it_is_where_the_node_is_refused(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.playbook = "wsl.yml"
    before = lab.windows.machine
    assert "no host in gpu_nodes" in lab.bad(wsl_shutdown=True)
    lab.node = {"nomad_client_servers": ["192.0.2.10"], "wsl_terminate": "perhaps"}
    assert "unable to convert to bool: The value 'perhaps' is not" in lab.bad(wsl_shutdown=True)
    assert lab.windows.machine == before
    assert not lab.config.exists()


@pytest.mark.parametrize("playbook", ["site.yml", "wsl.yml", "upgrade.yml"])
def test_two_distributions_of_a_machine_are_no_two_nodes(tmp_path: Path, playbook: str) -> None:
    """They have one network: what asks the agent of one would ask, close and drain the node of the other."""
    lab = Lab(tmp_path, distributions=[Distribution("Debian", default=True), Distribution("Ubuntu")])
    # Nobody gets as far as the roles, to which this is no node.
    lab.playbook, servers = playbook, {"nomad_client_servers": ["192.0.2.10"], "node_maintenance_policy": "perhaps"}
    lab.node = {**servers, "ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
    text = (
        "gaming-pc-{}: gaming-pc-Debian, gaming-pc-Ubuntu of gpu_nodes are distributions of gaming-pc, and WSL 2 has "
        "one network for all of them, in which Nomad's ports are another's. Expected: one of them in gpu_nodes. Next "
        "step: run gpufarm.core.remove with --limit for those of the others that are nodes already, and keep them out "
        "of gpu_nodes, by `groups` or `filters` of the inventory gpufarm.core.wsl."
    )
    before, limit = lab.windows.machine, ("--limit", "gaming-pc,gaming-pc-Ubuntu")
    said = lab.bad()
    assert all(text.format(name) in said for name in ("Debian", "Ubuntu"))
    # Also where a run has only one of them, which the agent of the other would answer.
    said = lab.bad(*limit)
    assert text.format("Ubuntu") in said
    assert lab.windows.machine == before
    # One of WSL 1 has no network of its own either, and no GPU, which is said of it.
    lab.nodes = {"Debian": lab.node, "Ubuntu": {**lab.node, "wsl_version": 1}}
    assert "are distributions of" not in lab.bad()
    # A removal is how the second one goes.
    lab.nodes, lab.playbook = None, "remove.yml"
    said = words(lab.run("--check", *limit).stdout)
    assert "are distributions of" not in said
    assert "PLAY [What goes and what stays]" in said


@pytest.mark.parametrize("playbook", ["site.yml", "wsl.yml"])
def test_a_node_that_ends_when_ansible_has_left_is_told(tmp_path: Path, playbook: str) -> None:
    nodes = {
        "free": {"wsl_host": "gaming-pc", "__wsl_asked": {"stdout_lines": ["systemd"]}},
        "held": {"wsl_host": "gaming-pc", "__wsl_asked": {"stdout_lines": ["systemd", "held"]}},
        # With an SSH server of its own, as in README.md.
        "listed": {"__wsl_asked": {"stdout_lines": ["systemd"]}},
        "metal": {},
    }
    inventory = {"gpu_nodes": {"hosts": nodes, "vars": LOCAL}, "wsl_hosts": {"hosts": {"gaming-pc": {}}}}
    first = ("--start-at-task", "Say where nothing holds the distribution")
    result = playbook_helper.run_playbook(tmp_path, inventory, playbook, *first)
    assert result.returncode == 0, result.stdout + result.stderr
    said = words(result.stdout)
    text = (
        "{}: found no process by which Windows holds this distribution, which ends 15 s after its last user, and the "
        "node with it. Expected: `/bin/sleep infinity`, which a scheduled task of Windows runs. Next step: {}, "
        "with wsl_keep_alive: true; or nothing, where something else holds it."
    )
    assert said.count(text.format("free", "run gpufarm.core.wsl_hosts for gaming-pc")) == 1
    assert said.count(text.format("listed", "list its Windows machine in the group wsl_hosts, and run "
                                  "gpufarm.core.wsl_hosts")) == 1  # fmt: skip
    assert said.count("holds this distribution") == 2


def test_a_node_whose_machine_tells_no_addresses_is_told(tmp_path: Path) -> None:
    def asked(network: str) -> dict[str, Any]:
        return {"__wsl_asked": {"stdout_lines": ["held", f"network {network}"]}}

    nodes = {
        "free": {"wsl_host": "silent", **asked("nat")},
        "older": {"wsl_host": "silent", **asked("")},
        "known": {"wsl_host": "gaming-pc", **asked("nat")},
        "said": {"wsl_host": "silent", "nomad_advertise_addr": "192.0.2.9", **asked("nat")},
        # It has the addresses of Windows, or one of its own.
        "mirrored": {"wsl_host": "silent", **asked("mirrored")},
        "bridged": {"wsl_host": "silent", **asked("bridged")},
        "listed": asked("nat"),
    }
    machines = {"silent": {}, "gaming-pc": {"wsl_addresses": [{"address": "192.0.2.31"}]}}
    inventory = {"gpu_nodes": {"hosts": nodes, "vars": LOCAL}, "wsl_hosts": {"hosts": machines}}
    first = ("--start-at-task", "Say where the address of Windows is not known")
    result = playbook_helper.run_playbook(tmp_path, inventory, "site.yml", *first)
    assert result.returncode == 0, result.stdout + result.stderr
    said = words(result.stdout)
    text = (
        "found no addresses of silent, so that Nomad advertises the one that this distribution has itself, which "
        "behind NAT no other machine reaches. Expected: one of Windows. Next step: set list_addresses: true for silent "
        "in the inventory of gpufarm.core.wsl, or nomad_advertise_addr for this host, and run this again."
    )
    assert [name for name in nodes if f"{name}: {text}" in said] == ["free", "older"]


@pytest.mark.parametrize("playbook", ["site.yml", "wsl.yml"])
@pytest.mark.parametrize("ports", [[], [8080], ["4646"], "8080,4646", 4646])
def test_a_port_that_leads_to_no_agent_is_told(tmp_path: Path, playbook: str, ports: object) -> None:
    lab = Lab(tmp_path)
    lab.playbook = playbook
    lab.node = {}
    said = lab.good("--start-at-task", "Say where nothing leads to its agent", wsl_ports=ports)
    told = "gaming-pc-Debian: found no 4646 in wsl_ports of gaming-pc, so"
    assert said.count(told) == int("4646" not in str(ports))


def test_a_machine_whose_nodes_are_not_reached_is_told_by_the_playbook_of_windows(tmp_path: Path) -> None:
    lab = Lab(tmp_path)

    def told(node: dict[str, Any] | None, **variables: Any) -> bool:
        lab.node = node
        said = lab.good("--start-at-task", "Say which nodes nothing leads to", **variables)
        return (
            "gaming-pc: found no 4646 in wsl_ports, so that other machines do not reach the Nomad agent of "
            "gaming-pc-Debian. Expected: that is enough for most"
        ) in said

    assert told({})
    assert not told({}, wsl_ports=["4646"])
    assert not told({}, wsl_ports="4646")
    assert not told({"nomad_advertise_addr": "192.0.2.9"})
    assert not told(None)
    # What site says afterwards need not be said twice.
    assert not told({}, common_site_to_come=True)
    plays = DataLoader().load_from_file(str(playbook_helper.ROOT / "playbooks/wsl.yml"), trusted_as_template=True)
    (windows,) = [play for play in plays if play.get("ansible.builtin.import_playbook") == "wsl_hosts.yml"]
    assert windows["vars"]["common_site_to_come"] is True


def test_check_mode_changes_nothing(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.config.write_text("[wsl2]\n")
    before = lab.windows.machine
    said = lab.good("--check", wsl_shutdown=True, wsl_ports=[4646])
    assert changed(said) > 3
    assert lab.config.read_text() == "[wsl2]\n"
    assert {path.name for path in lab.config.parent.iterdir()} == {".wslconfig"}
    after = lab.windows.machine
    assert (after.tasks, after.firewall, after.portproxy) == ({}, {}, {})
    assert after.rights == before.rights
    assert after.distributions[0].state == before.distributions[0].state


def test_behind_nat_ports_follow_the_address(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.good(wsl_shutdown=True, wsl_ports=[4646, 8080])
    address = life.address(lab.windows.machine)
    assert lab.windows.machine.portproxy == {
        "0.0.0.0/4646": f"{address}/4646", "0.0.0.0/8080": f"{address}/8080",
    }  # fmt: skip
    assert lab.windows.machine.firewall[RULE]["localport"] == "4646,8080"

    life.boot(lab.windows)
    life.wait(lab.windows, 60)
    assert life.address(lab.windows.machine) != address
    assert lab.windows.machine.portproxy["0.0.0.0/8080"] == f"{life.address(lab.windows.machine)}/8080"
    assert changed(lab.good(wsl_shutdown=True, wsl_ports=[4646, 8080])) == 0


@pytest.mark.parametrize("narrowed", [{"enabled": False}, {"profiles": ["domain"]}])
def test_a_rule_that_somebody_has_narrowed_lets_the_ports_through_again(
    tmp_path: Path, narrowed: dict[str, Any]
) -> None:
    lab = Lab(tmp_path)
    lab.good(wsl_shutdown=True, wsl_ports=[4646])
    before = lab.windows.machine.firewall
    with lab.windows.changed() as machine:
        machine.firewall[RULE] |= narrowed
    assert changed(lab.good(wsl_shutdown=True, wsl_ports=[4646])) == 1
    assert lab.windows.machine.firewall == before


def test_ports_that_are_not_wanted_any_more_are_led_no_more(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.good(wsl_shutdown=True, wsl_ports=[4646, 8080])
    with lab.windows.changed() as machine:
        machine.portproxy["0.0.0.0/22"] = "192.0.2.1/22"
    lab.good(wsl_shutdown=True, wsl_ports=[8080])
    assert set(lab.windows.machine.portproxy) == {"0.0.0.0/8080", "0.0.0.0/22"}
    life.wait(lab.windows, 600)
    assert set(lab.windows.machine.portproxy) == {"0.0.0.0/8080", "0.0.0.0/22"}
    assert changed(lab.good(wsl_shutdown=True, wsl_ports=[8080])) == 0
    lab.good(wsl_shutdown=True)
    machine = lab.windows.machine
    assert (machine.portproxy, machine.firewall, list(machine.tasks)) == ({"0.0.0.0/22": "192.0.2.1/22"}, {}, [KEEP])
    assert changed(lab.good(wsl_shutdown=True)) == 0


def test_a_machine_lets_go_of_its_distributions(tmp_path: Path) -> None:
    """With rules of the Hyper-V firewall; below with port proxies."""
    lab = Lab(tmp_path)
    mine = "# mine\r\n[wsl2]\r\nswap=0\r\n"
    lab.config.write_bytes(mine.encode())
    settings = {"wsl_ports": [4646], "wsl_config": {"wsl2": {"networkingMode": "mirrored"}}}
    lab.good(**settings, wsl_shutdown=True)
    assert lab.windows.machine.hyper_v_firewall
    # Nodes of the farm would have to leave in the same run.
    lab.playbook = "remove.yml"
    leave = ("--limit", "gaming-pc")
    before = lab.windows.machine
    assert changed(lab.good(*leave, "--check", **settings)) > 0
    assert lab.windows.machine.tasks == before.tasks

    lab.good(*leave, **settings)
    machine = lab.windows.machine
    assert (machine.tasks, machine.hyper_v_firewall) == ({}, {})
    assert "instanceIdleTimeout=-1" in lab.config.read_text()
    assert [(each.name, each.state) for each in machine.distributions] == [("Debian", "Running")]
    assert changed(lab.good(*leave, **settings)) == 0

    also = ("-e", "remove_also=wslconfig")
    assert "gaming-pc: .wslconfig has changed, and WSL has not read it." in lab.good(*leave, *also, **settings)
    assert lab.config.read_bytes().decode().startswith(mine)
    assert "=-1" not in lab.config.read_text() and "networkingMode" not in lab.config.read_text()
    assert changed(lab.good(*leave, *also, **settings)) == 0
    assert lab.called("--shutdown") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has files of its own in /etc")
def test_a_node_leaves_with_its_windows_machine_and_its_distribution_stays(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    under = playbook_helper.of_its_own(inside)
    for folder in ("bin", "plugins", "data/client"):
        (inside / folder).mkdir(parents=True)
    config = inside / "etc/nomad.d"
    config.mkdir()
    units = inside / "etc/systemd/system"
    (units / "multi-user.target.wants").mkdir(exist_ok=True)
    enabled = units / "multi-user.target.wants/nomad.service"
    enabled.symlink_to("/etc/systemd/system/nomad.service")
    conf = inside / "etc/wsl.conf"
    conf.write_text("[boot]\nsystemd=true\n")
    active = inside / "run/active/nomad"
    agent_of = [
        units / "nomad.service", active, inside / "bin/nomad", inside / "plugins/nomad-device-nvidia",
        *(config / f"{name}.hcl" for name in ("nomad", "client", "device_nvidia")),
    ]  # fmt: skip
    for path in agent_of:
        path.touch()
    identity = inside / "data/client/client-id"
    identity.write_text("id-0")

    farm = gate_helper.Farm(1, (ADDRESS, 4646))
    lab = Lab(tmp_path)
    lab.node = {
        **SU, "nomad_node_name": "gpu0", "nomad_bind_addr": ADDRESS, "nomad_client_servers": [ADDRESS],
        "nomad_bin_dir": str(inside / "bin"), "nomad_plugin_dir": str(inside / "plugins"),
        "nomad_data_dir": str(inside / "data"),
    }  # fmt: skip
    settings = {"wsl_ports": [4646]}
    # No node yet, so that nothing is taken out of work.
    node, lab.node = lab.node, None
    lab.good(**settings, wsl_shutdown=True)
    lab.node = node
    before, wslconfig, ended = lab.windows.machine, lab.config.read_bytes(), lab.called("--shutdown|--terminate")
    assert before.portproxy and before.firewall
    lab.playbook, lab.under = "remove.yml", under
    leave = ("--limit", "gaming-pc,gaming-pc-Debian", "-e", "remove_also=wslconfig", "-e", "_common_is_wsl=true")
    # As when the node joined, where the command line went before all else.
    leave += ("-e", "wsl_ports=4646", "-e", "wsl_keep_alive=true")

    # A node that has work does not leave, and Windows goes on holding it and leading to it.
    farm.run_job("id-0", "train")
    said = lab.bad(*leave, **settings)
    assert "1 running allocation, which its removal from the farm would end: train." in said
    assert (lab.windows.machine.tasks, lab.config.read_bytes()) == (before.tasks, wslconfig)
    assert farm.agent.writes == [] and all(path.exists() for path in agent_of)

    farm.allocations.clear()
    lab.good(*leave, **settings)
    assert farm.nodes == {}
    assert [path for path in [*agent_of, config, inside / "bin/nomad"] if path.exists()] == []
    assert not enabled.is_symlink()
    machine = lab.windows.machine
    assert (machine.tasks, machine.portproxy, machine.firewall) == ({}, {}, {})
    assert "IdleTimeout" not in lab.config.read_text()
    # What is not the farm's is as it was: the distribution, which runs on, its settings, and its identity.
    assert machine.distributions == before.distributions
    assert lab.called("--shutdown|--terminate|--unregister") == ended
    assert (conf.read_text(), identity.read_text()) == ("[boot]\nsystemd=true\n", "id-0")

    # Nobody answers there any more, and nothing is left to do.
    farm.agent.close()
    again = lab.good(*leave, **settings)
    assert re.findall(r"gaming-pc\S* : ok=\d+ changed=(\d+)", again) == ["0", "0"]


def test_ports_that_nobody_wants_any_more_are_free_again(tmp_path: Path) -> None:
    lab = Lab(tmp_path, portproxy={"0.0.0.0/9000": "198.51.100.1/80"})
    lab.good(wsl_shutdown=True, wsl_ports=[4646, 8080])
    lab.good(wsl_shutdown=True, wsl_ports=[4646])
    assert set(lab.windows.machine.portproxy) == {"0.0.0.0/9000", "0.0.0.0/4646"}
    # One of them would take the port from the distribution.
    lab.good(wsl_shutdown=True, wsl_ports=[4646], wsl_config={"wsl2": {"networkingMode": "mirrored"}})
    assert set(lab.windows.machine.portproxy) == {"0.0.0.0/9000"}


def test_ports_that_lead_nowhere_are_said(tmp_path: Path) -> None:
    lab = Lab(tmp_path, netsh_fails=True, language="de")
    settings: dict[str, Any] = {"wsl_shutdown": True, "wsl_ports": [4646, 8080]}

    def told(result: str, listed: str, look: str) -> str:
        return (
            f'gaming-pc: the task "ports" has {result}, and `netsh.exe interface portproxy show v4tov4` lists '
            f"{listed}. Expected: 0x0, and each of wsl_ports. Next step: run `wsl.exe -d Debian --exec hostname -I` "
            f"there, which has to print an IPv4 address, and look at what {look} says."
        )

    refused = "0x41 as its last result, because netsh.exe refused a port"
    add = "`netsh.exe interface portproxy add v4tov4 listenaddress=0.0.0.0 listenport=PORT connectaddress=ADDRESS`"
    assert told(refused, "no 4646, 8080", add) in lab.bad(**settings)
    with lab.windows.changed() as machine:
        machine.netsh_fails = False
    lab.good(**settings)
    assert len(lab.windows.machine.portproxy) == 2

    # They are there, and lead to where they have led before.
    with lab.windows.changed() as machine:
        machine.netsh_fails = True
    life.wait(lab.windows, 300)
    assert told(refused, "all of them", add) in lab.bad(**settings)
    with lab.windows.changed() as machine:
        machine.netsh_fails, machine.no_ipv4 = False, True
    life.wait(lab.windows, 300)
    task = rf'`schtasks.exe /Query /TN "\gpufarm\{OWNER}\ports" /V /FO LIST`'
    nothing = "0x40 as its last result, because WSL named no IPv4 address"
    assert told(nothing, "all of them", task) in lab.bad(**settings)
    # An end of another kind.
    with lab.windows.changed() as machine:
        machine.no_ipv4 = False
        next(each for name, each in machine.tasks.items() if name.endswith("ports"))["last_result"] = 0x800710E0
    assert told("0x800710e0 as its last result", "all of them", task) in lab.bad(**settings)


def test_in_the_mirrored_mode_ports_are_rules(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    settings = {"wsl_shutdown": True, "wsl_config": {"wsl2": {"networkingMode": "mirrored"}}}
    lab.good(**settings, wsl_ports=[4646, 8080])
    rules = lab.windows.machine.hyper_v_firewall
    assert {name: rule["LocalPorts"] for name, rule in rules.items()} == {
        f"{RULE}-4646": 4646, f"{RULE}-8080": 8080,
    }  # fmt: skip
    assert rules[f"{RULE}-4646"]["VMCreatorId"] == "{40E0AC32-46A5-438A-A0B2-2B479E8F2E90}"
    assert lab.windows.machine.portproxy == {}
    assert lab.called("wslinfo --networking-mode") == 1
    lab.good(**settings, wsl_ports=[4646])
    assert list(lab.windows.machine.hyper_v_firewall) == [f"{RULE}-4646"]


def test_a_mirrored_mode_that_falls_back_is_said(tmp_path: Path) -> None:
    lab = Lab(tmp_path, mirrored_fails=True)
    settings = {"wsl_shutdown": True, "wsl_config": {"wsl2": {"networkingMode": "mirrored"}}}
    assert (
        'gaming-pc: `wslinfo --networking-mode` in Debian says "nat". Expected: mirrored, as .wslconfig says '
        "(WSL#13793). Next step: run `wsl.exe` there, whose warning says what is missing, or set networkingMode to nat."
    ) in lab.bad(**settings)
    # The next step helps.
    lab.good(wsl_shutdown=True, wsl_config={"wsl2": {"networkingMode": "nat"}})


def test_the_mode_is_asked_where_wsl_2_is(tmp_path: Path) -> None:
    """One of WSL 1 has none of it, whichever name comes first."""
    mixed = [Distribution("Debian", default=True, version=1), Distribution("Ubuntu")]
    lab = Lab(tmp_path, distributions=mixed)
    settings = {"wsl_shutdown": True, "wsl_config": {"wsl2": {"networkingMode": "mirrored"}}}
    lab.good(**settings)
    assert lab.called("-d Ubuntu --exec wslinfo --networking-mode") == 1
    with lab.windows.changed() as machine:
        machine.distributions = mixed[:1]
    lab.good(**settings)
    assert lab.called("wslinfo") == 1


def test_distributions_are_installed_and_imported(tmp_path: Path) -> None:
    lab = Lab(tmp_path, distributions=[])
    image = lab.windows.mounted(r"C:\images\farm.tar")
    image.parent.mkdir(parents=True)
    image.touch()
    images = [
        {"name": "first", "distribution": "Debian"}, {"name": "second", "image": r"C:\images\farm.tar"},
    ]  # fmt: skip
    told = (
        "gaming-pc: Windows has first, second now, which the inventory of this run has not. Expected: it has what is "
        "to be a node. Next step: run gpufarm.core.wsl with --flush-cache, which asks Windows also where answers are "
        "kept."
    )
    assert told in lab.good(wsl_images=images, wsl_shutdown=True)
    assert {each.name: each.state for each in lab.windows.machine.distributions} == {
        "first": "Running", "second": "Running",
    }  # fmt: skip
    again = lab.good(wsl_images=images, wsl_shutdown=True)
    assert (changed(again), "the inventory of this run has not" in again) == (0, False)


def test_a_distribution_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    lab = Lab(tmp_path, distributions=[Distribution("Debian", default=True, version=1)])
    # WSL does not tell names apart by case.
    lab.good(wsl_images=[{"name": "debian", "folder": r"D:\wsl"}])
    assert list(lab.windows.machine.tasks) == [KEEP]
    assert [(each.name, each.version, each.state) for each in lab.windows.machine.distributions] == [
        ("Debian", 1, "Running")
    ]


def test_an_update_needs_consent_and_is_one(tmp_path: Path) -> None:
    lab = Lab(tmp_path, release="2.1.5")
    assert (
        "gaming-pc: WSL is 2.1.5. Expected: 2.2.4 or newer. Next step: set wsl_update: true, which ends its "
        "distributions, "
        "or run `wsl.exe --update` there."
    ) in lab.bad("-e", "wsl_update=no")
    assert not lab.config.exists()
    # What runs has ended with the old one, so the configuration needs no other consent.
    lab.good(wsl_update=True)
    assert lab.windows.machine.release == "2.6.3"
    assert (lab.windows.machine.running or {})["general.instanceidletimeout"] == "-1"
    assert lab.state == "Running"


def test_an_update_ends_nothing_that_nobody_could_see(tmp_path: Path) -> None:
    """WSL of the Store, before the MSI, has no wsl.exe where this role looks for it."""
    lab = Lab(tmp_path, release="1.2.5", has_program_files=False)
    said = lab.bad(wsl_update=True, of_instances={"wsl_running": True})
    assert (
        "gaming-pc: gaming-pc-Debian runs by the inventory, and C:\\Program Files\\WSL\\wsl.exe lists no distribution. "
        "Expected: one that does, because an update ends what runs. Next step: see that no work runs there, run "
        "`wsl.exe --update` on this machine, and this again."
    ) in said
    assert lab.called("--install|--update") == 0
    # Nor is it known of what the inventory has stopped.
    lab.run(wsl_update=True, of_instances={"wsl_running": False})
    assert lab.called("--install") == 1


@pytest.mark.parametrize(("here", "there", "same"), [
    ({"wsl_computer_name": "GAMING-PC"}, {"wsl_computer_name": "GAMING-PC", "ansible_host": "192.0.2.31"}, True),
    ({"ansible_host": "192.0.2.31"}, {"wsl_computer_name": "GAMING-PC", "ansible_host": "192.0.2.31"}, True),
    ({"wsl_computer_name": "GAMING-PC"}, {"wsl_computer_name": "OFFICE-PC"}, False),
    # Behind one address there may be several, by their ports.
    ({"ansible_host": "192.0.2.31"}, {"ansible_host": "192.0.2.31", "ansible_port": 2222}, False),
])  # fmt: skip
def test_an_update_does_not_end_nodes_of_another_user(
    tmp_path: Path, here: dict[str, Any], there: dict[str, Any], same: bool
) -> None:
    lab = Lab(tmp_path, release="2.1.5")
    lab.others = {"of-bob": there, "of-bob-Debian": {"wsl_host": "of-bob", "wsl_distribution": "Debian"}}
    told = (
        "gaming-pc: of-bob-Debian is of another user of this machine, and an update of WSL would end it. Expected: no "
        "such host in gpu_nodes or kubernetes_nodes; this role takes no nodes of other users out of work. Next step: "
        "see that no work runs on of-bob-Debian (`nomad node drain`, `kubectl drain`), run `wsl.exe --update` there, "
        "and this again."
    )
    if not same:
        lab.good("--check", wsl_update=True, **here)
        return
    assert told in lab.bad(wsl_update=True, **here)
    assert (lab.windows.machine.release, lab.windows.machine.tasks) == ("2.1.5", {})
    # The next step helps.
    with lab.windows.changed() as machine:
        machine.release = "2.6.3"
    lab.good(wsl_update=True, **here)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has processes of its own")
def test_nodes_work_again_where_another_was_refused(tmp_path: Path) -> None:
    lab = Lab(tmp_path, distributions=[Distribution("Debian", default=True), Distribution("Ubuntu")])
    with agent(ADDRESS) as tokens:
        lab.nodes = {"Debian": SU, "Ubuntu": {**SU, "nomad_bind_addr": ADDRESS, "nomad_token": "of-Ubuntu"}}
        said = lab.bad(wsl_shutdown=True)
    assert tokens == ["of-Ubuntu"]
    assert said.count("Look whether the GPUs are well, and let the node work again") == 2
    assert lab.called("--shutdown") == 0
    assert not lab.config.with_name(".wslconfig.out").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has processes of its own")
def test_a_node_is_put_back_by_its_own_variables(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.config.with_name(".wslconfig.out").write_text("Nodes:\r\ngaming-pc-Debian\r\n")
    lab.node = {
        **SU, "nomad_device_nvidia_ignored_gpu_ids": ["GPU-6b1f0c0a"], "gpu_node_gpus": 4,
        "gpu_health_close_on": "warning", "gpu_health_options": {"temperature_gpu_max_c": 80},
        "gpu_health_plugin_age_max": 90, "wsl_several_gpus": "first",
    }  # fmt: skip
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf 'GPU: A (UUID: GPU-%s)\\n' 0 6b1f0c0a 2\n")
    smi.chmod(0o755)
    # Of no module that could be asked, so by what it was given.
    said = lab.good("-vvv", "-e", f"__wsl_lib={tmp_path}", wsl_keep_alive=False)
    for given in (
        "ignored_gpu_ids: - GPU-6b1f0c0a - GPU-2 ", "close_on: warning", "plugin_age_max: 90.0",
        "health: gpus: 4 temperature_gpu_max_c: 80",
    ):  # fmt: skip
        assert given in said, given


def test_what_a_node_is_put_back_by_is_handed_over() -> None:
    """A delegated task would have the variables of the Windows machine: none of these."""
    roles = playbook_helper.ROOT / "roles"
    (step, _remember) = yaml.safe_load((roles / "wsl/tasks/windows/node.yml").read_text())
    defaults: dict[str, Any] = {}
    for role in ("nomad", "node_maintenance", "gpu_health", "nomad_device_nvidia"):
        defaults |= yaml.safe_load((roles / role / "defaults/main.yml").read_text())
    known = yaml.safe_load((roles / "nomad/vars/main.yml").read_text())
    text = json.dumps([known[f"__nomad_{name}"] for name in ("api", "binary", "tls", "local_host", "local_url")])
    for name in ("node_maintenance/tasks/take_out", "node_maintenance/tasks/put_back", "nomad/tasks/validate"):
        text += (roles / f"{name}.yml").read_text()
    used = {name for name in re.findall("[a-z_0-9]+", text) if name in defaults or name == "gpu_node_gpus"}
    # They are only said in an error.
    used -= {"nomad_version", "nomad_device_nvidia_version", "nomad_device_nvidia_program"}
    assert used <= step["vars"].keys()
    names = used & defaults.keys() - OURS

    def texts(variables: dict[str, Any]) -> dict[str, Any]:
        return {name: trust_as_template(text) if isinstance(text, str) else text for name, text in variables.items()}

    for has in ({}, {"nomad_tls": "generate"}):
        templar = Templar(loader=DataLoader())
        templar.available_variables = {**texts(step["vars"]), "inventory_dir": "/farm", "__wsl_windows_has": has}
        given = {name: templar.template(trust_as_template(step["vars"][name])) for name in names}
        templar.available_variables = {**texts(defaults), "inventory_dir": "/farm", **has}
        assert given == {name: templar.template(texts(defaults)[name]) for name in names}


def test_what_has_come_meanwhile_is_not_ended(tmp_path: Path) -> None:
    two = [Distribution("Debian", state="Stopped", default=True), Distribution("Ubuntu", state="Stopped")]
    lab = Lab(tmp_path, distributions=two, comes={"Ubuntu": 2})
    said = lab.good(wsl_keep_alive=False, wsl_config={"wsl2": {"processors": 4}})
    assert "WSL has not read it. Running: Ubuntu." in said
    with lab.windows.changed() as machine:
        machine.comes = {"Debian": lab.called("--verbose") + 3}
    lab.nodes = {"Ubuntu": SU}
    assert (
        "gaming-pc: Debian runs since gaming-pc-Ubuntu were taken out of work, and a shutdown of WSL on gaming-pc "
        "would end it. Expected: nothing that was not asked. Next step: run this again."
    ) in lab.bad(wsl_keep_alive=False, wsl_shutdown=True)
    assert lab.called("--shutdown") == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has processes of its own")
def test_an_agent_of_nomad_counts_in_whatever_group(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    program = tmp_path / "nomad"
    shutil.copy("/bin/sleep", program)
    lab.under = (*ALONE, "sh", "-c", f'{program} 3600 & exec "$@"', "sh")
    with agent(ADDRESS) as tokens:
        lab.bad(wsl_shutdown=True, of_instances={**SU, "nomad_bind_addr": ADDRESS, "nomad_token": "of-Debian"})
    assert tokens == ["of-Debian"]
    lab.unlisted = ("Debian",)
    assert (
        "gaming-pc: Nomad runs in Debian, which this inventory does not have, and a shutdown of WSL on gaming-pc would "
        "end it. Expected: it is a host of the inventory, and can be taken out of work. Next step: run this again with "
        "--flush-cache, or list it there."
    ) in lab.bad(wsl_shutdown=True)
    assert lab.called("--shutdown") == 0


@pytest.mark.parametrize("silent", [{"without": ["/bin/sh"]}, {"broken": "Wsl/Service/E_FAIL"}, {"seconds": HANGS}])
def test_what_does_not_say_whether_nomad_runs_in_it_is_not_ended(tmp_path: Path, silent: dict[str, Any]) -> None:
    lab = Lab(tmp_path, distributions=[Distribution("Debian", default=True), Distribution("Zoo", **silent)])
    lab.nodes, lab.unlisted = {"Debian": {}}, ("Zoo",)
    said = lab.bad(wsl_shutdown=True, __wsl_windows_patience=15)
    assert (
        "gaming-pc: Zoo does not say whether Nomad runs in it, and a shutdown of WSL on gaming-pc would end it. "
        "Expected: an answer of its /bin/sh and grep. Next step: see what runs there (`wsl.exe -d Zoo`), end it "
        "(`wsl.exe --terminate Zoo`), and run this again."
    ) in said
    assert lab.called("--shutdown") == 0


@pytest.mark.parametrize("nodes", [{}, {"Debian": SU}])
def test_a_node_of_kubernetes_that_runs_is_not_ended(tmp_path: Path, nodes: dict[str, Any]) -> None:
    """Whether it is one of Nomad's, too, or not."""
    lab = Lab(tmp_path)
    lab.nodes, lab.of_kubernetes = nodes, ("Debian",)
    assert (
        "gaming-pc: gaming-pc-Debian runs, a host of kubernetes_nodes, whose pods a shutdown of WSL on gaming-pc would "
        "end. Expected: none that runs;"
    ) in lab.bad(wsl_shutdown=True)
    assert lab.called("--shutdown") == 0
    with lab.windows.changed() as machine:
        machine.distributions[0].state = "Stopped"
    lab.good(wsl_shutdown=True)


def test_who_runs_in_the_machine_does_not_end_it(tmp_path: Path) -> None:
    """Also over SSH."""
    lab = Lab(tmp_path, control_node=True)
    said = lab.good(wsl_shutdown=True)
    assert "run `wsl.exe --shutdown` in a terminal of Windows, which ends every distribution and this one" in said
    assert lab.called("--shutdown") == 0


def test_a_configuration_that_cannot_be_changed_is_refused_first(tmp_path: Path) -> None:
    lab = Lab(tmp_path, release="2.1.5")
    lab.config.write_bytes(b"# M\xfcller\r\n")
    assert (
        "gaming-pc: .wslconfig is no UTF-8 (byte 3). Expected: UTF-8, or UTF-16 with a mark, as WSL reads it. Next "
        "step: save it with that encoding."
    ) in lab.bad(wsl_update=True)
    assert (lab.windows.machine.tasks, lab.windows.machine.release) == ({}, "2.1.5")


@pytest.mark.parametrize("mode", ["none", "consomme"])
def test_a_mode_that_leads_no_ports_is_no_matter_without_them(tmp_path: Path, mode: str) -> None:
    lab = Lab(tmp_path)
    lab.config.write_text(f"[wsl2]\nnetworkingMode={mode}\n")
    assert (
        f"gaming-pc: networkingMode of .wslconfig is {mode}, and wsl_ports has 4646, 80. Expected: nat or mirrored, in "
        "which this role can lead ports to a distribution. Next step: set one of them in wsl_config, or wsl_ports: []."
    ) in lab.bad(wsl_ports=[4646, 80])
    lab.good("--check")


def test_the_mode_is_that_of_the_whole_file(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.config.write_text("[experimental]\nnetworkingmode = Mirrored\n")
    lab.good(wsl_ports=[4646], wsl_shutdown=True)
    machine = lab.windows.machine
    assert (machine.portproxy, list(machine.hyper_v_firewall)) == ({}, [f"{RULE}-4646"])


def test_a_wsl_that_hangs_is_said(tmp_path: Path) -> None:
    lab = Lab(tmp_path, seconds={PROGRAM_FILES: HANGS})
    said = lab.bad(__wsl_windows_patience=2)
    assert r"gaming-pc: `C:\Program Files\WSL\wsl.exe` gave no answer (" in said
    assert (
        "). Expected: one within 2 s. Next step: run `wsl.exe --list --verbose` there; where that hangs, too, restart "
        "Windows (WSL#8529), and run this again."
    ) in said


def test_a_driver_that_hangs_is_said(tmp_path: Path) -> None:
    lab = Lab(tmp_path, seconds={programs.NVIDIA_SMI: HANGS})
    said = lab.bad(__wsl_windows_patience=15)
    assert rf"gaming-pc: `{programs.NVIDIA_SMI}` gave no answer (" in said
    assert (
        "). Expected: one within 15 s. Next step: run it there; where that hangs, too, restart Windows, and run this "
        "again; or empty wsl_driver_version_min where no GPU is wanted."
    ) in said
    lab.good(wsl_driver_version_min="")


def test_a_run_of_the_ports_task_that_hangs_ends_before_the_next(tmp_path: Path) -> None:
    """Which would not start beside it."""
    lab = Lab(tmp_path)
    lab.good(wsl_shutdown=True, wsl_ports=[4646])
    limits = {name: known["settings"]["ExecutionTimeLimit"] for name, known in lab.windows.machine.tasks.items()}
    assert limits == {KEEP: "PT0S", rf"\gpufarm\{OWNER}\ports": "PT4M"}


def test_sudo_is_nothing_for_windows(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.good("--become", wsl_keep_alive=False)


@pytest.mark.parametrize(("problem", "text"), [
    (
        {"administrator": False},
        r"tasks run as GAMING-PC\alice without an administrator's rights. Expected: them, to take away tasks, port "
        "proxies and rules of firewalls. Next step: connect as a user who is an administrator and owns the "
        "distributions.",
    ),
    (
        {"list_fails": True},
        r'`C:\Program Files\WSL\wsl.exe --list --verbose` ended with 255: "The system cannot find the file specified.'
        '". Expected: the distributions and whether they run, before any is ended. Next step: run it there, and mend '
        "what it says.",
    ),
])  # fmt: skip
def test_a_machine_that_cannot_let_go_keeps_all(tmp_path: Path, problem: dict[str, Any], text: str) -> None:
    lab = Lab(tmp_path)
    lab.good(wsl_shutdown=True)
    before, config = lab.windows.machine, lab.config.read_bytes()
    with lab.windows.changed() as machine:
        for key, value in problem.items():
            setattr(machine, key, value)
    lab.playbook = "remove.yml"
    assert f"gaming-pc: {text}" in lab.bad("--limit", "gaming-pc", "-e", "remove_also=wslconfig", wsl_shutdown=True)
    after = lab.windows.machine
    assert (after.tasks, after.distributions[0].state, lab.config.read_bytes()) == (before.tasks, "Running", config)
    assert lab.called("--shutdown") == 1


def test_a_machine_that_leaves_holds_nothing_that_the_inventory_has_no_more(tmp_path: Path) -> None:
    lab = Lab(tmp_path, distributions=[Distribution("Debian", default=True), Distribution("Ubuntu")])
    lab.good()
    # And what is not ours.
    foreign = rf"\gpufarm\{OWNER}\mine"
    with lab.windows.changed() as machine:
        machine.tasks[foreign] = machine.tasks[KEEP]
    lab.unlisted = ("Ubuntu",)
    lab.playbook = "remove.yml"
    lab.good("--limit", "gaming-pc")
    machine = lab.windows.machine
    assert (list(machine.tasks), machine.holds) == ([foreign], {})


def test_a_machine_that_leaves_tells_which_node_stays_out(tmp_path: Path) -> None:
    """Of a run that was cut off; the distribution does not run, so nobody can put its node back."""
    lab = Lab(tmp_path, distributions=[Distribution("Debian", state="Stopped", default=True)])
    note = lab.config.with_name(".wslconfig.out")
    note.write_text("Ansible has taken these nodes out of work:\r\ngaming-pc-Debian\r\n")
    lab.playbook = "remove.yml"
    assert (
        "gaming-pc: gaming-pc-Debian was taken out of work and is still out; gaming-pc-Debian does not run, or is not "
        "in this inventory. Expected: nodes that work again. Next step: start it there (`wsl.exe -d NAME`), and run "
        "gpufarm.core.site for it, which puts it back."
    ) in lab.bad("--limit", "gaming-pc")
    # The machine has left, and nothing of ours stays on it.
    assert not note.exists()
    assert changed(lab.good("--limit", "gaming-pc")) == 0


UPDATE = "Next step: set wsl_update: true, which ends its distributions, or run `wsl.exe --update` there."
LISTED = (
    "Expected: its distributions in the inventory, before any is ended. Next step: see that the machine answers and "
    "run this again, or set wsl_shutdown: false and wsl_update: false."
)
POWERS = (
    "Next step: connect as a user who is an administrator and owns the distributions; or set wsl_keep_alive: false, "
    "and wsl_ports: []."
)
REFUSALS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"administrator": False, "release": "2.1.5"}, {"wsl_update": True, "wsl_ports": [4646]},
        r"tasks run as GAMING-PC\alice without an administrator's rights. Expected: them, to hold Debian by a task at "
        "boot, to open wsl_ports, to update WSL. Next step: connect as a user who is an administrator and owns the "
        "distributions; or set wsl_keep_alive: false, wsl_ports: [] and wsl_update: false.",
    ),
    (
        {"release": "", "language": "de"}, {},
        r'C:\Program Files\WSL\wsl.exe --version says "Ungültiges Befehlszeilenargument: --version". '
        f"Expected: 2.2.4 or newer. {UPDATE}",
    ),
    (
        {"installed": False}, {},
        r"C:\Program Files\WSL\wsl.exe --version says Failed to execute: The system cannot find the file specified "
        rf"C:\Program Files\WSL\wsl.exe. Expected: 2.2.4 or newer. {UPDATE}",
    ),
    (
        {"release": "2.5.7", "language": "zh"}, {"wsl_config": {"general": {"instanceIdleTimeout": 60000}}},
        "WSL is 2.5.7. Expected: 2.5.8 or newer, which knows general.instanceIdleTimeout of wsl_config. "
        f"{UPDATE}",
    ),
    (
        {"release": "2.4.3"}, {"wsl_images": [{"name": "farm", "distribution": "Debian"}]},
        "WSL is 2.4.3. Expected: 2.4.4 or newer, which installs under a name of wsl_images. "
        f"{UPDATE}",
    ),
    (
        {"release": "2.1.5", "update_fails": "Wsl/UpdatePackage/0x80072ee7"}, {"wsl_update": True},
        "WSL is 2.1.5. Expected: 2.2.4 or newer. Next step: mend what the update said, which ended with 255: "
        '"The system cannot find the file specified. Error code: Wsl/UpdatePackage/0x80072ee7".',
    ),
    (
        {"release": "2.1.5", "newest_release": "2.1.5"}, {"wsl_update": True},
        "WSL is 2.1.5. Expected: 2.2.4 or newer. "
        "Next step: restart Windows, which may have to finish the installation.",
    ),
    (
        {"list_fails": True, "language": "de"}, {"wsl_shutdown": True, "wsl_update": True},
        r'`C:\Program Files\WSL\wsl.exe --list --verbose` ended with 255: "Das System kann die angegebene Datei nicht '
        'finden.". Expected: the distributions and whether they run, before any is ended. Next step: run it there, and '
        "mend what it says.",
    ),
    (
        {}, {"wsl_ports": [4646, "3389", 2222], "ansible_port": 2222},
        "wsl_ports has 3389, 2222. Expected: none of 22, 135, 139, 445, 2222, 3389, 5985, 5986, on which Windows "
        "itself is reached. Next step: take other ports, and let the distribution listen there.",
    ),
    (
        {"portproxy": {"192.0.2.31/8080": "198.51.100.1/80", "*/9000": "198.51.100.1/80"}}, {"wsl_ports": [4646, 8080]},
        "Windows already leads port 8080 to 198.51.100.1:80, which this role has not done. Expected: no port proxy for "
        "wsl_ports but those of this role. Next step: see who needs it, and take it away by `netsh.exe interface "
        "portproxy delete v4tov4`, or take other ports.",
    ),
    (
        {}, {"wsl_reachable": False, "wsl_error": "pc: no answer in 30 s.", "wsl_shutdown": True},
        f"the inventory has no answer of this machine: pc: no answer in 30 s. {LISTED}",
    ),
    (
        {}, {"wsl_reachable": False, "wsl_update": True},
        f"the inventory has no answer of this machine: nothing is known of it. {LISTED}",
    ),
    (
        {"build": 19045}, {"wsl_config": {"wsl2": {"networkingMode": "mirrored"}}},
        "Windows is of build 19045. Expected: 22621 (Windows 11 22H2) or newer, because .wslconfig sets "
        "networkingMode to mirrored (WSL#13793). Next step: update Windows, or set it to nat.",
    ),
    (
        {}, {"wsl_ports": [4646], "wsl_config": {"experimental": {"networkingMode": "VirtioProxy"}}},
        "networkingMode of .wslconfig is virtioproxy, and wsl_ports has 4646. Expected: nat or mirrored, in which this "
        "role can lead ports to a distribution. Next step: set one of them in wsl_config, or wsl_ports: [].",
    ),
    (
        {}, {"wsl_ports": [4646], "wsl_config": {"wsl2": {"networkingMode": "bridged"}}},
        "networkingMode of .wslconfig is bridged, and wsl_ports has 4646. Expected: nat or mirrored, in which this "
        "role can lead ports to a distribution. Next step: set one of them in wsl_config, or wsl_ports: [], and "
        "nomad_advertise_addr to the address that the distribution itself has.",
    ),
    (
        {"gpus": []}, {},
        "nvidia-smi.exe of Windows names no GPU (Failed to execute: The system cannot find the file specified "
        r"C:\Windows\System32\nvidia-smi.exe). Expected: the NVIDIA driver for Windows, 528.33 or newer. "
        "Next step: install it there, or empty wsl_driver_version_min where no GPU is wanted.",
    ),
    (
        {"smi_fails": True}, {},
        "nvidia-smi.exe of Windows names no GPU (NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA "
        "driver. Make sure that the latest NVIDIA driver is installed and running.). Expected: the NVIDIA driver for "
        "Windows, 528.33 or newer. Next step: install it there, or empty wsl_driver_version_min where no GPU is "
        "wanted.",
    ),
    (
        {"gpus": [{**GPU, "driver_version": "516.94"}]}, {},
        "the NVIDIA driver of Windows is 516.94. Expected: 528.33 or newer. "
        "Next step: update it in Windows; in WSL there is none.",
    ),
    (
        {"gpus": [GPU, {**GPU, "name": "Tesla V100-PCIE-16GB", "driver_model": "TCC"}]}, {},
        "the driver runs Tesla V100-PCIE-16GB in TCC mode. Expected: WDDM or MCDM, because WSL sees no GPU in TCC "
        "mode (WSL#12835). Next step: run `nvidia-smi.exe -dm 0` as administrator and restart Windows.",
    ),
    (
        {}, {"ansible_connection": "local"},
        "its connection is local. Expected: one to Windows itself, which is ssh, psrp, winrm or "
        "gpufarm.core.wsl_windows. Next step: leave it to the inventory plugin gpufarm.core.wsl.",
    ),
    (
        {"administrator": False}, BELOW,
        r"tasks run as GAMING-PC\alice without an administrator's rights. Expected: them, to hold Debian by a task at "
        'boot. Next step: open a terminal of Windows with "Run as administrator", start this distribution in it, and '
        "run this again there; or set wsl_keep_alive: false, and wsl_ports: [].",
    ),
    (
        {"administrator": False}, {"wsl_keep_alive": False, "wsl_ports": [4646], "wsl_ports_distribution": "Debian"},
        r"tasks run as GAMING-PC\alice without an administrator's rights. Expected: them, to open wsl_ports. "
        f"{POWERS}",
    ),
    (
        {}, {"wsl_keep_alive": False, "wsl_ports": [4646], "wsl_ports_distribution": "Debian"},
        "wsl_ports are to be led to a distribution that nothing holds, because wsl_keep_alive is false. Expected: one "
        "that is held; to lead them there would start it again every five minutes. Next step: set wsl_keep_alive: "
        "true, or wsl_ports: [].",
    ),
    (
        {"administrator": False, "release": "2.1.5"}, {"wsl_keep_alive": False, "wsl_update": True},
        r"tasks run as GAMING-PC\alice without an administrator's rights. Expected: them, to update WSL. Next step: "
        "connect as a user who is an administrator and owns the distributions; or set wsl_keep_alive: false, "
        "wsl_ports: [] and wsl_update: false.",
    ),
    (
        {"release": "2.1.5"}, {**BELOW, "wsl_update": True},
        "WSL is 2.1.5. Expected: 2.2.4 or newer. Next step: run `wsl.exe --update` in a terminal of Windows, which "
        "ends this distribution, too.",
    ),
    (
        {"distributions": [Distribution("Debian", default=True), Distribution("Ubuntu")]}, {"wsl_ports": [4646]},
        "wsl_ports lead to Debian, Ubuntu. Expected: one distribution of this machine, because a port proxy has one "
        "address. Next step: set wsl_ports_distribution.",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("machine", "given", "text"), REFUSALS)
def test_what_is_refused(tmp_path: Path, machine: Mapping[str, Any], given: Mapping[str, Any], text: str) -> None:
    lab = Lab(tmp_path, **machine)
    before = lab.windows.machine
    assert f"gaming-pc: {text}" in lab.bad(**given)
    after = lab.windows.machine
    assert (after.tasks, after.rights, lab.config.exists()) == ({}, before.rights, False)


def test_an_argument_of_another_type_is_refused(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    assert "Elements value for option 'wsl_ports' is of type" in lab.bad(wsl_ports=["nomad"])
    assert lab.windows.calls() == []


def test_a_missing_collection_is_named(tmp_path: Path) -> None:
    """microsoft.wsl is not in the package ansible, so here it is really missing."""
    lab = Lab(tmp_path)
    lab.without = ("microsoft.wsl",)
    assert (
        "gaming-pc: the control node has no collection microsoft.wsl. Expected: ansible.windows, community.windows, "
        "microsoft.wsl. Next step: `ansible-galaxy collection install microsoft.wsl`."
    ) in lab.bad(wsl_images=[{"name": "Debian"}])
    # Nobody needs it who installs none.
    lab.good()


def test_a_task_that_fails_is_said(tmp_path: Path) -> None:
    lab = Lab(
        tmp_path, distributions=[Distribution("Debian", state="Stopped", default=True, broken="Wsl/Service/E_FAIL")]
    )
    told = (
        'gaming-pc: the task "keep Debian" is Ready, its last result 0xff; there run no distributions. Expected: '
        r"all of Debian run, each held by its task as GAMING-PC\alice. Next step: look at what "
        r'`schtasks.exe /Query /TN "\gpufarm\GAMING-PC.alice\keep Debian" /V /FO LIST` says, '
    )
    assert f"{told}or set wsl_keep_alive_password, where Windows lets no task run without one." in lab.bad()
    assert f"{told}and set wsl_keep_alive_password to the present one." in lab.bad(wsl_keep_alive_password="of-alice")


def test_a_distribution_that_runs_and_is_not_held_is_said(tmp_path: Path) -> None:
    lab = Lab(tmp_path, s4u=False)
    assert 'the task "keep Debian" is Ready, its last result 0x80070569; there run Debian.' in lab.bad()
    lab.good(wsl_keep_alive_password="of-alice")
    assert lab.windows.machine.holds == {KEEP: "Debian"}


def test_another_password_is_stored_where_the_old_one_no_longer_lets_in(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.good(wsl_shutdown=True, wsl_keep_alive_password="of-alice")
    with lab.windows.changed() as machine:
        machine.password = "of-alice-since"
    life.boot(lab.windows)
    assert lab.state == "Stopped"
    lab.good(wsl_shutdown=True, wsl_keep_alive_password="of-alice-since")
    assert lab.windows.machine.holds == {KEEP: "Debian"}
    # Also while what it has let in before still runs.
    with lab.windows.changed() as machine:
        machine.password = "of-alice-now"
    lab.good(wsl_shutdown=True, wsl_keep_alive_password="of-alice-now")
    life.boot(lab.windows)
    assert lab.state == "Running"
