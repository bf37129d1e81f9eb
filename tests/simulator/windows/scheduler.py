"""Windows' Task Scheduler: what a definition in XML says, and the cmdlets of the module ScheduledTasks.

Names of elements and their order: Task Scheduler Schema of Microsoft's documentation, and what Windows itself exports.
"""

from __future__ import annotations

import datetime
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.simulator.windows import life
from tests.simulator.windows.host import Machine, Windows

NAMESPACE = "{http://schemas.microsoft.com/windows/2004/02/mit/task}"
DECLARATION = '<?xml version="1.0" encoding="UTF-16"?>'
# What is known of each element, in the order in which Windows writes them.
ELEMENTS = {
    "Task": ("RegistrationInfo", "Triggers", "Principals", "Settings", "Actions"),
    "RegistrationInfo": ("Description",),
    "Triggers": ("BootTrigger", "TimeTrigger"),
    "BootTrigger": ("Repetition", "StartBoundary", "Enabled", "Delay"),
    "TimeTrigger": ("Repetition", "StartBoundary", "Enabled"),
    "Repetition": ("Interval", "StopAtDurationEnd"),
    "Principals": ("Principal",),
    "Principal": ("UserId", "LogonType", "RunLevel"),
    "Settings": (
        "MultipleInstancesPolicy", "DisallowStartIfOnBatteries", "StopIfGoingOnBatteries", "ExecutionTimeLimit"
    ),
    "Actions": ("Exec",),
    "Exec": ("Command", "Arguments"),
}  # fmt: skip
# The machine's clock begins then.
BEGINNING = datetime.datetime(2026, 1, 1, 0, 1)
HAS_NOT_RUN, RUNS = 0x41303, 0x41301


class Denied(Exception):
    """What a cmdlet says; it is an error that ends a script only where errors are to do so."""


@dataclass(frozen=True)
class Enumeration:
    """A value of an enumeration: compares with its name, but is no text."""

    name: str

    def __eq__(self, other: object) -> bool:
        return self.name == (other.name if isinstance(other, Enumeration) else other)

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name


def cmdlet(windows: Windows, verb: str, noun: str, options: Mapping[str, Any]) -> Any:
    """Do what a cmdlet does."""
    given = {key.lower().lstrip("-"): value for key, value in options.items()}
    given.pop("erroraction", None)
    path = given.pop("taskpath", "\\")
    if not (path.startswith("\\") and path.endswith("\\")):
        raise Denied("The parameter is incorrect.")
    if verb == "Get" and noun == "ScheduledTask" and not given:
        found = [
            _task(windows.machine, name) for name in windows.machine.tasks
            if name.rpartition("\\")[0] + "\\" == path
            and (windows.machine.administrator or windows.machine.shows_tasks)
        ]  # fmt: skip
        if not found:
            raise Denied(f"No MSFT_ScheduledTask objects found with property 'TaskPath' equal to '{path}'.")
        return found
    name = f"{path}{given.pop('taskname')}"
    if verb == "Register" and noun == "ScheduledTask":
        return _registered(windows, name, given)
    if name not in windows.machine.tasks or not (windows.machine.administrator or noun == "ScheduledTaskInfo"):
        raise Denied("The system cannot find the file specified.")
    match verb, noun, given:
        case "Get", "ScheduledTaskInfo", {**none} if not none:
            known = windows.machine.tasks[name]
            return {"LastTaskResult": RUNS if name in windows.machine.holds else known.get("last_result", HAS_NOT_RUN)}
        case "Set", "ScheduledTask", {"user": user, "password": password, **none} if not none:
            with windows.changed() as machine:
                _must_let_in(machine, user, password)
                machine.tasks[name]["password"] = password
        case "Start", "ScheduledTask", {**none} if not none:
            life.task(windows, name)
        case "Unregister", "ScheduledTask", {"confirm": False}:
            with windows.changed() as machine:
                # An instance that runs goes on.
                del machine.tasks[name]
        case "Stop", "ScheduledTask", {**none} if not none:
            with windows.changed() as machine:
                held = machine.holds.pop(name, None)
                for each in machine.distributions:
                    each.idle_since = machine.clock if each.name == held else each.idle_since
        case _:
            raise ValueError(f"{verb}-{noun} {options} is not doubled")
    return None


def _task(machine: Machine, name: str) -> dict[str, Any]:
    known = machine.tasks[name]
    path, _slash, own = name.rpartition("\\")
    return {
        "TaskName": own, "TaskPath": f"{path}\\", "Description": known["description"],
        "State": Enumeration("Running" if name in machine.holds else "Ready"),
    }  # fmt: skip


def _registered(windows: Windows, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    if given.keys() - {"xml", "force", "user", "password"} or "xml" not in given:
        raise ValueError(f"Register-ScheduledTask {given} is not doubled")
    with windows.changed() as machine:
        if name in machine.tasks and not given.get("force"):
            raise Denied("Cannot create a file when that file already exists.")
        known = definition(given["xml"])
        password = given.get("password") if known["logon_type"] == "Password" else machine.password
        for user in (known["user"], given.get("user", machine.account)):
            _must_let_in(machine, user, password)
        known["password"] = given.get("password")
        for trigger in known["triggers"]:
            trigger["next"] = _first(trigger, machine.clock)
        machine.tasks[name] = known
        return _task(machine, name)


def _must_let_in(machine: Machine, user: str, password: str | None) -> None:
    """Windows checks a password when it stores it."""
    if password != machine.password:
        raise Denied("The user name or password is incorrect.")
    if not machine.administrator:
        raise Denied("Access is denied.")
    if user != machine.account:
        raise Denied("No mapping between account names and security IDs was done.")


def definition(text: str) -> dict[str, Any]:
    """Return what a definition says, as its own elements name it."""
    # Any other encoding than that of the text itself is refused: "unable to switch the encoding".
    if not text.startswith(DECLARATION):
        raise Denied("The task XML is malformed. (1,40)::ERROR: unable to switch the encoding")
    try:
        root = ET.fromstring(text.removeprefix(DECLARATION))  # noqa: S314 # our own role has written it
    except ET.ParseError as error:
        raise Denied("The task XML is malformed.") from error
    _check(root)
    execution = _one(root, "Actions/Exec")
    principal = _one(root, "Principals/Principal")
    return {
        "description": root.findtext(_path("RegistrationInfo/Description"), ""),
        "user": principal.findtext(f"{NAMESPACE}UserId", ""),
        "logon_type": principal.findtext(f"{NAMESPACE}LogonType", ""),
        "run_level": principal.findtext(f"{NAMESPACE}RunLevel", "LeastPrivilege"),
        "command": execution.findtext(f"{NAMESPACE}Command", ""),
        "arguments": execution.findtext(f"{NAMESPACE}Arguments", ""),
        "settings": {_tag(each): each.text for each in _one(root, "Settings")},
        "triggers": [
            {
                "type": _tag(each),
                "start": each.findtext(f"{NAMESPACE}StartBoundary"),
                "delay": each.findtext(f"{NAMESPACE}Delay"),
                "every": each.findtext(_path("Repetition/Interval")),
            }
            for each in _one(root, "Triggers")
        ],
    }


def _first(trigger: Mapping[str, Any], clock: float) -> float | None:
    """Return when a trigger goes off: one at boot waits for that, a repeated one goes on from its start."""
    if trigger["type"] == "BootTrigger":
        return None
    start = (datetime.datetime.fromisoformat(trigger["start"]) - BEGINNING).total_seconds()
    if start > clock or not trigger["every"]:
        return start if start > clock else None
    every = life.minutes(trigger["every"])
    return start + every * ((clock - start) // every + 1)


def _check(element: ET.Element) -> None:
    known = ELEMENTS.get(_tag(element), ())
    places = [known.index(_tag(child)) if _tag(child) in known else -1 for child in element]
    if -1 in places or (_tag(element) not in ("Triggers",) and places != sorted(set(places))):
        raise Denied("The task XML contains an unexpected node.")
    for child in element:
        _check(child)


def _tag(element: ET.Element) -> str:
    return element.tag.removeprefix(NAMESPACE)


def _path(path: str) -> str:
    return "/".join(f"{NAMESPACE}{part}" for part in path.split("/"))


def _one(root: ET.Element, path: str) -> ET.Element:
    found = root.find(_path(path))
    if found is None:
        raise Denied("The task XML is missing a required element or attribute.")
    return found
