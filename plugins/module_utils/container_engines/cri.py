# Copyright (c) gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a running containerd has read: one call of the Container Runtime Interface, which is gRPC on a socket.

`containerd config dump` tells what its files say now, not what the daemon goes by, and Debian has no crictl. So this
speaks as much of HTTP/2 (RFC 9113) and of Protocol Buffers as one call with a short request needs.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

# runtime/v1/api.proto of kubernetes/cri-api: StatusRequest{verbose = 1}, StatusResponse{map<string, string> info = 2}.
STATUS = "/runtime.v1.RuntimeService/Status"
VERBOSE = b"\x08\x01"
INFO = 2

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8
INITIAL_WINDOW_SIZE = 4
# An answer has some thousand bytes; of more than this nothing is right.
LARGEST = 1 << 24


class CriError(Exception):
    """The engine gave no answer; the message says why."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def header(name: str, value: str) -> bytes:
    """A field of HPACK (RFC 7541, 6.2.2) that no table has; both are shorter than 127 bytes."""
    return b"\x00" + b"".join(bytes([len(part)]) + part.encode("ascii") for part in (name, value))


def request(method: str, message: bytes) -> bytes:
    fields = {
        ":method": "POST", ":scheme": "http", ":path": method, ":authority": "localhost",
        "content-type": "application/grpc", "te": "trailers",
    }  # fmt: skip
    window = INITIAL_WINDOW_SIZE.to_bytes(2, "big") + LARGEST.to_bytes(4, "big")
    return b"".join((
        PREFACE,
        frame(SETTINGS, 0, 0, window),
        frame(WINDOW_UPDATE, 0, 0, LARGEST.to_bytes(4, "big")),
        frame(HEADERS, END_HEADERS, 1, b"".join(header(*field) for field in fields.items())),
        frame(DATA, END_STREAM, 1, b"\x00" + len(message).to_bytes(4, "big") + message),
    ))  # fmt: skip


def _read(connection: socket.socket, count: int, deadline: float) -> bytes:
    parts = b""
    while len(parts) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left)
        part = connection.recv(count - len(parts))
        if not part:
            raise CriError("it closed the connection")
        parts += part
    return parts


def _answer(connection: socket.socket, deadline: float) -> bytes:
    body = b""
    while True:
        head = _read(connection, 9, deadline)
        size, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
        payload = _read(connection, size, deadline)
        if kind == DATA:
            body += payload[1 : size - payload[0]] if flags & PADDED else payload
        elif kind in (SETTINGS, PING) and not flags & ACK:
            connection.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))
        elif kind in (RST_STREAM, GOAWAY):
            raise CriError("it refused the call")
        if len(body) > LARGEST:
            raise CriError("its answer has no end")
        if kind in (DATA, HEADERS) and flags & END_STREAM:
            return body


def call(path: str, method: str, message: bytes, timeout: float) -> bytes:
    """Return the message that a gRPC service on a socket answers with; CriError where it does not.

    Why it does not is in its trailers, which may be compressed and are not read.
    """
    deadline = time.monotonic() + timeout
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        try:
            connection.connect(path)
            connection.sendall(request(method, message))
            body = _answer(connection, deadline)
        except OSError as error:
            raise CriError(error.strerror or str(error)) from None
    if len(body) < 5 or body[0] != 0 or len(body) - 5 != int.from_bytes(body[1:5], "big"):
        raise CriError("its CRI plugin does not answer")
    return body[5:]


def _number(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at


def fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The fields of a message of Protocol Buffers that have a length: texts, bytes and messages."""
    at = 0
    while at < len(message):
        key, at = _number(message, at)
        kind = key & 7
        if kind == 0:
            _value, at = _number(message, at)
        elif kind == 2:
            size, at = _number(message, at)
            yield key >> 3, message[at : at + size]
            at += size
        else:
            at += {1: 8, 5: 4}[kind]


def info(message: bytes) -> dict[str, str]:
    """What a StatusResponse has in `info`."""
    entries = [dict(fields(value)) for number, value in fields(message) if number == INFO]
    return {entry.get(1, b"").decode(): entry.get(2, b"").decode() for entry in entries}


def runtimes(path: str, timeout: float) -> tuple[dict[str, str], str]:
    """Return the runtimes that containerd goes by, each with its program, empty for its own, and the default."""
    message = call(path, STATUS, VERBOSE, timeout)
    try:
        settings: dict[str, Any] = json.loads(info(message)["config"])["containerd"]
        found = {name: (one.get("options") or {}).get("BinaryName") or "" for name, one in settings["runtimes"].items()}
        return found, str(settings["defaultRuntimeName"])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CriError(f"its answer is of another kind ({type(error).__name__}: {error})") from None
