"""A Nomad with the little state that the gate changes."""

from __future__ import annotations

import json
from typing import Any

from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import nomad_helper as farm


class Farm:
    """Nomad's nodes with the little state that a gate changes, as Nomad 1.11.3 keeps it."""

    def __init__(self, number: int) -> None:
        self.agent = farm.Agent()
        self.agent.answer = self.answer
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
            }
            for name in range(number)
        }
        self.refuse: str | None = None
        self.stats: dict[str, Any] = {"Timestamp": 1795273862748802872, "DeviceStats": None}

    def answer(self, request: Any) -> bool:
        path, _, query = request.path.partition("?")
        if self.refuse and self.refuse in path:
            request.reply(500, b"rpc error: no path", {})
            return True
        if path == "/v1/nodes":
            found = list(self.nodes.values())
            if "filter=Meta" in query:
                found = [node for node in found if node["Meta"].get("gpufarm_gate") == "closed"]
            # The list has no meta.
            body: Any = [{**node, "Meta": None, "Drain": bool(node["DrainStrategy"])} for node in found]
        elif path == "/v1/client/stats":
            body = self.stats
        elif path == "/v1/client/metadata":
            body = self.metadata(request, query)
        else:
            body = self.node(request, path)
        request.reply(200, json.dumps(body).encode(), {"X-Nomad-Index": "7"})
        return True

    def metadata(self, request: Any, query: str) -> Any:
        if request.command == "GET":
            return {"Meta": self.nodes[query.removeprefix("node_id=")]["Meta"]}
        written = self.agent.writes[-1][1]
        meta = self.nodes[written["NodeID"]]["Meta"]
        meta.update(written["Meta"])
        for key in [key for key, value in meta.items() if value is None]:
            del meta[key]
        return {"Meta": meta}

    def node(self, request: Any, path: str) -> Any:
        _, _, _, node_id, *what = path.split("/")
        node = self.nodes[node_id]
        if request.command == "POST" and what == ["eligibility"]:
            node["SchedulingEligibility"] = self.agent.writes[-1][1]["Eligibility"]
        elif request.command == "POST" and what == ["drain"]:
            written = self.agent.writes[-1][1]
            node["DrainStrategy"] = written["DrainSpec"]
            if written["DrainSpec"]:
                node["SchedulingEligibility"] = "ineligible"
                node["LastDrain"] = {"Meta": written["Meta"]}
            elif written["MarkEligible"]:
                node["SchedulingEligibility"] = "eligible"
        return node
