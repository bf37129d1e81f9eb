# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When the certificates of a host's Nomad agent end: in its files, and of the agent that runs."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from ansible_collections.gpufarm.core.plugins.module_utils import certificates, nomad, problem
from ansible_collections.gpufarm.core.plugins.module_utils.text import utc

DAY_S = 86400
OK, ENDS_SOON, EXPIRED = "ok", "ends_soon", "expired"


class Certificate(TypedDict):
    """When one of them ends."""

    of: str
    """C(agent) for that of the agent that runs, C(file) for that in the agent's file, C(ca) for the CA's, and C(chain)
    for what is between the two, where that ends before the file's own."""
    path: str | None
    not_after: str
    days_left: int
    state: str


def of_agent(connection: nomad.Connection, days: int, now: float | None = None) -> list[Certificate]:
    """What there is of them, for an agent that is asked by TLS; they end soon that hold for fewer C(days)."""
    if urllib.parse.urlsplit(connection.address).scheme != "https":
        return []
    now = time.time() if now is None else now
    found: list[tuple[str, str | None, int]] = []
    held: dict[str, list[bytes]] = {}
    for kind, path in (("file", connection.client_cert), ("ca", connection.ca_cert)):
        with contextlib.suppress(OSError, ValueError):
            read = certificates.certificates_of(Path(path or "").read_bytes())
            ends = {each: certificates.end_of(each) for each in read}
            held[kind] = read
            # What follows an agent's own are those that lead to its CA; a CA that is renewed stands beside the former,
            # and those of others may, too.
            own = read[:1] if kind == "file" else certificates.authorities(held.get("file", []), read)
            found += [(kind, path, max(ends[each] for each in own))] if own else []
    with contextlib.suppress(IndexError, KeyError, ValueError):
        agent = held["file"][0]
        above = certificates.end_above(agent, [*held["file"], *held.get("ca", [])])
        if above is not None and above < certificates.end_of(agent):
            found.append(("chain", connection.client_cert, above))
    with contextlib.suppress(OSError, ValueError):
        found.insert(0, ("agent", None, certificates.end_of(_running(connection))))
    return [
        {
            "of": kind,
            "path": path,
            "not_after": utc(end),
            # Downwards: what has ended has less than none.
            "days_left": int((end - now) // DAY_S),
            "state": EXPIRED if end <= now else ENDS_SOON if end - now < days * DAY_S else OK,
        }
        for kind, path, end in found
    ]


def _running(connection: nomad.Connection) -> bytes:
    """The certificate that the agent shows, whoever has signed it."""
    parts = urllib.parse.urlsplit(connection.address)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname = False
    tls.verify_mode = ssl.CERT_NONE
    # Before TLS 1.3 nobody is shown one who has none.
    with contextlib.suppress(OSError, ValueError):
        tls.load_cert_chain(connection.client_cert or "", connection.client_key or None)
    address = (parts.hostname or "", parts.port or 443)
    with socket.create_connection(address, connection.request_timeout) as plain, tls.wrap_socket(plain) as secure:
        return secure.getpeercert(binary_form=True) or b""


def told(found: Sequence[Certificate], state: str, days: int) -> list[str]:
    """What to say of those in a state, where the agent's own goes for the file that it has read."""
    files = {each["not_after"] for each in found if each["of"] == "file"}
    return [
        problem.sentences(
            f"{_name(each, files)} {'has expired' if state == EXPIRED else 'expires'} on {each['not_after']}"
            + (f", in {each['days_left']} day(s)" if state != EXPIRED else ""),
            f"one that holds for {days} days or more"
            if state != EXPIRED
            else "one that holds now, by this host's clock",
            _next_step(each, files),
        )
        for each in found
        if each["state"] == state and not (each["of"] == "agent" and each["not_after"] in files)
    ]


def _name(each: Certificate, files: set[str]) -> str:
    if each["of"] == "agent":
        other = f", which is not that of its file ({', '.join(files)})" if files else ""
        return f"the certificate with which the agent runs{other}"
    what = {"ca": "the CA certificate in", "chain": "a certificate between the CA's and that in"}
    return f"{what.get(each['of'], 'the certificate in')} {each['path']}"


def _next_step(each: Certificate, files: set[str]) -> str:
    if each["of"] == "agent" and files and max(files) > each["not_after"]:
        return "`systemctl reload nomad` on this host, which reads the certificate anew"
    return (
        "run playbooks/site.yml, which renews it where nomad_tls is generate; where it is files, bring a new one and "
        "`systemctl reload nomad` on this host"
    )
