# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Engines asked side by side, with programs that print what theirs print."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils.container_engines import answers
from ansible_collections.gpufarm.core.plugins.modules import container_engine_info
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

PROGRAMS = {
    "docker": """echo '{"runtimes": {"runc": {"path": "runc"}}, "default": "runc"}'""",
    "podman": "echo crun 4.3.1",
    "crio": "echo connection refused >&2; exit 1",
    "nvidia-ctk": """case $2 in
generate) echo "made ${NVIDIA_CTK_CDI_GENERATE_DEVICE_NAME_STRATEGIES-}${NVIDIA_CTK_CDI_OUTPUT_FILE_PATH-}" ;;
list) echo level=info Found 2 CDI devices >&2; echo nvidia.com/gpu=0; echo nvidia.com/gpu=all ;;
esac""",
    "systemctl": "echo",
}


@pytest.fixture(autouse=True)
def _programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, script in PROGRAMS.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(answers, "SERVICE_PATH", f"{tmp_path}:{answers.SERVICE_PATH}")
    monkeypatch.setattr(answers, "REFRESH", tmp_path / "refresh.env")
    monkeypatch.setattr(answers, "SPECIFICATION", str(tmp_path / "nvidia.yaml"))


def test_engines_are_told_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"engines": ["docker", "containerd", "crio", "podman"], "containerd_socket": str(tmp_path / "none")}
    result = helper.run_module(container_engine_info.main, capsys, given)
    assert result["cdi_devices"] == ["nvidia.com/gpu=0", "nvidia.com/gpu=all"] and not result["changed"]
    assert result["engines"] == {
        "docker": {"answers": True, "reason": None, "runtimes": {"runc": "runc"}, "default": "runc", "version": None},
        "containerd": {
            "answers": False, "reason": f"{tmp_path}/none: No such file or directory", "runtimes": {}, "default": None,
            "version": None,
        },
        "crio": {"answers": False, "reason": "connection refused", "runtimes": {}, "default": None, "version": None},
        "podman": {"answers": True, "reason": None, "runtimes": {"crun": ""}, "default": "crun", "version": "4.3.1"},
    }  # fmt: skip


def test_no_list_is_not_an_empty_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "nvidia-ctk").write_text("#!/bin/sh\nexit 1\n")
    assert helper.run_module(container_engine_info.main, capsys, {"engines": []})["cdi_devices"] is None
    (tmp_path / "nvidia-ctk").write_text("#!/bin/sh\n")
    assert helper.run_module(container_engine_info.main, capsys, {"engines": []})["cdi_devices"] == []


def test_a_specification_is_current_that_would_be_made_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def current() -> object:
        return helper.run_module(container_engine_info.main, capsys, {"engines": []})["cdi_current"]

    # What the service has is none of ours.
    monkeypatch.setenv(answers.OUTPUT, "/nowhere")
    assert current() is False
    (tmp_path / "nvidia.yaml").write_text("made \n")
    assert current() is True
    # With the settings of the service, in the place that it has.
    elsewhere = tmp_path / "own.yaml"
    strategies = "NVIDIA_CTK_CDI_GENERATE_DEVICE_NAME_STRATEGIES=uuid"
    (tmp_path / "refresh.env").write_text(
        f"# {answers.OUTPUT}=/var/run\n{strategies}\n{answers.OUTPUT}='{elsewhere}'\n"
    )
    assert current() is False
    elsewhere.write_text("made uuid\n")
    assert current() is True
    (tmp_path / "nvidia-ctk").write_text("#!/bin/sh\nexit 1\n")
    assert current() is None


def test_a_specification_is_made_with_the_path_of_the_service(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-ctk").write_text("#!/bin/sh\ncommand -v sh\n")
    (tmp_path / "nvidia.yaml").write_text("/usr/bin/sh\n")
    # As sudo has it on RHEL, where /bin is a link.
    monkeypatch.setenv("PATH", f"{tmp_path}:/sbin:/bin:/usr/sbin:/usr/bin")
    assert helper.run_module(container_engine_info.main, capsys, {"engines": []})["cdi_current"] is True


@pytest.mark.parametrize(
    ("text", "version"),
    [(None, None), ("---\ncdiVersion: 0.7.0\nkind: nvidia.com/gpu\n", "0.7.0"), ('cdiVersion: "0.5.0"\n', "0.5.0")],
)
def test_the_version_of_a_specification(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, version: str | None
) -> None:
    if text:
        (tmp_path / "nvidia.yaml").write_text(text)
    assert helper.run_module(container_engine_info.main, capsys, {"engines": []})["cdi_version"] == version


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("[Unit]\nAfter=nvidia-persistenced.service\n", True),
        ("[Service]\nEnvironment=NVIDIA_CTK_CDI_GENERATE_MODE=csv\n", False),
        ("[Service]\nEnvironmentFile=-/etc/mine\n", False),
        ("[Service]\nExecStart=\nExecStart=/usr/bin/mine\n", False),
    ],
)
def test_of_a_specification_that_a_drop_in_has_made_otherwise_nothing_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, known: bool
) -> None:
    (tmp_path / "mine.conf").write_text(text)
    asked = "show --property=DropInPaths --value nvidia-cdi-refresh.service"
    (tmp_path / "systemctl").write_text(
        f'#!/bin/sh\n[ "$*" = "{asked}" ] && echo {tmp_path}/none.conf {tmp_path}/mine.conf\n'
    )
    current = helper.run_module(container_engine_info.main, capsys, {"engines": []})["cdi_current"]
    assert current is (False if known else None)


@pytest.mark.parametrize(
    ("text", "named"),
    [("", True), ("=uuid", False), ("=type-index,uuid", False), ("='uuid,index'", True), ("=index", True)],
)
def test_names_by_index_are_the_owner_s_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, named: bool
) -> None:
    (tmp_path / "refresh.env").write_text(f"{answers.STRATEGIES}{text}\n" if text else "")
    assert helper.run_module(container_engine_info.main, capsys, {"engines": []})["cdi_by_index"] is named
