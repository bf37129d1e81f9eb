"""A double of W&B's API, as far as a launch agent and the runs that it starts ask it.

One file of the standard library, so that it runs on a node as well. It knows the operations that the real agent (wandb
0.31.0) sends and refuses all others; who has not the key gets 401, and a queue that nobody has made is none. What it
has been told is answered by ``GET /double``, which W&B has not.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROJECT = "model-registry"


class Refused(Exception):
    """What W&B would answer with ``errors``."""


class Double:
    """The state of one entity: its queues, their items, agents and runs."""

    def __init__(self, key: str, entity: str, queues: list[str]) -> None:
        self.key = key
        self.entity = entity
        self.queues = queues
        self.items: list[dict[str, Any]] = []
        self.agents: list[dict[str, Any]] = []
        self.runs: dict[str, dict[str, Any]] = {}
        self.lock = threading.RLock()

    def told(self) -> dict[str, Any]:
        with self.lock:
            return {"items": self.items, "agents": self.agents, "runs": self.runs}

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The ``data`` of one operation, which is known by its name."""
        named = re.match(r"\s*(query|mutation)\s+(\w+)", query)
        operation = getattr(self, f"do_{named[2]}", None) if named else None
        if operation is None:
            raise Refused(f"unknown operation: {named[2] if named else query[:80]}")
        with self.lock:
            data: dict[str, Any] = operation(variables)
        return data

    def _own(self, entity: str | None) -> None:
        if entity not in (None, "", self.entity):
            raise Refused(f"permission denied for the entity {entity}")

    def _item(self, number: str) -> dict[str, Any]:
        for item in self.items:
            if item["id"] == number:
                return item
        raise Refused(f"no run queue item {number}")

    def _agent(self, number: str) -> dict[str, Any]:
        for agent in self.agents:
            if agent["id"] == number:
                return agent
        raise Refused(f"no launch agent {number}")

    def do_Viewer(self, _given: dict[str, Any]) -> dict[str, Any]:
        return {
            "viewer": {
                "id": "viewer", "entity": self.entity, "username": self.entity, "email": "launch@example.com",
                "flags": "{}", "teams": {"edges": [{"node": {"name": self.entity}}]},
            }
        }  # fmt: skip

    def do_ServerFeaturesQuery(self, _given: dict[str, Any]) -> dict[str, Any]:
        return {"serverInfo": {"features": []}}

    def do_ProjectRunQueues(self, given: dict[str, Any]) -> dict[str, Any]:
        if given["entity"] != self.entity or given["projectName"] != PROJECT:
            return {"project": None}
        queues = [
            {"id": f"queue-{name}", "name": name, "createdBy": "viewer", "access": "PROJECT"} for name in self.queues
        ]
        return {"project": {"runQueues": queues}}

    def do_createLaunchAgent(self, given: dict[str, Any]) -> dict[str, Any]:
        self._own(given["entity"])
        number = f"agent-{len(self.agents)}"
        self.agents.append(
            {
                "id": number, "name": f"launch-{len(self.agents)}", "status": "POLLING", "stop": False, "polls": 0,
                "queues": given["queues"], "config": json.loads(given["agentConfig"]), "version": given["version"],
            }
        )  # fmt: skip
        return {"createLaunchAgent": {"launchAgentId": number}}

    def do_EntityIsTeam(self, given: dict[str, Any]) -> dict[str, Any]:
        self._own(given["entity"])
        return {"entity": {"id": "entity", "isTeam": True}}

    def do_LaunchAgent(self, given: dict[str, Any]) -> dict[str, Any]:
        agent = self._agent(given["agentId"])
        return {
            "launchAgent": {
                "id": agent["id"], "name": agent["name"], "runQueues": agent["queues"], "hostname": "",
                "agentStatus": agent["status"], "stopPolling": agent["stop"], "heartbeatAt": None,
            }
        }  # fmt: skip

    def do_updateLaunchAgent(self, given: dict[str, Any]) -> dict[str, Any]:
        if given["agentStatus"] not in ("POLLING", "RUNNING", "KILLED"):
            raise Refused(f"no status of an agent: {given['agentStatus']}")
        self._agent(given["agentId"])["status"] = given["agentStatus"]
        return {"updateLaunchAgent": {"success": True}}

    def do_UpsertBucket(self, given: dict[str, Any]) -> dict[str, Any]:
        self._own(given.get("entity"))
        name = given["name"]
        run = self.runs.setdefault(
            name, {"project": given["project"], "state": "running", "stopped": False, "exit_code": None, "files": {}}
        )
        project = {"id": "project", "name": run["project"], "entity": {"id": "entity", "name": self.entity}}
        bucket = {
            "id": f"run-{name}", "name": name, "displayName": given.get("displayName") or name, "description": None,
            "config": given.get("config"), "sweepName": None, "project": project,
            "historyLineCount": len(run["files"].get("wandb-history.jsonl", [])),
        }  # fmt: skip
        return {"upsertBucket": {"bucket": bucket, "inserted": True}}

    def do_popFromRunQueue(self, given: dict[str, Any]) -> dict[str, Any]:
        self._own(given["entity"])
        if given["queueName"] not in self.queues:
            raise Refused(f"no run queue {given['queueName']}")
        agent = self._agent(given["launchAgentId"])
        agent["polls"] += 1
        if f"queue-{given['queueName']}" not in agent["queues"]:
            raise Refused(f"{agent['name']} does not poll {given['queueName']}")
        for item in self.items:
            if item["state"] == "PENDING" and item["queue"] == given["queueName"]:
                item["state"] = "LEASED"
                return {"popFromRunQueue": {"runQueueItemId": item["id"], "runSpec": item["spec"]}}
        return {"popFromRunQueue": None}

    def do_pushToRunQueueByName(self, given: dict[str, Any]) -> dict[str, Any]:
        self._own(given["entityName"])
        if given["queueName"] not in self.queues:
            raise Refused(f"no run queue {given['queueName']}")
        number = f"item-{len(self.items)}"
        self.items.append(
            {
                "id": number, "queue": given["queueName"], "spec": json.loads(given["runSpec"]), "state": "PENDING",
                "run": None, "message": None,
            }
        )  # fmt: skip
        return {"pushToRunQueueByName": {"runQueueItemId": number, "runSpec": given["runSpec"]}}

    def do_ackRunQueueItem(self, given: dict[str, Any]) -> dict[str, Any]:
        item = self._item(given["itemId"])
        if item["state"] != "LEASED":
            return {"ackRunQueueItem": {"success": False}}
        item.update(state="CLAIMED", run=given["runId"])
        return {"ackRunQueueItem": {"success": True}}

    def do_failRunQueueItem(self, given: dict[str, Any]) -> dict[str, Any]:
        self._item(given["runQueueItemId"]).update(state="FAILED", message=given["message"])
        return {"failRunQueueItem": {"success": True}}

    def _run(self, given: dict[str, Any], name: str) -> dict[str, Any] | None:
        run = self.runs.get(given[name])
        return run if run and run["project"] == given.get("projectName", given.get("project")) else None

    def do_RunStoppedStatus(self, given: dict[str, Any]) -> dict[str, Any]:
        run = self._run(given, "runId")
        return {"project": {"run": run and {"stopped": run["stopped"]}}}

    def do_RunState(self, given: dict[str, Any]) -> dict[str, Any]:
        run = self._run(given, "name")
        return {"project": {"run": run and {"state": run["state"]}}}

    def do_CreateRunFiles(self, given: dict[str, Any]) -> dict[str, Any]:
        files = [{"name": name, "uploadUrl": f"/storage/{given['run']}/{name}"} for name in given["files"]]
        return {"createRunFiles": {"runID": f"run-{given['run']}", "uploadHeaders": [], "files": files}}

    def stream(self, name: str, body: dict[str, Any]) -> None:
        """What a run tells of itself: lines of its files, each in the place that it says, and how it has ended."""
        with self.lock:
            run = self.runs.get(name)
            if run is None:
                raise Refused(f"no run {name}")
            for file, chunk in (body.get("files") or {}).items():
                content, offset = chunk["content"], chunk["offset"]
                if file != "output.log" and not all(isinstance(json.loads(line), dict) for line in content):
                    raise Refused(f"a line of {file} is no object")
                lines = run["files"].setdefault(file, [])
                lines += [""] * (offset - len(lines))
                lines[offset : offset + len(content)] = content
            if body.get("complete"):
                code = body.get("exitcode")
                run.update(state="finished" if code == 0 else "failed", exit_code=code)


class Handler(BaseHTTPRequestHandler):
    """Speaks HTTP; the double is the server's."""

    protocol_version = "HTTP/1.1"

    @property
    def double(self) -> Double:
        found: Double = self.server.double  # type: ignore[attr-defined]
        return found

    def _send(self, status: int, body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _known(self) -> bool:
        wanted = "Basic " + base64.b64encode(f"api:{self.double.key}".encode()).decode()
        if self.headers.get("Authorization") == wanted:
            return True
        self._send(401, {"errors": [{"message": "user is not logged in", "code": 401}]})
        return False

    def do_GET(self) -> None:
        if self.path == "/double":
            if self._known():
                self._send(200, self.double.told())
        else:
            self._send(404, {"error": "not found"})

    def do_PUT(self) -> None:
        self._body()
        self._send(200 if self.path.startswith("/storage/") else 404, {})

    def do_POST(self) -> None:
        body = self._body()
        stop = re.fullmatch("/double/(runs|agents)/([^/]+)/stop", self.path)
        stream = re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path)
        if not (self.path == "/graphql" or stream or stop):
            self._send(404, {"error": "not found"})
            return
        if not self._known():
            return
        try:
            if stop:
                with self.double.lock:
                    runs = self.double.runs
                    who = runs[stop[2]] if stop[1] == "runs" else self.double._agent(stop[2])
                    who["stopped" if stop[1] == "runs" else "stop"] = True
                self._send(200, {})
            elif stream:
                self.double.stream(stream[1], json.loads(body))
                self._send(200, {})
            else:
                asked = json.loads(body)
                self._send(200, {"data": self.double.answer(asked["query"], asked.get("variables") or {})})
        except (Refused, KeyError, ValueError) as error:
            self._send(400, {"errors": [{"message": f"{error or type(error).__name__}"}]})


def server(double: Double, address: str, port: int) -> ThreadingHTTPServer:
    made = ThreadingHTTPServer((address, port), Handler)
    made.double = double  # type: ignore[attr-defined]
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--key-file", type=argparse.FileType(), required=True)
    parser.add_argument("--entity", required=True)
    parser.add_argument("--queue", action="append", required=True)
    given = parser.parse_args()
    double = Double(given.key_file.read().strip(), given.entity, given.queue)
    server(double, given.address, given.port).serve_forever()


if __name__ == "__main__":
    main()
