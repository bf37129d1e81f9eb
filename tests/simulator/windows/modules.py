"""Ansible's modules for Windows, which need PowerShell: each takes what its own documentation lists, and no more.

They are action plugins, so nothing connects: the machine is the folder that the host's variable windows_double names.
A collection that has them lies before the installed one of the same name.
"""

from __future__ import annotations

import base64
import datetime
import importlib.util
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleConnectionFailure
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase

from tests.simulator.windows import command_line, life, powershell, programs, scheduler
from tests.simulator.windows.host import ROOT, USER_SID, Distribution, Windows

PLUGIN = """\
import sys
sys.path.insert(0, {root!r})
from tests.simulator.windows import modules
class ActionModule(modules.Double):
    name = {name!r}
"""
# The options of microsoft.wsl 1.0.0 (plugins/modules/*.yml), which Debian's and PyPI's package ansible lacks.
WSL_COMMON: dict[str, dict[str, Any]] = {
    "name": {"type": "str", "required": True},
    "version": {"type": "int", "choices": [1, 2]},
    "log_command_output": {"type": "bool", "default": False},
}
MICROSOFT_WSL: dict[str, dict[str, dict[str, Any]]] = {
    "microsoft.wsl.distribution": {
        **WSL_COMMON,
        "distribution_id": {"type": "str"},
        "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        "size": {"type": "int"},
        "location": {"type": "path"},
        "sparse": {"type": "bool"},
        "use_ms_store": {"type": "bool", "default": True},
        "use_fixed_vhd": {"type": "bool", "default": False},
        "allow_shutdown": {"type": "bool", "default": True},
    },
    "microsoft.wsl.import": {
        **WSL_COMMON,
        "src": {"type": "path", "required": True},
        "location": {"type": "path", "required": True},
        "vhd": {"type": "bool", "default": False},
        "remove_src": {"type": "bool", "default": False},
    },
}
Result = dict[str, Any]
# What Windows lets an administrator do alone: the policy of rights, the firewall.
ADMINISTRATORS = ("ansible.windows.win_user_right", "community.windows.win_firewall_rule")


def install(folder: Path, without: tuple[str, ...] = ()) -> Path:
    """Have the doubles in a folder of collections, and return it."""
    for name in BEHAVIOUR:
        collection, _dot, module = name.rpartition(".")
        if collection in without:
            continue
        plugins = folder / "ansible_collections" / collection.replace(".", "/") / "plugins"
        (plugins / "action").mkdir(parents=True, exist_ok=True)
        (plugins / "action" / f"{module}.py").write_text(PLUGIN.format(root=str(ROOT), name=name), encoding="utf-8")
        (plugins / "modules").mkdir(exist_ok=True)
        (plugins / "modules" / f"{module}.ps1").write_text("#!powershell\n", encoding="utf-8")
    return folder


def options(name: str) -> dict[str, dict[str, Any]]:
    """Return the options that a module documents, from the collection that is installed."""
    if name in MICROSOFT_WSL:
        return MICROSOFT_WSL[name]
    namespace, collection, module = name.split(".")
    # By its place: inside of Ansible the import leads to the doubles.
    spec = importlib.util.find_spec("ansible")
    assert spec and spec.origin
    folder = Path(spec.origin).parents[1] / "ansible_collections" / namespace / collection / "plugins/modules"
    if (folder / f"{module}.yml").exists():
        documented = yaml.safe_load((folder / f"{module}.yml").read_text(encoding="utf-8"))["DOCUMENTATION"]
    else:
        code: dict[str, Any] = {}
        exec((folder / f"{module}.py").read_text(encoding="utf-8"), code)
        documented = yaml.safe_load(code["DOCUMENTATION"])
    return _specification(documented["options"])


def _specification(documented: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    found = {}
    for name, option in documented.items():
        keys = ("type", "required", "choices", "aliases", "elements", "default")
        found[name] = {key: option[key] for key in keys if key in option}
        if "suboptions" in option:
            # What has options of its own is a dictionary, also where the documentation does not say so.
            found[name].setdefault("type", "dict")
            found[name]["options"] = _specification(option["suboptions"])
    return found


class Double(ActionBase):  # type: ignore[misc] # ansible-core has no types
    """One module."""

    name = ""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> Result:
        super().run(tmp, task_vars)
        windows = Windows(Path((task_vars or {})["windows_double"]))
        if self._connection.become:
            return {"failed": True, "msg": "'sudo' is not recognized as an internal or external command"}
        checked = ArgumentSpecValidator(options(self.name)).validate(self._task.args)
        if checked.error_messages:
            return {"failed": True, "msg": f"{self.name}: {'; '.join(checked.error_messages)}"}
        given = {key: value for key, value in checked.validated_parameters.items() if value is not None}
        environment = {key: str(value) for each in self._task.environment or [] for key, value in each.items()}
        asked = Asked(bool(self._task.check_mode), environment)
        denied = self.name in ADMINISTRATORS and given.get("state", "present") == "present"
        if denied and not windows.machine.administrator:
            return {"failed": True, "msg": f"{self.name}: Access is denied."}
        with (windows.folder / "modules").open("a", encoding="utf-8") as log:
            log.write(f"{self.name}\n")
        result = BEHAVIOUR[self.name](windows, given, asked)
        # It was done, and nobody hears of it.
        if windows.machine.cut and re.search(windows.machine.cut, f"{self.name} {given}") and not asked.check:
            with windows.changed() as machine:
                machine.cut = None
            raise AnsibleConnectionFailure("The connection is cut.")
        return result


class Asked:
    """How a module is run."""

    def __init__(self, check: bool, environment: Mapping[str, str]) -> None:
        self.check, self.environment = check, environment


def _failed(message: str, **more: Any) -> Result:
    return {"failed": True, "changed": False, "msg": message, **more}


def win_powershell(windows: Windows, given: Result, asked: Asked) -> Result:
    if asked.check and "SupportsShouldProcess" not in given["script"]:
        # As changed, and not as skipped.
        return {"changed": True, "msg": "skipped, running in check mode"}
    # Each is either a SecureString or, with a user, a PSCredential, which alone is doubled.
    secrets = {
        each["name"]: powershell.Credential(each["username"], each["password"])
        for each in given.get("sensitive_parameters", [])
    }
    interpreter = powershell.Interpreter(
        windows, parameters={**given.get("parameters", {}), **secrets}, stops=given["error_action"] == "stop"
    )
    ansible: Result = {"Changed": True, "Failed": False, "Result": {}}
    try:
        output = interpreter.run(given["script"], {"ansible": ansible})
    except powershell.Thrown as error:
        return _failed(f"Unhandled exception while executing script: {error}")
    return {
        "changed": ansible["Changed"], "failed": ansible["Failed"], "output": _told(output),
        "result": _told(ansible["Result"]),
    }  # fmt: skip


def _told(value: Any) -> Any:
    """Return what Convert-OutputObject of the module makes of a value."""
    if isinstance(value, scheduler.Enumeration):
        return {"Type": "Microsoft.PowerShell.Cmdletization.GeneratedTypes", "String": value.name, "Value": 4}
    if isinstance(value, dict):
        return {key: _told(each) for key, each in value.items()}
    return [_told(each) for each in value] if isinstance(value, list) else value


def win_command(windows: Windows, given: Result, asked: Asked) -> Result:
    if asked.check:
        return {"changed": False, "skipped": True, "msg": "skipped, running in check mode"}
    words = given["argv"] if "argv" in given else shlex.split(given["_raw_params"])
    line = command_line.joined(words[1:])
    try:
        code, raw = programs.run(windows, words[0], line, asked.environment)
    except FileNotFoundError:
        return _failed(
            f"Failed to execute: The system cannot find the file specified {words[0]}", rc=2, stdout="", stderr=""
        )
    text = raw.decode(given.get("output_encoding_override", "utf-8"), "replace")
    found = {"changed": True, "rc": code, "stdout": text, "stdout_lines": text.splitlines(), "stderr": "", "cmd": line}
    return _failed("non-zero return code", **{key: found[key] for key in found if key != "changed"}) if code else found


def win_copy(windows: Windows, given: Result, asked: Asked) -> Result:
    path = windows.mounted(given["dest"])
    raw = given["content"].encode()
    if not path.parent.is_dir():
        return _failed(f"Destination directory '{path.parent}' does not exist")
    there = path.read_bytes() if path.is_file() else None
    if there == raw:
        return {"changed": False, "dest": given["dest"]}
    found: Result = {"changed": True, "dest": given["dest"]}
    if not asked.check:
        if given["backup"] and there is not None:
            stamp = datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%d-%H%M%S")
            found["backup_file"] = f"{given['dest']}.4711.{stamp}.bak"
            windows.mounted(found["backup_file"]).write_bytes(there)
        path.write_bytes(raw)
    return found


def win_file(windows: Windows, given: Result, asked: Asked) -> Result:
    path = windows.mounted(given["path"])
    if given.get("state") not in ("directory", "absent") or (given["state"] == "absent" and path.is_dir()):
        return _failed(f"win_file {given} is not doubled")
    changed = path.exists() is (given["state"] == "absent")
    if changed and not asked.check:
        path.mkdir(parents=True) if given["state"] == "directory" else path.unlink()
    return {"changed": changed}


def win_stat(windows: Windows, given: Result, _asked: Asked) -> Result:
    return {"changed": False, "stat": {"exists": windows.mounted(given["path"]).exists()}}


def slurp(windows: Windows, given: Result, _asked: Asked) -> Result:
    path = windows.mounted(given["src"])
    if not path.is_file():
        return _failed(f"Path {given['src']} is not found")
    return {"changed": False, "content": base64.b64encode(path.read_bytes()).decode(), "encoding": "base64"}


def win_user_right(windows: Windows, given: Result, asked: Asked) -> Result:
    if given["action"] != "add":
        return _failed(f"win_user_right {given} is not doubled")
    with windows.changed() as machine:
        if not machine.administrator:
            return _failed("failed to enumerate eixsting accounts with the right: Access is denied")
        sids = [USER_SID if user == machine.account else user for user in given["users"]]
        for sid in sids:
            if not sid.startswith("S-1-"):
                return _failed(f"Failed to translate the account '{sid}' to a SID")
        added = [sid for sid in sids if sid not in machine.rights.get(given["name"], [])]
        if not asked.check:
            machine.rights[given["name"]] = machine.rights.get(given["name"], []) + added
    return {"changed": bool(added), "added": added, "removed": []}


def win_firewall_rule(windows: Windows, given: Result, asked: Asked) -> Result:
    """Of a rule that is there only what is given counts and changes (win_firewall_rule.ps1)."""
    everywhere = {"enabled": True, "profiles": ["domain", "private", "public"]}
    with windows.changed() as machine:
        there = machine.firewall.get(given["name"])
        wanted = None if given["state"] == "absent" else {**(there or everywhere), **given}
        if not asked.check:
            machine.firewall.pop(given["name"], None)
            machine.firewall |= {given["name"]: wanted} if wanted else {}
    return {"changed": there != wanted}


def distribution(windows: Windows, given: Result, asked: Asked) -> Result:
    """Install one; Update-Distribution of distribution.ps1 makes an existing one what is asked for."""
    name, wanted = given["name"], given.get("distribution_id", given["name"])
    if given["state"] != "present" or {"size", "sparse"} & given.keys() or given["use_fixed_vhd"]:
        return _failed(f"microsoft.wsl.distribution {given} is not doubled")
    with windows.changed() as machine:
        there = next((each for each in machine.distributions if each.name == name), None)
        if there:
            changed = there.version != given["version"] or "location" in given
            if changed and not asked.check:
                life.ended(machine, there)
                there.version = given["version"]
            return {"changed": changed}
        if life.release(machine.release) < (2, 4, 4):
            return _failed("WSL command returned an unexpected exit code, -1: Invalid command line argument: --name")
        if wanted not in ("Debian", "Ubuntu", "Ubuntu-24.04"):
            return _failed(
                "WSL command returned an unexpected exit code, -1: Invalid distribution name: "
                f"'{wanted}'.\nError code: Wsl/InstallDistro/WSL_E_DISTRO_NOT_FOUND"
            )
        if not asked.check:
            machine.distributions.append(Distribution(name, state="Stopped", default=not machine.distributions))
    return {"changed": True}


def imported(windows: Windows, given: Result, asked: Asked) -> Result:
    """Import an image; a name that is taken is left alone (import.ps1)."""
    if any(each.name == given["name"] for each in windows.machine.distributions):
        return {"changed": False}
    if not windows.mounted(given["src"]).is_file():
        return _failed(f"The source file '{given['src']}' was not found. Cannot import a distribution from a file that "
                       "does not exist.")  # fmt: skip
    if not asked.check:
        with windows.changed() as machine:
            machine.distributions.append(
                Distribution(given["name"], state="Stopped", default=not machine.distributions)
            )
    return {"changed": True}


BEHAVIOUR: dict[str, Callable[[Windows, Result, Asked], Result]] = {
    "ansible.windows.slurp": slurp,
    "ansible.windows.win_command": win_command,
    "ansible.windows.win_copy": win_copy,
    "ansible.windows.win_file": win_file,
    "ansible.windows.win_powershell": win_powershell,
    "ansible.windows.win_stat": win_stat,
    "ansible.windows.win_user_right": win_user_right,
    "community.windows.win_firewall_rule": win_firewall_rule,
    "microsoft.wsl.distribution": distribution,
    "microsoft.wsl.import": imported,
}
__all__ = ["BEHAVIOUR", "install", "life", "options"]
