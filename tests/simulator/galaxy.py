"""Stands in for galaxy.ansible.com: collections in one version each, by the calls of ansible-galaxy (API v3)."""

from __future__ import annotations

import hashlib
import io
import json
import sysconfig
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def archive_of(collection: str, folder: Path) -> Path:
    """Write the archive of a collection that Ansible's own package has installed, and return its path.

    The package leaves out files, such as tests, so the lists of the archive are made anew.
    """
    installed = Path(sysconfig.get_path("purelib"), "ansible_collections", *collection.split("."))
    files = json.loads((installed / "FILES.json").read_text(encoding="utf-8"))
    files["files"] = [entry for entry in files["files"] if (installed / entry["name"]).exists()]
    manifest = json.loads((installed / "MANIFEST.json").read_text(encoding="utf-8"))
    listed = json.dumps(files).encode()
    manifest["file_manifest_file"]["chksum_sha256"] = hashlib.sha256(listed).hexdigest()
    archive = folder / f"{collection.replace('.', '-')}-{manifest['collection_info']['version']}.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        for name, content in {"MANIFEST.json": json.dumps(manifest).encode(), "FILES.json": listed}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for entry in files["files"]:
            if entry["name"] != ".":
                tar.add(installed / entry["name"], entry["name"], recursive=False)
    return archive


@contextmanager
def galaxy(*archives: Path) -> Iterator[str]:
    """Serve the collections of built archives, and give the server's address."""
    contents = {f"/{archive.name}": archive.read_bytes() for archive in archives}

    def answers(address: str) -> dict[str, Any]:
        found: dict[str, Any] = {"/api/": {"available_versions": {"v3": "v3/"}}}
        for path, content in contents.items():
            with tarfile.open(fileobj=io.BytesIO(content)) as tar:
                manifest = tar.extractfile("MANIFEST.json")
                assert manifest is not None
                info = json.load(manifest)["collection_info"]
            version = info["version"]
            collection = f"/api/v3/collections/{info['namespace']}/{info['name']}/"
            one = f"{collection}versions/{version}/"
            found |= {
                collection: {"href": collection, "highest_version": {"version": version}},
                f"{collection}versions/": {
                    "meta": {"count": 1}, "links": {"next": None}, "data": [{"version": version, "href": one}],
                },
                one: {
                    "version": version, "href": one, "namespace": {"name": info["namespace"]},
                    "collection": {"name": info["name"]}, "download_url": address + path, "signatures": [],
                    "metadata": {"dependencies": info["dependencies"]},
                    "artifact": {"filename": path[1:], "sha256": hashlib.sha256(content).hexdigest()},
                },
            }  # fmt: skip
        return found

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path in contents:
                self.answer(contents[path])
            elif path in known:
                self.answer(json.dumps(known[path]).encode(), "application/json")
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
    address = f"http://127.0.0.1:{server.server_port}"
    known = answers(address)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"{address}/api/"
    finally:
        server.shutdown()
        server.server_close()
