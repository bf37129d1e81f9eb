# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Kubernetes' API, asked by kubectl, which knows every way to log in: certificates, tokens, OIDC and programs.

C(kubectl get --raw) hands on the apiserver's own JSON, whatever version kubectl has, so nothing depends on how it
prints things.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ansible_collections.gpufarm.core.plugins.module_utils.commands import MAX_OUTPUT_BYTES, Command, run_commands
from ansible_collections.gpufarm.core.plugins.module_utils.problem import FoundError
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean

if TYPE_CHECKING:
    from ansible_collections.gpufarm.core.plugins.module_utils.commands import Runner

# A node with its list of images is 10 to 50 KB of JSON, so this is some MB.
PAGE = 250
# A list that grows too old between two pages is read anew.
LISTS = 3
# What kubectl itself may need on top of the request: a program that logs in, a slow disk.
GRACE_S = 15.0
TOLD_CHARS = 600
# Programs side by side, each with some 30 MB.
AT_ONCE = 16

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Connection:
    """How to reach the cluster; what is None is kubectl's own default."""

    kubeconfig: str | None = None
    context: str | None = None
    kubectl: str = "kubectl"
    request_timeout: int = 30


class KubernetesError(FoundError):
    """Kubernetes could not be asked; the text says what was found, what was expected and what to do."""

    def __init__(
        self, found: str, expected: str, next_step: str, transient: bool = False, reason: str | None = None
    ) -> None:
        super().__init__(clean(found), expected, next_step)
        self.transient = transient
        self.reason = reason
        """The apiserver's own word for it, such as C(Forbidden), where that was the answer."""


@dataclasses.dataclass(frozen=True)
class _Kind:
    """How one kind of refusal is told."""

    pattern: str
    expected: str
    next_step: str
    transient: bool = False
    reason: str | None = None


# In this order; what kubectl 1.32 says was read off it.
_KINDS = (
    _Kind(
        r"^error: (context .* does not exist|stat |error loading config|no configuration has been provided)|"
        # There kubectl looks for an apiserver where it finds no kubeconfig.
        r"current-context|invalid configuration|server localhost:8080 was refused",
        "a kubeconfig with this context",
        "correct kubeconfig and context, and try 'kubectl config get-contexts' with them",
    ),
    _Kind(
        r"Unauthorized|must be logged in|provide credentials|getting credentials|Forbidden.*system:anonymous",
        "credentials that the cluster takes",
        "log in again, or correct the user in the kubeconfig",
        reason="Unauthorized",
    ),
    _Kind(
        r"x509|tls: |certificate",
        "a server certificate that the kubeconfig's CA has signed, for this address",
        "correct certificate-authority and server in the kubeconfig",
    ),
    _Kind(
        r"was refused|connection refused|i/o timeout|handshake timeout|Client\.Timeout|deadline exceeded|EOF$|"
        r"connection reset|broken pipe|no route to host|network is unreachable|server misbehaving",
        "an apiserver that answers at the address in the kubeconfig",
        "check that the control plane runs, and the address in the kubeconfig",
        transient=True,
    ),
    # What an apiserver says without a reason; a store that is full is none of these.
    _Kind(
        r"etcdserver: (leader changed|no leader|request timed out|too many requests)|request timed out|"
        r"code = Unavailable|http2: |unexpected EOF|no endpoints available|(?i:bad gateway|gateway time|unavailable)",
        "an apiserver that answers",
        "look at the control plane, and try again",
        transient=True,
    ),
    _Kind(
        r"Unable to connect",
        "an apiserver that answers at the address in the kubeconfig",
        "check the address in the kubeconfig",
    ),
)


_REASON = re.compile(r"^Error from server \((\w+)\): (.*)", re.DOTALL | re.MULTILINE)


_TRANSIENT = frozenset(("TooManyRequests", "ServiceUnavailable", "ServerTimeout", "Timeout", "Expired", "Gone"))


def read_failure(command: Command) -> KubernetesError:
    """What a call of kubectl that failed says."""
    name = command.argv[0] if command.argv else "kubectl"
    if command.error is not None:
        return KubernetesError(
            f"{name} cannot be run ({command.error})",
            "kubectl on the machine that runs this module",
            "install kubectl there, or set 'kubectl' to where it is",
        )
    if command.timed_out:
        return KubernetesError(
            f"no answer of {name} within {command.limit:.0f} s",
            "an answer of the apiserver",
            "check the control plane, or raise request_timeout",
            transient=True,
        )
    said = command.stderr.strip() or command.stdout.strip()
    match = _REASON.search(said)
    if match:
        return _refusal(match[1], " ".join(match[2].split())[:TOLD_CHARS].rstrip("."))
    said = " ".join(said[-TOLD_CHARS:].split()).rstrip(".") or f"exit code {command.returncode} without a word"
    for kind in _KINDS:
        if re.search(kind.pattern, said):
            return KubernetesError(f"kubectl says: {said}", kind.expected, kind.next_step, kind.transient, kind.reason)
    return KubernetesError(f"kubectl says: {said}", "an answer of the apiserver", "try the same call by hand")


def _refusal(reason: str, message: str) -> KubernetesError:
    found = f"Kubernetes answered {reason}: {message}"
    # An apiserver calls so what its store or a webhook did not answer, and what no other try mends.
    internal = reason == "InternalError"
    passes = any(kind.transient and re.search(kind.pattern, message) for kind in _KINDS)
    transient = reason in _TRANSIENT or (internal and passes)
    if reason == "Forbidden":
        expected, step = "that this is allowed", "change what is named: a right of the user, a quota or a policy"
    elif transient or internal:
        expected, step = "an apiserver that answers", "look at the control plane, and try again"
    elif reason == "NotFound":
        expected, step = "what was asked for", "check its name, and which cluster the kubeconfig means"
    else:
        expected, step = "an answer with what was asked for", "look whether somebody changed it meanwhile"
    return KubernetesError(found, expected, step, transient, reason)


def path_of(*parts: str, **query: str | int | None) -> str:
    """A path of the API with its query, each part escaped."""
    path = "/" + "/".join(urllib.parse.quote(part, safe="") for part in parts)
    given = {key: str(value) for key, value in query.items() if value is not None}
    return f"{path}?{urllib.parse.urlencode(given)}" if given else path


def in_parts(items: Sequence[T]) -> list[Sequence[T]]:
    """The items, as many at a time as calls should run side by side."""
    return [items[begin : begin + AT_ONCE] for begin in range(0, len(items), AT_ONCE)]


# The path of an address, with or without a scheme.
_PATH = re.compile(r"(?:\w+://)?[^/?#]*([^?#\s]*)")


class Client:
    """Asks the apiserver; every failure is a KubernetesError."""

    def __init__(self, connection: Connection, run: Runner | None = None) -> None:
        self.connection = connection
        self._run = run or run_commands

    def _argv(self, words: Sequence[str]) -> list[str]:
        given = [
            *([f"--kubeconfig={self.connection.kubeconfig}"] if self.connection.kubeconfig else ()),
            *([f"--context={self.connection.context}"] if self.connection.context else ()),
            f"--request-timeout={self.connection.request_timeout}s",
        ]
        # k3s has kubectl in it, so it can be two words.
        return [*self.connection.kubectl.split(), *given, *words]

    def calls(self, calls: Sequence[Sequence[str]]) -> list[str | KubernetesError]:
        """What calls of kubectl print, run side by side; a refusal stands in its place."""
        done = self._run([self._argv(words) for words in calls], self.connection.request_timeout + GRACE_S)
        return [command.stdout if command.returncode == 0 else read_failure(command) for command in done]

    def call(self, *words: str) -> str:
        (answer,) = self.calls([words])
        if isinstance(answer, KubernetesError):
            raise answer
        return answer

    @functools.cached_property
    def _base(self) -> str:
        """The path of the server's address, as behind Rancher, which C(--raw) leaves out (kubernetes/kubectl#1676)."""
        words = ["config", "view", "--minify", "--output=jsonpath={.clusters[0].cluster.server}"]
        (view,) = self._run([self._argv(words)], self.connection.request_timeout + GRACE_S)
        if view.returncode is None:
            raise read_failure(view)
        # A pod needs no kubeconfig; what is wrong with one the call itself tells.
        match = _PATH.match(view.stdout.strip()) if view.returncode == 0 else None
        return match[1].rstrip("/") if match else ""

    def raw(self, verb: str, path: str) -> list[str]:
        """The words of a call that hands on the apiserver's own JSON."""
        return [verb, "--raw", self._base + path]

    def get(self, path: str) -> dict[str, Any]:
        """One object."""
        return read_object(self.call(*self.raw("get", path)))

    def read(self, reader: Callable[[Iterator[dict[str, Any]]], T], *parts: str, **query: str | int | None) -> T:
        """What C(reader) makes of a list, whose items come one page after the other.

        It begins anew where the list was changed so often meanwhile that its end can no longer be told.
        """
        attempt = 1
        while True:
            try:
                return reader(self._pages(parts, query))
            except KubernetesError as error:
                if error.reason not in ("Expired", "Gone") or attempt == LISTS:
                    raise
                attempt += 1

    def _pages(self, parts: Sequence[str], query: Mapping[str, str | int | None]) -> Iterator[dict[str, Any]]:
        token, seen = "", set[str]()
        while True:
            page = self.get(path_of(*parts, **{**query, "limit": PAGE, "continue": token or None}))
            yield from items_of(page)
            token = str(mapping(page.get("metadata")).get("continue") or "")
            if not token:
                return
            if token in seen:
                raise _garbage("the same page again")
            seen.add(token)

    def create(self, bodies: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str | KubernetesError]:
        """Create objects, each at a path, side by side; the answers in the same order."""
        with tempfile.TemporaryDirectory(prefix="gpufarm-") as folder:
            calls = []
            for number, (path, body) in enumerate(bodies):
                file = os.path.join(folder, f"{number}.json")  # noqa: PTH118
                with open(file, "w", encoding="utf-8") as stream:  # noqa: PTH123
                    json.dump(body, stream)
                calls.append([*self.raw("create", path), "-f", file])
            return self.calls(calls)

    def delete(self, path: str) -> None:
        self.call(*self.raw("delete", path))

    def patch_node(self, name: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        """Merge this into a node, all at once; the node as it is then."""
        text = json.dumps(patch, separators=(",", ":"))
        return read_object(self.call("patch", "node", name, "--type=merge", f"--patch={text}", "--output=json"))


def read_object(text: str) -> dict[str, Any]:
    """One JSON object, and a KubernetesError for anything else."""
    try:
        answer = json.loads(text)
    except RecursionError:
        raise _garbage("JSON nested too deeply") from None
    except ValueError:
        start = " ".join(clean(text[:80]).split())
        size = "cut off at" if len(text) >= MAX_OUTPUT_BYTES else "of"
        raise _garbage(f"no JSON, {size} {len(text)} characters that begin with '{start}'") from None
    if not isinstance(answer, dict):
        raise _garbage(f"JSON that is no object, a {type(answer).__name__}")
    return answer


def items_of(page: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    items = page.get("items")
    if items is None and str(page.get("kind") or "").endswith("List"):
        # Go writes an empty list so.
        return
    if not isinstance(items, list):
        raise _garbage(f"a {page.get('kind') or 'text without kind'} instead of a list")
    yield from (item for item in items if isinstance(item, dict))


def mapping(value: Any) -> Mapping[str, Any]:
    """The value where it is one, and nothing where an answer has something else in its place."""
    return value if isinstance(value, dict) else {}


def listing(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def text_of(value: Any) -> str:
    """A text from outside, fit to be shown; empty where there is none."""
    return clean(value) if isinstance(value, str) else ""


def _garbage(found: str) -> KubernetesError:
    return KubernetesError(
        f"the answer of the apiserver is {found}",
        "what Kubernetes' API has at this path",
        "check the server's address in the kubeconfig, and what 'kubectl get --raw /version' says",
    )


def wait_for(seconds: float, deadline: float) -> None:
    """Pause so long, and no longer than until the deadline."""
    time.sleep(max(0.0, min(seconds, deadline - time.monotonic())))
