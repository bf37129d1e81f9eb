"""The double of W&B is no kinder than W&B."""

from __future__ import annotations

import base64
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.simulator.cache import ROOT
from tests.simulator.wandb.__main__ import HERE, VERSION
from tests.simulator.wandb.server import Double, server

KEY = "k" * 40
SPEC = json.dumps({"resource": "local-container"})


@pytest.fixture
def address() -> Iterator[str]:
    with server(Double(KEY, "lab", ["gpus", "spare"]), "127.0.0.1", 0) as running:
        threading.Thread(target=running.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


def send(address: str, body: Any, key: str = KEY, path: str = "/graphql") -> tuple[int, Any]:
    login = base64.b64encode(f"api:{key}".encode()).decode()
    request = urllib.request.Request(  # noqa: S310 - the address is our own
        address + path, json.dumps(body).encode(), {"Authorization": f"Basic {login}"}
    )
    try:
        with urllib.request.urlopen(request) as answer:  # noqa: S310
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def ask(address: str, operation: str, **variables: Any) -> Any:
    status, answer = send(address, {"query": f"mutation {operation}($a: ID!) {{}}", "variables": variables})
    assert status == 200, answer
    return answer["data"]


def test_a_wrong_key_and_unknown_operations_are_refused(address: str) -> None:
    viewer = {"query": "query Viewer { viewer { id } }"}
    assert send(address, viewer)[0] == 200
    for path in ("/graphql", "/files/lab/trial/r1/file_stream", "/double/runs/r1/stop"):
        assert send(address, viewer, "x" * 40, path) == (
            401,
            {"errors": [{"message": "user is not logged in", "code": 401}]},
        )
    assert send(address, {"query": "query Everything { all }"})[0] == 400
    assert send(address, {"query": "{ viewer { id } }"})[0] == 400
    assert send(address, viewer, path="/sdk/otel/v1/metrics")[0] == 404


def test_only_queues_that_are_there_and_ones_own_are_polled(address: str) -> None:
    assert ask(address, "ProjectRunQueues", entity="other", projectName="model-registry") == {"project": None}
    queues = ask(address, "ProjectRunQueues", entity="lab", projectName="model-registry")["project"]["runQueues"]
    assert [queue["name"] for queue in queues] == ["gpus", "spare"]
    made = {"entity": "lab", "queues": ["queue-spare"], "agentConfig": "{}", "version": "1"}
    agent = ask(address, "createLaunchAgent", **made)["createLaunchAgent"]["launchAgentId"]
    pop = {"query": "mutation popFromRunQueue {}", "variables": {"entity": "lab", "launchAgentId": agent}}
    for queue, status in (("gpus", 400), ("none", 400), ("spare", 200)):
        pop["variables"]["queueName"] = queue  # type: ignore[index]
        assert send(address, pop)[0] == status


def test_an_item_is_taken_once_and_a_run_ends_as_it_says(address: str) -> None:
    made = {"entity": "lab", "queues": ["queue-gpus"], "agentConfig": "{}", "version": "1"}
    agent = ask(address, "createLaunchAgent", **made)["createLaunchAgent"]["launchAgentId"]
    pushed = {"entityName": "lab", "queueName": "gpus", "runSpec": SPEC}
    item = ask(address, "pushToRunQueueByName", **pushed)["pushToRunQueueByName"]["runQueueItemId"]
    pop = {"entity": "lab", "queueName": "gpus", "launchAgentId": agent}
    taken = ask(address, "popFromRunQueue", **pop)["popFromRunQueue"]
    # An object, not a string.
    assert taken == {"runQueueItemId": item, "runSpec": json.loads(SPEC)}
    assert ask(address, "popFromRunQueue", **pop) == {"popFromRunQueue": None}
    assert ask(address, "ackRunQueueItem", itemId=item, runId="r1") == {"ackRunQueueItem": {"success": True}}
    assert ask(address, "ackRunQueueItem", itemId=item, runId="r1") == {"ackRunQueueItem": {"success": False}}
    state = {"project": "trial", "entity": "lab", "name": "r1"}
    assert ask(address, "RunState", **state) == {"project": {"run": None}}
    ask(address, "UpsertBucket", **state)
    asked = {"projectName": "trial", "entityName": "lab", "runId": "r1"}
    assert ask(address, "RunStoppedStatus", **asked) == {"project": {"run": {"stopped": False}}}
    send(address, {}, path="/double/runs/r1/stop")
    assert ask(address, "RunStoppedStatus", **asked) == {"project": {"run": {"stopped": True}}}
    assert ask(address, "RunState", **state) == {"project": {"run": {"state": "running"}}}
    assert send(address, {"complete": True, "exitcode": 3}, path="/files/lab/trial/r1/file_stream")[0] == 200
    assert ask(address, "RunState", **state) == {"project": {"run": {"state": "failed"}}}
    assert send(address, {"complete": True}, path="/files/lab/trial/none/file_stream")[0] == 400


def told(address: str) -> Any:
    login = base64.b64encode(f"api:{KEY}".encode()).decode()
    request = urllib.request.Request(f"{address}/double", headers={"Authorization": f"Basic {login}"})  # noqa: S310
    with urllib.request.urlopen(request) as answer:  # noqa: S310
        return json.loads(answer.read())


def test_what_a_run_tells_is_kept_line_by_line_where_it_says(address: str) -> None:
    """As wandb's core sends it: rows of the history one after the other, the summary over the one before."""
    run = {"project": "trial", "entity": "lab", "name": "r1"}

    def stream(**files: tuple[int, list[str]]) -> int:
        names = {"log": "output.log", "history": "wandb-history.jsonl", "summary": "wandb-summary.json"}
        body = {names[key]: {"offset": offset, "content": content} for key, (offset, content) in files.items()}
        return send(address, {"files": body}, path="/files/lab/trial/r1/file_stream")[0]

    def rows() -> Any:
        return ask(address, "UpsertBucket", **run)["upsertBucket"]["bucket"]["historyLineCount"]

    assert rows() == 0
    first, second = json.dumps({"loss": 0.75, "_step": 0}), json.dumps({"loss": 0.5, "_step": 1})
    # Of a log whose first line is not known yet, the second may come before.
    assert stream(history=(0, [first]), summary=(0, [first]), log=(1, ["two"])) == 200
    assert stream(history=(1, [second]), summary=(0, [second]), log=(0, ["one"])) == 200
    # What was not answered is sent once more.
    assert stream(history=(1, [second])) == 200
    assert told(address)["runs"]["r1"]["files"] == {
        "output.log": ["one", "two"], "wandb-history.jsonl": [first, second], "wandb-summary.json": [second],
    }  # fmt: skip
    assert rows() == 2
    assert stream(history=(2, ["0.25"])) == stream(summary=(0, ["loss"])) == 400
    assert rows() == 2


def test_the_wheels_are_of_the_version_that_the_role_installs() -> None:
    defaults = yaml.safe_load((ROOT / "roles/wandb_launch_agent/defaults/main.yml").read_text(encoding="utf-8"))
    assert defaults["wandb_launch_agent_version"] == VERSION
    assert VERSION in (Path(HERE) / "server.py").read_text(encoding="utf-8")
