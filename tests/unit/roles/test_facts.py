"""Roles run with facts cleared: what they read of Ansible's own facts, the first task of each gathers."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROLES = Path(__file__).resolve().parents[3] / "roles"
# Gathered by the collection's own modules.
OWN = {"nvidia_smi"}


def test_every_fact_that_roles_read_is_gathered() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in ROLES.rglob("*") if path.suffix in (".yml", ".j2"))
    read = set(re.findall(r"ansible_facts\[?\.?['\"]?([a-z_]+)", text)) - OWN
    (gather, *_) = yaml.safe_load((ROLES / "_common/tasks/requirements.yml").read_text(encoding="utf-8"))
    gathered = set(re.findall(r"'([a-z_]+)'", str(gather["when"])))
    assert "os_family" in read
    assert read - {"keys"} <= gathered


def test_every_public_role_enters_preflight() -> None:
    entered = {
        path.relative_to(ROLES).parts[0]
        for path in ROLES.rglob("tasks/*.yml")
        if re.search(r"tasks_from: preflight\.yml|name: gpufarm\.core\.nomad$", path.read_text("utf-8"), re.MULTILINE)
    }
    public = {path.name for path in ROLES.iterdir() if path.is_dir() and not path.name.startswith("_")}
    assert entered == public
