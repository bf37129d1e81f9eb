# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: certificate_subjects
short_description: Write names and addresses as a certificate has them
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Returns C(subject_alt_name) of a certificate that is for these names and addresses, as
    P(community.crypto.x509_certificate_info#filter) tells it of one that is there. An address of version 6 has one form
    in a certificate, and many in an inventory.
  - What is no address is a name, as V(007), by which a node may be called.
  - What no certificate can be for, such as a name with other letters than those of ASCII, is left out.
options:
  _input:
    description: Names and addresses.
    type: list
    elements: str
    required: true
"""

EXAMPLES = r"""
- name: Tell whether a certificate is for what it is asked by
  ansible.builtin.debug:
    msg: >-
      {{ certificate.subject_alt_name | sort
      == ['localhost', 'FD00::10'] | gpufarm.core.certificate_subjects | sort }}
"""

RETURN = r"""
_value:
  description: Each once, with C(DNS:) or C(IP:) before it, sorted.
  type: list
  elements: str
  sample: [DNS:localhost, IP:fd00::10]
"""

import re
from collections.abc import Callable, Iterable
from typing import Any


def certificate_subjects(names: Iterable[str]) -> list[str]:
    return sorted({_subject(name) for name in names if re.fullmatch(r"[0-9A-Za-z._:-]+", name)})


def _subject(name: str) -> str:
    if re.fullmatch(r"[0-9.]+|.*:.*", name):
        # Read by those alone who ask for it: each task that names a filter loads this file.
        import ipaddress

        try:
            return f"IP:{ipaddress.ip_address(name).compressed}"
        except ValueError:
            if ":" in name or name.count(".") == 3:
                # Who is to sign it says what is wrong with it.
                return f"IP:{name}"
    return f"DNS:{name}"


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"certificate_subjects": certificate_subjects}
