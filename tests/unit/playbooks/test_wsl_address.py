# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which of its Windows machine's addresses a distribution advertises, where somebody at a terminal is asked or not."""

from __future__ import annotations

import os
import pty
import select
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.tests.unit.playbooks.playbook_helper import HANGS_S, LOCAL, ROOT

pytestmark = pytest.mark.controller
ADDRESSES = [
    {"address": "192.0.2.31", "prefix": 24, "interface": "Ethernet", "default_route": True},
    {"address": "198.51.100.7", "prefix": 24, "interface": "Lab net", "default_route": False},
]
# Twice, as by wsl.yml, whose checks site.yml has again.
PLAY = [
    {
        "hosts": "all:!wsl_hosts",
        "gather_facts": False,
        "tasks": [
            {"ansible.builtin.include_role": {"name": "gpufarm.core.wsl", "tasks_from": "address.yml"}},
            {"ansible.builtin.debug": {"msg": "{{ inventory_hostname }} has {{ __nomad_advertise_addr }}."}},
        ],
    }
] * 2
LOST = "the addresses of Windows are not known (too slow). Expected: x. Next step: y."
ASKED = "pc has 192.0.2.31/24 (Ethernet, default route), 198.51.100.7/24 (Lab net). Which does Nomad advertise for {}"


def run(folder: Path, hosts: dict[str, dict[str, Any]], answer: str, *options: str) -> str:
    """Run the role's part at a terminal, and return what was shown there; all who are asked get the same answer."""
    inventory = {
        "wsl_hosts": {"hosts": {"pc": {"wsl_addresses": ADDRESSES}, "old": {}, "slow": {"wsl_addresses_error": LOST}}},
        "others": {"hosts": hosts, "vars": LOCAL},
    }
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory), encoding="utf-8")
    (folder / "play.yml").write_text(yaml.safe_dump(PLAY), encoding="utf-8")
    line = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "hosts.yml", "play.yml", *options]
    environment = {
        **os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "COLUMNS": "10000",
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"), "ANSIBLE_NOCOLOR": "True",
    }  # fmt: skip
    child, terminal = pty.fork()
    if not child:
        os.chdir(folder)
        os.execve(line[0], line, environment)
    shown, until = "", time.monotonic() + HANGS_S
    while time.monotonic() < until:
        # Ansible throws away what was typed before it reads, some time after it has shown what it asks.
        if shown.count("or an interface:") > shown.count("Note the answer"):
            os.write(terminal, f"{answer}\r".encode())
        if select.select([terminal], [], [], 1)[0]:
            try:
                shown += os.read(terminal, 65536).decode()
            except OSError:
                # The last of those who write to it has ended.
                break
    os.close(terminal)
    os.waitpid(child, 0)
    return " ".join(shown.split())


def test_only_who_asks_is_asked_and_each_for_itself(tmp_path: Path) -> None:
    shown = run(
        tmp_path,
        {
            "a": {"wsl_host": "pc", "wsl_address": "ask"},
            "b": {"wsl_host": "pc"},
            "c": {"wsl_host": "pc", "wsl_address": "ask"},
            "d": {"wsl_host": "pc", "wsl_address": "ask", "nomad_advertise_addr": "203.0.113.9"},
            "e": {"wsl_host": "pc", "wsl_address": "lab NET"},
            # Found by no inventory of ours, or by one whose machine has told nothing of its network.
            "f": {"wsl_host": "nobody"},
            "g": {"wsl_host": "old"},
            # No distribution.
            "h": {"wsl_address": "lab NET"},
        },
        "198.51.100.0/24",
    )
    assert [name for name in "abcdefgh" if ASKED.format(name) in shown] == ["a", "c"]
    for name, address in {
        "a": "198.51.100.7", "b": "192.0.2.31", "c": "198.51.100.7", "d": "203.0.113.9", "e": "198.51.100.7", "f": "",
        "g": "", "h": "",
    }.items():  # fmt: skip
        assert f"{name} has {address}." in shown


def test_who_is_asked_by_an_extra_variable_is_asked_once(tmp_path: Path) -> None:
    shown = run(tmp_path, {"a": {"wsl_host": "pc"}}, "198.51.100.0/24", "-e", "wsl_address=ask")
    assert shown.count("a has 198.51.100.7.") == 2
    assert shown.count(ASKED.format("a")) == 1


def test_an_answer_that_fits_none_is_refused(tmp_path: Path) -> None:
    shown = run(tmp_path, {"a": {"wsl_host": "pc", "wsl_address": "ask"}}, "")
    assert "Expected: the answer of somebody at a terminal." in shown
    shown = run(tmp_path, {"a": {"wsl_host": "pc", "wsl_address": "ask"}}, "Wi-Fi")
    assert (
        "a: the IPv4 addresses of its Windows machine are 192.0.2.31/24 (Ethernet), 198.51.100.7/24 (Lab net). "
        "Expected: one of an interface named Wi-Fi"
    ) in shown


def test_addresses_that_were_asked_for_and_not_given_change_nothing(tmp_path: Path) -> None:
    """The agent's configuration would lose the address that it has."""
    shown = run(
        tmp_path,
        {"a": {"wsl_host": "slow"}, "b": {"wsl_host": "slow", "nomad_advertise_addr": "203.0.113.9"}},
        "",
    )
    assert f"a: {LOST}" in shown
    assert "a has ." not in shown
    assert "b has 203.0.113.9." in shown
