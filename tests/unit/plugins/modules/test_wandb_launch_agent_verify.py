# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.modules import wandb_launch_agent_verify as verify
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import nomad_helper as farm
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

# Of wandb 0.31.0.
POLLS = "wandb: launch: agent launch-0 polling on queues gpus, running 0 out of a maximum of inf jobs\n"
BUSY = "wandb: launch: agent launch-0 running 1 out of a maximum of 1 jobs\n"
STARTED = f"{verify.STARTS}\nwandb: Starting launch agent\n"
LOGS = "wandb: ERROR Find detailed error logs at: /tmp/debug-cli.root.log\n"
NO_KEY = "Error: Failed to verify credentials with http://w.example: user is not logged in\n"
NO_QUEUE = (
    "Error: Could not start launch agent: Not all of requested queues (none) found. Available queues for this project: "
    "gpus,spare\n"
)
NO_ENTITY = "Error: Error fetching run queues for other check that you have access to this entity and project\n"
KEY = "k" * 40
ASKED = {"base_url": "http://w.example", "entity": "lab", "queues": ["gpus"], "api_key": KEY, "timeout": 0}


def test_the_mark_is_that_of_the_program() -> None:
    program = Path(__file__).resolve().parents[4] / "roles/wandb_launch_agent/files/agent.py"
    assert f'STARTS = "{verify.STARTS}"' in program.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("log", "status"),
    [
        ("", None),
        (STARTED, None),
        (STARTED + POLLS, "agent launch-0 polling on queues gpus, running 0 out of a maximum of inf jobs"),
        (STARTED + POLLS + BUSY, "agent launch-0 running 1 out of a maximum of 1 jobs"),
        # What an agent said that has ended is nothing of this one.
        (STARTED + POLLS + NO_KEY + STARTED, None),
        # A log that was cut off at its head.
        (POLLS, "agent launch-0 polling on queues gpus, running 0 out of a maximum of inf jobs"),
    ],
)
def test_an_agent_polls_when_it_says_so(log: str, status: str | None) -> None:
    assert verify.status_of(log) == status


@pytest.mark.parametrize(
    ("said", "found", "step"),
    [
        (LOGS + NO_KEY, "user is not logged in", "correct wandb_launch_agent_api_key, or"),
        (
            LOGS + NO_QUEUE,
            "requested queues (none) found",
            "make the queue in W&B, or correct wandb_launch_agent_queues",
        ),
        (LOGS + NO_ENTITY, "run queues for other", "correct wandb_launch_agent_entity"),
        ("Traceback:\nOops\n", "Traceback:; Oops", "see that http://w.example answers this host, and read the log"),
        ("", "has said nothing", "see that http://w.example answers this host"),
    ],
)
def test_one_that_has_ended_says_why(said: str, found: str, step: str) -> None:
    seen = verify.Seen(verify.STARTS + "\n" + said, "has ended with 1", "the log")
    told = str(verify.problem(seen, "lab", ["gpus"], "http://w.example"))
    assert told.startswith("the launch agent has ended with 1") and found in told
    assert "Expected: one that polls gpus of lab at http://w.example. Next step: " + step in told
    assert "detailed error logs" not in told


def test_the_time_is_a_limit_and_no_verdict() -> None:
    """It looks until something is so, however soon or late, and at the end once more."""
    now = [0.0]

    def pause(seconds: float) -> None:
        now[0] += seconds

    logs = iter([STARTED, STARTED, STARTED + POLLS])
    seen = verify.wait(lambda: verify.Seen(next(logs), "", ""), 100, lambda: now[0], pause)
    assert (verify.status_of(seen.log) is not None, now[0]) == (True, 2)
    now[0] = 0
    seen = verify.wait(lambda: verify.Seen(STARTED, "", ""), 5, lambda: now[0], pause)
    assert (seen.log, now[0]) == (STARTED, 5)
    seen = verify.wait(lambda: verify.Seen(STARTED, "has ended", ""), 100, lambda: now[0], pause)
    assert (seen.ended, now[0]) == ("has ended", 5)


def test_what_has_ended_before_and_is_started_again_is_waited_for() -> None:
    before = verify.Seen(STARTED + POLLS + NO_KEY, "has ended", "", "start 1")
    looks = [before, before, verify.Seen(STARTED, "", ""), verify.Seen(STARTED + POLLS, "", "")]
    seen = verify.wait(iter(looks).__next__, 100, lambda: 0.0, lambda _seconds: None)
    assert verify.status_of(seen.log) and not seen.ended
    other = verify.Seen(STARTED + NO_QUEUE, "has ended", "", "start 2")
    assert verify.wait(iter([before, before, other]).__next__, 100, lambda: 0.0, lambda _seconds: None) == other
    now = [0.0]

    def pause(seconds: float) -> None:
        now[0] += seconds

    assert verify.wait(lambda: before, 5, lambda: now[0], pause) == before and now[0] == 5


def show(active: str, sub: str, code: int = 0) -> str:
    return f"Result=x\nActiveState={active}\nSubState={sub}\nExecMainStatus={code}\nInvocationID=abc\n"


@pytest.mark.parametrize(
    ("state", "ended"),
    [
        (show("active", "running"), ""),
        (show("activating", "start"), ""),
        (show("activating", "auto-restart", 1), "has ended with 1"),
        (show("failed", "failed", 2), "has ended with 2"),
        (show("inactive", "dead"), "has ended with 0"),
    ],
)
def test_a_unit_is_read_by_its_last_start(state: str, ended: str) -> None:
    asked: list[list[str]] = []

    def run(words: list[str]) -> str:
        asked.append(words)
        return state if words[0] == "systemctl" else STARTED

    again = "abc" if "auto-restart" in state else ""
    read = "`journalctl -u a.service` on this host"
    assert verify.of_unit(run, "a.service") == verify.Seen(STARTED, ended, read, again)
    assert asked[1] == [
        "journalctl", "--no-pager", "--output=cat", "--lines=10000", "_SYSTEMD_INVOCATION_ID=abc"
    ]  # fmt: skip


def test_of_a_long_journal_the_end_is_read() -> None:
    """It has all that runs have printed, of weeks."""
    journal = f"{STARTED}{POLLS}" + "epoch 1\n" * 50000 + BUSY + "epoch 2\n" * 5000

    def run(words: list[str]) -> str:
        if words[0] == "systemctl":
            return show("active", "running")
        (lines,) = (int(word.partition("=")[2]) for word in words if word.startswith("--lines="))
        return "".join(journal.splitlines(keepends=True)[-lines:])

    seen = verify.of_unit(run, "a.service")
    assert (seen.log.count("\n"), verify.status_of(seen.log)) == (
        10000, "agent launch-0 running 1 out of a maximum of 1 jobs"
    )  # fmt: skip


class Nomad(farm.Agent):
    """An agent's job with one allocation of its version, and one of the version before."""

    def __init__(self) -> None:
        super().__init__()
        self.log: str | None = STARTED + POLLS
        self.status, self.state, self.event = "running", "running", "Started"
        self.placed = True
        self.answer = self.as_nomad

    def as_nomad(self, request: Any) -> bool:
        path = request.path.partition("?")[0]
        if path.startswith("/v1/client/fs/logs/new"):
            status, answer = (404, "not started yet") if self.log is None else (200, self.log)
        elif path.endswith("/allocations"):
            events = [
                {"Type": "Terminated", "DisplayMessage": "Exit Code: 1"},
                {"Type": self.event, "DisplayMessage": ""},
            ]
            new = {"ID": "new", "JobVersion": 3, "CreateIndex": 9, "ClientStatus": self.status,
                   "TaskStates": {"agent": {"State": self.state, "Events": events}}}  # fmt: skip
            old = {"ID": "old", "JobVersion": 2, "CreateIndex": 99, "ClientStatus": "running", "TaskStates": None}
            status, answer = 200, json.dumps([old, *([new] if self.placed else [])])
        elif path.endswith("/evaluations"):
            metric = {"ConstraintFiltered": {"missing drivers": 1}, "DimensionExhausted": None}
            status, answer = (
                200,
                json.dumps([{"CreateIndex": 2, "FailedTGAllocs": {"agent": metric}}, {"CreateIndex": 1}]),
            )
        else:
            status, answer = 200, json.dumps({"Version": 3})
        request.reply(status, answer.encode(), {})
        return True


@pytest.fixture
def nomad(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nomad]:
    for name in ("NOMAD_TOKEN", "NOMAD_NAMESPACE", "NOMAD_REGION"):
        monkeypatch.delenv(name, raising=False)
    running = Nomad()
    yield running
    running.close()


def run(nomad: Nomad, capsys: pytest.CaptureFixture[str]) -> helper.Outcome:
    return helper.run_module(verify.main, capsys, {**ASKED, "address": nomad.url, "job": "launch"})


def test_an_agent_in_nomad_polls(nomad: Nomad, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(nomad, capsys)
    assert (found["changed"], found["agent"][:23]) == (False, "agent launch-0 polling ")
    nomad.log = None
    assert "the launch agent does not poll, and has said nothing" in run(nomad, capsys)["msg"]


@pytest.mark.parametrize(("status", "state", "event"), [("running", "pending", "Restarting"), ("failed", "dead", "x")])
def test_an_agent_in_nomad_that_ends_is_seen_before_it_is_begun_again(
    nomad: Nomad, capsys: pytest.CaptureFixture[str], status: str, state: str, event: str
) -> None:
    nomad.status, nomad.state, nomad.event = status, state, event
    nomad.log = STARTED + POLLS + LOGS + f"Error: Failed to verify credentials: {KEY} is wrong\n"
    told = run(nomad, capsys)["msg"]
    assert "the launch agent has ended in Nomad (Exit Code: 1) (Error: Failed to verify credentials" in told
    assert "Next step: correct wandb_launch_agent_api_key" in told
    assert KEY not in told


def test_an_agent_that_nomad_cannot_place_is_named(nomad: Nomad, capsys: pytest.CaptureFixture[str]) -> None:
    nomad.placed = False
    told = run(nomad, capsys)["msg"]
    assert "the launch agent cannot be placed by Nomad: missing drivers" in told
    assert re.search("Next step: .*raw_exec", told), told
