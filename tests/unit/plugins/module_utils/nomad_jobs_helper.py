# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A Nomad that places jobs, runs their tasks and forgets them, in the form of the recorded answers of a real one.

It honours the pins of a job and nothing else: a task gets the GPU that its device constraint names on the node that the
job's constraint names, and without such a constraint the first one there is.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import http.server
import inspect
import json
import math
import threading
import time
import urllib.parse
from pathlib import Path
from types import ModuleType
from typing import Any

from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import nomad_helper as farm

# Of what a GPU did.
CODES_OF_WORK = {"context_failed", "memory_errors", "wrong_results", "slow_memory", "slow_fp32", "slow_tensor"}
RECORDED: dict[str, Any] = farm.recorded("jobs-1.11.3")
RECORDED_NODE = "6f147e38-ae1f-6715-e8fc-46638c4fbdfa"
RECORDED_UUIDS = (
    "GPU-3672890b-e127-9850-0c65-415ee8cf8a17",
    "GPU-5217b60b-a084-c509-4a92-d140ca81aaf5",
    "GPU-5372f0c7-5f41-d43c-8925-64cb2e6d1b39",
    "GPU-3e7bd34d-1ed9-e50f-bd5d-efb3ee9be693",
)
RECORDED_WSL_UUID = "GPU-323c8947-8478-b3a5-69f7-a496b426e4bb"


def codes_in(module: ModuleType) -> set[str]:
    """The codes that a source gives to findings and problems."""
    place = {"Finding": 0, "problem_of": 1, "skipped": 1}
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Call)]
    named = [(call, getattr(call.func, "id", None) or getattr(call.func, "attr", "")) for call in calls]
    arguments = [call.args[place[name]] for call, name in named if name in place and len(call.args) > place[name]]
    parts = [part for argument in arguments for part in ast.walk(argument) if isinstance(part, ast.Constant)]
    return {part.value for part in parts if isinstance(part.value, str)}


def log_of(name: str, uuid: str) -> str:
    """A recorded log as a task with another GPU would have written it."""
    text: str = RECORDED[name]["stdout"]["text"]
    return text.replace(RECORDED_UUIDS[0], uuid).replace(RECORDED_WSL_UUID, uuid)


def answer_of(uuid: str, **changes: Any) -> dict[str, Any]:
    """What the program that measures told of a real H100, but for these changes."""
    path = Path(__file__).parents[1] / "fixtures/gpu_benchmark/h100x2-quick.json"
    answer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    device = {**answer["devices"][0], "uuid": uuid}
    for key, value in changes.items():
        device[key] = {**device[key], **value} if isinstance(value, dict) and device[key] else value
    return {"devices": [device]}


def lines_that_say(answer: Any, computed: int | None = 0) -> str:
    """The lines of a log whose program said this, as text or as what becomes JSON."""
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return f"gpufarm-verify: answer {text}\n" + ("" if computed is None else f"gpufarm-verify: computed {computed}\n")


def log_that_says(uuid: str, answer: Any, computed: int | None = 0) -> str:
    """The log of a task whose program said this."""
    told = lines_that_say(answer, computed)
    return log_of("docker", uuid).replace("gpufarm-verify: end", f"{told}gpufarm-verify: end")


# As Docker 20.10 has said it of one container of eight that began at once on a busy machine.
NOT_STARTED = (
    "Failed to start container 40fbd9997343a982c30bc92a537234af2b23427e230b4667a947c37c9a64eda2: Error response from "
    "daemon: failed to create task for container: failed to create shim task: OCI runtime create failed: runc create "
    "failed: unable to start container process: waiting for init preliminary setup: read init-p: connection reset by "
    "peer: unknown"
)


@dataclasses.dataclass(frozen=True)
class Fate:
    """What becomes of a task on one GPU."""

    unplaced: str | None = None
    """Name of recorded evaluations of a job that was not placed."""
    unplaced_for_s: float = math.inf
    unplaced_from_job: int = 1
    """Which of the jobs on this GPU is the first that is not placed."""
    fails: bool = False
    """The image cannot be pulled."""
    starts_from_job: int = 1
    """Which of the jobs on this GPU is the first whose container starts."""
    status: str = "complete"
    log: str | None = None
    """What the task prints; the default is what it printed in a container."""
    stderr: str = ""
    log_status: int = 200
    log_after_looks: int = 0
    log_from_job: int = 1
    """Which of the jobs on this GPU is the first whose log is not lost."""
    runs_for_s: float = 0
    assigned: str | None = None
    desired: tuple[str, str] = ("run", "")

    def waits(self, job: dict[str, Any]) -> bool:
        """Whether Nomad has not placed the task yet."""
        if self.unplaced is None or int(job["ID"].rpartition("-")[2]) < self.unplaced_from_job:
            return False
        return time.monotonic() - job["began"] < self.unplaced_for_s


class FakeNomad:
    def __init__(self, nodes: int = 2, gpus: int = 2) -> None:
        self.nodes = [farm.make_node(number, gpus) for number in range(nodes)]
        self.fates: dict[str, Fate] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.listed: list[dict[str, Any]] = []
        self.allocations: list[dict[str, Any]] = []
        self.registered: list[dict[str, Any]] = []
        self.purged: list[str] = []
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.refuse: dict[tuple[str, str], list[int]] = {}
        """Method and beginning of a path to the statuses of the next answers; the last one stays."""
        self.arrives = True
        """Whether a refused registration has arrived all the same."""
        self.most_jobs = 0
        self.release_at = 0
        """So many jobs at once end all fates; 0 is never."""
        self._log_looks: dict[str, int] = {}
        self._jobs_of: dict[str, int] = {}
        self._lock = threading.Lock()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                parts = urllib.parse.urlsplit(self.path)
                query = dict(urllib.parse.parse_qsl(parts.query))
                with outer._lock:
                    status, answer = outer.answer(self.command, parts.path, query, body)
                text = answer if isinstance(answer, str) else json.dumps(answer)
                self.send_response(status)
                self.send_header("X-Nomad-Index", "7")
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_POST = do_DELETE = handle_any

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def uuids(self, node: int = 0) -> list[str]:
        return [each["ID"] for each in self.nodes[node]["NodeResources"]["Devices"][0]["Instances"]]

    # --- answers -----------------------------------------------------------------------------

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        self.requests.append((method, path, query))
        for (refused, beginning), statuses in self.refuse.items():
            if refused == method and path.startswith(beginning):
                status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
                if status != 200:
                    if method == "POST" and self.arrives:
                        self.register(body["Job"])
                    return status, "Permission denied" if status == 403 else "rpc error: No cluster leader"
        version, *parts = path.removeprefix("/").split("/")
        if version != "v1":
            return 404, "Invalid path"
        if method == "POST" and path == "/v1/jobs":
            return 200, self.register(body["Job"])
        if method == "DELETE" and parts[0] == "job":
            self.purged.append(parts[1])
            self.jobs.pop(parts[1], None)
            return 200, RECORDED["docker"]["purge"]
        if method != "GET":
            return 405, "Invalid method"
        return self.read(path, parts, query)

    def read(self, path: str, parts: list[str], query: dict[str, str]) -> tuple[int, Any]:
        answers = {"/v1/nodes": self.nodes, "/v1/jobs": self.listed, "/v1/allocations": self.allocations}
        if path in answers:
            return 200, answers[path]
        if parts[0] == "job" and parts[2] in ("allocations", "evaluations"):
            job = self.jobs.get(parts[1])
            stubs = [self.stub(job, group) for group in job["TaskGroups"]] if job else []
            found = [stub for stub in stubs if stub] if parts[2] == "allocations" else job and self.evaluations(job)
            return 200, found or []
        if parts[0] == "node":
            return 200, next(node for node in self.nodes if node["ID"] == parts[1])
        if parts[0] == "allocation":
            return self.allocation(parts[1])
        if parts[:3] == ["client", "fs", "logs"]:
            return self.log(parts[3], query["type"])
        return 404, "Invalid path"

    def register(self, job: dict[str, Any]) -> Any:
        job = {**job, "began": time.monotonic()}
        self.registered.append(job)
        self.jobs[job["ID"]] = job
        self.most_jobs = max(self.most_jobs, len(self.jobs))
        if len(self.jobs) == self.release_at:
            self.fates = {}
        for group in job["TaskGroups"]:
            uuid = self.pinned(job, group)
            self._jobs_of[uuid] = self._jobs_of.get(uuid, 0) + 1
        return RECORDED["docker"]["register"]

    def pinned(self, job: dict[str, Any], group: dict[str, Any]) -> str:
        wanted = [each["RTarget"] for each in job["Constraints"] if each["LTarget"] == "${node.unique.id}"]
        number = next(number for number, node in enumerate(self.nodes) if not wanted or node["ID"] == wanted[0])
        constraints = group["Tasks"][0]["Resources"]["Devices"][0].get("Constraints") or []
        exact = [each["RTarget"] for each in constraints if each["LTarget"] == "${device.ids}"]
        return next(uuid for uuid in self.uuids(number) if not exact or uuid == exact[0])

    def _recorded(self, uuid: str, fate: Fate) -> dict[str, Any]:
        if self._jobs_of[uuid] >= fate.starts_from_job:
            return dict(RECORDED["image" if fate.fails else "docker"])
        failed = json.loads(json.dumps(RECORDED["image"]))
        for allocation in (failed["allocation"], *failed["allocations"]):
            for event in allocation["TaskStates"]["see"]["Events"]:
                if event["Type"] == "Driver Failure":
                    event["DisplayMessage"] = NOT_STARTED
        return dict(failed)

    def stub(self, job: dict[str, Any], group: dict[str, Any]) -> dict[str, Any] | None:
        uuid = self.pinned(job, group)
        fate = self.fates.get(uuid, Fate())
        if fate.waits(job):
            return None
        recorded = copy.deepcopy(self._recorded(uuid, fate)["allocations"][0])
        recorded.update(
            ID=f"{job['ID']}/{group['Name']}".replace("/", "~"),
            JobID=job["ID"],
            TaskGroup=group["Name"],
            DesiredStatus=fate.desired[0],
            DesiredDescription=fate.desired[1],
        )
        state = recorded["TaskStates"]["see"]
        if fate.status != "complete":
            recorded["ClientStatus"] = fate.status
            state["Failed"] = fate.status == "failed"
        if time.monotonic() - job["began"] < fate.runs_for_s:
            recorded["ClientStatus"] = "running"
            del state["Events"][3:]
        return dict(recorded)

    def evaluations(self, job: dict[str, Any]) -> Any:
        """As recorded, with this job's groups, node and name."""
        waiting = {group["Name"]: self.fates.get(self.pinned(job, group), Fate()) for group in job["TaskGroups"]}
        unplaced = {name: fate.unplaced for name, fate in waiting.items() if fate.waits(job)}
        name = next(iter(unplaced.values()), None) or "docker"
        node = next(each["RTarget"] for each in job["Constraints"] if each["LTarget"] == "${node.unique.id}")
        evaluations = json.loads(json.dumps(RECORDED[name]["evaluations"]).replace(RECORDED_NODE, node))
        for evaluation in evaluations:
            metric = (evaluation.get("FailedTGAllocs") or {}).get("gpu-0")
            if metric:
                evaluation["FailedTGAllocs"] = dict.fromkeys(unplaced, metric)
        return evaluations

    def allocation(self, name: str) -> tuple[int, Any]:
        job = self.jobs.get(name.split("~", maxsplit=1)[0])
        if not job:
            return 404, "alloc not found"
        group = next(each for each in job["TaskGroups"] if each["Name"] == name.split("~")[1])
        uuid = self.pinned(job, group)
        fate = self.fates.get(uuid, Fate())
        recorded = copy.deepcopy(self._recorded(uuid, fate)["allocation"])
        recorded.update(self.stub(job, group) or {}, AllocatedResources=recorded["AllocatedResources"])
        given = recorded["AllocatedResources"]["Tasks"]["see"]["Devices"][0]
        given["DeviceIDs"] = [uuid if fate.assigned is None else fate.assigned] if fate.assigned != "" else []
        return 200, recorded

    def log(self, name: str, stream: str) -> tuple[int, str]:
        job = self.jobs.get(name.split("~", maxsplit=1)[0])
        if not job:
            return 404, f'Unknown allocation "{name}"'
        uuid = self.pinned(job, next(each for each in job["TaskGroups"] if each["Name"] == name.split("~")[1]))
        fate = self.fates.get(uuid, Fate())
        if fate.fails or self._jobs_of[uuid] < fate.starts_from_job:
            return 404, RECORDED["image"]["stdout"]["text"]
        if stream == "stderr":
            return 200, fate.stderr
        if fate.log_status != 200:
            return fate.log_status, "Permission denied"
        self._log_looks[name] = self._log_looks.get(name, 0) + 1
        if self._log_looks[name] <= fate.log_after_looks or self._jobs_of[uuid] < fate.log_from_job:
            return 200, ""
        return 200, log_of("docker", uuid) if fate.log is None else fate.log
