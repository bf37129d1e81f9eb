"""Faults of simulated GPUs, from the controller's side.

Each fault is a pure function that changes a profile (a mapping as `load` gives it) and returns nothing; `apply` reads a
profile, changes it and writes it back. The command does that in a node container, in place, so that processes and
containers that run already meet the fault:

    python -m tests.simulator.gpu.faults gpufarm-t4 lose-gpu 2
    python -m tests.simulator.gpu.faults gpufarm-t4 recover-gpu 2
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import yaml

Profile = dict[str, Any]
Change = Callable[[Profile], None]

PROFILE_PATH = "/etc/gpufarm-simulator/gpu.yml"
DEVICES_COMMAND = "/usr/local/lib/gpufarm-simulator/gpufarm-gpu-devices"

# Copies that could not be hard links are rewritten too; a reader takes a file as whole by its end marker.
WRITE_COMMAND = f"""\
cat > {PROFILE_PATH}
for copy in /lib/firmware/nvidia/*/gsp_ga10x.bin /usr/lib/wsl/drivers/*/nvcubins.bin; do
    if [ -e "$copy" ] && ! [ "$copy" -ef {PROFILE_PATH} ]; then cat {PROFILE_PATH} > "$copy"; fi
done
"""

# The kernel's side of a node: a FIFO where the kernel has /dev/kmsg, which the node's own journald imports.
# Whoever opens a FIFO for writing waits for a reader, and systemd does: so it is held open, and appears only then.
KMSG_COMMAND = r"""\
set -eu
message=$1
if [ -c /dev/kmsg ]; then
    echo "/dev/kmsg is the kernel's own, which nothing here writes to" >&2
    exit 1
fi
if ! [ -p /dev/kmsg ]; then
    rm -f /dev/.kmsg
    mkfifo -m 600 /dev/.kmsg
    systemd-run --quiet --collect --unit=gpufarm-kmsg \
        sh -c 'exec 3<>/dev/.kmsg && mv /dev/.kmsg /dev/kmsg && exec sleep infinity'
    left=50
    until [ -p /dev/kmsg ]; do
        left=$((left - 1))
        [ "$left" -gt 0 ] || { echo "gpufarm-kmsg.service made no /dev/kmsg" >&2; exit 1; }
        sleep 0.1
    done
    systemctl restart systemd-journald
fi
logged() { journalctl --dmesg --boot --output=cat --no-pager | grep -cFx -e "$message" || true; }
before=$(logged)
for _ in 1 2 3; do
    # journald takes a record for an old one unless it has the next number, which journald keeps here.
    sequence=$(od -An -tu8 -N8 /run/systemd/journal/kernel-seqnum 2>/dev/null | tr -d ' ')
    read -r uptime _ </proc/uptime
    printf '3,%s,%s0000,-;%s\n' "${sequence:-0}" "$(echo "$uptime" | tr -d .)" "$message" >/dev/kmsg
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        [ "$(logged)" -le "$before" ] || exit 0
        sleep 0.2
    done
done
echo "journald did not import the message; see journalctl -u systemd-journald" >&2
exit 1
"""

# What driver 580 says after the number; other numbers get the process alone.
XID_TEXTS = {
    13: "pid=4711, name=python, Graphics SM Warp Exception on (GPC 0, TPC 0, SM 0): Out Of Range Address",
    31: "pid=4711, name=python, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS faulted @ 0x7f_00000000",
    48: "pid='<unknown>', name=<unknown>, An uncorrectable double bit error (DBE) has been detected on GPU",
    79: "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    119: "pid=4711, name=python, Timeout after 45s of waiting for RPC response from GPU0 GSP!",
    154: "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
}


def load(text: str) -> Profile:
    """Read a profile. Every scalar stays a string: `No` is what nvidia-smi prints, not a boolean."""
    profile = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506  (BaseLoader makes nothing but strings)
    if not isinstance(profile, dict):
        raise ValueError("a GPU profile is a YAML mapping")
    return profile


def dump(profile: Profile) -> str:
    """Write a profile, with the end marker by which readers tell a whole file."""
    return yaml.safe_dump(profile, sort_keys=False, explicit_start=True, explicit_end=True, width=10000)


def apply(read: Callable[[], str], write: Callable[[str], None], change: Change) -> Profile:
    """Change the profile that `read` returns and hand the result to `write`."""
    profile = load(read())
    change(profile)
    write(dump(profile))
    return profile


def find_gpu(profile: Profile, which: int | str) -> Profile:
    """Return the entry of one GPU, by its position in the profile or by its UUID."""
    entries: list[Profile] = profile["gpus"]
    if isinstance(which, str) and not which.isdigit():
        for entry in entries:
            if entry["uuid"] == which:
                return entry
        raise LookupError(f"the profile has no GPU {which}; it has {', '.join(entry['uuid'] for entry in entries)}")
    index = int(which)
    if index >= len(entries):
        raise LookupError(f"the profile has no GPU {index}; it has {len(entries)}")
    return entries[index]


def value(profile: Profile, which: int | str, key: str) -> str | None:
    """Return what the profile says of a GPU at a dotted key: its own word, or else its model's."""
    sources: list[Any] = [find_gpu(profile, which)]
    model = sources[0].get("model")
    while model:
        sources.append(profile["models"][model])
        model = sources[-1].get("like")
    for source in sources:
        found: Any = source
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        if isinstance(found, str):
            return found
    return None


def set_value(profile: Profile, which: int | str, key: str, text: str) -> None:
    """Set one value of a GPU, at the dotted path that it has in `nvidia-smi -q -x`."""
    section = find_gpu(profile, which)
    *parents, last = key.split(".")
    for parent in parents:
        section = section.setdefault(parent, {})
    section[last] = text


# -- one GPU ----------------------------------------------------------------------------------------------------------


def lose_gpu(profile: Profile, which: int | str) -> None:
    """Let a GPU fall off the bus (Xid 79): NVML_ERROR_GPU_IS_LOST."""
    find_gpu(profile, which)["state"] = "lost"


def break_gpu(profile: Profile, which: int | str) -> None:
    """Let every call to a GPU end in NVML_ERROR_UNKNOWN, as newer drivers report a GPU that fell off the bus."""
    find_gpu(profile, which)["state"] = "unknown"


def require_reset(profile: Profile, which: int | str) -> None:
    """Let a GPU demand a reset: it is still listed, and its sensors end in NVML_ERROR_RESET_REQUIRED."""
    find_gpu(profile, which)["state"] = "reset"


def hang_gpu(profile: Profile, which: int | str, seconds: float = 3600.0) -> None:
    """Let every call to a GPU wait until the fault is taken back, or fail after so many seconds."""
    gpu = find_gpu(profile, which)
    gpu["state"] = "hang"
    gpu["hang_seconds"] = f"{seconds:g}"


def recover_gpu(profile: Profile, which: int | str) -> None:
    """Take back `lose_gpu`, `break_gpu`, `require_reset` and `hang_gpu`."""
    gpu = find_gpu(profile, which)
    gpu.pop("state", None)
    gpu.pop("hang_seconds", None)


def compute_wrongly(profile: Profile, which: int | str, part: str = "arithmetic") -> None:
    """Let CUDA get wrong results: of `arithmetic`, `tensor` cores, `memory` (one bit stays 0) or `copies`."""
    set_value(profile, which, "cuda.wrong", part)


def slow_memory(profile: Profile, which: int | str, speed: float = 0.5) -> None:
    """Let the memory give that share of its bandwidth, with the clocks that it always had."""
    set_value(profile, which, "cuda.memory_speed", f"{speed:g}")


def fill_memory(profile: Profile, which: int | str, free_mib: int) -> None:
    """Let all but so much memory be in use. The double's device memory is the machine's own, and half of a card's is
    more than a machine has. A context takes 500 MiB.
    """
    total = int((value(profile, which, "fb_memory_usage.total") or "").split()[0])
    set_value(profile, which, "fb_memory_usage.used", f"{total - free_mib} MiB")


def refuse_context(profile: Profile, which: int | str, code: int = 999) -> None:
    """Let no context start: cuCtxCreate ends with this CUDA error."""
    set_value(profile, which, "cuda.context_error", str(code))


def hang_cuda(profile: Profile, which: int | str, where: str = "context") -> None:
    """Let CUDA never come back, while NVML answers: at `context`, `compile`, `launch` or `copy`."""
    set_value(profile, which, "cuda.hangs", where)


def recover_cuda(profile: Profile, which: int | str) -> None:
    """Take back `compute_wrongly`, `slow_memory`, `refuse_context` and `hang_cuda`."""
    find_gpu(profile, which).pop("cuda", None)


def reset_gpu(profile: Profile, which: int | str) -> None:
    """Reset a GPU, as `nvidia-smi --gpu-reset` does: volatile errors and pending remappings are gone, the sum stays."""
    gpu = find_gpu(profile, which)
    if gpu.get("state") == "reset":
        del gpu["state"]
    gpu.get("ecc_errors", {}).pop("volatile", None)
    gpu.get("remapped_rows", {}).pop("remapped_row_pending", None)
    gpu.pop("gpu_recovery_action", None)


def ecc_errors(profile: Profile, which: int | str, count: int = 1, *, corrected: bool = False) -> None:
    """Add errors of the device memory to the volatile and to the aggregate counter."""
    for scope in ("volatile", "aggregate"):
        key = f"ecc_errors.{scope}.dram_{'correctable' if corrected else 'uncorrectable'}"
        before = value(profile, which, key)
        if before is None:
            raise LookupError(f"GPU {which} of the profile counts no ECC errors ({key})")
        set_value(profile, which, key, str(int(before) + count))
    if not corrected:
        set_value(profile, which, "gpu_recovery_action", "Drain and Reset")


def remap_rows(profile: Profile, which: int | str, count: int = 1, *, failed: bool = False) -> None:
    """Leave a row remapping pending until the GPU is reset, or failed for good."""
    set_value(profile, which, "remapped_rows.remapped_row_unc", str(count))
    set_value(profile, which, f"remapped_rows.remapped_row_{'failure' if failed else 'pending'}", "Yes")
    set_value(profile, which, "gpu_recovery_action", "Reset")


def set_mig(profile: Profile, which: int | str, devices: Sequence[str] | None, *, pending: bool = False) -> None:
    """Switch MIG on with these devices (names of `mig_profiles`, in order), or off with None.

    With `pending` only the mode after the next reset changes.
    """
    gpu = find_gpu(profile, which)
    current = value(profile, which, "mig_mode.current_mig")
    if current in (None, "N/A"):
        raise LookupError(f"GPU {which} of the profile has no MIG")
    wanted = "Disabled" if devices is None else "Enabled"
    if pending:
        gpu["mig_mode"] = {"current_mig": current, "pending_mig": wanted}
        return
    gpu["mig_mode"] = {"current_mig": wanted}
    gpu.pop("gpu_instances", None)
    gpu["mig_devices"] = []
    known = _mig_profiles(profile, gpu)
    start = 0
    for number, name in enumerate(devices or ()):
        entry = next((entry for entry in known if entry["name"] == name), None)
        if entry is None:
            raise LookupError(f"no MIG profile {name}; known are {', '.join(one['name'] for one in known)}")
        gpu["mig_devices"].append(
            {
                "profile": name,
                "gpu_instance_id": str(7 + number),
                "compute_instance_id": "0",
                "placement": str(start),
                "uuid": f"MIG-{uuid.uuid5(uuid.NAMESPACE_OID, '/'.join((gpu['uuid'], name, str(number))))}",
            }
        )
        start += int(entry["placement_size"])


def _mig_profiles(profile: Profile, gpu: Profile) -> list[Profile]:
    model: str | None = gpu["model"]
    while model:
        entry = profile["models"][model]
        if "mig_profiles" in entry:
            return list(entry["mig_profiles"])
        model = entry.get("like")
    return []


def add_process(
    profile: Profile, which: int | str, pid: int, name: str, memory_mib: int, *, instance: str | None = None
) -> None:
    """Let a compute process hold memory of a GPU, or of one of its MIG devices: `instance` is GPU/COMPUTE instance."""
    process = {"pid": str(pid), "type": "C", "process_name": name, "used_memory": f"{memory_mib} MiB"}
    if instance is not None:
        process["gpu_instance_id"], _, process["compute_instance_id"] = instance.partition("/")
    find_gpu(profile, which).setdefault("processes", []).append(process)


def end_processes(profile: Profile, which: int | str) -> None:
    """End all processes of a GPU."""
    find_gpu(profile, which).pop("processes", None)


def xid_message(profile: Profile, which: int | str, number: int, text: str | None = None) -> str:
    """Return what the driver writes to the kernel log about an Xid of a GPU."""
    if profile["platform"] == "wsl":
        raise LookupError("under WSL the driver writes no kernel log; Windows has it")
    address = value(profile, which, "pci.pci_bus_id")
    if address is None:
        raise LookupError(f"GPU {which} of the profile has no pci.pci_bus_id")
    bus = address.lower().rpartition(".")[0][-10:]
    said = XID_TEXTS.get(number, "pid=4711, name=python") if text is None else text
    return f"NVRM: Xid (PCI:{bus}): {number}, {said}"


# -- the driver -------------------------------------------------------------------------------------------------------


def unload_driver(profile: Profile) -> None:
    """Let NVML find no kernel module."""
    profile["driver"]["state"] = "unloaded"


def block_driver(profile: Profile) -> None:
    """Let the operating system keep the GPU away: no /dev/nvidiactl; under WSL, a card in TCC mode."""
    profile["driver"]["state"] = "blocked"


def deny_driver(profile: Profile) -> None:
    """Let the device nodes be there but closed, as after a daemon-reload took a container's GPUs away."""
    profile["driver"]["state"] = "denied"


def mismatch_driver(profile: Profile, kernel_version: str) -> None:
    """Let the loaded kernel module be of another version than the libraries, as after an upgrade without a reboot."""
    profile["driver"]["kernel_version"] = kernel_version


def restore_driver(profile: Profile) -> None:
    """Take back every fault of the driver."""
    profile["driver"].pop("state", None)
    profile["driver"].pop("kernel_version", None)


# -- in a node container ----------------------------------------------------------------------------------------------


def _docker(container: str, *command: str, text: str | None = None) -> str:
    docker = os.environ.get("GPUFARM_DOCKER", "/usr/bin/docker")
    options = ["-i"] if text is not None else []
    done = subprocess.run(
        [docker, "exec", *options, container, *command], input=text, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{container}: `{' '.join(command)}` ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def apply_to_container(container: str, change: Change) -> Profile:
    """Change the profile of a node container in place: the file keeps its inode, which running containers mount."""

    def write(text: str) -> None:
        _docker(container, "sh", "-c", WRITE_COMMAND, text=text)

    return apply(lambda: _docker(container, "cat", PROFILE_PATH), write, change)


def hide_gpu(container: str, which: int | str) -> None:
    """Remove a GPU's device node: whoever initialises NVML from now on does not see it."""
    _docker(container, "rm", "-f", f"/dev/nvidia{_minor(container, which)}")


def show_gpu(container: str, which: int | str) -> None:
    """Make a GPU's device node again."""
    minor = _minor(container, which)
    _docker(container, "sh", "-c", f"[ -e /dev/nvidia{minor} ] || mknod -m 666 /dev/nvidia{minor} c 195 {minor}")


def remake_devices(container: str) -> None:
    """Make the device nodes as the profile says, MIG capabilities included."""
    _docker(container, DEVICES_COMMAND)


def start_kernel_log(container: str) -> None:
    """Give the node a kernel log, with the line that every kernel begins with."""
    release = _docker(container, "uname", "-rv").strip()
    _docker(container, "sh", "-c", KMSG_COMMAND, "kmsg", f"Linux version {release}")


def xid(container: str, which: int | str, number: int, text: str | None = None) -> str:
    """Let the node's kernel log tell of an Xid, and return the message once `journalctl --dmesg` shows it."""
    message = xid_message(load(_docker(container, "cat", PROFILE_PATH)), which, number, text)
    _docker(container, "sh", "-c", KMSG_COMMAND, "kmsg", message)
    return message


def _minor(container: str, which: int | str) -> str:
    profile = load(_docker(container, "cat", PROFILE_PATH))
    gpu = find_gpu(profile, which)
    return value(profile, which, "minor_number") or str(profile["gpus"].index(gpu))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator.gpu.faults", description=__doc__.splitlines()[0])
    parser.add_argument("container")
    faults = parser.add_subparsers(dest="fault", required=True)
    for name in (
        "lose-gpu",
        "break-gpu",
        "require-reset",
        "recover-gpu",
        "recover-cuda",
        "reset-gpu",
        "end-processes",
        "hide-gpu",
        "show-gpu",
    ):
        faults.add_parser(name).add_argument("gpu")
    hang = faults.add_parser("hang-gpu")
    hang.add_argument("gpu")
    hang.add_argument("--seconds", type=float, default=3600.0)
    wrong = faults.add_parser("compute-wrongly")
    wrong.add_argument("gpu")
    wrong.add_argument("part", nargs="?", choices=("arithmetic", "tensor", "memory", "copies"), default="arithmetic")
    slow = faults.add_parser("slow-memory")
    slow.add_argument("gpu")
    slow.add_argument("--speed", type=float, default=0.5, help="share of its bandwidth")
    refuse = faults.add_parser("refuse-context")
    refuse.add_argument("gpu")
    refuse.add_argument("code", nargs="?", type=int, default=999)
    stuck = faults.add_parser("hang-cuda")
    stuck.add_argument("gpu")
    stuck.add_argument("where", nargs="?", choices=("context", "compile", "launch", "copy"), default="context")
    ecc = faults.add_parser("ecc-errors")
    ecc.add_argument("gpu")
    ecc.add_argument("--count", type=int, default=1)
    ecc.add_argument("--corrected", action="store_true")
    remap = faults.add_parser("remap-rows")
    remap.add_argument("gpu")
    remap.add_argument("--count", type=int, default=1)
    remap.add_argument("--failed", action="store_true")
    mig = faults.add_parser("set-mig")
    mig.add_argument("gpu")
    mig.add_argument("devices", nargs="*", help="MIG profiles; none switches MIG off")
    mig.add_argument("--pending", action="store_true")
    process = faults.add_parser("add-process")
    process.add_argument("gpu")
    process.add_argument("pid", type=int)
    process.add_argument("name")
    process.add_argument("memory_mib", type=int)
    process.add_argument("--instance", metavar="GPU/COMPUTE", help="the MIG device that it is on")
    setter = faults.add_parser("set-value")
    setter.add_argument("gpu")
    setter.add_argument("key")
    setter.add_argument("text")
    kernel = faults.add_parser("xid")
    kernel.add_argument("gpu")
    kernel.add_argument("number", type=int)
    kernel.add_argument("--text", help="what follows the number")
    for name in ("unload-driver", "block-driver", "deny-driver", "restore-driver", "remake-devices"):
        faults.add_parser(name)
    faults.add_parser("mismatch-driver").add_argument("kernel_version")
    return parser


def change_of(arguments: argparse.Namespace) -> Change | None:
    """Return the change of the profile that the command line asks for; None where it is about device nodes."""
    which = getattr(arguments, "gpu", "")
    changes: dict[str, Change] = {
        "lose-gpu": lambda profile: lose_gpu(profile, which),
        "break-gpu": lambda profile: break_gpu(profile, which),
        "require-reset": lambda profile: require_reset(profile, which),
        "recover-gpu": lambda profile: recover_gpu(profile, which),
        "reset-gpu": lambda profile: reset_gpu(profile, which),
        "hang-gpu": lambda profile: hang_gpu(profile, which, arguments.seconds),
        "compute-wrongly": lambda profile: compute_wrongly(profile, which, arguments.part),
        "slow-memory": lambda profile: slow_memory(profile, which, arguments.speed),
        "refuse-context": lambda profile: refuse_context(profile, which, arguments.code),
        "hang-cuda": lambda profile: hang_cuda(profile, which, arguments.where),
        "recover-cuda": lambda profile: recover_cuda(profile, which),
        "ecc-errors": lambda profile: ecc_errors(profile, which, arguments.count, corrected=arguments.corrected),
        "remap-rows": lambda profile: remap_rows(profile, which, arguments.count, failed=arguments.failed),
        "set-mig": lambda profile: set_mig(profile, which, arguments.devices or None, pending=arguments.pending),
        "add-process": lambda profile: add_process(
            profile, which, arguments.pid, arguments.name, arguments.memory_mib, instance=arguments.instance
        ),
        "end-processes": lambda profile: end_processes(profile, which),
        "set-value": lambda profile: set_value(profile, which, arguments.key, arguments.text),
        "unload-driver": unload_driver,
        "block-driver": block_driver,
        "deny-driver": deny_driver,
        "restore-driver": restore_driver,
        "mismatch-driver": lambda profile: mismatch_driver(profile, arguments.kernel_version),
    }
    return changes.get(arguments.fault)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    arguments = _parser().parse_args(argv)
    change = change_of(arguments)
    try:
        if change:
            apply_to_container(arguments.container, change)
        if arguments.fault == "hide-gpu":
            hide_gpu(arguments.container, arguments.gpu)
        elif arguments.fault == "show-gpu":
            show_gpu(arguments.container, arguments.gpu)
        elif arguments.fault == "xid":
            xid(arguments.container, arguments.gpu, arguments.number, arguments.text)
        elif arguments.fault == "remake-devices" or (arguments.fault == "set-mig" and not arguments.pending):
            remake_devices(arguments.container)
    except (LookupError, RuntimeError, ValueError) as error:
        sys.stderr.write(f"faults: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
