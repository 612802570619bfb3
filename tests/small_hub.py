"""A Hugging Face hub of one repository on this machine, with the faults that the real one has."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

Fault = Literal["", "gated", "missing", "cut short", "altered", "failing"]
REVISION = "0123456789abcdef0123456789abcdef01234567"


class SmallHub(ThreadingHTTPServer):
    """Serves a folder as one repository's files.

    Attributes:
        fetched: Names of the files that were sent.
        fault: How it answers from now on.
    """

    daemon_threads = True

    def __init__(self, repository: str, folder: Path, licence: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repository = repository
        self.folder = folder
        self.licence = licence
        self.fetched: list[str] = []
        self.fault: Fault = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def description(self) -> dict[str, Any]:
        return {
            "id": self.repository,
            "sha": REVISION,
            "cardData": {"license": self.licence},
            "siblings": [
                {"rfilename": path.name, "size": path.stat().st_size, "blobId": "0" * 40}
                | ({} if path.suffix == ".json" else {"lfs": _lfs(path)})
                for path in sorted(self.folder.iterdir())
            ],
        }


@contextmanager
def small_hub(repository: str, folder: Path, licence: str = "other") -> Iterator[SmallHub]:
    with SmallHub(repository, folder, licence) as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _lfs(path: Path) -> dict[str, Any]:
    return {"sha256": _digest(path), "size": path.stat().st_size, "pointerSize": 130}


class _Handler(BaseHTTPRequestHandler):
    server: SmallHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Quietly."""

    def _answer(self, *, body: bool) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        if hub.fault == "missing":
            return self._send(401, {"X-Error-Code": "RepoNotFound"})
        if path == f"/api/models/{hub.repository}":
            content = json.dumps(hub.description()).encode()
            return self._send(200, {"Content-Type": "application/json"}, content)
        start = f"/{hub.repository}/resolve/{REVISION}/"
        if not path.startswith(start):
            return self._send(404, {"X-Error-Code": "EntryNotFound"})
        file = hub.folder / path.removeprefix(start)
        if hub.fault == "gated":
            return self._send(403, {"X-Error-Code": "GatedRepo"})
        if hub.fault == "failing":
            return self._send(418, {})
        content = file.read_bytes()
        if hub.fault == "altered" and file.suffix != ".json":
            content = content[:-1] + bytes([content[-1] ^ 1])
        headers = {"X-Repo-Commit": REVISION, "ETag": f'"{_digest(file)}"'}
        if body:
            hub.fetched.append(file.name)
        cut = 100 if hub.fault == "cut short" and body and file.suffix != ".json" else None
        return self._send(200, headers, content, body=body, cut=cut)

    def _send(
        self,
        status: int,
        headers: dict[str, str],
        content: bytes = b"",
        *,
        body: bool = True,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content[:cut])
        # Otherwise the client would wait for the rest.
        self.close_connection = cut is not None
