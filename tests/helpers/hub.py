"""A Hugging Face hub on this machine, as far as uploading and fetching a model need one; real clients speak to it."""

import base64
import hashlib
import http.server
import json
import threading
import urllib.parse
from contextlib import contextmanager

COMMIT = "1" * 40


class Hub:
    """What the server holds.

    Attributes:
        files: path in the repository -> bytes.
        stored: SHA-256 -> bytes, of large files.
        asked: method and path of every request.
        created: what a repository was asked for with.
    """

    def __init__(self):
        self.files, self.stored, self.asked, self.created = {}, {}, [], None
        self.token = "hf_test"

    def entry(self, name):
        """A file as the hub lists it."""
        data = self.files[name]
        return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def answer(self, method, path, body, address):
        """Status and JSON, or bytes."""
        if method == "POST" and path == "/api/repos/create":
            self.created = json.loads(body)
            kind = "datasets/" if self.created.get("type") == "dataset" else ""
            return 200, {"url": f"{address}/{kind}{self.created['organization']}/{self.created['name']}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if "/preupload/" in path:
            asked = json.loads(body)["files"]
            kinds = {True: "lfs", False: "regular"}
            return 200, {
                "files": [
                    {
                        "path": f["path"],
                        "uploadMode": kinds[f["path"].endswith(".safetensors")],
                        "shouldIgnore": False,
                    }
                    for f in asked
                ]
            }
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                one | {"actions": {"upload": {"href": f"{address}/put/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": objects}
        if method == "PUT" and path.startswith("/put/"):
            assert hashlib.sha256(body).hexdigest() == path.removeprefix("/put/")
            self.stored[path.removeprefix("/put/")] = body
            return 200, {}
        if "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.files[value["path"]] = self.stored[value["oid"]]
            return 200, {
                "success": True,
                "commitOid": COMMIT,
                "commitUrl": f"{address}/me/mine/commit/{COMMIT}",
            }
        if "/revision/" in path:
            return 200, {"id": "me/mine", "sha": COMMIT, "siblings": [{"rfilename": f} for f in self.files]}
        if "/tree/" in path:
            return 200, [self.entry(name) for name in self.files]
        if "/paths-info/" in path:
            asked = urllib.parse.parse_qs(body.decode())["paths"]
            return 200, [self.entry(name) for name in asked if name in self.files]
        if "/resolve/" in path:
            name = path.split("/resolve/")[1].split("/", 1)[1]
            if name in self.files:
                return 200, self.files[name]
        return 404, {"error": f"no {method} {path}"}


@contextmanager
def hub(monkeypatch):
    """A `Hub` behind the address that huggingface_hub asks in this process."""
    held = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_any(self):
            held.asked.append(f"{self.command} {self.path}")
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            if path.startswith("/api/") and self.headers.get("Authorization") != f"Bearer {held.token}":
                status, found = 401, {"error": "Invalid credentials in Authorization header"}
            else:
                status, found = held.answer(self.command, path, body, address)
            data = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if status == 404:
                self.send_header("X-Error-Code", "EntryNotFound")
            if isinstance(found, bytes):
                self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
                self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_HEAD = do_POST = do_PUT = do_any

        def log_message(self, *_):
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, value in {
            "ENDPOINT": address,
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
        }.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        yield held
        server.shutdown()
