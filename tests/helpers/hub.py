"""A stand-in for the Hugging Face Hub on loopback: what the real one answers to the requests of a download.

Paths, fields, headers and error codes are those that huggingface_hub 2.4 reads (hf_api.py, file_download.py,
utils/_http.py). Large files are redirected to another host name, as the real ones are to a CDN.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".bin", ".pt", ".gguf")
"""Ends of the names of files that the Hub keeps in Large File Storage."""
SECRET = "hf_of_a_member"
"""A token that may read everything; others are those of strangers."""


@dataclass
class Repo:
    """A repository with one commit, which is ``main`` and has the tag ``v1``."""

    files: dict[str, bytes]
    gated: bool = False
    private: bool = False
    breaks: dict[str, int] = field(default_factory=dict)
    """Files whose next download breaks off after so many bytes."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Files that end too soon, whenever they are downloaded."""

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files)).encode()).hexdigest()

    def etag(self, name: str) -> str:
        content = self.files[name]
        if name.endswith(LARGE):
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def tree(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for name, content in self.files.items():
            found.append({"type": "file", "path": name, "size": len(content), "oid": self.etag(name)[:40]})
            if name.endswith(LARGE):
                found[-1]["lfs"] = {"oid": self.etag(name), "size": len(content), "pointerSize": 134}
        folders = {name.rpartition("/")[0] for name in self.files if "/" in name}
        return found + [{"type": "directory", "path": name, "size": 0, "oid": "0" * 40} for name in sorted(folders)]


@dataclass
class Request:
    """One that came, and what was sent of a file."""

    method: str
    path: str
    token: str | None
    file: str | None = None
    start: int = 0
    sent: int = 0


class Hub:
    """Repositories by name, and a log of what was asked for."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.repos: dict[str, Repo] = {}
        self.log: list[Request] = []
        self.status: int | None = None
        """What all requests are answered with, where the Hub is out of order."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add(self, name: str, directory: Path | None = None, **settings: Any) -> Repo:
        """A repository with the files of ``directory``."""
        files = {path.name: path.read_bytes() for path in directory.iterdir()} if directory else {}
        self.repos[name] = repo = Repo({**files, ".gitattributes": b"", "README.md": b"# A model"}, **settings)
        return repo

    def downloaded(self) -> list[str]:
        """Names of the files of which something was sent, in order."""
        return [request.file for request in self.log if request.file is not None and request.sent]

    def bytes_of(self, name: str) -> int:
        """How many bytes of a file were sent."""
        return sum(request.sent for request in self.log if request.file == name)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        token = (self.headers["Authorization"] or "").removeprefix("Bearer ") or None
        request = Request(self.command, path, token)
        self.hub.log.append(request)
        if self.hub.status is not None:
            self._send(self.hub.status)
        elif match := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path):
            self._file(request, self.hub.repos[match[1]], match[2])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            if repo := self._open(match[1], match[3] or "main", token):
                info = {"id": match[1], "sha": repo.commit, "private": repo.private, "gated": repo.gated}
                info["siblings"] = [{"rfilename": name} for name in repo.files]
                self._send(200, json.dumps(repo.tree() if match[2] == "tree" else info).encode())
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            if repo := self._open(match[1], match[2], token):
                self._resolve(request, match[1], repo, match[3])
        else:
            self._send(404)

    def _open(self, name: str, revision: str, token: str | None) -> Repo | None:
        """The repository; None where an error was sent."""
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and token != SECRET):
            said = "Repository not found" if token else "Invalid username or password."
            self._refuse(404 if token else 401, "RepoNotFound", said)
        elif revision not in ("main", "v1", repo.commit):
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return repo
        return None

    def _resolve(self, request: Request, model: str, repo: Repo, name: str) -> None:
        if repo.gated and request.token != SECRET:  # Its description is public, its files are not.
            said = f"Access to model {model} is restricted"
            if request.token:
                said += f" and you are not in the authorized list. Visit {self.hub.endpoint}/{model} to ask for access."
                self._refuse(403, "GatedRepo", said)
            else:
                said += ". You must have access to it and be authenticated to access it. Please log in."
                self._refuse(401, "GatedRepo", said)
        elif name not in repo.files:
            self._refuse(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": repo.commit})
        elif name.endswith(LARGE):
            linked = {"X-Linked-Etag": f'"{repo.etag(name)}"', "X-Linked-Size": str(len(repo.files[name]))}
            location = f"http://localhost:{self.hub.port}/cdn/{model}/{name}"
            self._send(302, headers={"X-Repo-Commit": repo.commit, **linked, "Location": location})
        else:
            self._file(request, repo, name)

    def _file(self, request: Request, repo: Repo, name: str) -> None:
        whole = repo.files[name]
        content = whole[: repo.sizes.get(name, len(whole))]
        headers = {"ETag": f'"{repo.etag(name)}"', "X-Repo-Commit": repo.commit, "Accept-Ranges": "bytes"}
        status, start, stop = 200, 0, len(content)
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or ""):
            status, start = 206, int(match[1])
            stop = min(stop, int(match[2]) + 1) if match[2] else stop
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(whole)}"
        part, breaks = content[start:stop], repo.breaks.pop(name, None) if request.method == "GET" else None
        request.file, request.start = name, start
        request.sent = len(part[:breaks]) if request.method == "GET" else 0
        self._send(status, part, headers, breaks)

    def _refuse(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        body = json.dumps({"error": message}).encode()
        self._send(status, body, {**(headers or {}), "X-Error-Code": code, "X-Error-Message": message})

    def _send(
        self, status: int, body: bytes = b"", headers: dict[str, str] | None = None, breaks: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.close_connection = self.close_connection or breaks is not None
            self.wfile.write(body[:breaks])


@contextmanager
def serve() -> Iterator[Hub]:
    """A hub that answers while the block runs."""
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.hub = hub = Hub(server.server_port)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def facts(said: str) -> dict[str, str]:
    found = dict(re.findall(r"^(\w[\w ]*?)\s{2,}(.*)$", said, re.MULTILINE))
    if "memory" in found:  # What is free is not the same twice.
        found["memory"] = found["memory"].rpartition("; ")[0]
    return found
