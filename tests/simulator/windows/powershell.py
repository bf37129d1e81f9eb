"""powershell.exe: runs the part of Windows PowerShell's language that the collection writes, and refuses the rest.

There is no PowerShell to be had for the tests, so this reads and runs the script itself; it knows nothing of what the
script is for. An expression that is a statement prints its value, as there, so a forgotten assignment is seen.
"""

from __future__ import annotations

import base64
import functools
import html
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.simulator.windows import command_line, scheduler, wsl
from tests.simulator.windows.host import HANGS, PROGRAM_FILES, ROOT, SYSTEM32, Windows

TOKENS = re.compile(
    r"""
    (?P<blank>[ \t]+) | (?P<end>[\r\n;]) | (?P<comment>\#[^\n]*)
  | (?P<single>['\u2018-\u201b](?:[^'\u2018-\u201b]|['\u2018-\u201b]{2})*['\u2018-\u201b]) | (?P<double>"[^"`]*")
  | (?P<variable>\$(?:env:)?\w+|\$\?)
  | (?P<operator>-(?:and|or|not|eq|ne|match|notmatch|cnotmatch|replace|split|join|contains)\b)
  | (?P<number>\d+(?![\w.]))
  | (?P<hash>@\{) | (?P<array>@\() | (?P<static>::) | (?P<add>\+=)
  | (?P<type>\[(?![0-9$'"])[A-Za-z][\w.]*(?:\[\])?\])
  | (?P<word>-?[A-Za-z][\w-]*(?:\.[\w.]+)?)
  | (?P<mark>[()\[\]{}.,:=+*/&-])
    """,
    re.VERBOSE,
)
KEYWORDS = {"begin", "process", "end", "data", "filter", "param", "return", "switch", "do", "until", "trap"}
BINARY = ("-and", "-or", "-eq", "-ne", "-match", "-notmatch", "-cnotmatch", "-replace", "-split", "-join", "-contains")


class Refused(Exception):
    """Something that this interpreter does not know, or that PowerShell would refuse."""


class Thrown(Exception):
    """A terminating error."""


class Break(Exception):
    """break."""


class Exit(Exception):
    """exit, with its code."""


VOID = object()


@dataclass
class Token:
    kind: str
    text: str
    # Whether blanks stand before it: in a command they end an argument.
    apart: bool


def tokens(text: str) -> list[Token]:
    found = []
    index, apart = 0, True
    while index < len(text):
        match = TOKENS.match(text, index)
        if not match or not match.lastgroup:
            raise Refused(f"cannot read {text[index : index + 30]!r}")
        kind, index = match.lastgroup, match.end()
        if kind == "operator":
            kind = "operator"
        if kind in ("blank", "comment"):
            apart = True
            continue
        found.append(Token(kind, match.group(), apart))
        apart = kind == "end"
    return [*found, Token("end", "", True)]


# --------------------------------------------------------------------------------------------------------------------
# .NET, as far as it is used


@dataclass
class Encoding:
    name: str

    def GetBytes(self, text: str | None) -> bytes:
        if text is None:
            raise Thrown("Array cannot be null.")
        return text.encode(self.name, "replace")

    def GetString(self, raw: bytes) -> str:
        return raw.decode(self.name, "replace").replace("\ufffd", "?" if self.name == "ascii" else "\ufffd")


@dataclass
class Clock:
    """The machine's clock. Only what a test makes slow takes time by it, so no machine is too slow for a test."""

    now: float = 0


@dataclass
class Span:
    seconds: float

    @property
    def TotalMilliseconds(self) -> float:
        return self.seconds * 1000


@dataclass
class Instant:
    seconds: float

    def AddSeconds(self, more: float) -> Instant:
        return Instant(self.seconds + more)

    def __sub__(self, other: Instant) -> Span:
        return Span(self.seconds - other.seconds)


@dataclass
class Principal:
    """A user with a token, in which the group of administrators is disabled where it is not elevated."""

    groups: list[str]

    def IsInRole(self, rid: int) -> bool:
        return f"S-1-5-32-{rid}" in self.groups


@dataclass
class Credential:
    """A PSCredential."""

    UserName: str
    password: str

    def GetNetworkCredential(self) -> dict[str, str]:
        return {"Password": self.password}


class MemoryStream:
    def __init__(self) -> None:
        self.raw = bytearray()

    def ToArray(self) -> bytes:
        return bytes(self.raw)


class FileStream:
    """A file of drive C."""

    def __init__(self, windows: Windows, path: str, mode: str) -> None:
        if not path.startswith("C:\\"):
            raise Refused(f"the path {path}")
        place, method = windows.mounted(path), {"wb": "Create", "rb": "Open"}[mode]
        said = {
            FileNotFoundError: f"Could not find file '{path}'."
            if place.parent.is_dir()
            else f"Could not find a part of the path '{path}'.",
            IsADirectoryError: f"Access to the path '{path}' is denied.",
        }
        try:
            self.file = place.open(mode)
        except OSError as error:
            count = {"Create": 1, "Open": 4}[method]
            raise Thrown(f'Exception calling "{method}" with "{count}" argument(s): "{said[type(error)]}"') from error

    @property
    def Length(self) -> int:
        self.file.flush()
        return os.fstat(self.file.fileno()).st_size

    def Write(self, raw: bytes, start: int, count: int) -> object:
        self.file.write(raw[start : start + count])
        return VOID

    def Read(self, raw: bytearray, start: int, count: int) -> int:
        found = self.file.read(count)
        raw[start : start + len(found)] = found
        return len(found)

    def Close(self) -> object:
        self.file.close()
        return VOID


class ProcessStartInfo:
    def __init__(self, program: str, arguments: str) -> None:
        self.FileName, self.Arguments = program, arguments
        self.UseShellExecute = True
        self.RedirectStandardInput = self.RedirectStandardOutput = self.RedirectStandardError = False


@dataclass
class NetworkInterface:
    Name: str
    OperationalStatus: str
    addresses: list[str]

    def GetIPProperties(self) -> dict[str, Any]:
        parts = [each.split("/") for each in self.addresses]
        return {"UnicastAddresses": [{"Address": address, "PrefixLength": int(length)} for address, length in parts]}


class Task:
    """What CopyToAsync returns: done when the process has ended, unless it is held open, or fails."""

    def __init__(self, copy: Callable[[], None], process: Process) -> None:
        self.process = process
        self.thread = threading.Thread(target=copy, daemon=True)
        self.thread.start()

    @property
    def done_at(self) -> float:
        return HANGS if self.process.holds else self.process.ends_at


class Reader:
    """BaseStream of a redirected output."""

    def __init__(self, file: Any, process: Process) -> None:
        self.file, self.process = file, process

    @property
    def BaseStream(self) -> Reader:
        return self

    def CopyToAsync(self, into: MemoryStream) -> Task:
        def copy() -> None:
            while chunk := os.read(self.file.fileno(), 65536):
                into.raw += chunk

        return Task(copy, self.process)


class Writer:
    """StandardInput and its BaseStream."""

    def __init__(self, file: Any) -> None:
        self.file = file

    @property
    def BaseStream(self) -> Writer:
        return self

    def Write(self, raw: bytes, start: int, count: int) -> object:
        try:
            self.file.write(raw[start : start + count])
            self.file.flush()
        except BrokenPipeError as error:
            raise Thrown("The pipe is being closed.") from error
        return VOID

    def Close(self) -> object:
        self.file.close()
        return VOID


class Process:
    """A running wsl.exe. Its code is read from a pipe, because Linux would keep its last byte only."""

    START = (
        "import sys; sys.path.insert(0, sys.argv[1]); from tests.simulator.windows import powershell as p; p.child()"
    )

    def __init__(self, windows: Windows, info: ProcessStartInfo, clock: Clock) -> None:
        if info.UseShellExecute:
            raise Thrown("The Process object must have the UseShellExecute property set to false.")
        known = {"wsl.exe": SYSTEM32, SYSTEM32: SYSTEM32, PROGRAM_FILES: PROGRAM_FILES}
        if not windows.machine.installed or info.FileName not in known:
            raise Thrown("The system cannot find the file specified")
        if not windows.machine.has_program_files and known[info.FileName] == PROGRAM_FILES:
            raise Thrown("The system cannot find the file specified")
        program = known[info.FileName]
        self.clock = clock
        self.ends_at = clock.now + wsl.seconds(windows.machine, program, info.Arguments)
        inside = [each for each in windows.machine.distributions if f"-d {each.name} " in info.Arguments]
        self.holds, self.faulty = any(each.holds for each in inside), any(each.faulty for each in inside)
        self.codes, writer = os.pipe()
        self.child = subprocess.Popen(
            [sys.executable, "-SEc", self.START, str(ROOT), str(windows.folder), program, info.Arguments,
             str(writer)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(writer,), bufsize=0,
        )  # fmt: skip
        os.close(writer)
        if self.ends_at >= HANGS:
            with (windows.folder / "hanging").open("a", encoding="ascii") as hanging:
                hanging.write(f"{self.child.pid}\n")
        self.StandardInput = Writer(self.child.stdin)
        self.StandardOutput, self.StandardError = Reader(self.child.stdout, self), Reader(self.child.stderr, self)
        if windows.machine.console_utf8:
            # Process sets AutoFlush on a StreamWriter of Console.InputEncoding, which then writes its mark.
            self.StandardInput.Write(b"\xef\xbb\xbf", 0, 3)

    def WaitForExit(self, milliseconds: int) -> bool:
        until = self.clock.now + milliseconds / 1000
        self.clock.now = min(until, max(self.clock.now, self.ends_at))
        if self.ends_at > until:
            return False
        self.child.wait()
        return True

    @property
    def ExitCode(self) -> int:
        code = int(os.read(self.codes, 20) or b"1")
        return code - 2**32 if code >= 2**31 else code

    def Kill(self) -> object:
        if self.ends_at <= self.clock.now:
            raise Thrown("Cannot process request because the process has exited.")
        self.child.kill()
        self.child.wait()
        return VOID


def child() -> None:
    """Run wsl.exe with a command line as Windows gives it."""
    _program, _root, folder, path, line, codes = sys.argv
    from pathlib import Path  # noqa: PLC0415

    code = wsl.main(Windows(Path(folder)), path, line, {}, session=0)
    os.write(int(codes), str(code).encode())


def wait_all(clock: Clock, tasks: list[Task], milliseconds: int) -> bool:
    done_at = max(task.done_at for task in tasks)
    until = clock.now + milliseconds / 1000
    clock.now = min(until, max(clock.now, done_at))
    for task in tasks:
        # What has ended by this clock has said all, however slow this machine is, and though a stream stays open.
        if task.process.ends_at <= clock.now:
            task.thread.join()
    if done_at > until:
        return False
    if any(task.process.faulty for task in tasks):
        raise Thrown("One or more errors occurred.")
    return True


def to_json(value: Any, depth: int) -> Any:
    if isinstance(value, (dict, list)) and depth < 0:
        return "System.Collections.Hashtable"
    if isinstance(value, dict):
        return {key: to_json(inner, depth - 1) for key, inner in value.items()}
    return [to_json(inner, depth - 1) for inner in value] if isinstance(value, list) else value


# --------------------------------------------------------------------------------------------------------------------
# The language


@dataclass
class Function:
    parameters: list[str]
    body: list[Token]


@dataclass
class Scope:
    values: dict[str, Any]
    outer: Scope | None = None

    def get(self, name: str) -> Any:
        if name in self.values:
            return self.values[name]
        return self.outer.get(name) if self.outer else None


@dataclass
class Interpreter:
    windows: Windows
    clock: Clock = field(default_factory=Clock)
    functions: dict[str, Function] = field(default_factory=dict)
    code: int = 0
    # What is given to the script by name.
    parameters: Mapping[str, Any] = field(default_factory=dict)
    # $ErrorActionPreference: only with stop does an error of a cmdlet end the script.
    stops: bool = False

    def run(self, text: str, given: Mapping[str, Any] | None = None) -> list[Any]:
        known = {"true": True, "false": False, "null": None, "?": True, **(given or {})}
        block = Block(self, tokens(text), Scope(known))
        block.parameters({name.lower(): value for name, value in self.parameters.items()})
        try:
            return block.statements()
        except Exit as end:
            self.code = int(str(end))
            return block.found

    def static(self, name: str, member: str, arguments: list[Any] | None) -> Any:
        known: Mapping[tuple[str, str], Callable[..., Any]] = {
            ("DateTime", "UtcNow"): lambda: Instant(self.clock.now),
            ("Text.Encoding", "ASCII"): lambda: Encoding("ascii"),
            ("Text.Encoding", "UTF8"): lambda: Encoding("utf-8"),
            ("Convert", "ToBase64String"): lambda raw, start=0, count=None: base64.b64encode(
                raw[start : len(raw) if count is None else start + count]
            ).decode(),
            ("Convert", "FromBase64String"): lambda text: base64.b64decode(text, validate=True),
            ("Security.Principal.WindowsIdentity", "GetCurrent"): self.identity,
            ("IO.File", "Create"): lambda path: FileStream(self.windows, path, "wb"),
            ("IO.File", "Open"): self.opened,
            ("byte[]", "new"): bytearray,
            ("Math", "Max"): max,
            ("Environment", "OSVersion"): lambda: {"Version": {"Build": self.windows.machine.build}},
            ("Net.NetworkInformation.NetworkInterface", "GetAllNetworkInterfaces"): lambda: [
                NetworkInterface(**each) for each in self.windows.machine.interfaces
            ],
            ("Diagnostics.Process", "Start"): lambda info: Process(self.windows, info, self.clock),
            ("Threading.Tasks.Task", "WaitAll"): functools.partial(wait_all, self.clock),
        }
        if (name, member) not in known:
            raise Refused(f"[{name}]::{member}")
        if self.windows.machine.constrained and name not in ("Convert", "DateTime", "Math"):
            raise Thrown("Cannot invoke method. Method invocation is supported only on core types in this mode.")
        return known[name, member](*(arguments or []))

    def opened(self, path: str, mode: str, access: str, share: str) -> FileStream:
        if (mode, access, share) != ("Open", "Read", "ReadWrite"):
            raise Refused(f"[IO.File]::Open with {mode}, {access}, {share}")
        return FileStream(self.windows, path, "rb")

    def identity(self) -> dict[str, Any]:
        user, *groups = ({"Value": sid} for sid in self.windows.machine.sids)
        return {"Name": self.windows.machine.account, "User": user, "Groups": groups}

    def command(self, name: str, arguments: list[Any], options: dict[str, Any], scope: Scope) -> Any:
        if name in self.functions:
            function = self.functions[name]
            if options or len(arguments) > len(function.parameters):
                raise Refused(f"{name} does not take {arguments} {options}")
            given = dict(zip(function.parameters, [*arguments, *[None] * len(function.parameters)], strict=False))
            return unrolled(Block(self, function.body, Scope(given, scope)).statements())
        match name, arguments:
            case "New-Object", [kind, *rest]:
                return self.new(kind, *(rest[0] if rest and isinstance(rest[0], list) else rest))
            case "Get-ItemProperty", [r"HKLM:\SOFTWARE\OpenSSH"]:
                if not self.windows.machine.openssh:
                    raise Thrown(r"Cannot find path 'HKLM:\SOFTWARE\OpenSSH' because it does not exist.")
                return {"DefaultShell": self.windows.machine.default_shell}
            case _, [] if re.search("-(NetFirewallHyperVRule|ScheduledTask(Info)?)$", name):
                return self.cmdlet(name, options)
            case "ConvertTo-Json", [value]:
                text = json.dumps(to_json(value, int(options.get("-Depth", 2))), separators=(",", ":"))
                # Windows PowerShell 5.1 escapes these.
                return re.sub("['<>&]", lambda found: f"\\u{ord(found.group()):04x}", text)
        raise Refused(f"command {name} {arguments} {options}")

    def new(self, kind: str, *given: Any) -> Any:
        known: Mapping[str, Callable[..., Any]] = {
            "Diagnostics.ProcessStartInfo": ProcessStartInfo,
            "IO.MemoryStream": MemoryStream,
            "Security.Principal.WindowsPrincipal": lambda identity: Principal(
                [group["Value"] for group in identity["Groups"]]
            ),
            "Net.Sockets.UdpClient": self.udp_client,
        }
        if kind not in known:
            raise Refused(f"New-Object {kind}")
        return known[kind](*given)

    def udp_client(self, _host: str, _port: int) -> Any:
        """Connect to a host of another network: nothing is sent, and the socket has an address from then on."""
        if not self.windows.machine.route:
            raise Thrown("A socket operation was attempted to an unreachable network")
        return {"Client": {"LocalEndPoint": {"Address": {"IPAddressToString": self.windows.machine.route}}}}

    def cmdlet(self, name: str, options: dict[str, Any]) -> Any:
        """Do what a cmdlet of CIM does, whose errors end a script only where all are to do so."""
        verb, noun = name.split("-")
        try:
            if noun == "NetFirewallHyperVRule":
                return self.hyper_v_rule(verb, options)
            return scheduler.cmdlet(self.windows, verb, noun, options)
        except (scheduler.Denied, Thrown) as error:
            if not self.stops or options.get("-ErrorAction") == "SilentlyContinue":
                return None
            raise Thrown(str(error)) from error

    def hyper_v_rule(self, verb: str, options: dict[str, Any]) -> Any:
        """Do what a cmdlet of the module NetSecurity does; Windows has it from build 22621 on."""
        if self.windows.machine.build < 22621:
            raise Thrown(f"The term '{verb}-NetFirewallHyperVRule' is not recognized as the name of a cmdlet")
        with self.windows.changed() as machine:
            rules = machine.hyper_v_firewall
            if verb == "Get" and options.keys() == {"-VMCreatorId", "-ErrorAction"}:
                found = [rule for rule in rules.values() if rule["VMCreatorId"] == options["-VMCreatorId"]]
                return found or None
            if verb == "Remove" and options.keys() == {"-Name"}:
                if rules.pop(options["-Name"], None) is None:
                    raise Thrown(f"No MSFT_NetFirewallHyperVRule objects found with property 'InstanceID' equal to "
                                 f"'{options['-Name']}'.")  # fmt: skip
                return None
            taken = {"-Name", "-DisplayName", "-Direction", "-VMCreatorId", "-Protocol", "-LocalPorts", "-Action"}
            if verb == "New" and options.keys() == taken:
                if options["-Name"] in rules:
                    raise Thrown("Cannot create a file when that file already exists.")
                rules[options["-Name"]] = {key[1:]: value for key, value in options.items()}
                return rules[options["-Name"]]
        raise Refused(f"{verb}-NetFirewallHyperVRule {options}")


def unrolled(values: list[Any]) -> Any:
    """Return what a variable gets of so many outputs."""
    return None if not values else values[0] if len(values) == 1 else values


def truth(value: Any) -> bool:
    return bool(value) if not isinstance(value, list) or len(value) != 1 else truth(value[0])


class Block:
    """Runs tokens."""

    def __init__(self, interpreter: Interpreter, all_tokens: list[Token], scope: Scope) -> None:
        self.interpreter, self.tokens, self.scope = interpreter, all_tokens, scope
        self.at = 0
        self.found: list[Any] = []

    @property
    def next(self) -> Token:
        return self.tokens[self.at] if self.at < len(self.tokens) else Token("end", "", True)

    def take(self, text: str | None = None) -> Token:
        token = self.next
        if text is not None and token.text != text:
            raise Refused(f"found {token.text!r} instead of {text!r}")
        self.at += 1
        return token

    def inner(self) -> list[Token]:
        """Take a block in braces and return what is in it."""
        while self.next.kind == "end":
            self.take()
        self.take("{")
        start, depth = self.at, 1
        while depth:
            if self.at >= len(self.tokens):
                raise Refused("a block does not end")
            text = self.take().text
            depth += (text in ("{", "@{")) - (text == "}")
        return self.tokens[start : self.at - 1]

    def parameters(self, given: Mapping[str, Any]) -> None:
        """Take the param block of a script, if it has one."""
        while self.next.kind == "end" and self.at < len(self.tokens) - 1:
            self.take()
        names = []
        if self.next.text == "param":
            self.take()
            self.take("(")
            while self.next.text != ")":
                names.append(self.take().text[1:].lower())
                if self.next.text == ",":
                    self.take()
            self.take(")")
        for name in given:
            if name not in names:
                raise Thrown(f"A parameter cannot be found that matches parameter name '{name}'.")
        self.scope.values |= {name: given.get(name) for name in names}

    def statements(self) -> list[Any]:
        found = self.found
        while self.at < len(self.tokens):
            if self.next.kind == "end":
                self.take()
            else:
                found += self.statement()
                if self.next.kind != "end":
                    raise Refused(f"found {self.next.text!r} behind a statement")
        return found

    def sub(self, body: list[Token]) -> list[Any]:
        return Block(self.interpreter, body, self.scope).statements()

    def statement(self) -> list[Any]:  # one for each kind
        word = self.next.text if self.next.kind == "word" else ""
        if word == "function":
            self.take()
            name = self.take().text
            if name.lower() in KEYWORDS:
                raise Refused(f"{name} is a keyword")
            parameters = []
            self.take("(")
            while self.next.text != ")":
                parameters.append(self.take().text[1:].lower())
                if self.next.text == ",":
                    self.take()
            self.take(")")
            self.interpreter.functions[name] = Function(parameters, self.inner())
            return []
        kinds = {"if": self.condition, "foreach": self.loop, "while": self.repeated}
        if word in kinds:
            return kinds[word]()
        if word == "try":
            self.take()
            body = self.inner()
            self.take("catch")
            handler = self.inner()
            try:
                return self.sub(body)
            except Thrown as error:
                scope = Scope({"_": {"Exception": {"Message": str(error)}}}, self.scope)
                block = Block(self.interpreter, handler, self.scope)
                block.scope = Scope(self.scope.values, scope)
                self.scope.values["_"] = scope.values["_"]
                return block.statements()
        if word == "break":
            self.take()
            raise Break
        if word == "exit":
            self.take()
            raise Exit(str(self.expression()))
        if word == "throw":
            self.take()
            raise Thrown(str(self.expression()))
        value = self.assignment_or_pipeline()
        return [] if value is VOID or value is None else value if isinstance(value, list) else [value]

    def condition(self) -> list[Any]:
        self.take("if")
        self.take("(")
        chosen = truth(self.pipeline())
        self.take(")")
        body = self.inner()
        other = None
        if self.next.text == "else":
            self.take()
            other = self.inner()
        return self.sub(body) if chosen else self.sub(other or [])

    def loop(self) -> list[Any]:
        self.take("foreach")
        self.take("(")
        name = self.take().text[1:].lower()
        self.take("in")
        values = self.pipeline()
        self.take(")")
        body = self.inner()
        found: list[Any] = []
        for value in values if isinstance(values, list) else [] if values is None else [values]:
            self.scope.values[name] = value
            try:
                found += self.sub(body)
            except Break:
                break
        return found

    def repeated(self) -> list[Any]:
        self.take("while")
        condition = self.at
        found: list[Any] = []
        while True:
            self.at = condition
            self.take("(")
            goes_on = truth(self.pipeline())
            self.take(")")
            body = self.inner()
            if not goes_on:
                return found
            try:
                found += self.sub(body)
            except Break:
                return found

    def assignment_or_pipeline(self) -> Any:
        start = self.at
        if self.next.kind == "variable":
            target = self.target()
            if self.next.text in ("=", "+="):
                sign = self.take().text
                value = self.pipeline()
                if value is VOID:
                    value = None
                self.assign(target, value, sign == "+=")
                return VOID
            self.at = start
        return self.pipeline()

    def target(self) -> list[Any]:
        path: list[Any] = [self.take().text[1:].lower()]
        while True:
            if self.next.text == "." and not self.next.apart:
                self.take()
                path.append(self.take().text)
            elif self.next.kind == "word" and self.next.text.startswith(".") and not self.next.apart:
                path += self.take().text[1:].split(".")
            elif self.next.text == "[" and not self.next.apart:
                self.take()
                path.append(self.expression())
                self.take("]")
            else:
                return path

    def assign(self, path: list[Any], value: Any, more: bool) -> None:
        if len(path) == 1:
            # What is assigned to $null is thrown away.
            if path[0] != "null":
                self.scope.values[path[0]] = value
            if path[0] == "erroractionpreference":
                self.interpreter.stops = value == "Stop"
            return
        owner = self.scope.get(path[0])
        for key in path[1:-1]:
            owner = member(owner, key)
        if more:
            value = [*(member(owner, path[-1]) or []), *(value if isinstance(value, list) else [value])]
        if isinstance(owner, dict):
            owner[path[-1]] = value
        elif hasattr(owner, path[-1]):
            setattr(owner, path[-1], value)
        else:
            raise Thrown(f"The property '{path[-1]}' cannot be found on this object.")

    def pipeline(self) -> Any:
        if self.next.kind == "word" and self.next.text not in ("if", "foreach", "try"):
            return self.command()
        return self.program() if self.next.text == "&" else self.expression()

    def program(self) -> Any:
        """Start a program with the call operator; its lines are what it is worth."""
        from tests.simulator.windows import programs  # noqa: PLC0415 # which runs scripts itself

        self.take("&")
        path, words = self.word(), []
        while self.next.kind != "end" and self.next.text not in (")", "}"):
            words.append(self.word())
        try:
            line = " ".join(f'"{word}"' if " " in word else word for word in words)
            code, raw = programs.run(self.interpreter.windows, path, line)
        except FileNotFoundError as error:
            raise Thrown(f"The term '{path}' is not recognized as the name of a cmdlet") from error
        self.scope.values |= {"lastexitcode": code, "?": code == 0}
        return unrolled(raw.decode("utf-8", "replace").replace("\r\n", "\n").splitlines())

    def word(self) -> str:
        """Take an argument of a program, which ends at a blank."""
        found, first = "", True
        while self.next.kind != "end" and self.next.text not in (")", "}") and (first or not self.next.apart):
            if self.next.kind in ("single", "double", "variable"):
                found += str(self.primary())
            elif self.next.kind in ("word", "number") or self.next.text in ("-", "/", "."):
                found += self.take().text
            else:
                raise Refused(f"found {self.next.text!r} as an argument of a program")
            first = False
        return found

    def command(self) -> Any:
        name = self.take().text
        if name.lower() in KEYWORDS:
            raise Refused(f"{name} is a keyword")
        arguments: list[Any] = []
        options: dict[str, Any] = {}
        while self.next.kind != "end" and self.next.text not in (")", "}"):
            token = self.next
            if token.kind == "word" and token.text.startswith("-"):
                option = self.take().text
                if self.next.text == ":":
                    self.take()
                if self.next.kind in ("single", "double", "variable", "number"):
                    options[option] = self.primary()
                else:
                    word = self.next.kind == "word" and not self.next.text.startswith("-")
                    options[option] = self.take().text if word else True
                continue
            value = self.take().text if token.kind == "word" else self.primary()
            while self.next.text == "," and value is not VOID:
                self.take()
                value = [*(value if isinstance(value, list) else [value]), self.primary()]
            arguments.append(value)
        return self.interpreter.command(name, arguments, options, self.scope)

    def expression(self) -> Any:
        left = self.sum()
        while self.next.kind == "operator" and self.next.text in BINARY:
            operator = self.take().text
            if operator in ("-and", "-or"):
                # The right side is read in any case; it changes nothing here.
                right = self.sum()
                left = (truth(left) and truth(right)) if operator == "-and" else (truth(left) or truth(right))
                continue
            left = compared(operator, left, self.sum())
        return left

    def sum(self) -> Any:
        left = self.comma()
        while self.next.text in ("+", "-"):
            sign = self.take().text
            right = self.comma()
            left = left + right if sign == "+" else left - right
        return left

    def comma(self) -> Any:
        values = [self.unary()]
        while self.next.text == ",":
            self.take()
            values.append(self.unary())
        return values[0] if len(values) == 1 else values

    def unary(self) -> Any:
        if self.next.text == "-not":
            self.take()
            return not truth(self.unary())
        if self.next.kind == "type" and self.tokens[self.at + 1].kind != "static":
            name = self.take().text
            if name == "[string]":
                return str(self.unary())
            if name != "[int]":
                raise Refused(f"cast to {name}")
            return round(self.unary())
        return self.primary()

    def primary(self) -> Any:
        token = self.take()
        match token.kind:
            case "variable":
                value = self.variable(token.text)
            case "single":
                value = re.sub("['\u2018-\u201b](['\u2018-\u201b])", r"\1", token.text[1:-1])
            case "double":
                value = re.sub(r"\$(\w+)", lambda found: str(self.scope.get(found.group(1).lower())), token.text[1:-1])
            case "number":
                value = int(token.text)
            case "type":
                self.take("::")
                # The name may come with members behind it.
                name, *behind = self.take().text.split(".")
                arguments = self.arguments() if not behind and self.next.text == "(" else None
                value = self.interpreter.static(token.text[1:-1], name, arguments)
                if behind:
                    return self.members(self.called(value, behind))
            case "array":
                value = self.pipeline() if self.next.text != ")" else []
                self.take(")")
                value = value if isinstance(value, list) else [] if value is None else [value]
            case "hash":
                value = self.hash()
            case _ if token.text == "(":
                value = self.pipeline()
                self.take(")")
            case _:
                raise Refused(f"found {token.text!r} where a value is expected")
        return self.members(value)

    def variable(self, text: str) -> Any:
        if text.startswith("$env:"):
            machine = self.interpreter.windows.machine
            return {
                # By OpenSSH a local user's domain is the workgroup (Win32-OpenSSH#1877, #2407).
                "COMPUTERNAME": machine.name, "USERDOMAIN": "WORKGROUP", "USERNAME": machine.user,
                "USERPROFILE": rf"C:\Users\{machine.user}",
            }.get(text[5:])  # fmt: skip
        return self.scope.get(text[1:].lower())

    def arguments(self) -> list[Any]:
        found = []
        self.take("(")
        while self.next.text != ")":
            found.append(self.argument())
            if self.next.text == ",":
                self.take()
        self.take(")")
        return found

    def argument(self) -> Any:
        # A comma ends an argument of a method.
        left = self.unary()
        while self.next.text in ("+", "-"):
            sign = self.take().text
            right = self.unary()
            left = left + right if sign == "+" else left - right
        return left

    def hash(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while True:
            while self.next.kind == "end":
                self.take()
            if self.next.text == "}":
                self.take()
                return found
            key = self.take().text
            self.take("=")
            found[key] = self.pipeline()

    def called(self, value: Any, names: list[str]) -> Any:
        """Follow members; the last is a method where parentheses stand behind it."""
        for name in names[:-1]:
            value = member(value, name)
        if self.next.text == "(" and not self.next.apart:
            method = getattr(value, names[-1], None)
            if method is None:
                raise Thrown(f"Method invocation failed because it does not contain a method named '{names[-1]}'.")
            return method(*self.arguments())
        return member(value, names[-1])

    def members(self, value: Any) -> Any:
        while not self.next.apart:
            if self.next.text == ".":
                self.take()
                value = self.called(value, self.take().text.split("."))
            elif self.next.text == "[":
                self.take()
                value = member(value, self.expression())
                self.take("]")
            else:
                break
        return value


def member(value: Any, name: Any) -> Any:
    """Return a member; what is not there is null, as without strict mode."""
    if isinstance(value, list) and name != "Length" and not isinstance(name, int):
        return [member(each, name) for each in value]
    if isinstance(value, list) and isinstance(name, int):
        return value[name] if name < len(value) else None
    if isinstance(value, dict):
        return list(value) if name == "Keys" else value.get(name)
    if name == "Length" and isinstance(value, (bytes, bytearray, str, list)):
        return len(value)
    return getattr(value, name, None) if value is not None else None


def compared(operator: str, left: Any, right: Any) -> Any:
    if operator in ("-eq", "-ne"):
        return (left == right) is (operator == "-eq")
    if operator == "-contains":
        return right in (left if isinstance(left, list) else [left])
    if operator == "-replace":
        return re.sub(right[0], right[1], left, flags=re.IGNORECASE)
    if operator == "-split":
        return re.split(right, left, flags=re.IGNORECASE)
    if operator == "-join":
        return str(right).join(str(each) for each in (left if isinstance(left, list) else [left]))
    flags = 0 if operator == "-cnotmatch" else re.IGNORECASE
    return bool(re.search(right, left, flags)) is (operator == "-match")


def run(windows: Windows, script: str, clock: Clock | None = None) -> str:
    """Return what a script prints."""
    return "".join(f"{line}\r\n" for line in Interpreter(windows, clock or Clock()).run(script))


def main(windows: Windows, line: str) -> int:
    """Run powershell.exe with what follows its name."""
    words = command_line.split(f"powershell.exe {line}")[1:]
    policy = ["-ExecutionPolicy", "Unrestricted"] if "-ExecutionPolicy" in words else []
    if words[:-1] != ["-NoProfile", "-NonInteractive", *policy, "-EncodedCommand"]:
        sys.stderr.write(f"powershell.exe: {words[:-1]} is not doubled\r\n")
        return 1
    script = base64.b64decode(words[-1], validate=True).decode("utf-16-le")
    interpreter = Interpreter(windows)
    try:
        # It reads its input by lines of the console's code page.
        given = {"input": sys.stdin.buffer.read().decode("cp437").splitlines()} if "$input" in script else {}
        sys.stdout.write("".join(f"{line}\r\n" for line in interpreter.run(script, given)))
    except Thrown as error:
        # Objects of the streams come as XML, in which a control character is written out.
        text = re.sub("[\r\n]", lambda char: f"_x{ord(char.group()):04X}_", html.escape(f"{error}\r\n", quote=False))
        space = "http://schemas.microsoft.com/powershell/2004/04"
        sys.stderr.write(f'#< CLIXML\r\n<Objs Version="1.1.0.1" xmlns="{space}"><S S="Error">{text}</S></Objs>')
        return 1
    return interpreter.code
