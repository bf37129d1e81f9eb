# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Addresses that may hold a login, what may be shown of them, and the error that shows none."""

from __future__ import annotations

import re
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.problem import FoundError

ADDRESS = re.compile(r"https?://(?:[^/?#\s]*@)?(?:[^/?#\s@:\[\]]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?(?:[/?#]\S*)?")
# A password with a slash in it: what stands before that would be a server, with a port or behind a login.
UNCLEAR = re.compile(r"https?://[^/?#]*(?::[0-9]*|@[^/?#]*)[/?#].*@")


class ReleaseError(FoundError):
    """A release, or a key, is not as it must be."""

    def __init__(self, found: str, expected: str, next_step: str) -> None:
        super().__init__(*map(without_login, (found, expected, next_step)))


def without_login(text: str) -> str:
    """The text with addresses that hold no name and no password; what is said of a mirror is read by many."""
    return re.sub(r"(https?://)[^/?#\s]*@", r"\1", text)


def shown(url: str) -> str:
    """An address as it may be shown; where a login may be anywhere in it, only how it begins."""
    return without_login(url) if _is_clear(url) or "@" not in url else f"{url.partition(':')[0]}:..."


def _is_clear(url: str) -> bool:
    return bool(ADDRESS.fullmatch(url)) and not UNCLEAR.match(url)


def take_addresses(params: dict[str, Any], *options: str) -> dict[str, Any]:
    """The options as they were given; those that Ansible shows at C(-vvv), C(params), lose their logins."""
    given = dict(params)
    params.update({option: shown(given[option]) for option in options if given[option]})
    return given


def check_address(url: str) -> None:
    """Refuse what is no address of a file on a server."""
    if not _is_clear(url):
        raise ReleaseError(
            found=f"the address is '{shown(url)}'",
            expected="https://host/path or http://host/path, in a password every special character as %XX, and with a "
            "login or a port every @ in the path as %40",
            next_step="correct the option that holds the address",
        )
