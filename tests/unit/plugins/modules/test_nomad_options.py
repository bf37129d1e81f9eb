# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What holds for every module that asks Nomad."""

from __future__ import annotations

import importlib
import json
import platform
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

MODULES = Path(__file__).resolve().parents[4] / "plugins" / "modules"
REFUSAL = (
    f"{platform.node()}: the address of Nomad holds an @, as one with a login does. "
    "Expected: an address such as https://nomad.example.com:4646. "
    "Next step: take the login out of the option 'address' or the variable NOMAD_ADDR, and say who asks by 'token' or "
    "'client_cert'."
)
WRONG_NODE = {"node": "a", "healthy": True}

# What each needs to come to Nomad, and, where one can, what it refuses before.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "nomad_acl": [{}],
    "nomad_agent_info": [{}, {"wait_for": "answer", "timeout": 0}],
    "nomad_client_introduction": [{"name": "a"}],
    "nomad_deregister": [{"name": "a", "timeout": 0}],
    "nomad_gossip_key": [{"key": "bmV3LW5ldy1uZXcta2V5MQ==", "keyring": "KEYRING", "timeout": 0}],
    "nomad_gpu_gate": [{"nodes": [WRONG_NODE]}, {"nodes": [WRONG_NODE], "max_closed": "many"}],
    "nomad_gpu_info": [{}, {"gather_gpus": False, "only_gpu_nodes": True}],
    "nomad_gpu_job_verify": [{"timeout": 0}],
    "nomad_gpu_verify": [{"expected": [{"node": "a"}], "timeout": 0}, {"expected": []}],
    "nomad_node_maintenance": [
        {"state": "out", "change": "c", "timeout": 1},
        {"state": "in", "health": {"nonsense": 1}},
    ],
    "nomad_node_meta": [{"meta": {"a": "b"}}, {"meta": {"a": 1}}],
    "nomad_owned_jobs": [{"owner": "o"}],
    "nomad_tenancy": [{"namespaces": [], "node_pools": []}],
    "wandb_launch_agent_verify": [
        {"job": "j", "base_url": "https://wandb.example.com", "entity": "e", "queues": ["q"], "timeout": 0},
        {"unit": "none.service", "base_url": "https://wandb.example.com", "entity": "e", "queues": ["q"], "timeout": 0},
    ],
}


def test_no_module_is_left_out() -> None:
    asking = {path.stem for path in MODULES.glob("*.py") if "nomad_options.argument_spec()" in path.read_text()}
    assert asking == set(OPTIONS)


@pytest.mark.parametrize("address", ["http://robot:s3cret@127.0.0.1:9", "http://robot:1/s3cret@127.0.0.1:9"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_login_in_the_address_is_refused_and_shown_nowhere(
    name: str, address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"ansible_collections.gpufarm.core.plugins.modules.{name}")
    monkeypatch.delenv("NOMAD_TOKEN", raising=False)
    monkeypatch.setenv("NOMAD_ADDR", address)
    keyring = tmp_path / "keyring"
    keyring.write_text('["other"]')
    for number, options in enumerate([*OPTIONS[name], {**OPTIONS[name][0], "address": address}]):
        given = {key: str(keyring) if value == "KEYRING" else value for key, value in options.items()}
        result = helper.run_module(module.main, capsys, given)
        assert result["failed"] and "s3cret" not in json.dumps(result)
        assert result["invocation"]["module_args"]["address"] == "http:..."
        if number in (0, len(OPTIONS[name])):
            assert result["msg"] == REFUSAL
