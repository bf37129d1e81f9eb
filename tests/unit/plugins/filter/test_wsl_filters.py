# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import base64

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.gpufarm.core.plugins.filter import missing_collections as collections
from ansible_collections.gpufarm.core.plugins.filter import wsl_config as config

missing_collections = collections.FilterModule().filters()["missing_collections"]
pytestmark = pytest.mark.controller
wsl_config = config.FilterModule().filters()["wsl_config"]


def test_collections_that_are_there_are_not_named() -> None:
    names = ["gpufarm.core", "gpufarm.none", "none_of_this.namespace"]
    assert missing_collections(names) == ["gpufarm.none", "none_of_this.namespace"]


def test_a_file_is_changed_and_none_is_made() -> None:
    settings = {"wsl2": {"processors": 4}}
    assert wsl_config(base64.b64encode(b"# \xc3\xa4\n").decode(), settings) == "# \u00e4\n\n[wsl2]\nprocessors=4\n"
    utf16 = base64.b64encode("[wsl2]\nmemory=8GB\n".encode("utf-16")).decode()
    assert wsl_config(utf16, settings) == "[wsl2]\nmemory=8GB\nprocessors=4\n"
    assert wsl_config("", settings) == "[wsl2]\r\nprocessors=4\r\n"


def test_what_cannot_be_changed() -> None:
    with pytest.raises(AnsibleFilterError) as no_utf8:
        wsl_config(base64.b64encode(b"\xe4").decode(), {})
    assert str(no_utf8.value) == (
        ".wslconfig is no UTF-8 (byte 0). Expected: UTF-8, or UTF-16 with a mark, as WSL reads it. "
        "Next step: save it with that encoding."
    )
    with pytest.raises(AnsibleFilterError) as no_name:
        wsl_config("", {"wsl2": {"a b": 1}})
    assert str(no_name.value) == (
        "wsl_config has wsl2.a b with 1. Expected: names of letters and digits. Next step: correct the setting."
    )
