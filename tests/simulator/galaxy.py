"""Stands in for galaxy.ansible.com: one collection in one version, by the calls that ansible-galaxy makes (API v3)."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@contextmanager
def galaxy(archive: Path) -> Iterator[str]:
    """Serve the collection of a built archive (NAMESPACE-NAME-VERSION.tar.gz), and give the server's address."""
    namespace, name, version = archive.name.removesuffix(".tar.gz").split("-", 2)
    content = archive.read_bytes()
    collection = f"/api/v3/collections/{namespace}/{name}/"
    one = f"{collection}versions/{version}/"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == f"/{archive.name}":
                self.answer(content)
                return
            address = f"http://{self.headers['Host']}"
            answers = {
                "/api/": {"available_versions": {"v3": "v3/"}},
                collection: {"href": collection, "highest_version": {"version": version}},
                f"{collection}versions/": {
                    "meta": {"count": 1}, "links": {"next": None}, "data": [{"version": version, "href": one}],
                },
                one: {
                    "version": version, "href": one, "namespace": {"name": namespace}, "collection": {"name": name},
                    "download_url": f"{address}/{archive.name}", "metadata": {"dependencies": {}}, "signatures": [],
                    "artifact": {"filename": archive.name, "sha256": hashlib.sha256(content).hexdigest()},
                },
            }  # fmt: skip
            if path in answers:
                self.answer(json.dumps(answers[path]).encode(), "application/json")
            else:
                self.send_error(404)

        def answer(self, body: bytes, kind: str = "application/octet-stream") -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: ansible-galaxy says what it gets."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/api/"
    finally:
        server.shutdown()
        server.server_close()
