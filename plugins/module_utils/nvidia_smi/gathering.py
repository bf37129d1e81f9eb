# Copyright (c) gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One run of nvidia-smi, with what must be asked beside it, and after it where a GPU fails."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ansible_collections.gpufarm.core.plugins.module_utils.commands import Command, run_commands
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.facts import (
    WITHOUT_XML,
    Answer,
    Facts,
    Gpu,
    NvLink,
    NvLinkPeer,
    empty_facts,
    empty_gpu,
    keep_subsets,
)
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.failures import (
    NvidiaSmiError,
    classify,
    explain,
    next_step,
    outcome,
)
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.listings import (
    merge_list,
    parse_list,
    parse_nvlink_status,
    parse_topology,
    parse_version,
)
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.node import (
    WSL_DIRECTORY,
    detect_platform,
    find_nvidia_smi,
    kernel_gpus,
    kernel_has_mig,
    kernel_modules,
    process_affinity,
    read_file,
    sees_pids_of_the_driver,
    topology,
)
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.query_csv import (
    QUERY_FIELDS,
    REQUIRED_FIELDS,
    UNKNOWN_FIELD,
    parse_query_csv,
)
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.query_xml import parse_query_xml, split_xml
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.values import first_of, int_of
from ansible_collections.gpufarm.core.plugins.module_utils.pci import BUS_ID, normal_bus_id, padded_bus_id
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean

if TYPE_CHECKING:
    from ansible_collections.gpufarm.core.plugins.module_utils.commands import Runner


@dataclass
class _Gathering:
    """One run of collect: what is asked, by which program, and how long that may take."""

    binary: str
    subsets: frozenset[str]
    run: Runner
    deadline: float
    root: Path
    platform: str | None
    kernel: dict[str, dict[str, str | None]]
    fields: tuple[str, ...] = QUERY_FIELDS
    failed: dict[str, str] = field(default_factory=dict)
    """Subsets whose own call should have told of the GPUs and did not, and why."""

    @property
    def with_xml(self) -> bool:
        return not self.subsets <= WITHOUT_XML

    def call(self, *arguments: Sequence[str]) -> list[Command]:
        left = max(self.deadline - time.monotonic(), 0.1)
        return self.run([(self.binary, *argument) for argument in arguments], left)

    def question(self) -> list[str]:
        if self.with_xml:
            return ["-q", "-x"]
        return ["--query-gpu=" + ",".join(self.fields), "--format=csv,noheader,nounits"]

    def ask(self) -> tuple[Command, dict[str, Command]]:
        """The main call, and those beside it by their arguments."""
        beside = []
        if not self.with_xml:
            beside.append(["--version"])
        if "mig" in self.subsets and kernel_has_mig(self.root):
            beside.append(["-L"])
        if "nvlink" in self.subsets:
            beside.append(list(_LINKS_AND_ERRORS))
        if "peers" in self.subsets:
            beside.append(list(_WAYS))
        main, *others = self.call(self.question(), *beside)
        while main.returncode == 2 and not self.with_xml:
            refused = UNKNOWN_FIELD.search(main.words)
            if not refused or refused.group(1) not in self.fields or refused.group(1) in REQUIRED_FIELDS:
                break
            self.fields = tuple(name for name in self.fields if name != refused.group(1))
            main = self.call(self.question())[0]
        return main, {" ".join(command.argv[1:]): command for command in others}

    def read(self, command: Command) -> Answer:
        """The answer to a main call, or NvidiaSmiError."""
        if command.timed_out:
            raise NvidiaSmiError("timeout", explain(command, "timeout", command.stderr, self.platform))
        if command.error:
            reason = "permission_denied" if "denied" in command.error.lower() else "unknown_error"
            raise NvidiaSmiError(reason, explain(command, reason, "", self.platform))
        document, words = self._split(command)
        failed = classify(command.returncode, words)
        if failed is None and not document:
            failed = "invalid_output" if words else "no_devices"
        if failed:
            raise NvidiaSmiError(failed, explain(command, failed, words, self.platform))
        try:
            return parse_query_xml(document) if self.with_xml else parse_query_csv(document, self.fields)
        except NvidiaSmiError as error:
            raise NvidiaSmiError(error.reason, explain(command, error.reason, error.message, self.platform)) from error

    def _split(self, command: Command) -> tuple[str, str]:
        if self.with_xml:
            document, words = split_xml(command.stdout)
        else:
            lines = command.stdout.splitlines()
            is_row = [len(line.split(",")) == len(self.fields) for line in lines]
            document = "\n".join(line for number, line in enumerate(lines) if is_row[number])
            words = "\n".join(line for number, line in enumerate(lines) if not is_row[number])
        return document, "\n".join(part for part in (words.strip(), command.stderr.strip()) if part)

    def words(self, command: Command) -> str:
        return self._split(command)[1]


def _lost_gpu(status: str, message: str, bus_id: str | None, kernel: dict[str, str | None]) -> Gpu:
    """What can be said of a GPU that nvidia-smi cannot read."""
    gpu = empty_gpu()
    gpu.update(
        {
            "status": status,
            "status_message": message,
            "name": kernel.get("model"),
            "uuid": kernel.get("gpu uuid"),
            "pci_bus_id": padded_bus_id(bus_id) if bus_id else None,
            "minor_number": int_of(kernel.get("device minor")),
        }
    )
    return gpu


# What makes a GPU unreadable without saying that it is lost.
_NOT_ITS_FAULT = frozenset(
    ("permission_denied", "access_blocked", "timeout", "crashed", "unsupported", "invalid_output")
)


def _alone(gathering: _Gathering, command: Command, target: str, bus_id: str | None) -> Answer:
    """The answer about one GPU, which is whole or a lost one in it."""
    try:
        answer = gathering.read(command)
        if answer["gpus"]:
            if gathering.with_xml:
                # The XML of one GPU does not say which one it is.
                answer["gpus"][0]["index"] = None
            return answer
        failure = NvidiaSmiError("gpu_lost", f"nvidia-smi says nothing about {target}.")
    except NvidiaSmiError as error:
        failure = error
    if failure.reason == "reset_required":
        status = "reset_required"
    else:
        status = "unreadable" if failure.reason in _NOT_ITS_FAULT else "lost"
    gpu = _lost_gpu(status, failure.message, bus_id, gathering.kernel.get(bus_id or "", {}))
    if bus_id is None:
        gpu["uuid"] = target
    return {"driver_version": None, "cuda_version": None, "attached_gpus": None, "gpus": [gpu]}


def _one_by_one(gathering: _Gathering, failure: NvidiaSmiError, words: str) -> Answer | None:
    """Ask each GPU alone: one that is lost fails the call for all, while C(-i) still reads its neighbours."""
    targets: list[tuple[str, str | None]] = [(bus_id, bus_id) for bus_id in _expected(gathering)]
    if not targets:
        listing = gathering.call(["-L"])[0]
        words = f"{words}\n{listing.words}"
        with contextlib.suppress(NvidiaSmiError):
            targets = [(gpu["uuid"], None) for gpu in parse_list(listing.stdout) if gpu["uuid"]]
    if not targets:
        return None
    commands = gathering.call(*([*gathering.question(), "-i", target] for target, _bus_id in targets))
    answers = [_alone(gathering, command, *targets[number]) for number, command in enumerate(commands)]
    gpus = [answer["gpus"][0] for answer in answers]
    # Where the kernel gives no list, the message itself names the GPU that no listing has any more.
    named = {normal_bus_id(gpu["pci_bus_id"]) for gpu in gpus}
    for match in BUS_ID.finditer(words):
        bus_id = normal_bus_id(match.group(0))
        if match.group(1) and bus_id not in named:
            named.add(bus_id)
            gpus.append(_lost_gpu("lost", failure.message, bus_id, {}))
    return {
        "driver_version": first_of(*(answer["driver_version"] for answer in answers)),
        "cuda_version": first_of(*(answer["cuda_version"] for answer in answers)),
        "attached_gpus": None,
        "gpus": _indexed(gpus),
    }


def _indexed(gpus: list[Gpu]) -> list[Gpu]:
    """The GPUs by PCI address, which is NVML's order too, so that it gives those their index that brought none."""
    ordered = sorted(gpus, key=lambda gpu: normal_bus_id(gpu["pci_bus_id"]) or "~")
    if all(gpu["index"] in (None, position) for position, gpu in enumerate(ordered)):
        for position, gpu in enumerate(ordered):
            gpu["index"] = position
    return ordered


def _expected(gathering: _Gathering) -> list[str]:
    """The GPUs of the kernel module that can be meant to be seen here.

    In a container the kernel's list is the host's: a GPU without device node belongs to somebody else.
    """
    expected = []
    for bus_id, information in gathering.kernel.items():
        device = gathering.root / f"dev/nvidia{int_of(information.get('device minor'))}"
        excluded = (information.get("gpu excluded") or "").lower() == "yes"
        if device.exists() and not excluded:
            expected.append(bus_id)
    return expected


_CORRUPTED = re.compile(r"infoROM is corrupted at gpu ([0-9a-fA-F:.]+)", re.IGNORECASE)


def _mark_inforoms(gpus: list[Gpu], words: str) -> None:
    """nvidia-smi tells a damaged infoROM in a line of its own, after a full answer."""
    corrupted = {normal_bus_id(match.group(1)) for match in _CORRUPTED.finditer(words)}
    for gpu in gpus:
        gpu["inforom_corrupted"] = normal_bus_id(gpu["pci_bus_id"]) in corrupted


def _missing(gathering: _Gathering, gpus: list[Gpu]) -> list[Gpu]:
    """The GPUs that the kernel module holds while nvidia-smi is silent about them."""
    reported = {normal_bus_id(gpu["pci_bus_id"]) for gpu in gpus}
    return [
        _lost_gpu(
            "lost",
            f"The kernel module holds GPU {bus_id}, but nvidia-smi does not list it.",
            bus_id,
            gathering.kernel[bus_id],
        )
        for bus_id in _expected(gathering)
        if bus_id not in reported
    ]


def _complete(gathering: _Gathering, gpus: list[Gpu], aside: dict[str, Command]) -> list[Gpu]:
    """The GPUs with what other calls, /proc and sysfs say of them, and without what was not asked for."""
    subsets = gathering.subsets
    if "mig" in subsets and any(gpu["mig_mode"] == "Enabled" for gpu in gpus):
        listing = aside.get("-L") or gathering.call(["-L"])[0]
        why = outcome(listing, listing.words) if listing.returncode != 0 else ""
        try:
            gpus = merge_list(gpus, parse_list(listing.stdout))
        except NvidiaSmiError as error:
            why = error.message
        if why and any(gpu["mig_mode"] == "Enabled" and gpu["mig_devices"] is None for gpu in gpus):
            gathering.failed["mig"] = why
    links = _nvlinks(gathering, aside[" ".join(_LINKS_AND_ERRORS)], gpus) if "nvlink" in subsets else None
    peers = _nvlink_peers(aside[" ".join(_WAYS)]) if "peers" in subsets else None
    with_pids = "processes" in subsets and sees_pids_of_the_driver(gathering.root)
    completed = []
    for gpu in gpus:
        information = gathering.kernel.get(normal_bus_id(gpu["pci_bus_id"]) or "", {})
        gpu["minor_number"] = first_of(gpu["minor_number"], int_of(information.get("device minor")))
        if links is not None:
            gpu["nvlinks"] = links.get(gpu["uuid"] or "", [])
        if "topology" in subsets:
            place = topology(gpu["pci_bus_id"], gathering.root)
            gpu["numa_node"], gpu["cpu_affinity"], gpu["pci_root"] = place
        if peers is not None:
            gpu["nvlink_peers"] = peers.get(gpu["index"], [])
        for process in gpu["processes"] or [] if with_pids else []:
            process["cpu_affinity"] = process_affinity(process["pid"], gathering.root)
        completed.append(keep_subsets(gpu, subsets))
    return completed


_LINKS_AND_ERRORS = ("nvlink", "-s", "-e")


_WAYS = ("topo", "-m")


def _nvlink_peers(command: Command) -> dict[int | None, list[NvLinkPeer]] | None:
    """The GPUs that each one reaches by NVLink, by their indices; None where the matrix cannot be had."""
    ways = parse_topology(command.stdout) if command.returncode == 0 else {}
    peers: dict[int | None, list[NvLinkPeer]] = {}
    for (index, other), way in sorted(ways.items()):
        if way.startswith("NV"):
            peers.setdefault(index, []).append({"index": other, "links": int(way[2:])})
    return peers if command.returncode == 0 and not command.timed_out else None


_LINK = re.compile(r"^\s*Link [0-9]", re.MULTILINE)


# Words of a card without NVLink, or in MIG mode, and of an nvidia-smi that does not know the call.
_NO_LINKS = re.compile(r"not (?:have or )?support|not recognized|all links are inactive", re.IGNORECASE)


def _nvlinks(gathering: _Gathering, command: Command, gpus: Sequence[Gpu]) -> dict[str, list[NvLink] | None] | None:
    """The links by UUID; None when the call failed, for then nothing is known of them."""
    links, why = _read_links(command)
    unplaced = links is not None and not any(links.values()) and _LINK.search(command.stdout)
    if not command.timed_out and (links is None or unplaced):
        # A driver that counts no errors there, tells them in other words, or does not tell both at once.
        state, why = _read_links(gathering.call(_LINKS_AND_ERRORS[:2])[0])
        links = links if state is None else state
    # A guest may have no NVLink that it could be asked about.
    guest = gathering.platform == "wsl" or all(gpu["virtualization_mode"] == "VGPU" for gpu in gpus)
    if links is None and why and not guest:
        gathering.failed["nvlink"] = why
    return links


def _read_links(command: Command) -> tuple[dict[str, list[NvLink] | None] | None, str]:
    """The links, or why there is no answer; nothing where there can be none."""
    # 14: an infoROM is corrupted, a warning after a full answer.
    if command.returncode not in (0, 14):
        absent = classify(command.returncode, command.words) == "unsupported" or _NO_LINKS.search(command.words)
        return None, "" if absent else outcome(command, command.words)
    try:
        return parse_nvlink_status(command.stdout), ""
    except NvidiaSmiError as error:
        return None, error.message


def _sick(gpus: list[Gpu], facts: Facts) -> tuple[str | None, str | None]:
    """Reason and message when a GPU is lost, must be reset or fails; otherwise those that are known already."""
    reason = facts["reason"]
    sick = [gpu for gpu in gpus if gpu["status"] in ("lost", "reset_required")]
    if not sick and reason is None:
        sick = [gpu for gpu in gpus if gpu["status"] == "unreadable"]
    if not sick:
        return reason, facts["message"]
    reasons = {"lost": "gpu_lost", "reset_required": "reset_required", "unreadable": "unknown_error"}
    reason = next(reasons[status] for status in reasons if any(gpu["status"] == status for gpu in sick))
    named = " ".join(f"GPU {first_of(gpu['pci_bus_id'], gpu['uuid'])}: {gpu['status_message']}" for gpu in sick)
    step = next_step(reason, facts["platform"])
    return reason, named if named.endswith(step) else f"{named} {step}"


def collect(
    subsets: frozenset[str],
    *,
    path: str | None = None,
    timeout: float = 60.0,
    run: Runner = run_commands,
    root: str = "/",
    search: str | None = None,
    failed: dict[str, str] | None = None,
) -> Facts:
    """The facts of this node; a node without GPU, driver or nvidia-smi is an answer too, never an exception.

    C(failed) gets the subsets whose own call should have told of the GPUs and did not, and why.
    """
    base = Path(root)
    facts = empty_facts(detect_platform(base))
    facts["kernel_modules"] = kernel_modules(base)
    binary = find_nvidia_smi(path, search)
    if binary is None:
        looked = path or f"nvidia-smi in PATH and in {WSL_DIRECTORY}"
        facts["reason"] = "not_installed"
        step = next_step("not_installed", facts["platform"])
        facts["message"] = f"No executable program was found as {looked}. {step}"
        return facts

    gathering = _Gathering(binary, subsets, run, time.monotonic() + timeout, base, facts["platform"], kernel_gpus(base))
    gathering.failed = {} if failed is None else failed
    main, aside = gathering.ask()
    try:
        answer = gathering.read(main)
    except NvidiaSmiError as failure:
        facts.update({"reason": failure.reason, "message": failure.message})
        module = (read_file(base / "sys/module/nvidia/version") or "").strip()
        if failure.reason == "library_mismatch" and module:
            facts["message"] = f"{failure.message} The loaded kernel module is {clean(module)}."
        words = gathering.words(main)
        speaks_of_one = failure.reason in ("gpu_lost", "reset_required", "interrupt_issue") or BUS_ID.search(words)
        recovered = _one_by_one(gathering, failure, words) if speaks_of_one and not main.timed_out else None
        if recovered is None:
            return facts
        answer = recovered
    else:
        _mark_inforoms(answer["gpus"], gathering.words(main))
        answer["gpus"] += _missing(gathering, answer["gpus"])
        if not answer["gpus"]:
            facts.update({"reason": "no_devices", "message": explain(main, "no_devices", "", gathering.platform)})

    versions = parse_version(aside["--version"].stdout) if "--version" in aside else {}
    gpus = _complete(gathering, answer["gpus"], aside)
    reason, message = _sick(gpus, facts)
    facts.update(
        {
            "available": any(gpu["status"] == "ok" for gpu in gpus),
            "reason": reason,
            "message": message,
            "driver_version": first_of(answer["driver_version"], versions.get("driver_version")),
            "cuda_version": first_of(answer["cuda_version"], versions.get("cuda_version")),
            "gpus": gpus,
        }
    )
    return facts


def collect_topology(path: str | None, timeout: float) -> dict[tuple[int, int], str]:
    """How GPUs, by their indices, are connected; nothing where nvidia-smi does not say."""
    binary = find_nvidia_smi(path)
    command = run_commands([[binary, "topo", "-m"]], timeout)[0] if binary else None
    return parse_topology(command.stdout) if command and command.returncode == 0 else {}
