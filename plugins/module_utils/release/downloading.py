# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What is at an address, whole and in time, or why not."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import itertools
import os
import signal
import ssl
import tempfile
import time
import urllib.error
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from ansible.module_utils.urls import open_url
from ansible_collections.gpufarm.core.plugins.module_utils import retry
from ansible_collections.gpufarm.core.plugins.module_utils.release.addresses import (
    ADDRESS,
    ReleaseError,
    check_address,
    shown,
)
from ansible_collections.gpufarm.core.plugins.module_utils.release.files import CHUNK, write
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean

SMALL_FILE_LIMIT = 4 * 1024 * 1024
ARCHIVE_LIMIT = 2 * 1024 * 1024 * 1024

# How long a download may take, every try and pause included.
SMALL_FILE_SECONDS = 300.0
ARCHIVE_SECONDS = 3600.0

_USER_AGENT = "gpufarm.core"
_REDIRECTIONS = 5


@dataclasses.dataclass(frozen=True)
class Network:
    """How to reach a server, and where what comes from there lies; C(timeout) is for each single wait."""

    timeout: int = 60
    retries: int = 3
    ca_path: str | None = None
    folder: str | None = None
    pause: Callable[[float], None] = time.sleep


class _Interrupted(Exception):
    """The connection ended before the whole file was there."""


class _OutOfTime(Exception):
    """No OSError, which some layers take for an address that does not answer and then try the next one."""


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """End what is in hand after so long: the time-out of a socket begins anew with each byte."""

    def end(_number: int, _frame: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, end)
    # Again some seconds later, for the case that the first one met a callback, which swallows exceptions.
    signal.setitimer(signal.ITIMER_REAL, seconds, 5.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _open(url: str, network: Network) -> Any:
    """The answer to a request. Redirections are followed here, where each can be looked at before it is taken."""
    first = url
    for _hop in range(_REDIRECTIONS + 1):
        try:
            return open_url(
                url,
                timeout=network.timeout,
                ca_path=network.ca_path,
                http_agent=_USER_AGENT,
                decompress=False,
                follow_redirects="no",
                # A login for this host in somebody's netrc must not be sent along.
                use_netrc=False,
            )
        except urllib.error.HTTPError as error:
            target = error.headers.get("Location")
            if error.code not in (301, 302, 303, 307, 308) or not target:
                raise
            error.close()
            url = _next_address(url, target)
    raise ReleaseError(
        found=f"{first} leads from one address to the next, more than {_REDIRECTIONS} times",
        expected="the file, or an address that has it",
        next_step="check what the server delivers at this address",
    )


def _next_address(url: str, target: str) -> str:
    """Where a redirection leads; the login goes with it to the same server only."""
    old, new = urllib.parse.urlsplit(url), urllib.parse.urlsplit(urllib.parse.urljoin(url, target))
    if not ADDRESS.fullmatch(new.geturl()) or (old.scheme, new.scheme) == ("https", "http"):
        raise ReleaseError(
            found=f"{url} leads to '{shown(new.geturl())}'",
            expected=f"an address that starts with {old.scheme}://",
            next_step="name the address of a mirror that delivers the file itself",
        )
    if (new.scheme, new.netloc) == (old.scheme, old.netloc.rpartition("@")[2]):
        new = new._replace(netloc=old.netloc)
    return new.geturl()


def _receive(url: str, network: Network, limit: int, sink: IO[bytes]) -> None:
    """One try to download into C(sink)."""
    received = 0
    with _open(url, network) as answer:
        stated = answer.headers.get("Content-Length", "")
        while True:
            chunk = answer.read(CHUNK)
            if not chunk:
                break
            received += len(chunk)
            if received > limit:
                raise ReleaseError(
                    found=f"{url} is larger than {limit} bytes",
                    expected="a file of a release",
                    next_step="check what the server delivers at this address",
                )
            write(sink, chunk, url)
    # http.client does not complain about a body that ends early when it is read in pieces.
    if stated.isdecimal() and received != int(stated):
        raise _Interrupted(f"the connection ended after {received} of {stated} bytes")


def _final_answer(url: str, status: int, reason: str) -> ReleaseError:
    if status == 404:
        return ReleaseError(
            found=f"{url} does not exist (HTTP 404)",
            expected="the file of this release",
            next_step="check product/version, or base_url of your mirror",
        )
    return ReleaseError(
        found=f"{url} answered HTTP {status} {reason}".rstrip(),
        expected="HTTP 200",
        next_step="check the address and this node's access to the server (proxy, login, mirror)",
    )


def download(url: str, network: Network, limit: int = ARCHIVE_LIMIT, seconds: float = ARCHIVE_SECONDS) -> IO[bytes]:
    """What is at C(url), as an open file that has no name, tried again where that can help; a path is opened itself.

    Each try has a file of its own: in one file, a long answer that broke off would stay behind the short one that
    came whole.
    """
    if url.startswith("/"):
        return _open_local(Path(url), limit)
    check_address(url)
    deadline = time.monotonic() + seconds
    for attempt in itertools.count(1):
        asked = None
        try:
            with contextlib.ExitStack() as stack:
                file = stack.enter_context(tempfile.TemporaryFile(dir=network.folder))
                with _time_limit(max(deadline - time.monotonic(), 0.001)):
                    _receive(url, network, limit, file)
                file.seek(0)
                stack.pop_all()
                return file
        except urllib.error.HTTPError as error:
            reason = clean(str(error.reason))
            if error.code not in retry.STATUS:
                raise _final_answer(url, error.code, reason) from error
            trouble = f"HTTP {error.code} {reason}".rstrip()
            asked = error.headers.get("Retry-After")
            if asked:
                trouble += f", Retry-After: {clean(asked)}"
        except _OutOfTime:
            trouble = f"not complete after {seconds:.0f} seconds"
        except (OSError, http.client.HTTPException, _Interrupted) as error:
            # OSError is the base of URLError, of SSLError and of every time-out, on every Python.
            cause = getattr(error, "reason", error)
            trouble = clean(str(cause)) or type(cause).__name__
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise ReleaseError(
                    found=f"the certificate of {url} is not trusted ({trouble})",
                    expected="a certificate that this node trusts",
                    next_step="install the CA of the mirror on the node, or name it in the option 'ca_path'",
                ) from error
        pause = retry.pause_s(attempt, asked)
        if attempt > network.retries or pause is None or time.monotonic() + pause >= deadline:
            break
        network.pause(pause)
    tried = "tried once" if attempt == 1 else f"tried {attempt} times"
    raise ReleaseError(
        found=f"{url} could not be downloaded ({trouble}; {tried})",
        expected="a complete answer of the server",
        next_step="check name resolution, proxy and firewall of this node, or set the address of a mirror",
    )


def _open_local(path: Path, limit: int) -> IO[bytes]:
    """A file that somebody has brought to this machine."""
    trouble = f"is larger than {limit} bytes"
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(path.open("rb"))
            if os.fstat(file.fileno()).st_size <= limit:
                stack.pop_all()
                return file
    except OSError as error:
        trouble = f"cannot be read ({error.strerror})"
    raise ReleaseError(
        found=f"{path} {trouble}",
        expected="a file of a release, in a folder laid out like releases.hashicorp.com",
        next_step="bring the file there, or name the address of a server that has it",
    )


def download_small(url: str, network: Network, limit: int = SMALL_FILE_LIMIT) -> bytes:
    """A small file (a key, a signature, a checksum list) as bytes."""
    with download(url, network, limit, SMALL_FILE_SECONDS) as file:
        return file.read()
