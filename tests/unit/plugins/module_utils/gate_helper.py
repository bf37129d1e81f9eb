"""A Nomad with the little state that the gate changes, as strict about it as Nomad 1.11.3."""

from __future__ import annotations

import copy
import json
import re
import urllib.parse
from typing import Any

from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import nomad_helper as farm


class RefusedError(Exception):
    """What Nomad answers instead."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Farm:
    """Nodes as servers know them, the meta that each client has, and the agent of the node C(own)."""

    def __init__(self, number: int, at: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.agent = farm.Agent(at=at)
        self.agent.answer = self.answer
        self.index = 100
        self.nodes = {
            f"id-{name}": {
                "ID": f"id-{name}",
                "Name": f"gpu{name}",
                "Status": "ready",
                "SchedulingEligibility": "eligible",
                "DrainStrategy": None,
                "LastDrain": None,
                "Meta": {},
                "CreateIndex": 10,
                "ModifyIndex": 10 + name,
                "NodeResources": {"Devices": [{"Type": "gpu", "Instances": []}]},
            }
            for name in range(number)
        }
        self.clients: dict[str, dict[str, str]] = {node_id: {} for node_id in self.nodes}
        self.own: str | None = "id-0"
        self.leader = True
        self.behind: dict[str, Any] | None = None
        """What a server knows that is behind the leader."""
        self.slow_registration = False
        """Servers learn of new meta seconds after the client has it, here with C(register)."""
        self.refuse: str | None = None
        self.drains = 0
        self.allocations: dict[str, list[dict[str, Any]]] = {}
        """Of each node. What a drain stops has ended when they are read the second time after that, and so has it."""
        self.hiccups: list[str] = []
        """Parts of paths, for each of which one request fails."""
        self.stats: dict[str, Any] = {"Timestamp": 1795273862748802872, "Uptime": 1000, "DeviceStats": None}

    @property
    def asked(self) -> list[str]:
        """What was read, in the order of asking."""
        return [path + (" stale" if query.get("stale") == "true" else "") for path, query, _ in self.agent.requests]

    def touch(self, node_id: str) -> None:
        """Raise the index of the node, as each change in Nomad does."""
        self.index += 1
        self.nodes[node_id]["ModifyIndex"] = self.index

    def register(self, node_id: str) -> None:
        """The client tells its servers what it has."""
        if self.nodes[node_id]["Meta"] != self.clients[node_id]:
            self.nodes[node_id]["Meta"] = dict(self.clients[node_id])
            self.touch(node_id)

    def set_status(self, node_id: str, status: str) -> None:
        self.nodes[node_id]["Status"] = status
        self.touch(node_id)

    def answer(self, request: Any) -> bool:
        parts = urllib.parse.urlsplit(request.path)
        query = dict(urllib.parse.parse_qsl(parts.query))
        headers = {"X-Nomad-Index": "7"}
        try:
            if self.refuse and self.refuse in parts.path:
                raise RefusedError(500, "rpc error: no path")
            if self.hiccups and self.hiccups[0] in parts.path:
                self.hiccups.pop(0)
                raise RefusedError(500, "No cluster leader")
            if request.command in ("POST", "PUT"):
                body = self.write(parts.path, self.agent.writes[-1][1])
            else:
                body = self.read(parts.path, query, headers)
        except RefusedError as refused:
            request.reply(refused.status, str(refused).encode(), {})
        else:
            request.reply(200, json.dumps(body).encode(), headers)
        return True

    # --- reading ---

    def read(self, path: str, query: dict[str, str], headers: dict[str, str]) -> Any:
        if path == "/v1/agent/self":
            return {"config": {}, "stats": {"client": {"node_id": self.own}} if self.own else {"nomad": {}}}
        told = {"/v1/client/stats": self.stats, "/v1/status/leader": "127.0.0.1:4647" if self.leader else ""}
        if path in told:
            return told[path]
        if path == "/v1/client/metadata":
            node_id = query.get("node_id") or self.own or ""
            self.require_client(node_id)
            return {"Meta": self.clients[node_id], "Dynamic": self.clients[node_id], "Static": {}}
        stale = query.get("stale") == "true"
        if not self.leader and not stale:
            raise RefusedError(500, "No cluster leader")
        headers["X-Nomad-KnownLeader"] = "true" if self.leader else "false"
        nodes = self.behind if stale and self.behind is not None else self.nodes
        if path == "/v1/nodes":
            return [self.stub(node) for node in nodes.values() if self.matches(node, query.get("filter"))]
        if path.endswith("/allocations"):
            return self.read_allocations(path.split("/")[3])
        node = nodes.get(path.removeprefix("/v1/node/"))
        if node is None:
            raise RefusedError(404, "node not found")
        headers["X-Nomad-Index"] = str(node["ModifyIndex"])
        return node

    def run_job(self, node_id: str, name: str, kind: str = "service") -> dict[str, Any]:
        """An allocation that runs on the node; to end one of a batch job in time is a test's own."""
        allocation = {
            "ID": f"{name}-0000-1111", "Name": f"{name}.group[0]", "JobID": name, "DesiredStatus": "run",
            "ClientStatus": "running", "NodeID": node_id, "JobType": kind,
        }  # fmt: skip
        self.allocations.setdefault(node_id, []).append(allocation)
        return allocation

    def read_allocations(self, node_id: str) -> list[dict[str, Any]]:
        found = self.allocations.get(node_id, [])
        told = copy.deepcopy(found)
        for each in found:
            if each["DesiredStatus"] == "stop":
                each["ClientStatus"] = "complete"
        drain = self.nodes[node_id]["DrainStrategy"]
        drained = [
            each for each in found if not (drain and drain.get("IgnoreSystemJobs") and each["JobType"] == "system")
        ]
        if drain and found and all(each["ClientStatus"] == "complete" for each in drained):
            self.nodes[node_id]["DrainStrategy"] = None
            self.touch(node_id)
        return told

    @staticmethod
    def matches(node: dict[str, Any], expression: str | None) -> bool:
        if expression is None:
            return True
        if expression == 'Meta.gpufarm_gate == "closed"':
            return bool(node["Meta"].get("gpufarm_gate") == "closed")
        if expression == 'Status != "down"':
            return bool(node["Status"] != "down")
        if expression == "NodeResources.Devices is not empty":
            return bool(node["NodeResources"]["Devices"])
        if named := re.fullmatch(r'Name == "([^"]*)"(?: or ID == "([^"]*)")?', expression):
            return node["Name"] == named[1] or node["ID"] == named[2]
        raise RefusedError(400, f"failed to read filter expression: {expression}")

    @staticmethod
    def stub(node: dict[str, Any]) -> dict[str, Any]:
        """A list has neither meta nor, unless it is asked for them, resources."""
        listed = {key: value for key, value in node.items() if key not in ("Meta", "NodeResources", "DrainStrategy")}
        return {**listed, "Drain": bool(node["DrainStrategy"])}

    # --- writing ---

    def write(self, path: str, body: Any) -> Any:
        if path == "/v1/client/metadata":
            return self.write_meta(body)
        if not self.leader:
            raise RefusedError(500, "No cluster leader")
        _, _, _, node_id, what = path.split("/")
        if node_id not in self.nodes:
            raise RefusedError(500, "node not found")
        if what == "eligibility":
            self.set_eligibility(self.nodes[node_id], body["Eligibility"])
        elif what == "drain":
            self.drain(self.nodes[node_id], body)
        elif what == "purge":
            self.index += 1
            del self.nodes[node_id]
            return {"NodeModifyIndex": self.index}
        else:
            raise RefusedError(404, f"no {path}")
        self.touch(node_id)
        return {"NodeModifyIndex": self.index}

    def require_client(self, node_id: str) -> None:
        if node_id not in self.nodes or self.nodes[node_id]["Status"] == "down":
            raise RefusedError(404, "No path to node")

    def write_meta(self, body: Any) -> Any:
        node_id = body.get("NodeID") or self.own
        self.require_client(node_id)
        if not body["Meta"] or not all(value is None or isinstance(value, str) for value in body["Meta"].values()):
            raise RefusedError(400, "json: cannot unmarshal into Go struct field Meta of type string")
        meta = self.clients[node_id]
        meta.update(body["Meta"])
        for key in [key for key, value in meta.items() if value is None]:
            del meta[key]
        if not self.slow_registration:
            self.register(node_id)
        return {"Meta": meta, "Dynamic": meta, "Static": {}}

    @staticmethod
    def set_eligibility(node: dict[str, Any], wanted: str) -> None:
        if wanted not in ("eligible", "ineligible"):
            raise RefusedError(500, f"invalid scheduling eligibility {wanted!r}")
        if wanted == "eligible" and node["DrainStrategy"]:
            raise RefusedError(500, "can not set node's scheduling eligibility to eligible while it is draining")
        node["SchedulingEligibility"] = wanted

    def drain(self, node: dict[str, Any], body: Any) -> None:
        spec, meta = body["DrainSpec"], body.get("Meta")
        if not all(isinstance(value, str) for value in (meta or {}).values()):
            raise RefusedError(400, "json: cannot unmarshal into Go struct field Meta of type string")
        if spec and {key: type(value) for key, value in spec.items()} != {"Deadline": int, "IgnoreSystemJobs": bool}:
            raise RefusedError(400, "json: cannot unmarshal into Go struct field DrainSpec")
        began = bool(spec) and not node["DrainStrategy"]
        if began:
            self.drains += 1
            node["LastDrain"] = {"StartedAt": f"2026-11-21T12:00:{self.drains:02d}Z", "Meta": None}
        if (spec or node["DrainStrategy"]) and meta:
            node["LastDrain"]["Meta"] = copy.deepcopy(meta)
        node["DrainStrategy"] = copy.deepcopy(spec)
        if spec:
            node["SchedulingEligibility"] = "ineligible"
            for each in self.allocations.get(node["ID"], []):
                # Batch jobs go on until the deadline.
                if each["JobType"] == "service" or (each["JobType"] == "system" and not spec["IgnoreSystemJobs"]):
                    each["DesiredStatus"] = "stop"
            if node["Status"] == "down":
                # Nothing runs there, so it is done at once.
                node["DrainStrategy"] = None
        elif body.get("MarkEligible"):
            node["SchedulingEligibility"] = "eligible"
