# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from ansible_collections.gpufarm.core.plugins.filter.certificate_subjects import certificate_subjects


def test_a_name_or_an_address_is_written_as_a_certificate_has_it() -> None:
    names = ["t4", "192.0.2.1", "FD00::10", "fd00:0::10", "GPU.example", "t4", "::1", "10.example", "", "ß", "a b"]
    assert certificate_subjects(names) == [
        "DNS:10.example", "DNS:GPU.example", "DNS:t4", "IP:192.0.2.1", "IP:::1", "IP:fd00::10"
    ]  # fmt: skip


def test_what_is_no_address_is_a_name() -> None:
    """A node may be called by a number. What was to be an address is left to who signs it, and takes no such one."""
    names = ["007", "1.2.3", "1.2.3.256", "fd00:", "10.0.0.1"]
    assert certificate_subjects(names) == ["DNS:007", "DNS:1.2.3", "IP:1.2.3.256", "IP:10.0.0.1", "IP:fd00:"]
