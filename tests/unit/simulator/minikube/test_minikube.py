# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The double of minikube against what was read off minikube 1.38.1: `--help` of its commands, and its answers.

That one was built of the Go module k8s.io/minikube (`go build -tags libvirt_dlopen k8s.io/minikube/cmd/minikube`). With
GPUFARM_MINIKUBE=/path, and Docker, the same is asked of a real one.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.simulator.cache import ROOT

DOUBLE = ROOT / "tests/simulator/minikube/minikube"
MINIKUBE = os.environ.get("GPUFARM_MINIKUBE") or str(DOUBLE)
RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "recorded.json").read_text(encoding="utf-8"))
MADE = {"KubernetesConfig": {"KubernetesVersion": "v1.35.1", "ContainerRuntime": "docker"}, "GPUs": "",
        "Nodes": [{"Port": 8443, "KubernetesVersion": "v1.35.1", "ControlPlane": True, "Worker": True}]}  # fmt: skip


def ask(home: Path, *argv: str, path: str = "") -> tuple[int, str]:
    """Return the exit code and all that it says; it finds a Docker, unless it is sent elsewhere."""
    folder = home / "bin"
    if not os.environ.get("GPUFARM_MINIKUBE"):
        folder.mkdir(exist_ok=True)
        (folder / "docker").write_text("#!/bin/sh\necho '{\"nvidia\":{}}'\n", encoding="ascii")
        (folder / "docker").chmod(0o755)
    settings = {"MINIKUBE_IN_STYLE": "false", "MINIKUBE_WANTUPDATENOTIFICATION": "false"}
    env = {"HOME": str(home), "PATH": path or f"{folder}:/usr/bin:/bin", **settings}
    # Which the double's first line would look for on that PATH.
    python = [] if os.environ.get("GPUFARM_MINIKUBE") else [sys.executable]
    done = subprocess.run([*python, MINIKUBE, *argv], env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_it_takes_no_option_that_minikube_has_not() -> None:
    names = runpy.run_path(str(DOUBLE))
    shorts = {name: short for short, name in names["SHORT"].items()}
    assert names["VERSION"] == RECORDED["version"]
    for command, options in {**names["OPTIONS"], "all": names["OF_ALL"]}.items():
        for name, takes in options.items():
            told = RECORDED["options"][command][name]
            assert takes is told.endswith("VALUE"), (command, name)
            assert told.startswith(f"-{shorts[name]}") if name in shorts else not told.startswith("-"), (command, name)


@pytest.mark.skipif(os.geteuid() != 0, reason="what root is told, root alone can ask for")
def test_it_answers_as_minikube_does(tmp_path: Path) -> None:
    for name, driver in (("of-podman", "podman"), ("plain", "docker")):
        folder = tmp_path / ".minikube/profiles" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"Name": name, "Driver": driver, **MADE}), encoding="utf-8")
    for asked in RECORDED["answers"]:
        code, told = ask(tmp_path, *asked["argv"], path=asked.get("path", ""))
        assert code == asked["code"] and asked["said"] in told, (asked, code, told)


def test_it_takes_no_gpus_without_nvidias_runtime(tmp_path: Path) -> None:
    if os.environ.get("GPUFARM_MINIKUBE"):
        pytest.skip("a real one would make a cluster")
    (tmp_path / "docker").write_text("#!/bin/sh\necho '{\"runc\":{}}'\n", encoding="ascii")
    (tmp_path / "docker").chmod(0o755)
    options = ("--driver", "docker", "--gpus", "all", *["--force"] * (os.geteuid() == 0))
    code, told = ask(tmp_path, "start", *options, path=f"{tmp_path}:/usr/bin:/bin")
    assert code == 80 and "GUEST_PROVISION" in told, told
