"""What begins and ends by itself on a Windows machine: WSL's virtual machine, its distributions, tasks at boot.

No time passes unless a test says so, so that ten idle timeouts take no time at all.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.simulator.docker import docker_binary
from tests.simulator.windows import wslconfig
from tests.simulator.windows.host import Distribution, Machine, Windows

# WslCoreConfig.h: VmIdleTimeout and InstanceIdleTimeout, in milliseconds; negative is never (LxssUserSession.cpp).
IDLE_MS = {"general.instanceidletimeout": 15_000, "wsl2.vmidletimeout": 60_000}
# The first tag whose source has the key; before that the 15 s are fixed (WSL#11239).
INSTANCE_TIMER = (2, 5, 8)
MIRRORED_BUILD = 22621
# init waits until systemctl is-system-running says one of these, and goes on after some time (doc/docs/
# technical-documentation/systemd.md). Without systemd there is nothing to wait for.
UP = """\
until [ "$(cat /proc/1/comm)" = init ] || systemctl is-system-running 2>/dev/null | grep -qx -e running -e degraded; do
    sleep 0.2
done
"""


def profile(machine: Machine) -> str:
    return rf"C:\Users\{machine.user}"


def release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")) if text else (0,)


def idle_timeout(machine: Machine, key: str) -> float | None:
    """Return seconds, or nothing where it is never."""
    settings = machine.running or {}
    if key == "general.instanceidletimeout" and release(machine.release) < INSTANCE_TIMER:
        settings = {}
    try:
        milliseconds = int(settings[key], 0) if key in settings else IDLE_MS[key]
    except ValueError:
        # MessageConfigInvalidInteger is a warning, the default stays.
        milliseconds = IDLE_MS[key]
    return None if milliseconds < 0 else milliseconds / 1000


def networking_mode(machine: Machine) -> str:
    """Return what `wslinfo --networking-mode` prints; WSL falls back with a warning (WSL#13793)."""
    running = machine.running or {}
    mode = running.get("wsl2.networkingmode", running.get("experimental.networkingmode", "nat")).lower()
    fails = machine.build < MIRRORED_BUILD or machine.mirrored_fails
    return "nat" if mode == "mirrored" and fails else mode


def address(machine: Machine) -> str:
    """Return the address behind NAT, which is another one after each start (WSL#4210)."""
    return f"172.20.{machine.starts % 250}.2"


def boot_id(machine: Machine) -> str:
    """Return what the kernel below all distributions says of its start: each has another."""
    if machine.control_node:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"6b1f0c0a-0000-4000-8000-{machine.starts:012d}"


def started(windows: Windows, machine: Machine, distribution: Distribution) -> None:
    """Have a distribution running, and the virtual machine below it."""
    if distribution.version == 2 and machine.running is None:
        # The file is read when the virtual machine is made, not later (WslCoreVm.cpp).
        machine.running = wslconfig.read(windows.mounted(rf"{profile(machine)}\.wslconfig"))
        machine.starts += 1
    if distribution.state != "Running":
        distribution.state = "Running"
        _container(distribution, "start")
    distribution.idle_since = machine.clock


def ended(machine: Machine, distribution: Distribution) -> None:
    if distribution.state == "Running":
        distribution.state = "Stopped"
        machine.empty_since = machine.clock
        # What a task has started there ends with it, and so does the task.
        machine.holds = {task: name for task, name in machine.holds.items() if name != distribution.name}
        _container(distribution, "stop")


def shut_down(machine: Machine) -> None:
    """End all distributions and the virtual machine, as `wsl --shutdown` does."""
    for each in machine.distributions:
        ended(machine, each)
    machine.running = None


def _container(distribution: Distribution, verb: str) -> None:
    if not distribution.container:
        return
    # All that runs in it is killed; what init and systemd keep in memory is lost.
    options = ["--time", "0"] if verb == "stop" else []
    subprocess.run([docker_binary(), verb, *options, distribution.container], check=True, capture_output=True)
    if verb == "start":
        subprocess.run([docker_binary(), "exec", distribution.container, "/bin/sh", "-c", UP], check=True)


def wait(windows: Windows, seconds: float) -> None:
    """Let time pass: who is idle for too long ends at its time, and tasks are repeated at theirs."""
    with windows.changed() as machine:
        until = machine.clock + seconds
    while True:
        with windows.changed() as machine:
            due = [each for each in _due(machine) if each[0] <= until]
            if not due:
                machine.clock = until
                return
            machine.clock, what = min(due, key=lambda each: each[0])
            if isinstance(what, Distribution):
                ended(machine, what)
                continue
            if what is None:
                machine.running = None
                continue
            name, trigger = what
            every = machine.tasks[name]["triggers"][trigger]["every"]
            machine.tasks[name]["triggers"][trigger]["next"] = machine.clock + minutes(every) if every else None
        task(windows, name)


def _due(machine: Machine) -> list[tuple[float, Distribution | tuple[str, int] | None]]:
    due: list[tuple[float, Distribution | tuple[str, int] | None]] = []
    instance, whole = (idle_timeout(machine, key) for key in IDLE_MS)
    running = [each for each in machine.distributions if each.state == "Running"]
    due += [
        (each.idle_since + instance, each) for each in running
        if instance is not None and each.name not in machine.holds.values()
    ]  # fmt: skip
    if machine.running is not None and whole is not None and not any(each.version == 2 for each in running):
        due.append((machine.empty_since + whole, None))
    due += [
        (trigger["next"], (name, index)) for name, known in machine.tasks.items()
        for index, trigger in enumerate(known["triggers"]) if trigger["next"] is not None
    ]  # fmt: skip
    return due


def boot(windows: Windows) -> None:
    """Start Windows again; nobody logs on."""
    with windows.changed() as machine:
        shut_down(machine)
        for known in machine.tasks.values():
            for trigger in known["triggers"]:
                if trigger["type"] == "BootTrigger":
                    # Its repetition begins here, and not where it is registered.
                    trigger["next"] = machine.clock + minutes(trigger["delay"] or "PT0M")
    wait(windows, 0)


def minutes(duration: str) -> float:
    """Return the seconds of a duration in minutes, the only ones that are used."""
    if not (duration.startswith("PT") and duration.endswith("M") and duration[2:-1].isdecimal()):
        raise ValueError(f"{duration} is not doubled")
    return 60.0 * int(duration[2:-1])


def task(windows: Windows, name: str) -> int:
    """Run a task of the scheduler, as its trigger or Start-ScheduledTask does, which waits for no end."""
    from tests.simulator.windows import programs  # noqa: PLC0415 # which run tasks themselves

    with windows.changed() as machine:
        known = machine.tasks[name]
        # IgnoreNew: a new one is not started while one runs.
        if name in machine.holds:
            return 0
        # Without a password or S4U a task runs in a session that is there already, and there is none. The right to log
        # on as a batch job is the account's, or that of a group.
        allowed = known["logon_type"] in ("S4U", "Password") and not set(machine.sids).isdisjoint(
            machine.rights.get("SeBatchLogonRight", [])
        )
        if not allowed or (known["logon_type"] == "S4U" and not machine.s4u):
            known["last_result"] = 0x80070569
            return 1
        if known["logon_type"] == "Password" and known["password"] != machine.password:
            # What was stored stays as it was when the user gets another password.
            known["last_result"] = 0x8007052E
            return 1
    try:
        code = programs.held(windows, name, known["command"], known["arguments"])
    except FileNotFoundError:
        code = 0x80070002
    with windows.changed() as machine:
        machine.tasks[name]["last_result"] = code
    return 0
