# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What a Windows host says of its WSL distributions, asked in one connection.

Each way of asking ends in the same three things: the names that run, an answer for each of them from inside, and the
list of all. They are read in one place, whichever way they came.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import json
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils import wsl
from ansible_collections.gpufarm.core.plugins.module_utils.commands import run_commands
from ansible_collections.gpufarm.core.plugins.module_utils.problem import FoundError
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean, clean_all

# Windows looks for the first on PATH; in session 0, which SSH and PSRP have, only the second may work (WSL#9231).
PROGRAMS = ("wsl.exe", r"C:\Program Files\WSL\wsl.exe")
# cmd.exe takes no longer command line.
LONGEST_COMMAND = 8191
MARK = "gpufarm-wsl"
# Far above what a distribution says of itself, and what an error needs of it.
LONGEST_PROBE = 64 * 1024
LONGEST_SAID = 500


class WslError(FoundError):
    """A Windows host gave no usable answer."""

    def __init__(self, host: Host, found: str, expected: str, next_step: str) -> None:
        super().__init__(f"{host.name}: {found}", expected, next_step)


@dataclass(frozen=True)
class Host:
    """A Windows host, as its inventory source describes it."""

    name: str
    connection: str = "ssh"
    address: str = ""
    port: int | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    private_key: str | None = None
    ssh_arguments: tuple[str, ...] = ()
    psrp: Mapping[str, Any] = field(default_factory=dict, repr=False)
    wsl_exe: str | None = None
    distribution_connection: str = "wsl"
    distribution_user: str | None = None
    distribution_ssh_port: int = 22
    list_addresses: bool = False


@dataclass(frozen=True)
class Question:
    """What every host is asked."""

    # Which distributions are looked into: none, those that run, or all, which starts the others.
    details: str = "running"
    exclude: tuple[str, ...] = ()
    timeout_s: int = 30

    @property
    def names(self) -> str:
        """Options of wsl.exe that print the names to look into; they succeed without a distribution, too."""
        return "--list --quiet" if self.details == "all" else "--list --running --quiet"

    @property
    def excluded(self) -> str:
        """A regular expression of names that are left out, for Python as for .NET."""
        patterns = "|".join(re.escape(each).replace(r"\*", ".*").replace(r"\?", ".") for each in self.exclude)
        return f"^({patterns})$" if patterns else "^$"

    @property
    def refused(self) -> str:
        """The same of names that are not looked into."""
        return "." if self.details == "none" else self.excluded

    def excludes(self, name: str) -> bool:
        return re.search(self.excluded, name) is not None


@dataclass(frozen=True)
class Output:
    """What one run of wsl.exe gave; no code where it did not end in time."""

    code: int | None
    stdout: bytes
    stderr: bytes = b""

    def said(self) -> str:
        if self.code is None:
            return "no end in time"
        said = wsl.readable(self.stdout) or wsl.readable(self.stderr) or f"exit code {self.code}"
        return said[-LONGEST_SAID:].rstrip(".")


@dataclass(frozen=True)
class Answer:
    """What a host has answered, before it is read."""

    program: str
    names: Output
    listed: Output
    probes: Mapping[str, Output]
    # The names of all, asked for where the list has failed: without a distribution, too, wsl.exe ends with an error.
    every: Output | None = None
    computer_name: str | None = None
    shell: str | None = None
    addresses: Sequence[Mapping[str, Any]] | None = None
    # Why they are not known, though they were asked for.
    addresses_error: str | None = None


# --------------------------------------------------------------------------------------------------------------------
# Inside a distribution

# Read by its shell from standard input, so that no quoting rule of Windows touches it. Its first line may get a byte
# order mark in front, which .NET sends where a console's code page is UTF-8; nothing it starts may read what follows.
PROBE = """\
:
s() { printf '\\n@@%s\\n' "$1"; shift; "$@" 2>/dev/null </dev/null; }
s release cat /etc/os-release
s kernel cat /proc/sys/kernel/osrelease
s systemd ls -d /run/systemd/system
s route ip -4 route get 192.0.2.1
s addresses hostname -I
s gpus /usr/lib/wsl/lib/nvidia-smi --query-gpu=name,uuid,driver_version --format=csv,noheader
s end
"""


def parse_probe(raw: bytes) -> dict[str, Any]:
    """The variables of a distribution, from what PROBE printed in it."""
    parts: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in raw[:LONGEST_PROBE].decode("utf-8", errors="replace").replace("\r", "").split("\n"):
        if line.startswith("@@"):
            lines = parts.setdefault(line[2:], [])
        elif line.strip():
            lines.append(line.strip())
    if "end" not in parts:
        raise ValueError(f"its answer breaks off: {wsl.readable(raw[:LONGEST_PROBE])[-200:]}")
    parts = {name: parts.get(name, []) for name in ("release", "kernel", "systemd", "route", "addresses", "gpus")}
    release = dict(line.split("=", 1) for line in parts["release"] if "=" in line)
    route = " ".join(parts["route"])
    source = re.search(r"\bsrc ([0-9.]+)", route)
    addresses = [address for address in " ".join(parts["addresses"]).split() if re.fullmatch(r"[0-9.]+", address)]
    gpus = [line.rsplit(", ", 2) for line in parts["gpus"]]
    found: dict[str, Any] = clean_all(
        {
            "release": _unquoted(release.get("PRETTY_NAME")),
            "release_id": _unquoted(release.get("ID")),
            "release_version": _unquoted(release.get("VERSION_ID")),
            "kernel": next(iter(parts["kernel"]), ""),
            "systemd": bool(parts["systemd"]),
            "ip": source.group(1) if source else next(iter(addresses), ""),
            "gpus": [
                {"name": gpu[0], "uuid": gpu[1], "driver_version": gpu[2]}
                for gpu in gpus
                if len(gpu) == 3 and gpu[1].startswith("GPU-")
            ],
        }
    )
    return found


def _unquoted(value: str | None) -> str:
    return (value or "").strip("\"'")


# --------------------------------------------------------------------------------------------------------------------
# Reading


def read(host: Host, answer: Answer, question: Question) -> dict[str, Any]:
    """What a host has answered, as plain data that a cache can hold."""
    try:
        rows = _rows(answer)
    except ValueError as error:
        raise WslError(
            host,
            str(error),
            "a row with name, state and version for each distribution",
            "run `wsl.exe --list --verbose` there and compare",
        ) from error
    running = set(wsl.parse_names(answer.names.stdout)) if question.details != "all" else set()
    distributions = []
    for row in rows:
        probe = answer.probes.get(row["name"])
        found: dict[str, Any] = {}
        if probe is not None:
            try:
                if probe.code is None and b"@@end" not in probe.stdout:
                    raise ValueError("it did not answer in time")
                if probe.code and b"@@" not in probe.stdout:
                    raise ValueError(probe.said())
                found = parse_probe(probe.stdout)
                running.add(row["name"])
                # It was asked for the list before it started.
                row["state"] = "Running" if row["state"] == "Stopped" else row["state"]
            except ValueError as error:
                found = {"error": str(error)}
        # Where states are translated, the names that run say what a state means.
        distributions.append({**row, "running": row["name"] in running or row["state"] == "Running", **found})
    return {
        "program": clean(answer.program),
        "computer_name": clean(answer.computer_name or "") or None,
        "shell": answer.shell,
        "addresses": answer.addresses,
        "addresses_error": answer.addresses_error,
        "distributions": distributions,
    }


def parse_addresses(lines: Sequence[str], route: str | None) -> list[dict[str, Any]]:
    """The IPv4 addresses by which a machine may be reached, from lines of state, address, prefix and interface."""
    found = []
    for line in lines:
        state, address, prefix, interface = line.split(" ", 3)
        if state != "Up" or ":" in address or address.startswith(("127.", "169.254.")):
            continue
        found.append(
            {
                "address": str(ipaddress.IPv4Address(address)),
                "prefix": int(prefix),
                "interface": clean(interface),
                "default_route": address == route,
            }
        )
    return found


def _rows(answer: Answer) -> list[dict[str, Any]]:
    if answer.listed.code != 0:
        every = answer.every
        if every is None or every.code != 0 or wsl.parse_names(every.stdout):
            raise ValueError(f"{clean(answer.program)} does not list the distributions: {answer.listed.said()}")
        return []
    return wsl.parse_distribution_list(answer.listed.stdout)


def _nobody_answered(host: Host, refusals: Sequence[str]) -> WslError:
    said = "; ".join(refusals)
    if "WSL_E_LOCAL_SYSTEM_NOT_SUPPORTED" in said:
        next_step = "ask as the user who owns the distributions, never as LocalSystem"
    else:
        next_step = (
            "log on as the user who owns the distributions and run `wsl.exe --version`; without a session it needs "
            "WSL 2.2.4 or newer"
        )
    return WslError(host, f"no wsl.exe answered ({said})", f"one on PATH or {PROGRAMS[1]}", next_step)


# --------------------------------------------------------------------------------------------------------------------
# Through interop, from inside WSL


def ask_local(host: Host, question: Question) -> dict[str, Any]:
    """Ask this very machine's Windows."""
    begun = time.monotonic()
    until = begun + question.timeout_s
    places = wsl.programs(host.wsl_exe)
    refusals = []
    for number, place in enumerate(places, 1):
        # One that hangs leaves the next its share.
        names = _interop(place, question.names.split(), b"", begun + question.timeout_s * number / (len(places) + 1))
        if names.code == 0:
            break
        refusals.append(f"{place}: {names.said()}")
    else:
        raise _nobody_answered(host, refusals or ["none was found"])
    wanted = [name for name in wsl.parse_names(names.stdout) if not re.search(question.refused, name)]
    with ThreadPoolExecutor(len(wanted) + 2) as pool:
        network = pool.submit(_addresses, place, until) if host.list_addresses else None
        listing = pool.submit(_interop, place, ["--list", "--verbose"], b"", until)
        asked = {
            name: pool.submit(_interop, place, ["-d", name, "--exec", "/bin/sh"], PROBE.encode(), until)
            for name in wanted
        }
        listed = listing.result()
        every = _interop(place, ["--list", "--quiet"], b"", until) if listed.code else None
        probes = {name: probe.result() for name, probe in asked.items()}
    addresses = error = None
    try:
        addresses = network.result() if network else None
    except ValueError as refusal:
        error = str(refusal)
    answer = Answer(place, names, listed, probes, every, addresses=addresses, addresses_error=error)
    return read(host, answer, question)


def _addresses(wsl_exe: str, until: float) -> Sequence[Mapping[str, Any]]:
    """The addresses of this machine's Windows; a ValueError says why its PowerShell does not tell them."""
    refusal = ""
    code = base64.b64encode(NETWORK_SCRIPT.encode("utf-16-le")).decode("ascii")
    for place in wsl.powershells(wsl_exe):
        said = _interop(place, ["-NoProfile", "-NonInteractive", "-EncodedCommand", code], b"", until)
        answered = re.search(f"^{MARK} (.*)$", said.stdout.decode("utf-8", errors="replace"), re.MULTILINE)
        if answered:
            try:
                network = json.loads(answered[1])
                found = _network(network)
            except (ValueError, TypeError, AttributeError) as error:
                raise ValueError(f"the answer of {place} is damaged: {clean(str(error))}") from error
            if not network.get("network"):
                # A policy keeps a script from them; there is always the loopback.
                raise ValueError(f"{place} names no interface")
            return found
        refusal = f"{place}: {said.said()}"
    raise ValueError(refusal)


def _interop(program: str, arguments: Sequence[str], given: bytes, until: float) -> Output:
    try:
        done = subprocess.run(
            [program, *arguments], input=given, capture_output=True, check=False, cwd=Path(program).parent,
            timeout=max(0.1, until - time.monotonic()),
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        return Output(None, late.stdout or b"", late.stderr or b"")
    except OSError as error:
        return Output(126, b"", str(error).encode())
    return Output(done.returncode, done.stdout, done.stderr)


# --------------------------------------------------------------------------------------------------------------------
# In PowerShell

# What both scripts have. The source that a datagram would have, which is never sent, is the address of the default
# route, whatever the metrics.
TEXT = r"""
function Code($raw) { [Convert]::ToBase64String($raw) }
function Text64($text) { Code ([Text.Encoding]::UTF8.GetBytes($text)) }
""".lstrip()
NETWORK = r"""
  try {
    foreach ($card in [Net.NetworkInformation.NetworkInterface]::GetAllNetworkInterfaces()) {
      foreach ($each in $card.GetIPProperties().UnicastAddresses) {
        $said.network += Text64 ($card.OperationalStatus, $each.Address, $each.PrefixLength, $card.Name -join ' ')
      }
    }
  } catch { }
  try {
    $said.route = (New-Object Net.Sockets.UdpClient '192.0.2.1', 9).Client.LocalEndPoint.Address.IPAddressToString
  } catch { }
""".lstrip("\n")
# Of a machine that needs no script for the rest.
NETWORK_SCRIPT = f"""
$ErrorActionPreference = 'Stop'
$ProgressPreference = 'SilentlyContinue'
{TEXT}$said = @{{ network = @() }}
{NETWORK}'{MARK} ' + (ConvertTo-Json $said -Compress)
"""

# Windows PowerShell 5.1, which every Windows has. Raw bytes go through base64: what PowerShell itself reads from a
# program it decodes by the console's code page. Processes run side by side, and a hanging one ends at the deadline.
SCRIPT = r"""
$ErrorActionPreference = 'Stop'
$ProgressPreference = 'SilentlyContinue'
try {
$begun = [DateTime]::UtcNow
$until = $begun.AddSeconds(@SECONDS@)
$probe = [Text.Encoding]::ASCII.GetBytes('@PROBE@')
@TEXT@function Ask($program, $words, $given) {
  $info = New-Object Diagnostics.ProcessStartInfo $program, $words
  $info.UseShellExecute = $false
  $info.RedirectStandardInput = $true
  $info.RedirectStandardOutput = $true
  $info.RedirectStandardError = $true
  $run = @{ out = New-Object IO.MemoryStream; err = New-Object IO.MemoryStream }
  $run.child = [Diagnostics.Process]::Start($info)
  $run.reads = @()
  $run.reads += $run.child.StandardOutput.BaseStream.CopyToAsync($run.out)
  $run.reads += $run.child.StandardError.BaseStream.CopyToAsync($run.err)
  try {
    if ($given) { $run.child.StandardInput.BaseStream.Write($given, 0, $given.Length) }
    $run.child.StandardInput.Close()
  } catch { }
  $run
}
function Left($end) { [Math]::Max(1, [int]($end - [DateTime]::UtcNow).TotalMilliseconds) }
function Hear($run, $end) {
  $code = $null
  try {
    if ([Threading.Tasks.Task]::WaitAll($run.reads, (Left $end))) {
      if ($run.child.WaitForExit((Left $end))) { $code = $run.child.ExitCode }
    }
  } catch { }
  try { if ($code -eq $null) { $run.child.Kill() } } catch { }
  @{ code = $code; out = Code $run.out.ToArray(); err = Code $run.err.ToArray() }
}
  $said = @{ name = Text64 $env:COMPUTERNAME; refusals = @(); probes = @{}; network = @() }
  try { $said.shell = Text64 (Get-ItemProperty 'HKLM:\SOFTWARE\OpenSSH').DefaultShell } catch { }
@NETWORK@  $end = $begun.AddSeconds(@HALF@)
  foreach ($program in @(@PROGRAMS@)) {
    try {
      $names = Hear (Ask $program '@NAMES@' $null) $end
      if ($names.code -eq 0) { $said.program = $program; break }
      $said.refusals += @{ program = $program; code = $names.code; out = $names.out; err = $names.err }
    } catch {
      $said.refusals += @{ program = $program; code = 126; out = ''; err = Text64 $_.Exception.Message }
    }
    $end = $until
  }
  if ($said.program) {
    $text = [Text.Encoding]::ASCII.GetString([Convert]::FromBase64String($names.out)) -replace '[^A-Za-z0-9._\r\n-]', ''
    $list = Ask $program '--list --verbose' $null
    $runs = @{}
    foreach ($name in ($text -split '[\r\n]+')) {
      if ($name -and ($name -cnotmatch '@REFUSED@')) { $runs[$name] = Ask $program "-d $name --exec /bin/sh" $probe }
    }
    $said.names = $names
    $said.list = Hear $list $until
    if ($said.list.code -ne 0) { $said.every = Hear (Ask $program '--list --quiet' $null) $until }
    foreach ($name in @($runs.Keys)) { $said.probes[$name] = Hear $runs[$name] $until }
  }
  '@MARK@ ' + (ConvertTo-Json $said -Depth 4 -Compress)
} catch {
  '@MARK@ ' + (ConvertTo-Json -Compress @{ error = $_.Exception.Message })
}
""".replace("@TEXT@", TEXT).replace("@NETWORK@", NETWORK)


# Variables of the script, and none of PowerShell's own.
OURS = r"\$(?!env:|true\b|false\b|null\b|_\b|\w+Preference\b)(\w+)"


def script(host: Host, question: Question) -> str:
    """The script that asks Windows; its words are ours, and what comes from a configuration is quoted."""
    programs = [host.wsl_exe] if host.wsl_exe else PROGRAMS
    values = {
        # The connection ends later than what it carries.
        "@SECONDS@": str(max(1, question.timeout_s * 4 // 5)),
        # A program that hangs leaves the next its share.
        "@HALF@": str(max(1, question.timeout_s * 2 // 5)),
        "@PROBE@": single_quoted(PROBE),
        "@PROGRAMS@": ", ".join(f"'{single_quoted(program)}'" for program in programs),
        "@NAMES@": question.names,
        "@REFUSED@": single_quoted(question.refused),
        "@MARK@": MARK,
    }
    lines = "\n".join(line.strip() for line in SCRIPT.strip().splitlines())
    # cmd.exe takes so little that blanks count, and names; those between quotes are not ours to leave out.
    shorter = r"""('[^']*'|"[^"]*")| *(\+?=|[{};,]) *|\b(if|foreach) (?=\()"""
    short = re.sub(shorter, lambda found: found[1] or found[2] or found[3], lines)
    short = re.sub(r"(?<=\{)\n|\n(?=\})", "", short)
    letters: dict[str, str] = {}
    short = re.sub(OURS, lambda found: f"${letters.setdefault(found[1], ascii_lowercase[len(letters)])}", short)
    return re.sub("|".join(values), lambda found: values[found.group()], short)


def single_quoted(text: str) -> str:
    # PowerShell takes typographic quotes for quotes, too.
    return re.sub("['\u2018-\u201b]", r"\g<0>\g<0>", text)


def command(host: Host, question: Question) -> str:
    """The script as a command that cmd.exe and PowerShell, whichever SSH starts, take in the same way."""
    code = base64.b64encode(script(host, question).encode("utf-16-le")).decode("ascii")
    words = f"powershell.exe -NoProfile -NonInteractive -EncodedCommand {code}"
    if len(words) > LONGEST_COMMAND:
        raise WslError(
            host,
            f"the command for Windows has {len(words)} characters",
            f"at most {LONGEST_COMMAND}",
            "shorten exclude_distributions",
        )
    return words


def parse_answer(host: Host, text: str) -> Answer:
    """What SCRIPT printed; whatever a profile or a banner has printed around it is left out."""
    for line in text.splitlines():
        if line.startswith(f"{MARK} "):
            try:
                said = json.loads(line[len(MARK) :])
                if "error" in said:
                    raise WslError(
                        host,
                        f"PowerShell ended with: {clean(str(said['error']))[:LONGEST_SAID].rstrip('.')}",
                        "a script that may start programs",
                        "look whether a policy limits PowerShell there ($ExecutionContext.SessionState.LanguageMode)",
                    )
                if not said.get("program"):
                    refusals = [f"{clean(str(each['program']))}: {_output(each).said()}" for each in said["refusals"]]
                    raise _nobody_answered(host, refusals)
                return Answer(
                    program=said["program"],
                    names=_output(said["names"]),
                    listed=_output(said["list"]),
                    probes={name: _output(probe) for name, probe in said["probes"].items()},
                    every=_output(said["every"]) if "every" in said else None,
                    computer_name=_text(said.get("name")) or None,
                    addresses=_network(said),
                    shell="powershell" if re.search(r"(powershell|pwsh)", _text(said.get("shell")), re.I) else "cmd",
                )
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise WslError(
                    host, f"the answer of PowerShell is damaged: {error!r} in {line[:200]!r}", "one line of JSON",
                    "look what else prints there, and ask again",
                ) from error  # fmt: skip
    raise WslError(
        host,
        f"PowerShell gave no answer: {wsl.readable(text.encode()[-400:]).rstrip('.') or 'nothing was printed'}",
        f"a line that begins with {MARK}",
        "run `powershell.exe -NoProfile -Command 1` there",
    )


def _network(said: Mapping[str, Any]) -> list[dict[str, Any]]:
    return parse_addresses([_text(line) for line in said.get("network", [])], said.get("route"))


def _output(said: Mapping[str, Any]) -> Output:
    try:
        return Output(said["code"], base64.b64decode(said["out"]), base64.b64decode(said["err"]))
    except binascii.Error as error:
        raise ValueError(str(error)) from error


def _text(code: str | None) -> str:
    return base64.b64decode(code or "").decode("utf-8", errors="replace")


# --------------------------------------------------------------------------------------------------------------------
# Over SSH


def ssh_options(host: Host) -> list[str]:
    """Options of ssh that reach a Windows host."""
    options = [] if host.port is None else ["-p", str(host.port)]
    options += ["-l", host.user] if host.user else []
    options += ["-i", host.private_key] if host.private_key else []
    return [*options, *host.ssh_arguments]


def ask_ssh(host: Host, question: Question) -> dict[str, Any]:
    """Ask by OpenSSH's own client, so that keys, agent, jump hosts and ~/.ssh/config are the user's."""
    timeout = str(question.timeout_s)
    # What ~/.ssh/config has for people at a terminal.
    ours = ["-o", "BatchMode=yes", "-o", "RemoteCommand=none", "-o", "ClearAllForwardings=yes"]
    arguments = ["ssh", "-T", *ours, "-o", f"ConnectTimeout={timeout}", *ssh_options(host)]
    settings = ["ssh", "-G", *ssh_options(host), "--", host.address]
    done, asked = run_commands(
        [[*arguments, "--", host.address, command(host, question)], settings], question.timeout_s
    )
    if done.error:
        raise WslError(host, f"ssh cannot be started ({done.error})", "OpenSSH's client", "install it")
    # What kept the connection open may have nothing to do with an answer that is there.
    answered = re.search(f"^{MARK} .*\\n", done.stdout, re.MULTILINE)
    said = wsl.readable(done.stderr.encode())[-LONGEST_SAID:].rstrip(".")
    if done.timed_out and not answered:
        raise WslError(
            host,
            f"no answer within {timeout} s{f' ({said})' if said else ''}",
            "a machine that is on",
            "start it, or raise the option timeout",
        )
    if done.returncode == 255 and not answered:
        raise WslError(
            host, f"ssh cannot connect to {host.address}: {said}", "a connection without a password",
            f"try `ssh {host.address}` as this user",
        )  # fmt: skip
    text = done.stdout if answered else f"{done.stdout}\n{said}"
    return {**read(host, parse_answer(host, text), question), "ssh": _settings(asked.stdout)}


def _settings(printed: str) -> dict[str, Any]:
    """What ssh itself makes of a host's name: connections that do not read its configuration need that."""
    lines = [line.split(" ", 1) for line in printed.splitlines() if " " in line]
    wanted = (
        "hostname", "port", "user", "proxyjump", "proxycommand", "userknownhostsfile", "stricthostkeychecking",
        "hostkeyalias",
    )  # fmt: skip
    found: dict[str, Any] = {key: value for key, value in lines if key in wanted}
    # Of several, who runs the tasks chooses.
    keys = [value for key, value in lines if key == "identityfile" and value != "none"]
    return {**found, "identityfiles": keys}


# --------------------------------------------------------------------------------------------------------------------
# Over PSRP


def ask_psrp(host: Host, question: Question) -> dict[str, Any]:
    """Ask by PowerShell Remoting."""
    try:
        from pypsrp.client import Client  # noqa: PLC0415 # for these hosts only
    except ImportError as error:
        raise WslError(
            host, f"pypsrp is missing ({error})", "it is installed where Ansible runs",
            "`pip install pypsrp`, or connection: ssh",
        ) from error  # fmt: skip
    # A request that waits for output ends before its own connection gives up.
    options = {
        "connection_timeout": question.timeout_s,
        "read_timeout": question.timeout_s,
        "operation_timeout": max(1, question.timeout_s * 2 // 3),
        **host.psrp,
    }
    if host.port is not None:
        options["port"] = host.port
    try:
        with Client(host.address, username=host.user, password=host.password, **options) as client:
            text, streams, failed = client.execute_ps(script(host, question))
    except Exception as error:
        # Of pypsrp, requests or what they use.
        raise WslError(
            host, f"PSRP cannot ask {host.address}: {type(error).__name__}: {clean(str(error)).rstrip('.')}",
            "PowerShell Remoting that lets this user in", "try Enter-PSSession",
        ) from error  # fmt: skip
    if failed and MARK not in text:
        text = f"{text}\n{' '.join(str(each) for each in streams.error)}"
    return read(host, parse_answer(host, text), question)


ASK: Mapping[str, Callable[[Host, Question], dict[str, Any]]] = {
    "local": ask_local,
    "ssh": ask_ssh,
    "psrp": ask_psrp,
}
