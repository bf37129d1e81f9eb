# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A small client of Nomad's HTTP API, and what keeps it from an answer."""

from __future__ import annotations

import copy
import dataclasses
import functools
import http.client
import ipaddress
import json
import re
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NoReturn

from ansible_collections.gpufarm.core.plugins.module_utils import retry
from ansible_collections.gpufarm.core.plugins.module_utils.nomad.stream import CHUNK, json_items
from ansible_collections.gpufarm.core.plugins.module_utils.problem import FoundError
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean, clean_all

DEFAULT_ADDRESS = "http://127.0.0.1:4646"


ATTEMPTS = 3


FIRST_PAUSE_S = 0.5


_USER_AGENT = "gpufarm.core"


_PASSING = re.compile(
    r"leader|not ready|no servers|enqueuing|shut ?down|stream closed|use of closed|time[d -]*out|refused|"
    r"deadline (exceeded|reached)|reset by peer|broken pipe|\bEOF\b|get conn|get connection|unreachable|"
    r"no route to host|nodes reported",
    re.IGNORECASE,
)
"""What Nomad says with 500 of servers that elect a leader, start, end or cannot be reached; others need a change."""


class NomadError(FoundError):
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
        super().__init__(clean(found), expected, next_step)
        self.transient = transient
        self.status = status
        """Nomad's HTTP status where that was the answer."""
        self.said = said
        """What came with that status."""
        self.nobody = nobody
        """Whether nobody listens at the address."""


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


def is_own(host: str | None) -> bool:
    """Whether a host is this machine, which no proxy has to reach for us: its loopback, or what it would speak by."""
    if not host or host.lower() == "localhost":
        return bool(host)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if address.is_loopback or address.is_unspecified:
        return True
    try:
        with socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            # Nothing is sent. The way to an own address begins at that address.
            probe.connect((host, 9))
            return ipaddress.ip_address(probe.getsockname()[0]) == address
    except OSError:
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

    No request to an address of this machine goes through a proxy; with C(direct) none does, whatever it is called.
    """

    def __init__(self, connection: Connection, repeat: Collection[int] = retry.STATUS, *, direct: bool = False) -> None:
        self._repeat = repeat
        if "@" in connection.address:
            # urllib would take the login for a part of the server's name, and each error would show it.
            raise NomadError(
                found="the address of Nomad holds an @, as one with a login does",
                expected="an address such as https://nomad.example.com:4646",
                next_step="take the login out of the option 'address' or the variable NOMAD_ADDR, and say who asks by "
                "'token' or 'client_cert'",
            )
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
        handlers.append(urllib.request.ProxyHandler({} if direct or is_own(parts.hostname) else None))
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
        return self._with(request_timeout=min(seconds, self.connection.request_timeout))

    def in_namespace(self, namespace: str) -> Client:
        """The same client, which asks for what is in that namespace."""
        return self._with(namespace=namespace)

    def _with(self, **changes: Any) -> Client:
        other = copy.copy(self)
        other.connection = dataclasses.replace(self.connection, **changes)
        return other

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

    def find(self, path: str) -> Any:
        """What Nomad has at a path; None where nothing is."""
        try:
            return self.call("GET", path)
        except NomadError as error:
            if error.status == 404:
                return None
            raise

    def own_token(self) -> Any:
        """The token that asks, as Nomad has it; None where Nomad has no ACLs."""
        try:
            return self.call("GET", "/v1/acl/token/self")
        except NomadError as error:
            if "ACL support disabled" in error.said:
                return None
            raise

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

    def text(self, path: str, query: Mapping[str, str], limit: int = CHUNK) -> str:
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
                chunk = answer.read(CHUNK)
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
        # A proxy in front of a starting agent answers 502 to 504.
        transient=status in (429, 502, 503, 504) or (status == 500 and bool(_PASSING.search(body))),
        status=status,
        said=body,
    )


def _unreachable(address: str, error: Exception) -> NoReturn:
    # An alert that arrives while the answer is read is an error of its own, whose reason is a text.
    reason = error if isinstance(error, ssl.SSLError) else getattr(error, "reason", None) or error
    text = str(reason) or type(error).__name__
    if re.search("certificate (has expired|is not yet valid)|alert certificate expired", text):
        raise NomadError(
            # An alert is what the other side says of what it was shown.
            found=f"{address} does not accept this host's own certificate ({text})"
            if "alert" in text
            else f"the certificate of {address} is not accepted ({text})",
            expected="one that holds now by this host's clock, as its CA's has to",
            next_step="check the clocks; then run playbooks/site.yml, which renews it where nomad_tls is generate, or "
            "bring a new one; an agent that still shows the former reads it by `systemctl reload nomad`",
        ) from error
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
