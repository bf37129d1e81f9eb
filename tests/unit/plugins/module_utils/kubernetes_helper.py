# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A cluster of any size in the form of Kubernetes' answers, and an apiserver over HTTP that serves it to a kubectl.

By default that is the stand-in in the fixtures. With GPUFARM_KUBECTL=/path the same tests run with a real one.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import http.server
import json
import os
import re
import runpy
import threading
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.commands import Command, run_commands

FIXTURES = Path(__file__).parents[1] / "fixtures" / "kubernetes"
DRIVER = "580.159.04"
MODEL = "NVIDIA H100 80GB HBM3"
PRODUCT = "NVIDIA-H100-80GB-HBM3"
KUBECTL = os.environ.get("GPUFARM_KUBECTL") or str(FIXTURES / "kubectl")
PLUGIN = "nvidia-device-plugin"
# The value of a label.
LABEL = re.compile("[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
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
            "restartPolicy": "Always",
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


def kubectl_inside() -> Callable[[Any, float], list[Command]]:
    """The stand-in without a process of its own, for tests that call it often; a real one stays one."""
    if os.environ.get("GPUFARM_KUBECTL"):
        return run_commands
    program = runpy.run_path(KUBECTL)

    def run(argvs: Any, _timeout: float) -> list[Command]:
        done = []
        for argv in argvs:
            try:
                done.append(Command(tuple(argv), 0, program["answer"](argv[1:]).decode("utf-8", "replace")))
            except program["Failure"] as failure:
                done.append(Command(tuple(argv), 1, stderr=f"{failure}\n"))
        return done

    return run


class Cluster:
    """An apiserver with nodes and pods, whose answers a test can change."""

    def __init__(self, folder: Path) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.pods: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.created: list[str] = []
        self.removed: list[str] = []
        self.undying = False
        """Whether pods stay whatever is asked."""
        self.held: list[str] = []
        """Pods that a disruption budget keeps."""
        self.fate_of: Callable[[dict[str, Any], str, str], Fate] = lambda _pod, _node, _resource: Fate()
        """By the pod, its node and the resource that it asks for."""
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.bodies: list[Any] = []
        self.answer: Callable[[Any], bool] = lambda _request: False
        """Answers a request itself and says so."""
        self.base = ""
        """Path under which it serves, as behind Rancher; anything else is another cluster."""
        self.lock = threading.RLock()
        cluster = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_request(self) -> None:
                url = urllib.parse.urlsplit(self.path)
                query = dict(urllib.parse.parse_qsl(url.query))
                query.pop("timeout", None)
                self.body = self._body()
                base, path = url.path[: len(cluster.base)], url.path[len(cluster.base) :]
                if base != cluster.base or path == "/version":
                    # Google's kubectl asks which kubectl it should be.
                    self.refuse(404, "NotFound", "the server could not find the requested resource")
                    return
                with cluster.lock:
                    cluster.requests.append((self.command, path, query))
                    cluster.bodies.append(copy.deepcopy(self.body))
                    if not cluster.answer(self):
                        cluster.serve(self, urllib.parse.unquote(path), query)

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
                told = {"reason": reason} if reason else {}
                self.reply(status, {**about, "message": message, **told, "code": status})

            def log_message(self, *_arguments: Any) -> None:
                pass

            do_GET = do_POST = do_PATCH = do_DELETE = handle_request

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.kubeconfig = folder / "kubeconfig"
        self.serve_under("")

    def serve_under(self, base: str) -> None:
        self.base = base
        self.write_kubeconfig(f"http://127.0.0.1:{self._server.server_port}{base}")

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
        group, version, *parts = path.strip("/").split("/")
        if (group, version) != ("api", "v1"):
            request.refuse(404, "NotFound", "the server could not find the requested resource")
        elif request.command == "GET" and parts == ["nodes"]:
            name = query.get("fieldSelector", "").partition("metadata.name=")[2]
            self.page(
                request, "NodeList", [node for node in self.nodes if name in ("", node["metadata"]["name"])], query
            )
        elif parts[0] == "nodes" and len(parts) == 2:
            self.serve_node(request, parts[1])
        elif request.command == "GET" and parts == ["pods"]:
            self.page(request, "PodList", [pod for pod in self.pods if selected(pod, query)], query)
        else:
            self.serve_pods(request, parts, query)

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
        labels = patch.get("metadata", {}).get("labels", {})
        for value in filter(None, labels.values()):
            if not LABEL.fullmatch(value):
                words = f'metadata.labels: Invalid value: "{value}"'
                request.refuse(422, "Invalid", f'Node "{node["metadata"]["name"]}" is invalid: {words}')
                return
        merge(node, patch)
        node["metadata"]["resourceVersion"] = str(int(node["metadata"]["resourceVersion"]) + 1)
        request.reply(200, node)

    # --- pods, with a scheduler, a kubelet and a device plugin that are done at once ---

    def serve_pods(self, request: Any, parts: list[str], query: dict[str, str]) -> None:
        scope, namespace, kind, *rest = parts
        if scope != "namespaces" or kind not in ("pods", "events"):
            request.refuse(404, "NotFound", "the server could not find the requested resource")
            return
        if kind == "events":
            # Those of every pod.
            events = [
                {"type": "Warning", "involvedObject": {"name": pod["metadata"]["name"]}, **event}
                for pod in self.pods
                for event in self.events
            ]
            self.page(request, "EventList", [event for event in events if selected(event, query)], query)
            return
        here = [pod for pod in self.pods if pod["metadata"]["namespace"] == namespace and selected(pod, query)]
        named = [pod for pod in here if rest and pod["metadata"]["name"] == rest[0]]
        if request.command == "POST" and not rest:
            self.create(request, namespace)
        elif rest and not named:
            request.refuse(404, "NotFound", f'pods "{rest[0]}" not found')
        elif rest[1:] == ["log"]:
            self.log(request, named[0])
        elif rest[1:] == ["eviction"]:
            self.evict(request, named[0])
        elif request.command == "DELETE":
            doomed = [pod["metadata"]["name"] for pod in (named if rest else here) if not self.undying]
            self.removed += doomed
            self.pods = [pod for pod in self.pods if pod["metadata"]["name"] not in doomed]
            request.reply(200, {"kind": "Status", "status": "Success"})
        else:
            for pod in here:
                self.run(pod)
            self.page(request, "PodList", here, query)

    def create(self, request: Any, namespace: str) -> None:
        pod, name = request.body, request.body["metadata"]["name"]
        if any(each["metadata"]["name"] == name for each in self.pods):
            request.refuse(409, "AlreadyExists", f'pods "{name}" already exists')
            return
        assert pod["metadata"]["namespace"] == namespace
        pod["status"] = {"phase": "Pending"}
        self.pods.append(pod)
        self.created.append(name)
        request.reply(201, pod)

    def evict(self, request: Any, pod: dict[str, Any]) -> None:
        metadata, body = pod["metadata"], request.body
        assert (body["kind"], body["metadata"]["name"]) == ("Eviction", metadata["name"])
        wanted = body["deleteOptions"]["preconditions"]["uid"]
        if wanted != metadata["uid"]:
            words = f"Precondition failed: UID in precondition: {wanted}, UID in object meta: {metadata['uid']}"
            request.refuse(409, "Conflict", words)
        elif metadata["name"] in self.held:
            request.refuse(429, "TooManyRequests", "Cannot evict pod as it would violate the pod's disruption budget.")
        else:
            if self.undying:
                metadata["deletionTimestamp"] = "2026-11-25T18:00:00Z"
            else:
                self.pods.remove(pod)
            self.removed.append(metadata["name"])
            request.reply(201, {"kind": "Status", "status": "Success"})

    def run(self, pod: dict[str, Any]) -> None:
        """What becomes of a pod of a proof by its fate; others stay as they are."""
        if "gpufarm.core/verify" not in pod["metadata"].get("labels", {}) or pod["status"] != {"phase": "Pending"}:
            return
        required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        (name,) = required["nodeSelectorTerms"][0]["matchFields"][0]["values"]
        limits = pod["spec"]["containers"][0]["resources"]["limits"]
        (resource,) = [key for key in limits if key.startswith("nvidia.com/")]
        fate = self.fate_of(pod, name, resource)
        if fate.log is not None:
            pod["log"] = fate.log
        if fate.status is not None:
            pod["status"] = copy.deepcopy(fate.status)
            return
        # The kubelet takes the GPU of a pod that has ended for free.
        holds = [each for each in self.pods if each["status"]["phase"] not in ("Succeeded", "Failed")]
        taken = {each["gpu"] for each in holds if each.get("node") == name and each.get("resource") == resource}
        free = [gpu for gpu in self.devices_of(name, resource) if gpu not in taken]
        if not free:
            pod["status"] = unplaced(
                f"0/3 nodes are available: 1 Insufficient {resource}, 2 node(s) didn't match Pod's"
            )
            return
        pod.update(node=name, resource=resource, gpu=free[0])
        pod["spec"]["nodeName"] = name
        sees, work = free[:1] if fate.sees is None else fate.sees, fate.does(free[0])
        pod.setdefault("log", listing_of(sees, None if fate.after else fate.exit_code, fate.wsl, work))
        pod["status"] = fate.after or {
            "phase": "Running", "containerStatuses": [{"name": "see", "ready": True, "state": RUNNING}]
        }  # fmt: skip

    def devices_of(self, node: str, resource: str) -> list[str]:
        number = int(node.removeprefix("node"))
        (found,) = [each for each in self.nodes if each["metadata"]["name"] == node]
        count = int(found["status"]["allocatable"].get(resource, 0))
        if resource == "nvidia.com/gpu":
            return [uuid_of(number, gpu) for gpu in range(count)]
        return [f"MIG-{resource[15:]}-{number}-{gpu}" for gpu in range(count)]

    def log(self, request: Any, pod: dict[str, Any]) -> None:
        if "log" in pod:
            request.reply(200, pod["log"].encode(), "text/plain")
        else:
            name = pod["metadata"]["name"]
            words = f'container "see" in pod "{name}" is waiting to start: ContainerCreating'
            request.refuse(400, "BadRequest", words)


RUNNING = {"running": {"startedAt": "2026-11-25T18:00:00Z"}}


@dataclasses.dataclass(frozen=True)
class Fate:
    """What becomes of a pod: the status it gets, what it sees and how nvidia-smi ends, or what else it prints."""

    status: dict[str, Any] | None = None
    sees: list[str] | None = None
    exit_code: int = 0
    wsl: bool = False
    log: str | None = None
    after: dict[str, Any] | None = None
    """The status that it has once it has listed its GPU, and gets no further."""
    does: Callable[[str], str] = lambda _uuid: ""
    """What is printed of the work of the GPU that it was given."""


def unplaced(message: str) -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "conditions": [condition]}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
    return {"phase": "Pending", "containerStatuses": [{"name": "see", "ready": False, "state": state}]}


def ended(reason: str, exit_code: int, message: str = "", started: bool = True) -> dict[str, Any]:
    began = {"startedAt": "2026-11-25T18:00:00Z"} if started else {"startedAt": None}
    state = {"terminated": {"exitCode": exit_code, "reason": reason, "message": message, **began}}
    return {"phase": "Failed", "containerStatuses": [{"name": "see", "ready": False, "state": state}]}


def listing_of(devices: list[str], exit_code: int | None = 0, wsl: bool = False, work: str = "") -> str:
    """What the script of a pod prints; without a code it does not get to its end."""
    lines = []
    for number, uuid in enumerate(devices):
        if uuid.startswith("MIG-"):
            lines.append(f"GPU 0: {MODEL} (UUID: {uuid_of(99, 0)})")
            lines.append(f"  MIG 1g.10gb     Device  {number}: (UUID: {uuid})")
        else:
            lines.append(f"GPU {number}: {MODEL} (UUID: {uuid})")
    if not devices:
        lines.append("No devices found.")
    lines += [*(["gpufarm-verify: wsl"] if wsl else []), "gpufarm-verify: visible void"]
    end = "" if exit_code is None else f"gpufarm-verify: end {exit_code}\n"
    return "\n".join([*lines, work + end])


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
        found: Any = pod
        for field in key.split("."):
            found = found.get(field, "")
        if (found == value) is unlike:
            return False
    labels = pod.get("metadata", {}).get("labels", {})
    for term in filter(None, query.get("labelSelector", "").split(",")):
        key, sign, value = term.partition("=")
        if key not in labels or (sign and labels[key] != value):
            return False
    return True
