"""What W&B's launch agent takes for Docker: each `docker run` becomes a job of Nomad, which finds a node for it.

It dispatches the parameterized job that has as many GPUs as `--gpus` asks for, waits for its end and ends as it did. A
dispatched job has the image, its command and its environment in its meta. What is named without a value, as the API
key, stays out of it: the job takes it from Nomad's variables.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import socket
import sys
import time
import urllib.parse
import uuid
from typing import NoReturn

SECRET = "WANDB_API_KEY"
PAUSE_S = 2
# As a program that SIGTERM has ended.
STOPPED = 143
# Seconds for which Nomad may be away, as while its servers elect a leader.
PATIENCE_S = 300
# Seconds for which the node of a run may not answer Nomad. Until then nothing begins anew, for the run may go on there.
LOST_S = 900
LOG_BYTES = 65536
# What Nomad answers 500 to although no other try helps: the job is not there, not parameterized, or takes no such meta.
REFUSED = re.compile("parameterized job|job .* is stopped|meta(data)? keys")
# What a container of a cluster has no use for, or what the parameterized job says already.
LEFT_TO_THE_JOB = ("network", "add-host")


class Problem(Exception):
    """What was found, expected, and what to do."""


class Gone(Exception):
    """Nomad does not answer now."""


class Nomad:
    """The API on the socket that Nomad gives a task with an identity, or at an address."""

    def __init__(self, address: str, token: str, namespace: str) -> None:
        self.parts = urllib.parse.urlsplit(address)
        self.token = token
        self.namespace = namespace

    def _connection(self) -> http.client.HTTPConnection:
        if self.parts.scheme != "unix":
            return http.client.HTTPConnection(self.parts.hostname or "", self.parts.port, timeout=60)
        connection = http.client.HTTPConnection("localhost", timeout=60)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(60)
        connection.sock.connect(self.parts.path)
        return connection

    def call(self, method: str, path: str, body: object = None, **query: str) -> bytes:
        """What Nomad answers; Gone where another try may help."""
        query["namespace"] = self.namespace
        try:
            connection = self._connection()
            connection.request(
                method, f"{path}?{urllib.parse.urlencode(query)}", None if body is None else json.dumps(body),
                {"Authorization": f"Bearer {self.token}"},
            )  # fmt: skip
            answer = connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise Gone(f"{path}: {error}") from error
        told = text.decode(errors="replace").strip()
        if (answer.status >= 500 or answer.status == http.client.TOO_MANY_REQUESTS) and not REFUSED.search(told):
            raise Gone(f"{path} answered {answer.status}: {told}")
        if answer.status >= 400:
            raise Problem(
                f"Nomad answered {answer.status} to {method} {path}: {told}. Expected: "
                "a job that it takes, from an agent that may send it. Next step: run the role wandb_launch_agent again"
            )
        return text


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class Words(argparse.ArgumentParser):
    """What is wrong is told as all else here."""

    def error(self, message: str) -> NoReturn:
        raise Problem(f"docker run: {message}. Expected: an image. Next step: correct the item of the queue")


def parse(words: list[str]) -> argparse.Namespace:
    """The words after `docker run`, as the agent writes them."""
    parser = Words(prog="docker run", allow_abbrev=False, add_help=False)
    parser.add_argument("--rm", action="store_true")
    parser.add_argument("-e", "--env", action="append", default=[])
    parser.add_argument("--gpus")
    parser.add_argument("--entrypoint")
    parser.add_argument("--name")
    for name in LEFT_TO_THE_JOB:
        parser.add_argument(f"--{name}")
    parser.add_argument("image")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    found, more = parser.parse_known_args(words)
    # What argparse does not know lies before the image, and so may have taken a value for the image.
    if more or found.image.startswith("-"):
        raise Problem(
            f"docker run has {' '.join(more) or found.image}. Expected: gpus, env, name and a command alone, for the "
            "other resources of a run are those of wandb_launch_agent_run_*. Next step: take it out of the queue's "
            "resource_args"
        )
    return found


def count_of(gpus: str | None, counts: list[int]) -> int:
    """How many GPUs a run asks for; without a word of it, the first count that there is a job for."""
    if gpus is None:
        return counts[0]
    told = gpus.strip('"').removeprefix("count=")
    if told.isdigit() and int(told) in counts:
        return int(told)
    raise Problem(
        f"a run asks for gpus {gpus}. Expected: one of {', '.join(map(str, counts))}, as a number. "
        "Next step: correct gpus in the queue's resource_args, or add the number to wandb_launch_agent_gpus"
    )


def meta_of(run: argparse.Namespace) -> dict[str, str]:
    """What the dispatched job is told; values that the caller keeps to itself are not."""
    pairs = [each.partition("=") for each in run.env]
    return {
        "image": run.image,
        "entrypoint": json.dumps([run.entrypoint] if run.entrypoint else []),
        "words": json.dumps(run.words),
        "env": json.dumps({name: value for name, sign, value in pairs if sign and name != SECRET}),
    }


class Run:
    """A dispatched job."""

    def __init__(self, nomad: Nomad) -> None:
        self.nomad = nomad
        self.path = ""
        self.over = ""
        self.silent_since: float | None = None

    def stop(self, *_signal: object) -> None:
        self.over = "stopped the job in Nomad"

    def dispatch(self, job: str, meta: dict[str, str]) -> str:
        """Its name in Nomad, which makes one of a token, however often it is asked: an answer may be lost."""
        path, token = f"/v1/job/{urllib.parse.quote(job, safe='')}/dispatch", str(uuid.uuid4())
        begun = time.monotonic()
        while True:
            try:
                answer = json.loads(self.nomad.call("POST", path, {"Meta": meta}, idempotency_token=token))
            except Gone as error:
                if time.monotonic() - begun > PATIENCE_S:
                    raise
                say(f"Nomad does not answer ({error})")
            else:
                child = str(answer["DispatchedJobID"])
                self.path = f"/v1/job/{urllib.parse.quote(child, safe='')}"
                return child
            time.sleep(PAUSE_S)

    def wait(self) -> int:
        """Wait for its end and return its exit code; end it where this is asked to end."""
        away = told = None
        while True:
            try:
                if self.over:
                    self.nomad.call("DELETE", self.path)
                    say(self.over)
                    return STOPPED
                found = json.loads(self.nomad.call("GET", f"{self.path}/allocations"))
                job = json.loads(self.nomad.call("GET", self.path))
                away = None
            except Gone as error:
                away = away or time.monotonic()
                if time.monotonic() - away > PATIENCE_S:
                    raise
                told = f"Nomad does not answer ({error})"
            else:
                last = max(found, key=lambda each: each["CreateIndex"]) if found else None
                # One that was ended is complete, whatever it had done.
                if job["Stop"]:
                    say("somebody has stopped the job in Nomad")
                    return STOPPED
                if last and self.silent(last):
                    self.over = f"{last['NodeName']} has not answered for {LOST_S} s; the job is stopped"
                    continue
                if last and last["ClientStatus"] not in ("pending", "running", "unknown"):
                    if last.get("DesiredStatus") not in ("stop", "evict"):
                        return self.ended(last)
                    # Where there is no room now, Nomad would begin it anew later, for nobody.
                    self.over = f"Nomad has ended it on {last['NodeName']}"
                    continue
                told = (
                    f"{last['ClientStatus']} on {last['NodeName']}"
                    if last
                    else "waits in Nomad for a node with free GPUs"
                )
            # The agent looks for a stop request only after it has read something.
            say(told)
            time.sleep(PAUSE_S)

    def silent(self, last: dict) -> bool:  # type: ignore[type-arg]
        """Whether the node of a run has not answered for too long."""
        if last["ClientStatus"] != "unknown":
            self.silent_since = None
            return False
        now = time.monotonic()
        self.silent_since = self.silent_since or now
        return now - self.silent_since > LOST_S

    def ended(self, last: dict) -> int:  # type: ignore[type-arg]
        for kind in ("stdout", "stderr"):
            try:
                log = self.nomad.call(
                    "GET", f"/v1/client/fs/logs/{last['ID']}", task="run", type=kind, plain="true", origin="end",
                    offset=str(LOG_BYTES),
                )  # fmt: skip
                say(log.decode(errors="replace"))
            except (Gone, Problem) as error:
                say(f"its {kind} cannot be read: {error}")
        state = (last.get("TaskStates") or {}).get("run") or {}
        for event in state.get("Events") or []:
            say(event["DisplayMessage"])
        say(f"{last['ClientStatus']} on {last['NodeName']}")
        if last["ClientStatus"] == "complete":
            return 0
        codes = [
            int(event["Details"].get("exit_code", 0)) for event in state.get("Events") or [] if event.get("Details")
        ]
        return next((code for code in reversed(codes) if code), 1)


def run(words: list[str], environment: dict[str, str]) -> int:
    wanted = parse(words)
    if any(word.startswith(f"{SECRET}=") and word != f"{SECRET}={environment.get(SECRET)}" for word in wanted.env):
        raise Problem(
            f"a run has a {SECRET} of its own. Expected: none, for a run has the agent's. Next step: take it out of "
            "the queue's resource_args, or have an agent with that key"
        )
    jobs = json.loads(environment["GPUFARM_RUN_JOBS"])
    job = jobs[str(count_of(wanted.gpus, [int(count) for count in jobs]))]
    nomad = Nomad(
        environment["NOMAD_ADDR"], environment.get("NOMAD_TOKEN", ""), environment.get("NOMAD_NAMESPACE", "default")
    )
    dispatched = Run(nomad)
    # Before Nomad is asked, for it may have the job before this has its answer.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, dispatched.stop)
    say(f"Nomad has it as {dispatched.dispatch(job, meta_of(wanted))}")
    return dispatched.wait()


def main() -> int:
    try:
        if sys.argv[1:2] == ["run"]:
            return run(sys.argv[2:], dict(os.environ))
        # The node that gets the run pulls its image.
        if sys.argv[1:2] == ["pull"] or sys.argv[1:3] == ["image", "inspect"]:
            return 0
        raise Problem(
            f"docker {' '.join(sys.argv[1:])} was asked for. Expected: run, pull or image inspect, for there is no "
            "Docker here that builds. Next step: queue jobs that have an image"
        )
    except (Problem, Gone) as error:
        sys.stderr.write(f"gpufarm: {error}.\n")
        return 125


if __name__ == "__main__":
    sys.exit(main())
