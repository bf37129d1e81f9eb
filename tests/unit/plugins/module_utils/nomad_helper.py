# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Farms of any size in the form of Nomad's answers, an agent that serves them, and a bench.

Every node is the recorded one with other names, UUIDs and, on request, as many cores as a real GPU server has.
As a script it measures nomad_gpu_verify in a process of its own:

    PYTHONPATH=.collections python tests/unit/plugins/module_utils/nomad_helper.py --nodes 5000 --gpus 8 --cores 192
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import http.server
import json
import os
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parents[1] / "fixtures" / "nomad"
DRIVER = "580.159.04"
MODEL = "NVIDIA H100 80GB HBM3"


def stand_behind_a_proxy(monkeypatch: Any) -> None:
    """Have a proxy for all that is not asked directly, even on this machine, where nobody answers."""
    client = "ansible_collections.gpufarm.core.plugins.module_utils.nomad.client"
    monkeypatch.setattr(f"{client}.is_own", lambda _host: False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


def recorded(name: str) -> Any:
    """A recorded answer of a real Nomad."""
    return json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))


def uuid_of(node: int, gpu: int) -> str:
    return f"GPU-{node:08x}-0000-4000-8000-{gpu:012x}"


def make_node(number: int, gpus: int, cores: int = 2) -> dict[str, Any]:
    """The recorded node with another identity."""
    node: dict[str, Any] = copy.deepcopy(recorded("nodes-1.11.3")[0])
    return _as_node(node, number, gpus, cores)


def _as_node(node: dict[str, Any], number: int, gpus: int, cores: int) -> dict[str, Any]:
    node["ID"] = f"{number:08x}-5555-4444-8888-000000000000"
    node["Name"] = f"node{number:05d}"
    node["CreateIndex"] = number + 10
    topology = node["NodeResources"]["Processors"]["Topology"]
    topology["Cores"] = [{**topology["Cores"][0], "ID": core} for core in range(cores)]
    group = node["NodeResources"]["Devices"][0]
    group["Instances"] = [
        {
            "HealthDescription": "",
            "Healthy": True,
            "ID": uuid_of(number, gpu),
            "Locality": {"PciBusID": f"00000000:{gpu + 1:02X}:00.0"},
        }
        for gpu in range(gpus)
    ]
    if not gpus:
        node["NodeResources"]["Devices"] = None
    return node


def make_expected(nodes: int, gpus: int) -> list[dict[str, Any]]:
    return [
        {
            "node": f"node{number:05d}",
            "uuids": [uuid_of(number, gpu) for gpu in range(gpus)],
            "models": {MODEL: gpus},
            "memory_mib_min": 80000,
            "driver_version": DRIVER,
        }
        for number in range(nodes)
    ]


def write_farm(path: Path, nodes: int, gpus: int, cores: int) -> None:
    template = recorded("nodes-1.11.3")[0]
    with path.open("w", encoding="utf-8") as file:
        for number in range(nodes):
            file.write("[" if number == 0 else ",")
            json.dump(_as_node(template, number, gpus, cores), file, separators=(",", ":"))
        file.write("]" if nodes else "[]")


class Agent:
    """Nomad's HTTP API as far as the modules ask it. What it answers can be changed while it runs."""

    def __init__(self, tls: ssl.SSLContext | None = None, at: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.allocations: list[dict[str, Any]] = []
        self.namespaces: list[dict[str, Any]] = []
        self.index = 10
        self.requests: list[tuple[str, dict[str, str], dict[str, str]]] = []
        self.writes: list[tuple[str, Any]] = []
        self.answer: Callable[[http.server.BaseHTTPRequestHandler], bool] = lambda _request: False
        self._changed = threading.Condition()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = urllib.parse.urlsplit(self.path)
                query = dict(urllib.parse.parse_qsl(parts.query))
                outer.requests.append((parts.path, query, dict(self.headers)))
                if outer.answer(self):
                    return
                if "index" in query:
                    outer.wait_for_change(int(query["index"]), float(query["wait"].rstrip("ms")) / 1000)
                lists = {
                    "/v1/nodes": outer.nodes, "/v1/allocations": outer.allocations, "/v1/namespaces": outer.namespaces
                }  # fmt: skip
                if parts.path not in lists:
                    self.reply(404, b"Invalid path", {})
                    return
                items = lists[parts.path]
                self.reply(200, json.dumps(items).encode(), {"X-Nomad-Index": str(outer.index)})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "null")
                outer.writes.append((self.path, body))
                if not outer.answer(self):
                    self.reply(200, b"{}", {})

            do_PUT = do_POST

            def do_DELETE(self) -> None:
                outer.writes.append((self.path, None))
                if not outer.answer(self):
                    self.reply(200, b"", {})

            def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(at, Handler)
        self._server.daemon_threads = True
        if tls:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.port = self._server.server_address[1]
        self.url = f"{'https' if tls else 'http'}://{at[0]}:{self.port}"

    def wait_for_change(self, index: int, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.index > index, timeout=seconds)

    def change(self, nodes: list[dict[str, Any]], index: int | None = None) -> None:
        with self._changed:
            self.nodes = nodes
            self.index = self.index + 1 if index is None else index
            self._changed.notify_all()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def agent_of(version: str, *servers: str) -> Agent:
    """An agent that runs a version, has a leader and knows servers of versions."""
    tags = [{"region": "global", "build": build} for build in servers]
    answers: dict[str, Any] = {
        "/v1/agent/health": {}, "/v1/status/leader": "127.0.0.1:4647", "/v1/client/stats": {},
        "/v1/agent/self": {"config": {"Version": {"Version": version}}},
        "/v1/agent/members": {
            "ServerRegion": "global", "Members": [{"Name": "s", "Status": "alive", "Tags": each} for each in tags],
        },
    }  # fmt: skip

    def answer(request: Any) -> bool:
        request.reply(200, json.dumps(answers[request.path]).encode(), {})
        return True

    agent = Agent()
    agent.answer = answer
    return agent


@contextlib.contextmanager
def serve_file(path: Path) -> Iterator[str]:
    """Serve one file as every answer, from a process of its own so that it costs the client nothing."""
    code = (
        "import http.server, shutil, sys\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.send_header('X-Nomad-Index', '7'); self.end_headers()\n"
        "        shutil.copyfileobj(open(sys.argv[1], 'rb'), self.wfile, 1 << 20)\n"
        "    def log_message(self, *a): pass\n"
        "s = http.server.HTTPServer(('127.0.0.1', 0), H); print(s.server_address[1], flush=True); s.serve_forever()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.terminate()


def measure(nodes: int, gpus: int, cores: int, missing: int = 0) -> dict[str, Any]:
    """Wall time and peak memory of nomad_gpu_verify on a generated farm, the start of Python included."""
    module = "ansible_collections.gpufarm.core.plugins.modules.nomad_gpu_verify"
    with tempfile.TemporaryDirectory() as folder:
        farm = Path(folder) / "nodes.json"
        write_farm(farm, nodes, gpus, cores)
        with serve_file(farm) as address:
            expected = make_expected(nodes + missing, gpus)
            arguments = {"ANSIBLE_MODULE_ARGS": {"address": address, "expected": expected, "timeout": 0}}
            code = (
                "import resource, sys, time\n"
                "started = time.perf_counter()\n"
                "from ansible.module_utils.testing import patch_module_args\n"
                "import json, io\n"
                f"from {module} import main\n"
                "arguments = json.load(sys.stdin)['ANSIBLE_MODULE_ARGS']\n"
                "with patch_module_args(arguments):\n"
                "    try:\n"
                "        main()\n"
                "    except SystemExit:\n"
                "        pass\n"
                "used = resource.getrusage(resource.RUSAGE_SELF)\n"
                "figures = {'seconds': time.perf_counter() - started, 'cpu': used.ru_utime + used.ru_stime}\n"
                # Not ru_maxrss: across fork and exec it keeps the peak of the process that started this one.
                "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM:'))\n"
                "print(json.dumps({**figures, 'mib': int(peak.split()[1]) / 1024}), file=sys.stderr)\n"
            )
            began = time.perf_counter()
            answer = subprocess.run(
                [sys.executable, "-c", code],
                input=json.dumps(arguments),
                capture_output=True,
                text=True,
                check=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
            wall = time.perf_counter() - began
            result = json.loads(answer.stdout)
            own = json.loads(answer.stderr.strip().splitlines()[-1])
            return {
                "nodes": nodes,
                "gpus": nodes * gpus,
                "answer_mb": round(farm.stat().st_size / 1e6, 1),
                "wall_s": round(wall, 2),
                "module_s": round(own["seconds"], 2),
                "cpu_s": round(own["cpu"], 2),
                "peak_mib": round(own["mib"]),
                "failed_nodes": sum(1 for node in result["nodes"] if node["problems"]),
            }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--missing", type=int, default=0, help="nodes that are expected and not there")
    parser.add_argument("--limit", type=float, help="end with 1 above so many seconds of the processor")
    parser.add_argument("--write", type=Path, help="write Nomad's answer there instead of measuring")
    options = parser.parse_args()
    if options.write:
        write_farm(options.write, options.nodes, options.gpus, options.cores)
        return 0
    figures = measure(options.nodes, options.gpus, options.cores, options.missing)
    sys.stdout.write(f"{json.dumps(figures)}\nverify: {figures['cpu_s']} s of Python (limit {options.limit})\n")
    return int(options.limit is not None and figures["cpu_s"] > options.limit)


if __name__ == "__main__":
    sys.exit(main())
