# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs a playbook as a user does, over hosts that are this machine."""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import kubernetes_helper

ROOT = Path(__file__).resolve().parents[3]
LOCAL = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
# Seconds after which a playbook hangs, also on a machine that does much else.
HANGS_S = 600
# Where a test's agent of Nomad answers, whose port is the same everywhere: other processes' tests run at the same time.
ADDRESS = f"127.{64 + (os.getpid() >> 16)}.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"


# What systemd says and does of units, as far as a removal and Ansible's module ask it; anything else is refused.
SYSTEMCTL = """#!/usr/bin/env python3
import sys
from pathlib import Path

UNITS, ACTIVE = Path("/etc/systemd/system"), Path("/run/active")
ENABLED = UNITS / "multi-user.target.wants"
what, *words = sys.argv[1:]
options = [word for word in words if word.startswith("-")]
unit = "".join(word.removesuffix(".service") for word in words if not word.startswith("-"))
there = (UNITS / f"{unit}.service").exists()
if what == "show" and unit == "nomad":
    told = {
        "Id": f"{unit}.service", "LoadState": "loaded" if there else "not-found",
        "ActiveState": "active" if (ACTIVE / unit).exists() else "inactive", "NeedDaemonReload": "no",
        "UnitFileState": "" if not there else "enabled" if (ENABLED / f"{unit}.service").exists() else "disabled",
    }
    wanted = "".join(options).removeprefix("--property=").split(",") if options else told
    print("".join(f"{key}={told[key]}\\n" for key in wanted), end="")
elif what == "is-enabled" and there:
    found = (ENABLED / f"{unit}.service").exists()
    print("enabled" if found else "disabled")
    sys.exit(not found)
elif what == "disable" and there:
    (ENABLED / f"{unit}.service").unlink()
elif what == "stop" and there:
    (ACTIVE / unit).unlink()
elif what == "daemon-reload" or (what, unit) == ("reset-failed", "nomad"):
    pass
else:
    sys.exit(f"systemctl: no answer to {sys.argv[1:]}")
"""
# What runs on this machine, as in the nodes of a test farm, is nothing of a test's node.
ALONE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "--")
# Ends what has no parent any more, as a system's first process.
FIRST = "echo begun; while :; do sleep 3600 & wait; done"
# What a distribution has of its own, processes, too; all else that a removal might touch is this machine's, and stays.
INSIDE = (
    *("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-e", "-c"),
    """
    for place in /usr/local /opt /var/lib; do mount --bind $place $place; mount -o remount,bind,ro $place; done
    for place in /etc /run /usr/bin/systemctl; do mount --bind "$1$place" $place; done
    shift
    exec "$@"
    """,
    "sh",
)


@functools.cache
def alone() -> tuple[str, ...]:
    """Return what runs a command apart from all other processes, but with what such commands of these tests have left.

    That is what shares their work (tests/simulator/quick), which begins anew where each is alone with ALONE.
    """
    if os.geteuid() != 0:
        return ()
    first = subprocess.Popen(
        [*ALONE, "sh", "-c", FIRST], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
    )
    atexit.register(first.kill)
    assert first.stdout and first.stdout.readline() == b"begun\n"
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text(encoding="ascii").split()
    return ("nsenter", "--target", children[0], "--pid", "--mount", "--")


def plays(said: str) -> dict[str, list[str]]:
    """Return the hosts of each play, as --list-hosts prints them."""
    return {
        name.strip(): re.sub(r"(?s).*hosts \(\d+\):", "", body).split()
        for name, body in re.findall(r"\): (.*)\tTAGS.*((?:\n +.*)+)", said)
    }


def of_its_own(folder: Path) -> tuple[str, ...]:
    """Return what runs a command, by root, on a machine whose processes, /etc, /run and units are its own."""
    shutil.copytree("/etc", folder / "etc", symlinks=True)
    for name in ("run/active", "usr/bin"):
        (folder / name).mkdir(parents=True)
    (folder / "usr/bin/systemctl").write_text(SYSTEMCTL, encoding="utf-8")
    (folder / "usr/bin/systemctl").chmod(0o755)
    return (*INSIDE, str(folder))


# What roles ask of kubectl beside modules, who ask the API itself. Without a limit it may wait for ever.
KUBECTL = f"""#!/bin/sh
case "$*" in
    *' --request-timeout=30s get nodes --output=name') echo node/node00000; echo node/node00001 ;;
    *) exec {kubernetes_helper.KUBECTL} "$@" ;;
esac
"""


def asked_of(cluster: kubernetes_helper.Cluster, folder: Path) -> dict[str, str]:
    """Variables of hosts whose cluster this is."""
    kubectl = folder / "kubectl"
    kubectl.write_text(KUBECTL, encoding="utf-8")
    kubectl.chmod(0o755)
    return {"kubernetes_kubectl": str(kubectl), "kubernetes_kubeconfig": str(cluster.kubeconfig)}


def run_playbook(
    folder: Path,
    inventory: dict[str, Any],
    name: str,
    *options: str,
    before: Path | None = None,
    under: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run one of the collection's playbooks from ``folder``, where the inventory is written to.

    Collections in ``before`` stand before those that are installed. The words of ``under`` stand before the command.
    """
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory, sort_keys=False), encoding="utf-8")
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_COLLECTIONS_PATH": ":".join(str(path) for path in (before, ROOT / ".collections") if path),
        "ANSIBLE_LOCALHOST_WARNING": "False",
        "ANSIBLE_FORKS": "2",
        # Tests may run as root, whom Ansible never makes root again.
        "ANSIBLE_BECOME_ALLOW_SAME_USER": "True",
    }
    line = [*under, str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(folder / "hosts.yml")]
    line += [str(ROOT / "playbooks" / name), *options]
    return subprocess.run(
        line, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=HANGS_S
    )
