# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Nomad's HTTP API as far as GPUs need it: a small client, and pure functions over its answers.

C(gpus_of_node) reads one node, C(compare) judges a whole farm. Both are linear in the number of GPUs, and the client
hands nodes out one by one, because one node with many cores is 45 KB of JSON and a farm has thousands. Nothing of
Ansible is needed, so that the health gate on the nodes uses it too.
"""

from __future__ import annotations

import codecs
import copy
import dataclasses
import functools
import http.client
import ipaddress
import json
import re
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from ansible_collections.gpufarm.core.plugins.module_utils import retry
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean, clean_all

DEFAULT_ADDRESS = "http://127.0.0.1:4646"
GPU_DEVICE_TYPE = "gpu"
LONGEST_WAIT = 60.0
ATTEMPTS = 3
FIRST_PAUSE_S = 0.5

_CHUNK = 1 << 20
_USER_AGENT = "gpufarm.core"
_MEBIBYTE = 1 << 20
_BYTES = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
}


class NomadError(Exception):
    """Nomad could not be asked; the text says what was found, what was expected and what to do."""

    def __init__(
        self,
        found: str,
        expected: str,
        next_step: str,
        transient: bool = False,
        status: int | None = None,
        *,
        said: str = "",
        nobody: bool = False,
    ) -> None:
        found = clean(found)
        super().__init__(f"{found}. Expected: {expected}. Next step: {next_step}.")
        self.found = found
        self.transient = transient
        self.status = status
        """Nomad's HTTP status where that was the answer."""
        self.said = said
        """What came with that status."""
        self.nobody = nobody
        """Whether nobody listens at the address."""


# --- the client ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Connection:
    """Where Nomad is and who asks. The token is no part of any text."""

    address: str = DEFAULT_ADDRESS
    token: str | None = dataclasses.field(default=None, repr=False)
    namespace: str | None = None
    region: str | None = None
    ca_cert: str | None = None
    ca_path: str | None = None
    client_cert: str | None = None
    client_key: str | None = None
    tls_server_name: str | None = None
    validate_certs: bool = True
    request_timeout: float = 30


def skips_verification(value: str) -> bool:
    """NOMAD_SKIP_VERIFY as Nomad's CLI reads it."""
    return value in ("1", "t", "T", "true", "TRUE", "True")


def is_loopback(host: str | None) -> bool:
    """Whether a host is this machine, which no proxy can reach for us."""
    if not host:
        return False
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _parts(address: str) -> urllib.parse.SplitResult | None:
    """The parts of an address of HTTP; None where it is none."""
    try:
        parts = urllib.parse.urlsplit(address)
        # Only a look at the port tells whether it is one.
        return parts if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 else None
    except ValueError:
        return None


class _NamedConnection(http.client.HTTPSConnection):
    """HTTPS to a server whose certificate carries another name than its address has."""

    def __init__(self, host: str, *, server_name: str, tls: ssl.SSLContext, **settings: Any) -> None:
        super().__init__(host, context=tls, **settings)
        self._server_name = server_name
        self._tls = tls

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._server_name)


class _NamedHandler(urllib.request.HTTPSHandler):
    def __init__(self, tls: ssl.SSLContext, server_name: str) -> None:
        super().__init__(context=tls)
        self._factory = functools.partial(_NamedConnection, tls=tls, server_name=server_name)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._factory, req)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected request would carry the token to another server."""

    def redirect_request(self, *_unused: Any, **_also: Any) -> None:
        return None


@dataclasses.dataclass(frozen=True)
class Nodes:
    """One answer: its items as they arrive, and the index to wait from."""

    items: Iterator[dict[str, Any]]
    index: int


class Client:
    """Asks one Nomad agent; what ends with one of the HTTP statuses C(repeat) is asked again.

    Nomad's own CLI never sends requests to this machine through a proxy either; C(direct) is for its other addresses.
    """

    def __init__(self, connection: Connection, repeat: Collection[int] = retry.STATUS, *, direct: bool = False) -> None:
        self._repeat = repeat
        parts = _parts(connection.address)
        if parts is None:
            raise NomadError(
                found=f"the address of Nomad is '{connection.address}'",
                expected="an address such as https://nomad.example.com:4646",
                next_step="correct the option 'address' or the variable NOMAD_ADDR",
            )
        # As a file or a lookup gives it, with its newline. What no header can hold would be quoted in an error.
        token = (connection.token or "").strip()
        if not re.fullmatch("[!-~]*", token):
            raise NomadError(
                found="the token of Nomad holds characters that no HTTP header may have",
                expected="the Secret ID of an ACL token",
                next_step="correct the option 'token' or the variable NOMAD_TOKEN",
            )
        self.connection = dataclasses.replace(connection, token=token)
        handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
        if parts.scheme == "https":
            tls = self._tls()
            name = connection.tls_server_name
            handlers.append(_NamedHandler(tls, name) if name else urllib.request.HTTPSHandler(context=tls))
        handlers.append(urllib.request.ProxyHandler({} if direct or is_loopback(parts.hostname) else None))
        self._opener = urllib.request.build_opener(*handlers)

    def _tls(self) -> ssl.SSLContext:
        wanted = self.connection
        try:
            tls = ssl.create_default_context(cafile=wanted.ca_cert or None, capath=wanted.ca_path or None)
            if wanted.client_cert or wanted.client_key:
                tls.load_cert_chain(wanted.client_cert or "", wanted.client_key or None)
        except (OSError, ValueError) as error:
            files = [wanted.ca_cert, wanted.ca_path, wanted.client_cert, wanted.client_key]
            raise NomadError(
                found=f"the TLS files {', '.join(file for file in files if file)} cannot be used ({error})",
                expected="readable PEM files that belong together",
                next_step="check ca_cert, ca_path, client_cert and client_key and who may read them",
            ) from error
        if not wanted.validate_certs:
            tls.check_hostname = False
            tls.verify_mode = ssl.CERT_NONE
        return tls

    def within(self, seconds: float) -> Client:
        """The same client, no request of which takes longer than C(seconds)."""
        hurried = copy.copy(self)
        timeout = min(seconds, self.connection.request_timeout)
        hurried.connection = dataclasses.replace(self.connection, request_timeout=timeout)
        return hurried

    def url(self, path: str, query: Mapping[str, str]) -> str:
        fields = {"region": self.connection.region, "namespace": self.connection.namespace, **query}
        text = urllib.parse.urlencode({name: value for name, value in fields.items() if value})
        return self.connection.address.rstrip("/") + path + (f"?{text}" if text else "")

    def items(self, path: str, query: Mapping[str, str], index: int = 0, wait: float = 0) -> Nodes:
        """A list of Nomad's, element by element.

        With an C(index) this is a blocking query: it answers when something is newer than that, or after C(wait)
        seconds at the latest.
        """
        answer, address, newest = self._wait(path, query, index, wait)
        return Nodes(items=self._read(answer, address), index=newest)

    def known(self, path: str, index: int = 0, wait: float = 0) -> tuple[Any, int]:
        """What the server next to the agent knows, and the index to wait from, as C(items) does.

        It may be behind the leader, which is not asked. One without a leader learns nothing any more: NomadError.
        """
        answer, address, newest = self._wait(path, {"stale": "true"}, index, wait)
        leader = answer.headers.get("X-Nomad-KnownLeader")
        found = self._json(answer, address)
        if leader == "false":
            raise NomadError(
                found=f"{address} was answered by a server without a leader",
                expected="servers with a leader",
                next_step="check 'nomad server members' and read `journalctl -u nomad` on the servers",
                transient=True,
            )
        return found, newest

    def _wait(self, path: str, query: Mapping[str, str], index: int, wait: float) -> tuple[Any, str, int]:
        timeout = self.connection.request_timeout
        if index > 0 and wait > 0:
            # The server adds up to a sixteenth, so that not all clients come back at once.
            query = {**query, "index": str(index), "wait": f"{max(1, round(wait * 1000 * 16 / 17))}ms"}
            timeout += wait
        address = self.url(path, query)
        answer = self._open(address, timeout)
        try:
            newest = int(answer.headers.get("X-Nomad-Index") or 0)
        except ValueError:
            newest = 0
        return answer, address, next_index(index, newest)

    def call(self, method: str, path: str, body: Any = None, query: Mapping[str, str] | None = None) -> Any:
        """What Nomad answers to one request, as JSON; None for an empty answer."""
        address = self.url(path, query or {})
        return self._json(self._open(address, self.connection.request_timeout, method, body), address)

    def _json(self, answer: Any, address: str) -> Any:
        with answer:
            try:
                text = answer.read()
                return clean_all(json.loads(text)) if text else None
            except ValueError as error:
                raise NomadError(
                    found=f"{address} did not answer in JSON ({error})",
                    expected="JSON, as Nomad's API answers",
                    next_step="check that the address is that of Nomad's HTTP API",
                    transient=True,
                ) from error
            except (OSError, http.client.HTTPException) as error:
                _unreachable(address, error)

    def text(self, path: str, query: Mapping[str, str], limit: int = _CHUNK) -> str:
        """What Nomad answers in plain text, as it does for logs; no more than C(limit) bytes of it."""
        address = self.url(path, query)
        with self._open(address, self.connection.request_timeout) as answer:
            try:
                content: bytes = answer.read(limit)
            except (OSError, http.client.HTTPException) as error:
                _unreachable(address, error)
        return content.decode("utf-8", "replace")

    def _open(self, address: str, timeout: float, method: str = "GET", body: Any = None) -> Any:
        headers = {"Accept": "application/json", "User-Agent": _USER_AGENT}
        if self.connection.token:
            headers["X-Nomad-Token"] = self.connection.token
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            headers["Content-Type"] = "application/json"
        request = urllib.request.Request(address, data=data, headers=headers, method=method)  # noqa: S310
        deadline = time.monotonic() + timeout
        attempt = 1
        while True:
            try:
                return self._opener.open(request, timeout=max(0.1, deadline - time.monotonic()))
            except (OSError, http.client.HTTPException, ValueError) as error:
                pause = _pause_s(error, method, attempt, self._repeat)
                # All attempts together take no longer than one may.
                if pause is None or time.monotonic() + pause >= deadline:
                    self._failed(address, error)
                time.sleep(pause)
            attempt += 1

    def _failed(self, address: str, error: Exception) -> NoReturn:
        if not isinstance(error, urllib.error.HTTPError):
            _unreachable(address, error)
        try:
            said = error.read(2000).decode("utf-8", "replace").strip()
        except (OSError, http.client.HTTPException):
            said = ""
        _refused(address, error.code, self._without_token(said), error.headers.get("Location"))

    def _read(self, answer: Any, address: str) -> Iterator[dict[str, Any]]:
        def chunks() -> Iterator[bytes]:
            while True:
                chunk = answer.read(_CHUNK)
                if not chunk:
                    return
                yield chunk

        with answer:
            try:
                yield from json_items(chunks())
            except ValueError as error:
                raise NomadError(
                    found=f"{address} did not answer with a complete list ({error})",
                    expected="a list in JSON, as Nomad's API answers",
                    next_step="check that the address is that of Nomad's HTTP API",
                    transient=True,
                ) from error
            except (OSError, http.client.HTTPException) as error:
                _unreachable(address, error)

    def _without_token(self, text: str) -> str:
        return text.replace(self.connection.token, "********") if self.connection.token else text


def _pause_s(error: Exception, method: str, attempt: int, repeat: Collection[int]) -> float | None:
    """Seconds after which a request may be made again; None where it may not.

    Whether a write that was cut off, or that ended with 500, has arrived is not known. With 429 it has not.
    """
    header = None
    if isinstance(error, urllib.error.HTTPError):
        header = error.headers.get("Retry-After")
        passing = error.code in repeat and (method == "GET" or error.code == 429)
    else:
        reason = getattr(error, "reason", error)
        # Nobody listening is no hiccup, and what has hung already took all the time there is.
        passing = method == "GET" and isinstance(reason, (ConnectionResetError, BrokenPipeError))
    return retry.pause_s(attempt, header, FIRST_PAUSE_S) if passing and attempt < ATTEMPTS else None


def next_index(asked: int, answered: int) -> int:
    """The index to wait from next; after a server was restored it can go backwards, and waiting starts anew."""
    if answered < asked or answered < 1:
        return 0
    return answered


def _refused(address: str, status: int, body: str, location: str | None) -> NoReturn:
    detail = f": {body}" if body else ""
    if status == 403:
        raise NomadError(
            found=f"{address} was refused (HTTP 403{detail})",
            expected="a token that may do this",
            next_step="set 'token' or NOMAD_TOKEN to one whose policy has node { policy = \"read\" } to see nodes, "
            '"write" to close and open them, and read-job in the namespace where allocations are read',
            status=status,
        )
    if 300 <= status < 400:
        raise NomadError(
            found=f"{address} redirects to {location}",
            expected="Nomad's HTTP API itself, because a token is not sent on to another server",
            next_step="set 'address' to the one that it redirects to",
        )
    if status == 400 and "filter" in address:
        raise NomadError(
            found=f"{address} was not understood (HTTP 400{detail})",
            expected="a filter expression of Nomad's",
            next_step="correct the option 'filter', see Nomad's API documentation on filtering",
        )
    raise NomadError(
        found=f"{address} answered HTTP {status}{detail}",
        expected="HTTP 200 from a Nomad agent that knows its servers and has a leader",
        next_step="check 'nomad server members' and that the address is that of Nomad's HTTP API",
        # Without a leader Nomad answers 500, and a proxy in front of a starting agent 502 to 504.
        transient=status >= 500 or status == 429,
        status=status,
        said=body,
    )


def _unreachable(address: str, error: Exception) -> NoReturn:
    # An alert that arrives while the answer is read is an error of its own, whose reason is a text.
    reason = error if isinstance(error, ssl.SSLError) else getattr(error, "reason", None) or error
    text = str(reason) or type(error).__name__
    if isinstance(reason, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY_FAILED" in text:
        raise NomadError(
            found=f"the certificate of {address} is not accepted ({text})",
            expected="a certificate of a trusted CA with the right name",
            next_step="set ca_cert to the farm's CA and tls_server_name to a name in the certificate",
        ) from error
    if isinstance(reason, ssl.SSLError):
        raise NomadError(
            found=f"TLS with {address} failed ({text})",
            expected="a server that speaks TLS and accepts this client",
            next_step="check the scheme of the address, and client_cert and client_key where the server asks for them",
        ) from error
    raise NomadError(
        found=f"{address} cannot be reached ({text})",
        expected="a Nomad agent that answers there",
        next_step="check the address, that the agent runs, and the firewall in between",
        transient=True,
        nobody=isinstance(reason, ConnectionRefusedError),
    ) from error


_CORES = '"Cores":['
_BLANKS = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def _without_cores(text: str) -> str:
    """The text with null for each list of cores, which is nine tenths of a node with many cores.

    A quote inside of a string is escaped, so this never begins in one. What a chunk cuts off is simply read.
    """
    parts, start = [], 0
    while True:
        begin = text.find(_CORES, start)
        end = text.find("]", begin)
        if begin < 0 or end < 0:
            break
        # Nomad's cores are flat objects of numbers; anything else stays.
        if text[end - 1] in "}[" and text.find("[", begin + len(_CORES), end) < 0:
            parts += [text[start:begin], '"Cores":null']
        else:
            parts.append(text[start : end + 1])
        start = end + 1
    return "".join([*parts, text[start:]]) if parts else text


def json_items(chunks: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The elements of a JSON list of objects, each as soon as it is complete; null counts as an empty list.

    A farm's answer can have hundreds of megabytes, most of which nobody asked for: so nothing but one chunk and one
    element is kept, and the cores of processors are skipped.
    """
    decode = codecs.getincrementaldecoder("utf-8")()
    source = iter(chunks)
    text, position, ended = "", 0, False

    def more() -> bool:
        nonlocal text, position, ended
        chunk = next(source, None)
        if chunk is None:
            ended = True
        text = _without_cores(text[position:] + decode.decode(chunk or b"", final=ended))
        position = 0
        return not ended

    def token() -> str:
        nonlocal position
        while True:
            match = _BLANKS.match(text, position)
            position = match.end() if match else position
            if position < len(text):
                return text[position]
            if not more():
                raise ValueError("the answer ends too early")

    if token() != "[":
        while more():
            if len(text) > 2 * _CHUNK:
                break
        if text.strip() == "null":
            return
        raise ValueError(f"the answer starts with '{text.strip()[:60]}'")
    position += 1
    if token() == "]":
        return
    while True:
        token()
        try:
            item, end = _DECODER.raw_decode(text, position)
        except ValueError:
            if more():
                continue
            raise
        if not isinstance(item, dict):
            raise ValueError(f"the list holds '{item}', not only objects")
        # Nearly all answers are clean, and this is quicker than a look at every value.
        source_text = text[position:end]
        position = end
        yield clean_all(item) if "\\" in source_text or not source_text.isprintable() else item
        following = token()
        if following == "]":
            return
        if following != ",":
            raise ValueError(f"'{following}' stands where a comma should")
        position += 1


def name_filter(names: list[str]) -> str:
    """An expression for Nomad that is true for nodes with one of these names."""
    for name in names:
        if not name or re.search(r'["\\`\x00-\x1f]', name):
            raise NomadError(
                found=f"'{name}' is given as the name of a node",
                expected="a name without quotes, backslashes and control characters",
                next_step="correct the option 'node_name'",
            )
    return " or ".join(f'Name == "{name}"' for name in names)


# --- one node --------------------------------------------------------------------------------


def attribute_value(attribute: Any) -> Any:
    """The value in Nomad's C({"Int": ..., "Unit": ...}) form; None where there is none."""
    if isinstance(attribute, dict):
        for kind in ("Int", "Float", "String", "Bool"):
            if attribute.get(kind) is not None:
                return attribute[kind]
    return None


def mebibytes(attribute: Any) -> int | None:
    """A memory attribute in MiB, whatever its unit is; without a unit it counts as MiB, as the plugin means it."""
    value = attribute_value(attribute)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    unit = attribute.get("Unit") or "MiB"
    if unit not in _BYTES:
        return None
    return int(value * _BYTES[unit] // _MEBIBYTE)


def normalize_pci(address: str) -> str:
    """A PCI address as the kernel writes it; NVML writes the domain with eight digits, sysfs with four."""
    match = re.match(r"^([0-9A-Fa-f]+):([0-9A-Fa-f]{2}):([0-9A-Fa-f]{2})\.([0-7])$", address.strip())
    if not match:
        return address.strip().lower()
    return f"{int(match.group(1), 16):04x}:{match.group(2)}:{match.group(3)}.{match.group(4)}".lower()


_MIG_PROFILE = re.compile(r"\bMIG (\S+)")


def gpus_of_node(node: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The GPUs of one element of C(GET /v1/nodes?resources=true), or of C(GET /v1/node/:id); what is not known is None.

    Attributes belong to a group of devices: Nomad's plugin takes them from the first GPU of each model.
    """
    resources = node.get("NodeResources") or {}
    groups = resources.get("Devices")
    if not groups:
        return []
    associated = _numa_nodes(resources)
    gpus: list[dict[str, Any]] = []
    for group in groups:
        if not group or group.get("Type") != GPU_DEVICE_TYPE:
            continue
        attributes = group.get("Attributes") or {}
        vendor, model = group.get("Vendor") or "", group.get("Name") or ""
        profile = _MIG_PROFILE.search(model)
        driver = attribute_value(attributes.get("driver_version"))
        common = {
            "model": model,
            "vendor": vendor,
            "type": GPU_DEVICE_TYPE,
            "device_id": f"{vendor}/{GPU_DEVICE_TYPE}/{model}",
            "memory_mib": mebibytes(attributes.get("memory")),
            "driver_version": None if driver is None else str(driver),
            "mig_profile": profile.group(1) if profile else None,
        }
        for instance in group.get("Instances") or []:
            if not instance:
                continue
            uuid = instance.get("ID") or ""
            bus = (instance.get("Locality") or {}).get("PciBusID") or None
            gpus.append(
                {
                    "uuid": uuid,
                    **common,
                    "mig": uuid.startswith("MIG-"),
                    "healthy": bool(instance.get("Healthy")),
                    "health_description": instance.get("HealthDescription") or None,
                    "pci_bus_id": bus,
                    "numa_node": associated.get(normalize_pci(bus)) if bus and associated else None,
                }
            )
    return gpus


def _numa_nodes(resources: Mapping[str, Any]) -> dict[str, int]:
    """PCI address to NUMA node, where the agent reports it."""
    topology = (resources.get("Processors") or {}).get("Topology") or {}
    return {normalize_pci(bus): numa for bus, numa in (topology.get("BusAssociativity") or {}).items()}


def describe_node(node: Mapping[str, Any]) -> dict[str, Any]:
    """What nomad_gpu_info returns for one element of C(GET /v1/nodes?resources=true)."""
    return {
        "id": node.get("ID") or "",
        "name": node.get("Name") or "",
        "address": node.get("Address") or None,
        "status": node.get("Status") or "",
        "eligibility": node.get("SchedulingEligibility") or "",
        "drain": bool(node.get("Drain")),
        "datacenter": node.get("Datacenter") or "",
        "node_pool": node.get("NodePool") or None,
        "node_class": node.get("NodeClass") or None,
        "version": node.get("Version") or None,
        "gpus": gpus_of_node(node),
    }


ALLOCATIONS_QUERY = {
    "resources": "true",
    "task_states": "false",
    # What has ended on its client holds no device any more.
    "filter": 'ClientStatus == "running" or ClientStatus == "pending" or ClientStatus == "unknown"',
}


def devices_in_use(allocations: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Node ID and device UUID to the allocation that holds it, from C(GET /v1/allocations?resources=true)."""
    held: dict[tuple[str, str], dict[str, Any]] = {}
    for allocation in allocations:
        if allocation.get("ClientStatus") in ("complete", "failed", "lost"):
            continue
        tasks = (allocation.get("AllocatedResources") or {}).get("Tasks") or {}
        for task, resources in tasks.items():
            for device in (resources or {}).get("Devices") or []:
                for uuid in (device or {}).get("DeviceIDs") or []:
                    held[allocation.get("NodeID") or "", uuid] = {
                        "id": allocation.get("ID"),
                        "namespace": allocation.get("Namespace"),
                        "job_id": allocation.get("JobID"),
                        "task_group": allocation.get("TaskGroup"),
                        "task": task,
                        "client_status": allocation.get("ClientStatus"),
                    }
    return held


# --- the whole farm --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Expected:
    """What one node should have; None asks nothing."""

    node: str
    count: int | None = None
    uuids: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    model_counts: Mapping[str, int] | None = None
    memory_mib_min: int | None = None
    driver_version: str | None = None
    mig: bool | None = None
    mig_profiles: Mapping[str, int] | None = None

    @property
    def number(self) -> int | None:
        """How many GPUs that makes."""
        if self.count is not None:
            return self.count
        if self.uuids is not None:
            return len(self.uuids)
        return None if self.model_counts is None else sum(self.model_counts.values())


def expected_of_facts(facts: Mapping[str, Any], node: str, ignored: Iterable[str] = ()) -> dict[str, Any]:
    """What Nomad must have of a node with these C(nvidia_smi) facts, as an entry of nomad_gpu_verify's C(expected).

    The plugin lists each MIG device under a name of its own and not the GPU that it is on, so models are those of
    nodes without MIG. It hides the UUIDs in C(ignored). A GPU that the driver could not start may have no UUID and no
    model; Nomad must have it all the same, so it counts. Of a node whose GPUs, or MIG devices, could not be asked,
    Nomad must have at least one. A KeyError names what the facts lack.
    """
    if not facts["available"]:
        # It must have one at least.
        return {"node": node}
    expected: dict[str, Any] = {"node": node, "driver_version": facts["driver_version"]}
    divided = [gpu for gpu in facts["gpus"] if gpu["mig_mode"] == "Enabled"]
    if any(gpu["mig_devices"] is None for gpu in divided):
        return expected
    devices: list[Mapping[str, Any]] = []
    for gpu in facts["gpus"]:
        # A divided GPU without devices is lost to jobs, so it is missing under its own UUID.
        devices += gpu["mig_devices"] or [gpu] if gpu in divided else [gpu]
    hidden = {uuid.lower() for uuid in ignored}
    devices = [device for device in devices if (device["uuid"] or "").lower() not in hidden]
    expected["uuids"] = [device["uuid"] for device in devices if device["uuid"]]
    if len(expected["uuids"]) < len(devices):
        expected["count"] = len(devices)
    if not divided and all(gpu["name"] for gpu in devices):
        expected["models"] = sorted({gpu["name"] for gpu in devices})
    return expected


@dataclasses.dataclass(frozen=True)
class ActualNode:
    """What Nomad knows of one node, as far as it is compared."""

    id: str
    name: str
    status: str
    eligibility: str
    drain: bool
    created: int
    gpus: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that is not as it should be; C(message) is for people."""

    node: str
    code: str
    expected: str
    found: str
    message: str


@dataclasses.dataclass
class NodeVerdict:
    """The judgement on one node."""

    name: str
    id: str | None
    status: str | None
    gpus_expected: int | None
    gpus_found: int
    problems: list[Problem]

    @property
    def verdict(self) -> str:
        return "failed" if self.problems else "ok"


def actual_node(node: Mapping[str, Any]) -> ActualNode:
    return ActualNode(
        id=node.get("ID") or "",
        name=node.get("Name") or "",
        status=node.get("Status") or "",
        eligibility=node.get("SchedulingEligibility") or "",
        drain=bool(node.get("Drain")),
        created=int(node.get("CreateIndex") or 0),
        gpus=gpus_of_node(node),
    )


def _problem(node: str, code: str, expected: str, found: str, next_step: str) -> Problem:
    return Problem(
        node=node,
        code=code,
        expected=expected,
        found=found,
        message=f"Node {node}: found {found}. Expected: {expected}. Next step: {next_step}.",
    )


def compare(
    expected: Iterable[Expected],
    actual: Iterable[ActualNode],
    allow_extra_nodes: bool = True,
    require_eligible: bool = False,
) -> list[NodeVerdict]:
    """Judge every expected node, and those others that must not be as they are; each in the order given."""
    nodes = list(actual)
    by_name: dict[str, list[ActualNode]] = {}
    by_id: dict[str, ActualNode] = {}
    for node in nodes:
        by_name.setdefault(node.name, []).append(node)
        by_id[node.id] = node
    verdicts: list[NodeVerdict] = []
    by_node_id: dict[str, NodeVerdict] = {}
    seen: set[str] = set()
    for wanted in expected:
        candidates = by_name.get(wanted.node) or ([by_id[wanted.node]] if wanted.node in by_id else [])
        verdict = _judge(wanted, candidates, require_eligible)
        verdicts.append(verdict)
        for node in candidates:
            seen.add(node.id)
            by_node_id[node.id] = verdict
    extra: dict[str, NodeVerdict] = {}

    def verdict_of(node: ActualNode) -> NodeVerdict:
        if node.id in by_node_id:
            return by_node_id[node.id]
        if node.id not in extra:
            extra[node.id] = NodeVerdict(node.name, node.id, node.status, None, len(node.gpus), [])
        return extra[node.id]

    if not allow_extra_nodes:
        for node in nodes:
            if node.id not in seen and node.gpus and node.status != "down":
                verdict_of(node).problems.append(_unexpected_node(node))
    for node, problem in _duplicates(nodes):
        verdict_of(node).problems.append(problem)
    return verdicts + list(extra.values())


def extra_gpu_nodes(expected: Iterable[Expected], actual: Iterable[ActualNode]) -> list[str]:
    """Names of living nodes with GPUs that nobody expects, sorted."""
    known = {wanted.node for wanted in expected}
    names = {
        node.name
        for node in actual
        if node.gpus and node.status != "down" and node.name not in known and node.id not in known
    }
    return sorted(names)


def _judge(wanted: Expected, candidates: list[ActualNode], require_eligible: bool) -> NodeVerdict:
    name = wanted.node
    if not candidates:
        problem = _problem(
            name,
            "node_missing",
            "a node of this name in Nomad",
            "no such node",
            "check that the Nomad client runs there, reaches the servers and has this name ('nomad node status')",
        )
        return NodeVerdict(name, None, None, wanted.number, 0, [problem])
    # A client that lost its data registers anew; its former self stays listed as down for a day.
    living = [node for node in candidates if node.status != "down"]
    node = max(living or candidates, key=lambda candidate: candidate.created)
    problems: list[Problem] = []
    if len(living) > 1:
        problems.append(
            _problem(
                name,
                "node_duplicate",
                "one living node of this name",
                f"{len(living)} of them ({', '.join(sorted(each.id for each in living))})",
                "give each machine a name of its own, and never clone Nomad's data_dir",
            )
        )
    if node.status != "ready":
        problems.append(
            _problem(
                name,
                "node_down",
                "status ready",
                f"status {node.status or 'unknown'}",
                "look at the Nomad client on the node ('journalctl -u nomad') and at its way to the servers",
            )
        )
    if require_eligible and (node.drain or node.eligibility != "eligible"):
        problems.append(
            _problem(
                name,
                "node_ineligible",
                "a node that takes work",
                "a node that is being drained" if node.drain else f"eligibility {node.eligibility or 'unknown'}",
                f"find out why it was taken out, then run 'nomad node eligibility -enable {node.id}'",
            )
        )
    problems += _judge_gpus(wanted, node)
    return NodeVerdict(name, node.id, node.status, wanted.number, len(node.gpus), problems)


def _judge_gpus(wanted: Expected, node: ActualNode) -> list[Problem]:
    name, number = wanted.node, wanted.number
    if not node.gpus and number != 0:
        wish = "at least one GPU" if number is None else _gpus(number)
        return [
            _problem(
                name,
                "no_devices",
                wish,
                "no GPU device at all",
                "check nvidia-smi on the node and that the device plugin is in plugin_dir with a plugin block of its "
                "name, then restart Nomad there, because it never retries a plugin that could not load the driver",
            )
        ]
    problems = _judge_uuids(wanted, node) if wanted.uuids is not None else []
    problems += _judge_models(wanted, node)
    found = len(node.gpus)
    # A list of what is missing says more than two numbers.
    told = problems and (wanted.uuids is not None or wanted.model_counts is not None)
    if number is not None and found != number and not told:
        problems.append(
            _problem(
                name,
                "count_mismatch",
                _gpus(number),
                _gpus(found),
                "compare with 'nvidia-smi -L' on the node, and restart Nomad there if that is right",
            )
        )
    problems += _judge_mig(wanted, node)
    for gpu in node.gpus:
        problems += _judge_gpu(wanted, gpu)
    problems += _judge_driver(wanted, node)
    return problems


def _gpus(number: int) -> str:
    return f"{number} GPU" if number == 1 else f"{number} GPUs"


def _judge_uuids(wanted: Expected, node: ActualNode) -> list[Problem]:
    there = {gpu["uuid"].lower(): gpu["uuid"] for gpu in node.gpus}
    listed = {uuid.lower(): uuid for uuid in wanted.uuids or ()}
    problems = [
        _problem(
            wanted.node,
            "gpu_missing",
            f"GPU {uuid}",
            f"{_gpus(len(there))} without it",
            "check 'nvidia-smi -L' and the kernel log for Xid errors on the node, then restart Nomad there",
        )
        for key, uuid in listed.items()
        if key not in there
    ]
    problems += [
        _problem(
            wanted.node,
            "gpu_unexpected",
            f"only the {_gpus(len(listed))} of the list",
            f"GPU {uuid}",
            "add it to what is expected if it was built in, or restart Nomad on the node if it is no longer there",
        )
        for key, uuid in there.items()
        if key not in listed
    ]
    return problems


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} x {model}" for model, number in sorted(counts.items()) if number) or "none"


def _judge_models(wanted: Expected, node: ActualNode) -> list[Problem]:
    found = Counter(gpu["model"] for gpu in node.gpus)
    if wanted.model_counts is not None and dict(found) != {
        model: number for model, number in wanted.model_counts.items() if number
    }:
        wish = _counted(wanted.model_counts)
    elif wanted.models is not None and set(found) != set(wanted.models):
        wish = f"the models {', '.join(sorted(set(wanted.models))) or 'none'}"
    else:
        return []
    next_step = "correct the expected models, or look for a GPU that was exchanged or is missing"
    return [_problem(wanted.node, "model_mismatch", wish, _counted(found), next_step)]


def _judge_mig(wanted: Expected, node: ActualNode) -> list[Problem]:
    next_step = "check 'nvidia-smi mig -lgi' on the node, and restart Nomad there after the layout was changed"
    if wanted.mig is not None:
        wrong = [gpu["uuid"] for gpu in node.gpus if gpu["mig"] is not wanted.mig]
        if wrong:
            wish = "only MIG devices" if wanted.mig else "no MIG device"
            return [_problem(wanted.node, "mig_mismatch", wish, ", ".join(wrong), next_step)]
    if wanted.mig_profiles is not None:
        found = Counter(gpu["mig_profile"] or "without a profile" for gpu in node.gpus if gpu["mig"])
        layout = {profile: number for profile, number in wanted.mig_profiles.items() if number}
        if dict(found) != layout:
            return [_problem(wanted.node, "mig_mismatch", _counted(layout), _counted(found), next_step)]
    return []


def _judge_gpu(wanted: Expected, gpu: Mapping[str, Any]) -> list[Problem]:
    problems = []
    memory = gpu["memory_mib"]
    if wanted.memory_mib_min is not None and (memory is None or memory < wanted.memory_mib_min):
        problems.append(
            _problem(
                wanted.node,
                "memory_too_small",
                f"at least {wanted.memory_mib_min} MiB",
                f"{'no size' if memory is None else f'{memory} MiB'} for GPU {gpu['uuid']} ({gpu['model']})",
                "correct memory_mib_min, or check that this is the right card and MIG layout",
            )
        )
    if not gpu["healthy"]:
        problems.append(
            _problem(
                wanted.node,
                "gpu_unhealthy",
                "healthy GPUs",
                f"GPU {gpu['uuid']} unhealthy ({gpu['health_description'] or 'no reason given'})",
                "check the GPU with nvidia-smi and the kernel log, and drain the node if it is sick",
            )
        )
    return problems


def _judge_driver(wanted: Expected, node: ActualNode) -> list[Problem]:
    if wanted.driver_version is None:
        return []
    found = sorted({gpu["driver_version"] or "none" for gpu in node.gpus})
    if not node.gpus or found == [wanted.driver_version]:
        return []
    return [
        _problem(
            wanted.node,
            "driver_version_stale",
            f"driver {wanted.driver_version}",
            f"driver {', '.join(found)} in Nomad",
            "restart Nomad on the node, because unchanged UUIDs keep it from reporting a new driver",
        )
    ]


def _unexpected_node(node: ActualNode) -> Problem:
    return _problem(
        node.name,
        "node_unexpected",
        "only nodes of the list to have GPUs",
        f"a node with {_gpus(len(node.gpus))} ({node.id})",
        "add it to what is expected, or take it out of the farm",
    )


def _duplicates(nodes: Iterable[ActualNode]) -> Iterator[tuple[ActualNode, Problem]]:
    """UUIDs that more than one living node reports, as cloned images do; once for each node."""
    holders: dict[str, list[ActualNode]] = {}
    for node in nodes:
        if node.status != "down":
            for uuid in dict.fromkeys(gpu["uuid"] for gpu in node.gpus):
                holders.setdefault(uuid, []).append(node)
    for uuid, several in holders.items():
        if len(several) < 2:
            continue
        for node in several:
            others = ", ".join(f"{other.name} ({other.id})" for other in several if other is not node)
            yield (
                node,
                _problem(
                    node.name,
                    "duplicate_uuid",
                    f"GPU {uuid} on one node only",
                    f"GPU {uuid} also on {others}",
                    "look for a cloned image or a second Nomad client on the same machine, and stop one of them",
                ),
            )


# --- waiting ---------------------------------------------------------------------------------


def wait_until(
    fetch: Callable[[int, float], tuple[int, Any]],
    good: Callable[[Any], bool],
    timeout: float,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Any:
    """Ask until the answer is good or the time is up; returns the last answer.

    C(fetch(index, wait)) returns the next index and an answer. What a server cannot tell for a moment, as while it
    elects a leader, is asked again; the last such error is raised when the time is up without any answer.
    """
    deadline = clock() + timeout
    index = 0
    answers: list[Any] = []
    while True:
        left = deadline - clock()
        try:
            index, answer = fetch(index, max(0.0, min(left, LONGEST_WAIT)))
        except NomadError as error:
            if not error.transient:
                raise
            if deadline - clock() <= 0:
                if answers:
                    return answers[0]
                raise
            index = 0
        else:
            answers = [answer]
            if good(answer) or deadline - clock() <= 0:
                return answer
        # Also where every answer has news, a busy farm must not be asked without a break.
        pause(min(0.5, max(0.05, deadline - clock())))


# --- for people ------------------------------------------------------------------------------


def table(verdicts: Iterable[NodeVerdict], limit: int | None = None) -> str:
    """The verdicts as text in columns, failed nodes first; C(limit) counts lines of nodes."""
    ordered = sorted(verdicts, key=lambda verdict: (not verdict.problems, verdict.name))
    rows = [("NODE", "STATUS", "EXPECTED", "FOUND", "VERDICT", "PROBLEMS")]
    for verdict in ordered[:limit]:
        codes = Counter(problem.code for problem in verdict.problems)
        rows.append(
            (
                verdict.name,
                verdict.status or "-",
                "-" if verdict.gpus_expected is None else str(verdict.gpus_expected),
                str(verdict.gpus_found),
                verdict.verdict,
                ", ".join(code if number == 1 else f"{code} ({number}x)" for code, number in codes.items()) or "-",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join([*(row[column].ljust(widths[column]) for column in range(5)), row[5]]) for row in rows]
    if limit is not None and len(ordered) > limit:
        lines.append(f"... and {len(ordered) - limit} more nodes")
    return "\n".join(lines)
