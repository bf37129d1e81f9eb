# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A list of JSON objects, read element by element."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.text import clean_all

CHUNK = 1 << 20


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
            if len(text) > 2 * CHUNK:
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
