"""What check mode says of packages that it cannot look up: that they would come, not that nothing would change."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

from tests.simulator.cache import ROOT

NOBODYS = "gpufarm-that-nobody-has"
UNITS = {"docker.service": {"enabled": "disabled", "active": "inactive"}}


@pytest.mark.parametrize(
    ("role", "entry", "given"),
    [
        ("docker", "install", {"docker_packages": [NOBODYS]}),
        ("_common", "verifiers", {"_common_verifiers": {"/usr/bin/that": NOBODYS}}),
        ("container_toolkit", "engines", {
            "__container_toolkit_engine_packages": [NOBODYS], "__container_toolkit_stopped": [],
        }),
        ("nomad_client", "bridge", {"__nomad_client_cni_wanted": [NOBODYS], "__nomad_client_cni_paths": ["/nowhere"]}),
        ("_common", "packages", {"common_packages": [NOBODYS], "common_packages_for": "setpci"}),
    ],
)  # fmt: skip
def test_packages_that_are_missing_would_come(tmp_path: Path, role: str, entry: str, given: dict[str, object]) -> None:
    """Lists that were never read, as an image of a cloud has them, have the same answer as a name of nobody's."""
    play = {
        "hosts": "localhost",
        "connection": "local",
        "gather_facts": False,
        "tasks": [
            {"ansible.builtin.include_role": {
                "name": f"gpufarm.core.{role}", "tasks_from": f"{entry}.yml", "rolespec_validate": False,
            }},
        ],
        "handlers": [{"name": "Restart Nomad", "ansible.builtin.debug": {"msg": "notified"}}],
    }  # fmt: skip
    (tmp_path / "play.yml").write_text(json.dumps([play]), encoding="utf-8")
    variables = {
        "_common_bundle": "",
        "_common_family": {"packages": "apt"},
        "_common_packages_environment": {},
        "_common_host": role_helper.host("/run/systemd/system", units=UNITS),
        **given,
    }
    ran = subprocess.run(
        [str(Path(sys.executable).with_name("ansible-playbook")), "--check", "--extra-vars", json.dumps(variables),
         str(tmp_path / "play.yml")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"^localhost +: .* changed=1 ", ran.stdout, re.MULTILINE), ran.stdout
    assert ("notified" in ran.stdout) is (role == "nomad_client")
