# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What roles work out: their variables as Ansible finds, loads and templates them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar
from ansible_collections.gpufarm.core.tests.unit.patience import PATIENCE_S

from tests.simulator.callbacks import quick

# A template is compiled each time that it is asked for, which is two thirds of what an answer costs.
quick.Compiled().share(quick.templating.AnsibleEnvironment)
ROLES = Path(__file__).resolve().parents[3] / "roles"
# Filters of a collection, and lookups by their full names, need the loader, which a process has once.
PROGRAM = """
import json, sys
from ansible.plugins.loader import init_plugin_loader
init_plugin_loader([sys.argv[1]])
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper
asked = json.load(sys.stdin)
known = role_helper.variables(*asked["roles"])
print(json.dumps([role_helper.value(asked["name"], {**known, **given}) for given in asked["cases"]]))
"""


def variables(*roles: str, folder: Path = ROLES) -> dict[str, Any]:
    """Return the variables of the roles that are in a folder."""
    loader = DataLoader()
    paths = [
        path for role in roles for part in ("defaults", "vars")
        for path in loader.find_vars_files(str(folder / role / part), "main")
    ]  # fmt: skip
    return {
        name: text for path in paths for name, text in loader.load_from_file(path, trusted_as_template=True).items()
    }


def value(name: str, given: dict[str, Any]) -> Any:
    """Return what a variable is worth among the given ones."""
    return Templar(DataLoader(), variables=given).template(given[name])


def values(name: str, roles: Sequence[str], cases: Sequence[dict[str, Any]]) -> list[Any]:
    """Return what a variable of roles, which takes plugins of the collection, is worth in each case."""
    collections = next(path for path in map(Path, sys.path) if (path / "ansible_collections/gpufarm/core").exists())
    found: list[Any] = json.loads(
        subprocess.run(
            [sys.executable, "-c", PROGRAM, str(collections)],
            input=json.dumps({"name": name, "roles": roles, "cases": cases}),
            capture_output=True, text=True, check=True, timeout=PATIENCE_S,
        ).stdout
    )  # fmt: skip
    return found


def tasks_of(name: str, *, templates: bool = False) -> list[dict[str, Any]]:
    """Return the tasks of a file of the roles, those of blocks after the block; value() works templates out."""
    if templates:
        return list(_tasks(DataLoader().load_from_file(str(ROLES / name), trusted_as_template=True)))
    return list(_tasks(yaml.safe_load((ROLES / name).read_text(encoding="utf-8"))))


def _tasks(items: Any) -> Iterator[dict[str, Any]]:
    for item in items or []:
        yield item
        for part in ("block", "rescue", "always"):
            yield from _tasks(item.get(part))


def begun(items: Any, *failing: str) -> tuple[list[str], bool]:
    """Return which tasks begin where all are due and those that are named fail, and whether the last of it failed."""
    names: list[str] = []
    for item in items:
        if "block" in item:
            more, failed = begun(item["block"], *failing)
            names += more
            if failed and "rescue" in item:
                more, failed = begun(item["rescue"], *failing)
                names += more
            more, unfinished = begun(item.get("always", []), *failing)
            names += more
            failed = failed or unfinished
        else:
            names.append(item["name"])
            failed = item["name"] in failing or "ansible.builtin.fail" in item
        if failed:
            return names, True
    return names, False


def included(task: dict[str, Any]) -> str:
    """Return what a task enters, with all that is said of it."""
    return str([task.get(f"ansible.builtin.include_{what}") for what in ("role", "tasks")])


def host(*paths: str, packages: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """Return what the module host_info tells of a host that has these paths."""
    file = {"mode": "0644", "uid": 0, "gid": 0, "isdir": False, "isreg": True, "managed": True}
    files = [{"path": path, **file} for path in paths]
    now = int(time.time())
    empty = {
        "clock": {"asked_at": now, "host": now},
        "links": {},
        "certificates": {},
        "json_errors": {},
        "toml_errors": {},
        "keyrings": {},
        "packages_auto": [],
        "pci_devices": [],
        "programs": {"dockerd": ""},
        "units": {},
    }
    return {"user_id": 0, "files": files, "packages": list(packages), **empty, **more}


def facts(platform: str, kernel: str = "6.12.0") -> dict[str, str]:
    """Return what Ansible tells of a host, by family, distribution and version, as in ``Debian: Linux Mint 22``."""
    family, _colon, rest = platform.partition(": ")
    distribution, _space, version = rest.rpartition(" ")
    return {
        "architecture": "x86_64",
        "distribution": distribution,
        "distribution_major_version": version.partition(".")[0],
        "distribution_release": "n/a",
        "distribution_version": version,
        "kernel": kernel,
        "os_family": family,
    }
