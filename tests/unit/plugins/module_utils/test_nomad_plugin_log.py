# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What logs of Nomad 1.11.3 mean, with the plugin of Nomad 1.1.0 over the GPU double, as the journal has them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import nomad_plugin_log

RECORDED = Path(__file__).parents[1] / "fixtures/nomad/plugin-logs-1.11.3.json"
LOGS: dict[str, list[str]] = json.loads(RECORDED.read_text(encoding="utf-8"))
STAMP = "2026-11-26T14:12:26.390Z"
TOKEN = "b379deba-2d12-96a1-f561-687b93a28533"


def said(*lines: str) -> list[str]:
    return nomad_plugin_log.said(line.encode() for line in lines)


@pytest.mark.parametrize(
    ("case", "cause", "word"),
    [
        ("no library", "no NVML", None),
        ("not loaded", "the driver was not loaded when the agent started", "nvml: Driver Not Loaded"),
        ("mismatch", "a driver mismatch: the kernel module that is loaded", "nvml: Driver/library version mismatch"),
        ("blocked", "the operating system keeps the GPU", "nvml: GPU access blocked by the operating system"),
        ("denied", "an NVML that does not start", "problems with NVML loading: error=\"nvml: Unknown Error\""),
        ("lost", "one GPU that the plugin cannot read, which hides", "DeviceInfoByIndex() error: nvml: GPU is lost"),
        ("broken", "one GPU that the plugin cannot read, which hides", "DeviceInfoByIndex() error: nvml: Unknown"),
    ],
)  # fmt: skip
def test_causes_by_what_was_really_said(case: str, cause: str, word: str | None) -> None:
    log = nomad_plugin_log.judged(said(*LOGS[case]))
    assert log.cause.startswith(cause)
    assert bool(log.lines) is (word is not None) and (word or "") in log.message
    assert f"Likely cause: {log.cause}. Next step: {log.next_step}." in log.message
    # Before the journal takes the white space away it says the same.
    indented = (line if line.startswith("2026") else f"  {line}" for line in LOGS[case])
    assert said(*indented) == log.lines


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        # As NVML names its errors where its library cannot tell them.
        ('unable to initialize: reason="failed to initialize: ERROR_LIB_RM_VERSION_MISMATCH"', "a driver mismatch"),
        ('unable to initialize: reason="failed to initialize: ERROR_DRIVER_NOT_LOADED"', "the driver was not loaded"),
        ('unable to initialize: reason="failed to initialize: ERROR_LIBRARY_NOT_FOUND"', "no NVML"),
        ("failed to get device handle: ERROR_GPU_IS_LOST", "one GPU that the plugin cannot read"),
        # As release 1.1.0 has it.
        *[
            (f"fingerprinting returned an error: nvidia nvml DeviceInfoByUUID() error: failed to get {what}", cause)
            for what, cause in [
                ("device power info: Unknown Error", "one GPU that the plugin cannot read"),
                ("pcie link width: Unknown Error", "one GPU that the plugin cannot read"),
                ("device handle: GPU is lost", "one GPU that the plugin cannot read"),
                ("device bar 1 memory info: Not Supported", "a plugin that asks what this GPU does not tell"),
                ("device mem clock: ERROR_NOT_SUPPORTED", "a plugin that asks what this GPU does not tell"),
                ("device display mode: Not Supported", "a plugin that asks what this GPU does not tell"),
            ]
        ],
        (
            "ListDeviceUUIDs() error: failed to get device MIG mode: Unknown Error",
            "one GPU that the plugin cannot read",
        ),
        ("unable to initialize: Insufficient Permissions", "the agent may not use the GPU's devices"),
        ("dispensing initial plugin failed: error=", "a plugin that does not start"),
        ("something else", "not known"),
    ],
)
def test_causes_by_words(line: str, cause: str) -> None:
    assert nomad_plugin_log.judged(["of an earlier kind", line]).cause.startswith(cause)


def test_the_newest_word_that_means_something_counts() -> None:
    lines = ["nvml: Driver Not Loaded", "DeviceInfoByIndex() error: nvml: GPU is lost", "something else"]
    assert nomad_plugin_log.judged(lines).cause.startswith("one GPU")


def test_an_agent_that_is_not_told_of_the_plugin() -> None:
    words = "plugin not referenced in the agent configuration file, loading skipped"
    lines = [
        f"{STAMP} [WARN]  agent.plugin_loader: {words}: plugin_dir=/opt plugin=nomad-device-nvidia",
        f"{STAMP} [WARN]  agent.plugin_loader: {words}: plugin_dir=/opt plugin=another",
    ]
    assert said(*lines) == [words]
    assert nomad_plugin_log.judged(said(*lines)).cause == "an agent that is not told of the plugin"


def test_nothing_is_told_but_what_the_plugin_and_its_manager_say() -> None:
    lines = [
        f"{STAMP} [ERROR] client.rpc: error performing RPC to server: token={TOKEN}",
        f"| more of {TOKEN}",
        f"{STAMP} [INFO]  client.device_mgr: plugin process exited: {TOKEN}",
        f"{STAMP} [ERROR] client.device_mgr: fingerprinting returned an error: plugin=nvidia-gpu",
        "error=",
        f"| GPU-{TOKEN} with {TOKEN} at https://somebody:secret@mirror.example.com/",
        f"goroutine 1 of {TOKEN}",
        f"| {TOKEN}",
        f"{STAMP} [ERROR] client.device_mgr.nomad-device-nvidia: \x1b[31mred\x07: plugin=nvidia-gpu id={TOKEN}",
    ]
    assert said(*lines) == [
        f"fingerprinting returned an error: GPU-{TOKEN} with (hidden) at https://(hidden)mirror.example.com/",
        "[31mred",
    ]


def test_few_short_lines_none_of_them_twice() -> None:
    lines = [
        f"{STAMP} [ERROR] client.device_mgr: number {n % 9}: timestamp={n} error={'x' * 5000}" for n in range(1000)
    ]
    found = said(*lines)
    assert [line[:8] for line in found] == [f"number {n}" for n in (5, 6, 7, 8, 0)]
    assert {len(line) for line in found} == {nomad_plugin_log.LINE_CHARS}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder in front of PATH, where systemctl and journalctl note how they are called."""
    for name in ("systemctl", "journalctl"):
        program = tmp_path / name
        program.write_text(
            f'#!/bin/sh\necho "{name} $*" >>{tmp_path}/called\ncat {tmp_path}/{name}.out\n', encoding="utf-8"
        )
        program.chmod(0o755)
    (tmp_path / "systemctl.out").write_text("InvocationID=abc\n", encoding="utf-8")
    (tmp_path / "journalctl.out").write_text("\n".join(LOGS["lost"]), encoding="utf-8")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_the_journal_of_the_agent_that_runs_is_read(host: Path) -> None:
    assert nomad_plugin_log.read() == nomad_plugin_log.judged(said(*LOGS["lost"]))
    called = (host / "called").read_text(encoding="utf-8").splitlines()
    assert called[0] == "systemctl show nomad --property=InvocationID"
    assert called[1] == "journalctl --no-pager --output=cat _SYSTEMD_INVOCATION_ID=abc"
    # An agent that never ran has none.
    (host / "systemctl.out").write_text("InvocationID=\n", encoding="utf-8")
    nomad_plugin_log.read()
    assert (host / "called").read_text(encoding="utf-8").splitlines()[-1].endswith(" --unit=nomad")


@pytest.mark.parametrize("program", ["systemctl", "journalctl"])
def test_a_journal_that_cannot_be_read_is_no_cause(host: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    (host / f"{program}.out").unlink()
    log = nomad_plugin_log.read()
    assert log.lines == [] and log.cause.startswith("not known, as the journal cannot be read (")
    monkeypatch.setenv("PATH", "/nowhere")
    assert nomad_plugin_log.read().next_step == "read `journalctl -u nomad` on the node"
