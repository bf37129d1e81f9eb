# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A cluster of any size in the form of Kubernetes' answers, and an apiserver over HTTP that serves it to a kubectl.

By default that is the stand-in in the fixtures. With GPUFARM_KUBECTL=/path the same tests run with a real one.
"""

from __future__ import annotations

import contextlib
import copy
import http.server
import json
import os
import threading
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parents[1] / "fixtures" / "kubernetes"
DRIVER = "580.159.04"
MODEL = "NVIDIA H100 80GB HBM3"
PRODUCT = "NVIDIA-H100-80GB-HBM3"
KUBECTL = os.environ.get("GPUFARM_KUBECTL") or str(FIXTURES / "kubectl")
PLUGIN = "nvidia-device-plugin"
# Longer than any request may take.
HANGS_S = 60


def uuid_of(node: int, gpu: int) -> str:
    return f"GPU-{node:08x}-0000-4000-8000-{gpu:012x}"


def recorded(name: str) -> Any:
    return json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))


def make_node(number: int, gpus: int, well: int | None = None, **more: Any) -> dict[str, Any]:
    """The recorded node with another identity; C(more) are other resources, and C(labels) instead of those of GFD."""
    node: dict[str, Any] = copy.deepcopy(recorded("node-1.34.1"))
    name = f"node{number:05d}"
    labels = {
        "kubernetes.io/hostname": name,
        "nvidia.com/gpu.present": "true",
        "nvidia.com/gpu.product": PRODUCT,
        "nvidia.com/gpu.memory": "81559",
        "nvidia.com/gpu.replicas": "1",
        "nvidia.com/cuda.driver-version.full": DRIVER,
        "nvidia.com/mig.strategy": "mixed",
    }
    node["metadata"].update(
        name=name, uid=f"{number:08x}-5555-4444-8888-000000000000", labels=more.pop("labels", labels)
    )
    for key, value in (("capacity", gpus), ("allocatable", gpus if well is None else well)):
        of = node["status"][key]
        for resource in [each for each in of if each.startswith("nvidia.com/")]:
            del of[resource]
        of.update({"nvidia.com/gpu": str(value)} if gpus else {}, **{name: str(n) for name, n in more.items()})
    return node


def make_expected(nodes: int, gpus: int) -> list[dict[str, Any]]:
    return [
        {
            "node": f"node{number:05d}",
            "uuids": [uuid_of(number, gpu) for gpu in range(gpus)],
            "models": [MODEL],
            "driver_version": DRIVER,
        }
        for number in range(nodes)
    ]


def make_pod(name: str, node: str, gpus: int, phase: str = "Running", **more: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": more.pop("namespace", "default"), "uid": f"uid-{name}"},
        "spec": {
            "nodeName": node,
            "containers": [
                {
                    "name": more.pop("container", "main"),
                    "image": "example.com/image:1",
                    "resources": {"limits": {"nvidia.com/gpu": str(gpus)}, "requests": {"nvidia.com/gpu": str(gpus)}}
                    if gpus
                    else {},
                }
            ],
        },
        "status": {"phase": phase, "containerStatuses": [{"name": "main", "ready": phase == "Running"}]},
        **more,
    }


def plugin_pod(node: str, **more: Any) -> dict[str, Any]:
    return make_pod(f"{PLUGIN}-{node}", node, 0, namespace=PLUGIN, container="nvidia-device-plugin-ctr", **more)


class Cluster:
    """An apiserver with nodes and pods, whose answers a test can change."""

    def __init__(self, folder: Path) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.pods: list[dict[str, Any]] = []
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.bodies: list[Any] = []
        self.answer: Callable[[Any], bool] = lambda _request: False
        """Answers a request itself and says so."""
        self.lock = threading.RLock()
        cluster = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_request(self) -> None:
                url = urllib.parse.urlsplit(self.path)
                query = dict(urllib.parse.parse_qsl(url.query))
                query.pop("timeout", None)
                self.body = self._body()
                if url.path == "/version":
                    # Google's kubectl asks which kubectl it should be.
                    self.refuse(404, "NotFound", "the server could not find the requested resource")
                    return
                with cluster.lock:
                    cluster.requests.append((self.command, url.path, query))
                    cluster.bodies.append(self.body)
                    if not cluster.answer(self):
                        cluster.serve(self, urllib.parse.unquote(url.path), query)

            def _body(self) -> Any:
                if self.headers.get("Transfer-Encoding") == "chunked":
                    data = b""
                    while size := int(self.rfile.readline(), 16):
                        data += self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                else:
                    data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                return json.loads(data) if data else None

            def reply(self, status: int, content: Any, kind: str = "application/json") -> None:
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(data)

            def refuse(self, status: int, reason: str, message: str) -> None:
                about = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
                self.reply(status, {**about, "message": message, "reason": reason, "code": status})

            def log_message(self, *_arguments: Any) -> None:
                pass

            do_GET = do_POST = do_PATCH = do_DELETE = handle_request

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.kubeconfig = folder / "kubeconfig"
        self.write_kubeconfig(f"http://127.0.0.1:{self._server.server_port}")

    def write_kubeconfig(self, url: str) -> None:
        """As JSON, which is YAML too; C(contexts) once for kubectl and once for the stand-in."""
        real = os.environ.get("GPUFARM_KUBECTL")
        contexts: Any = {"farm": url}
        if real:
            contexts = [{"name": "farm", "context": {"cluster": "farm", "user": "farm"}}]
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "farm",
            "contexts": contexts,
            "clusters": [{"name": "farm", "cluster": {"server": url}}],
            "users": [{"name": "farm", "user": {}}],
        }
        self.kubeconfig.write_text(json.dumps(config), encoding="utf-8")

    @property
    def arguments(self) -> dict[str, Any]:
        """The options by which a module reaches it."""
        return {"kubeconfig": str(self.kubeconfig), "kubectl": KUBECTL}

    def paths(self, method: str = "GET") -> list[str]:
        return [path for asked, path, _query in self.requests if asked == method]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    # --- what an apiserver does ---

    def serve(self, request: Any, path: str, query: dict[str, str]) -> None:
        parts = path.strip("/").split("/")[2:]
        if request.command == "GET" and parts == ["nodes"]:
            self.page(request, "NodeList", self.nodes, query)
        elif parts[0] == "nodes" and len(parts) == 2:
            self.serve_node(request, parts[1])
        elif request.command == "GET" and parts == ["pods"]:
            self.page(request, "PodList", [pod for pod in self.pods if selected(pod, query)], query)
        else:
            request.refuse(404, "NotFound", "the server could not find the requested resource")

    def page(self, request: Any, kind: str, items: list[dict[str, Any]], query: dict[str, str]) -> None:
        begin, limit = int(query.get("continue") or 0), int(query.get("limit") or 0)
        end = begin + limit if limit else len(items)
        metadata: dict[str, Any] = {"resourceVersion": "4711"}
        if end < len(items):
            metadata.update({"continue": str(end), "remainingItemCount": len(items) - end})
        answer = {"kind": kind, "apiVersion": "v1", "metadata": metadata, "items": items[begin:end]}
        request.reply(200, answer)

    def serve_node(self, request: Any, name: str) -> None:
        (node,) = [each for each in self.nodes if each["metadata"]["name"] == name] or [None]
        if node is None:
            request.refuse(404, "NotFound", f'nodes "{name}" not found')
        elif request.command == "GET":
            request.reply(200, node)
        else:
            self.patch(request, node)

    def patch(self, request: Any, node: dict[str, Any]) -> None:
        patch = request.body
        version = patch.get("metadata", {}).get("resourceVersion")
        if version not in (None, node["metadata"]["resourceVersion"]):
            words = f'Operation cannot be fulfilled on nodes "{node["metadata"]["name"]}": the object has been modified'
            request.refuse(409, "Conflict", f"{words}; please apply your changes to the latest version and try again")
            return
        merge(node, patch)
        node["metadata"]["resourceVersion"] = str(int(node["metadata"]["resourceVersion"]) + 1)
        request.reply(200, node)


def merge(target: dict[str, Any], patch: dict[str, Any]) -> None:
    """RFC 7386."""
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict):
            merge(target.setdefault(key, {}), value)
        else:
            target[key] = value


def selected(pod: dict[str, Any], query: dict[str, str]) -> bool:
    """Whether the selectors of a request mean this pod."""
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        unlike = "!=" in term
        key, _sign, value = term.partition("!=" if unlike else "=")
        top, field = key.split(".")
        found = pod[top].get(field, "")
        if (found == value) is unlike:
            return False
    labels = pod["metadata"].get("labels", {})
    for term in filter(None, query.get("labelSelector", "").split(",")):
        key, sign, value = term.partition("=")
        if key not in labels or (sign and labels[key] != value):
            return False
    return True
