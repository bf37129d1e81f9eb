"""What each of the farm's own tokens may do, and what is told of it."""

from __future__ import annotations

from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[3]
POLICIES = yaml.safe_load((ROOT / "roles/nomad_server/vars/main.yml").read_text())["__nomad_server_policies"]


def test_the_gate_of_a_node_sees_who_has_its_gpus() -> None:
    """Nomad leaves out of a node's allocations what a token may not read, and says nothing of it."""
    assert 'namespace "*" { capabilities = ["read-job"] }' in POLICIES["gpufarm-gate"]
    for path in ("README.md", "roles/gpu_health/README.md"):
        text = " ".join((ROOT / path).read_text().split())
        assert "`namespace:read-job` in every namespace" in text, path
