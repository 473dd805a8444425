"""Servers that stand for the hub and for Google Cloud Storage, with faults when a test wants them."""
import http.server
import io
import random
import threading
import time
from http import HTTPStatus
from pathlib import Path

import helpers  # noqa: F401  it adds the project to sys.path

from runtime.bucket import Bucket


class Server(http.server.ThreadingHTTPServer):
    """Serves at a free port of this machine, on another thread; state: its attributes."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, handler, **state):
        vars(self).update(dict(files={}, faults={}, log=[], tokens=[], cdn="") | state)
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=[0.02], daemon=True).start()

    def handle_error(self, request, client_address):
        pass  # the resets that the tests ask for

    def server_close(self):
        self.shutdown()
        super().server_close()


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves server.files; each request takes the next fault of server.faults[path].

    A fault is a status, where 302 leads to the same path at server.cdn; or "break": the connection breaks
    half-way. server.log: the paths of the requests. server.tokens: what they were sent with.
    """

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server = self.server
        server.log.append(self.path)
        server.tokens.append(self.headers["Authorization"])
        body = server.files.get(self.path, b"")
        fault = server.faults[self.path].pop(0) if server.faults.get(self.path) else None
        self.send_response(fault if isinstance(fault, int) else 200 if body else 404)
        self.send_header("Location", server.cdn + self.path)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.close_connection = fault == "break"
        self.wfile.write(body[:len(body) // 2] if fault == "break" else body)

    def log_message(self, *args):
        pass


class Front(http.server.BaseHTTPRequestHandler):
    """Passes requests on to the emulator. Each takes the next fault of server.script, if there is one.

    server.faults: {a part of an object's name: the fault of the first request for such an object}.
    Kinds of requests: insert (an upload), media (a download), list, DELETE. server.log has the kind of each.
    A fault is a status; "stall" or "slow": the answer comes late; "short": the connection breaks before its
    end.
    """

    def do(self):
        server = self.server
        length = int(self.headers.get("Content-Length", 0))
        self.body = self.rfile.read(length)
        if len(self.body) < length:  # the client was killed; a bucket drops what is not whole
            return
        kind = "media" if "alt=media" in self.path else KINDS[self.command]
        with server.lock:
            fault = server.script.pop(0) if server.script else None
            for part in [part for part in server.faults if part in self.path]:
                fault = server.faults.pop(part)
            server.log.append(kind)
        if not self.headers.get("Authorization", "").endswith(server.token):
            fault = 401
        if kind in server.denied:
            fault = 403

        # the answer; the emulator takes one request at a time
        time.sleep(PAUSES.get(fault, 0))
        connection = self.wfile
        self.wfile = io.BytesIO()
        with server.lock:
            self.answer(fault)
        answer = self.wfile.getvalue()
        connection.write(answer[:-1] if fault == "short" else answer)

    do_GET = do_POST = do_DELETE = do

    def answer(self, fault):
        """Writes the answer of the emulator, or a status."""
        from gcp_storage_emulator.server import Response, Router
        if not isinstance(fault, int):
            self.storage = self.server.storage
            return Router(self).handle(self.command)
        response = Response(self)
        response.status = HTTPStatus(fault)
        response["Location"] = self.server.url
        response.write_file(f"a fault, {self.headers['Authorization']}".encode())
        response.close()

    def log_message(self, *args):
        pass


KINDS = {"GET": "list", "POST": "insert", "DELETE": "DELETE"}
PAUSES = {"slow": 0.5, "stall": 1}  # seconds


def draw_faults(seed, share):
    """Returns a script of faults for a share of the requests."""
    draw = random.Random(seed)
    return [draw.choice([503, 429, 408, 500, "short", "stall"]) if draw.random() < share else None
            for _ in range(10_000)]


def serve_bucket():
    """Returns a Front of an empty bucket in memory; its emulator is not in requirements.txt."""
    from gcp_storage_emulator import server
    server._read_data = lambda handler, query: handler.body  # its own refuses empty files
    emulator = server.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    return Server(
        Front, storage=emulator._storage, lock=threading.Lock(), script=[], token="", denied=())


def stored(bucket_server, name):
    """Returns the content of an object in the bucket."""
    return bucket_server.storage.get_file("bucket", name)


def upload(folder, url):
    """Copies the files of a dataset to url, as `gcloud storage rsync` does."""
    for path in Path(folder).rglob("*.*"):
        Bucket(url).write(str(path.relative_to(folder)), path.read_bytes())
