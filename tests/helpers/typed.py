"""Commands as they stand in a shell script, without the imports: `rge`, `python` and `accelerate launch` are programs of `forked`."""

import json
import os
import shlex
import socketserver
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import forked

ASK = """
import json, os, socket, sys
port, name, *words = sys.argv[1:]
if name == "python" and words[0] == "-c":
    os.execv(sys.executable, [sys.executable, *words])
with socket.create_connection(("127.0.0.1", int(port))) as server:
    server.sendall(json.dumps([name, words, os.getcwd()]).encode() + b"\\n")
    code, out, err = json.loads(server.makefile().read())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""
STARTS = {"rge": ["-m", "rge"], "python": [], "accelerate": []}
"""What each command starts; of `accelerate launch`, the one process that it would."""


@contextmanager
def commands(folder: Path, **environment: str) -> Iterator[dict[str, str]]:
    """The environment of a shell that finds these commands first.

    Args:
        folder: a new one, for the commands.
        environment: further variables, of the programs too.
    """

    class Answer(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            name, words, cwd = json.loads(self.rfile.readline())
            if name == "accelerate":
                assert words.pop(0) == "launch"
            done = forked.run(*STARTS[name], *words, cwd=Path(cwd), **environment)
            self.wfile.write(json.dumps([done.returncode, done.stdout, done.stderr]).encode())

    folder.mkdir()
    (folder / "ask.py").write_text(ASK)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer) as server:
        for name in STARTS:
            ask = shlex.join(
                [sys.executable, "-SE", f"{folder / 'ask.py'}", str(server.server_address[1]), name]
            )
            (folder / name).write_text(f'#!/bin/sh\nexec {ask} "$@"\n')
            (folder / name).chmod(0o755)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield os.environ | environment | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
        server.shutdown()
