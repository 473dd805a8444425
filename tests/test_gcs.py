"""Buckets: against gcp-storage-emulator, behind a front that breaks requests as networks and servers do."""
import base64
import collections
import hashlib
import http.client
import http.server
import json
import os
import pathlib
import random
import re
import shutil
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
from types import SimpleNamespace

import numpy as np
import pytest
from gcp_storage_emulator.server import create_server

import data
from configurator import TransientError, UserError, command
from data import Bucket, BucketError, Dataset, local_dataset

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STEP = 1 << 18  # what chunks are multiples of
CONTENT = np.random.default_rng(0).bytes(6 * STEP + 1234)


class Front(http.server.BaseHTTPRequestHandler):
    """Passes requests on to the emulator, with the faults of server.script or drawn at server.rate.

    server.log holds (kind, fault, Content-Range or Range) of each request. Where the emulator differs from
    the real service, the answer is the real one's: it has no Range if nothing has arrived, and the session of
    a finished upload still knows its object. Chunks must be multiples of server.step.
    """

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do(self):
        server = self.server
        url = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(url.query)
        session = query.get("upload_id", [None])[0]
        span = self.headers.get("Content-Range", "")
        length = int(self.headers.get("Content-Length", 0))
        kind = self.kind(url, query, session, span)
        with server.lock:
            fault = server.script.pop(0) if server.script else self.draw(kind, length)
            server.log.append((kind, fault, span or self.headers.get("Range")))
            server.paths.append((kind, urllib.parse.unquote(url.path)))
        if fault in ("reset", "stall") and kind != "media":
            self.rfile.read(length // 2)
            return self.leave(fault)
        body = self.rfile.read(length)
        status = self.refusal(kind, fault, span, len(body))
        if status:
            message = f"a fault, {self.headers.get('Authorization')}"
            return self.answer(status, {}, json.dumps({"error": {"message": message}}).encode())
        if fault in ("less", "reset after some") and kind == "chunk" and length > server.step:
            first, _, total = map(int, re.findall(r"\d+", span))
            body, span = body[:server.step], f"bytes {first}-{first + server.step - 1}/{total}"
        if fault == "flip" and length:
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1:]
        with server.lock:  # the emulator takes one request at a time
            status, headers, content = self.forward(body, span, session)
        if kind == "list" and status == 200:
            content = self.page(json.loads(content), query)
        if fault == "other md5" or (kind == "GET" and server.composite):
            value = json.loads(content)
            value["md5Hash"] = base64.b64encode(bytes(16)).decode()
            if server.composite:
                del value["md5Hash"]
            content = json.dumps(value).encode()
        if fault in ("lost", "reset after some"):
            return self.leave("reset")
        if fault == "ignore range" and status == 206:
            status, headers, content = 200, {}, server.whole
        breaks_off = fault in ("reset", "stall", "short") and content
        self.answer(status, headers, content, fault if breaks_off else None)

    do_GET = do_POST = do_PUT = do_DELETE = do

    def kind(self, url, query, session, span):
        if session:
            return "query" if "*/" in span else "chunk"
        if self.command == "POST":
            return "start"
        if query.get("alt") == ["media"]:
            return "media"
        return "list" if url.path.endswith("/o") else self.command

    def draw(self, kind, length):
        server = self.server
        if server.random.random() >= server.rate:
            return None
        faults = [503, 429, 408, 401, 500, "reset", "stall", "lost"]
        if kind == "chunk":
            faults += ["gone", "less", "reset after some", "flip"]
        fault = server.random.choice(faults)
        if fault == 401 and server.log and server.log[-1][1] == 401:
            return 503  # a second 401 in a row would be a refusal
        return fault

    def refusal(self, kind, fault, span, length):
        """The status with which the request is refused, or None."""
        server = self.server
        if kind == "chunk":
            first, last, total = map(int, re.findall(r"\d+", span))
            if length != last - first + 1 or last >= total or (last + 1 < total and length % server.step):
                return 400
        if kind in server.denied:
            return 403
        if fault == "gone" and kind in ("chunk", "query"):
            return 404
        tokens = None if server.tokens is None else [f"Bearer {token}" for token in server.tokens]
        if tokens is not None and self.headers.get("Authorization") not in tokens:
            return 401
        return fault if isinstance(fault, int) else None

    def forward(self, body, span, session):
        server = self.server
        if session in server.finished and "*/" in span:
            return 200, {}, server.finished[session]
        connection = http.client.HTTPConnection("127.0.0.1", server.emulator)
        own = ("content-range", "content-length", "connection")
        headers = {key: value for key, value in self.headers.items() if key.lower() not in own}
        if span:
            headers["Content-Range"] = span
        connection.request(self.command, self.path, body, headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        if session and response.status == 200:
            server.finished[session] = content
        kept = ("location", "range", "content-range")
        headers = {key: value for key, value in response.getheaders() if key.lower() in kept}
        if headers.get("Range") == "bytes=0-0":
            del headers["Range"]
        return response.status, headers, content

    def page(self, listing, query):
        start = int(query.get("pageToken", ["0"])[0])
        end = start + min(self.server.page, int(query.get("maxResults", ["1000"])[0]))
        more = {"nextPageToken": str(end)} if end < len(listing["items"]) else {}
        return json.dumps({"items": listing["items"][start:end]} | more).encode()

    def leave(self, fault):
        if fault == "stall":
            self.server.stop.wait(4)
        else:  # a reset instead of an orderly end
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def answer(self, status, headers, content, fault=None):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        try:
            sent = content[:len(content) // 2] if fault else content
            for i in range(0, len(sent), 1 << 14):
                self.wfile.write(sent[i:i + (1 << 14)])
                self.server.stop.wait(self.server.slow)
            if fault:
                self.leave(fault)
        except OSError:  # the client was killed
            self.close_connection = True

    def log_message(self, *args):
        pass


class Quiet(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        pass  # the resets that the tests ask for


@pytest.fixture(scope="module")
def emulator():
    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    server.start()
    while not server._api._httpd:
        time.sleep(0.01)
    yield server
    server.stop()


def serve(handler, **state):
    server = Quiet(("127.0.0.1", 0), handler)
    server.stop = threading.Event()
    server.lock = threading.Lock()
    server.url = f"http://127.0.0.1:{server.server_port}"
    vars(server).update(state)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return server


@pytest.fixture
def front(emulator, monkeypatch):
    emulator.wipe(keep_buckets=True)
    port = emulator._api._httpd.server_port
    server = serve(
        Front, emulator=port, script=[], rate=0.0, random=random.Random(0), log=[], paths=[], tokens=None,
        denied=(), finished={}, step=STEP, page=1000, composite=False, slow=0, whole=CONTENT)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    monkeypatch.setenv("PYTHONPATH", ROOT)
    yield server
    server.stop.set()
    server.shutdown()
    server.server_close()


def bucket(url="gs://bucket/run", **settings):
    return Bucket(url, **dict(attempts=12, wait=0.001, timeout=10, chunk=2 * STEP) | settings)


def stored(emulator, name):
    return emulator._storage.get_file("bucket", name)


def kinds(front):
    return [kind for kind, _, _ in front.log]


# Uploads.

def test_200_uploads_lose_nothing(front, emulator, tmp_path):
    rng = np.random.default_rng(1)
    front.step = step = 1 << 12
    target = bucket(timeout=0.15, chunk=2 * step)
    front.rate = 0.3
    sent = {}
    for i in range(200):
        content = rng.bytes(rng.integers(0, 2000) if i % 2 else rng.integers(2 * step + 1, 6 * step))
        name = f"ckpt_{i % 150:08d} ü+%.pt"  # the last 50 overwrite
        if i % 4 == 1:
            target.write(name, content)
        else:
            (tmp_path / "file").write_bytes(content)
            target.upload(str(tmp_path / "file"), name)
        sent[name] = content
    faults = collections.Counter(fault for _, fault, _ in front.log)
    front.rate = 0.0
    assert len(front.log) > 500 and 0.25 < 1 - faults[None] / len(front.log) < 0.35
    assert {503, 429, 408, 401, 500, "reset", "stall", "lost"} <= faults.keys()
    assert {"gone", "less", "reset after some", "flip"} <= faults.keys()
    assert target.list() == sizes_and_digests(sent)
    assert all(stored(emulator, f"run/{name}") == content for name, content in sent.items())


def sizes_and_digests(objects):
    return {name: (len(content), hashlib.md5(content).hexdigest()) for name, content in objects.items()}


@pytest.mark.parametrize("script, expected", [
    ([], "start c0 c2 c4 c6"),
    ([None, None, "less"], "start c0 c2 c3 c5"),
    ([None, None, "reset after some"], "start c0 c2 q c3 c5"),
    ([None, None, "reset"], "start c0 c2 q c2 c4 c6"),
    ([None, "stall"], "start c0 q c0 c2 c4 c6"),
    ([None, None, 503, 429], "start c0 c2 q q c2 c4 c6"),
    ([None, "less", "lost"], "start c0 c1 q c3 c5"),
    ([None] * 4 + ["lost"], "start c0 c2 c4 c6 q"),  # the finished upload is recognised
    ([None, None, "gone"], "start c0 c2 start c0 c2 c4 c6"),
    ([None, None, 410], "start c0 c2 start c0 c2 c4 c6"),
    ([None, "lost", "gone"], "start c0 q start c0 c2 c4 c6"),
    ([None, 401], "start c0 c0 c2 c4 c6"),
    ([None, None, 308], "start c0 c2 q c2 c4 c6"),  # nothing has arrived
    ([None] * 4 + ["short"], "start c0 c2 c4 c6 q"),
    ([503, 429, 408, 500, 502, "reset", "stall", "lost"], "start " * 9 + "c0 c2 c4 c6"),
    ([None, "flip"], "start c0 c2 c4 c6 start c0 c2 c4 c6"),
    ([None] * 4 + ["other md5"], "start c0 c2 c4 c6 start c0 c2 c4 c6"),
])
def test_resumable_session(front, emulator, script, expected):
    """c2: a chunk from the third step on; q: asking how much has arrived."""
    front.script = list(script)
    bucket(timeout=0.5 if "stall" in script else 10).write("big", CONTENT)
    requests = []
    for kind, _, span in front.log:
        if kind == "chunk":
            kind = f"c{int(re.match(r'bytes ([0-9]+)', span)[1]) // STEP}"
        requests.append("q" if kind == "query" else kind)
    assert " ".join(requests) == expected
    assert stored(emulator, "run/big") == CONTENT


GAVE_UP = "; gave up after {} attempts$"


@pytest.mark.parametrize("content, script", [
    (b"x", [503]),
    (CONTENT, [None] + [503] * 50),
    (CONTENT, [None] + [308] * 50),
    (CONTENT, [None, "gone"]),
    (CONTENT, [None, None, "gone"]),
    (CONTENT, [None, None, "flip", None, None]),
])
def test_uploads_give_up(front, content, script):
    front.script = script * 50
    message = r"^gs://bucket/run/a at http://\S+: (status \d+|nothing of what).*"
    with pytest.raises(TransientError, match=message + GAVE_UP.format(4)):
        bucket(attempts=4).write("a", content)
    front.script = []
    assert bucket().list() == {}  # nothing half-uploaded or damaged is seen


def test_a_slow_upload_does_not_give_up(front, emulator):
    front.script = [None] + ["reset after some", None] * 5
    bucket(attempts=2).write("big", CONTENT)
    assert front.script == [] and stored(emulator, "run/big") == CONTENT


def test_a_file_that_grows_is_sent_as_it_was(front, emulator, tmp_path, monkeypatch):
    path = tmp_path / "log.txt"
    size_and_digest = data.size_and_digest

    def append_afterwards(f, digest):
        result = size_and_digest(f, digest)
        with open(path, "ab") as f:
            f.write(b"later" * 1000)
        return result

    monkeypatch.setattr(data, "size_and_digest", append_afterwards)
    for size in (100, 2 * STEP, 3 * STEP + 1):
        path.write_bytes(CONTENT[:size])
        bucket().upload(str(path), "log.txt")
        assert stored(emulator, "run/log.txt") == CONTENT[:size]


@pytest.mark.parametrize("status", [400, 403, 404, 412])
@pytest.mark.parametrize("call", [
    lambda: bucket().write("a", b"x"),
    lambda: bucket().list(),
    lambda: bucket().download("a", "never"),
], ids=["write", "list", "download"])
def test_refusals_fail_at_once(front, status, call):
    front.script = [status]
    with pytest.raises(BucketError, match=f"status {status} a fault"):
        call()
    assert len(front.log) == 1 and issubclass(BucketError, UserError)


# Downloads, lists.

def test_downloads_lose_nothing(front, tmp_path):
    target = bucket(timeout=0.15)
    sizes = [0, 1, 5000, len(CONTENT)]
    for size in sizes:
        target.write(str(size), CONTENT[:size])
    front.rate = 0.3
    for i in range(60):
        size, path = sizes[i % 4], tmp_path / "new" / str(i)
        target.download(str(size), str(path))
        assert path.read_bytes() == CONTENT[:size] and os.listdir(path.parent) == [path.name]
        os.remove(path)
        assert target.read("5000") == CONTENT[:5000]
    assert any(span and span.startswith("bytes=") for kind, _, span in front.log if kind == "media")


@pytest.mark.parametrize("script, part, ranges", [
    ([], None, [None]),
    ([None, "reset", "stall"], None, [None, "resumed", "resumed"]),
    ([None] + ["reset"] * 7, None, [None] + ["resumed"] * 7),  # more than 4 attempts: each receives something
    ([None, "short"], None, [None, "resumed"]),
    ([], CONTENT[:70000], ["resumed"]),
    ([], b"x" * 70000, ["resumed", None]),  # of another object
    ([], CONTENT + b"x", [None]),
    ([], CONTENT, []),
    ([None, "ignore range"], CONTENT[:70000], ["resumed"]),
])
def test_downloads_resume(front, tmp_path, script, part, ranges):
    target = bucket(attempts=4, timeout=0.5 if "stall" in script else 10)
    path = tmp_path / "file"
    target.write("a", CONTENT)
    if part:
        (tmp_path / "file.part").write_bytes(part)
    front.script, front.log[:] = list(script), []
    target.download("a", str(path))
    assert path.read_bytes() == CONTENT and os.listdir(tmp_path) == ["file"]
    assert ["resumed" if span else None for kind, _, span in front.log if kind == "media"] == ranges


@pytest.mark.parametrize("script, error, message", [
    ([None] + [503] * 50, TransientError, "status 503.*" + GAVE_UP.format(4)),
    ([404], BucketError, "status 404.*: no such bucket or object"),
    (["other md5"], TransientError, "another size or MD5 than the object" + GAVE_UP.format(4)),
])
def test_downloads_give_up(front, tmp_path, script, error, message):
    target = bucket(attempts=4)
    target.write("a", CONTENT)
    front.script = list(script)
    with pytest.raises(error, match=message):
        target.download("a", str(tmp_path / "file"))
    assert not os.path.exists(tmp_path / "file")


def test_an_object_without_md5_is_checked_by_size(front, tmp_path):
    target = bucket()
    target.write("a", CONTENT)
    front.composite = True
    (tmp_path / "file.part").write_bytes(CONTENT + b"x")
    target.download("a", str(tmp_path / "file"))
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_list_read_delete(front):
    target = bucket()
    front.page = 10
    names = [f"ckpt_{i:08d}.json" for i in range(25)] + ["sub/deep", "ü #?%2F.txt"]
    for name in names:
        target.write(name, name.encode())
    bucket("gs://bucket/run2").write("other", b"")
    bucket("gs://bucket").write("run/", b"")
    front.log[:] = []
    assert target.list() == sizes_and_digests({name: name.encode() for name in names})
    assert kinds(front) == ["list"] * 3
    front.script = ["short"]
    assert target.list().keys() == set(names)
    front.script = ["short"]
    assert target.read(names[0]) == names[0].encode() and not front.script
    assert bucket("gs://bucket").list().keys() == {f"run/{name}" for name in names} | {"run2/other"}
    assert [target.read(name) for name in names] == [name.encode() for name in names]
    for name in sorted(names)[:20]:  # as old checkpoints are pruned
        target.delete(name)
        target.delete(name)
    assert sorted(target.list()) == sorted(names)[20:] and target.read(sorted(names)[0]) is None


# Tokens.

class Metadata(http.server.BaseHTTPRequestHandler):
    """The metadata server of a VM: tokens secret-1, secret-2, ... that are valid for server.seconds."""

    def do_GET(self):
        assert self.path == "/computeMetadata/v1/instance/service-accounts/default/token"
        assert self.headers["Metadata-Flavor"] == "Google"
        self.server.count += 1
        token = f"secret-{self.server.count}"
        token = {"access_token": token, "expires_in": self.server.seconds, "token_type": "Bearer"}
        content = json.dumps(token).encode()
        self.send_response(self.server.status)
        self.send_header("Metadata-Flavor", "Google")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def metadata(monkeypatch):
    server = serve(Metadata, count=0, seconds=3600, status=200)
    monkeypatch.setenv("GCE_METADATA_HOST", server.url.removeprefix("http://"))
    yield server
    server.shutdown()
    server.server_close()


def with_token():
    target = bucket()
    target.emulator = ""  # as for the real service
    return target


def test_one_token_for_many_requests(front, metadata, monkeypatch, tmp_path):
    (tmp_path / ".netrc").write_text("default login somebody password else\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("http_proxy", f"http://{nothing_listens()}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")  # the front, not the metadata server
    monkeypatch.setenv("GCE_METADATA_HOST", metadata.url.replace("http://127.0.0.1", "localhost"))
    front.tokens = {"secret-1"}
    target = with_token()
    for i in range(10):
        target.write(f"{i}", b"x")
    target.write("big", CONTENT)
    assert metadata.count == 1 and len(front.log) == 25


def test_a_401_is_answered_with_a_fresh_token_once(front, metadata):
    front.tokens = {"secret-1"}
    target = with_token()
    target.write("a", b"x")
    front.tokens = {"secret-2"}
    target.write("big", CONTENT)
    assert metadata.count == 2 and kinds(front) == ["start", "chunk", "start", "start"] + ["chunk"] * 4
    front.tokens, front.log[:] = set(), []
    with pytest.raises(BucketError, match="status 401.*log in again") as e:
        target.write("a", b"x")
    assert metadata.count == 3 and len(front.log) == 2
    # The front's answer holds the token.
    assert "***" in str(e.value) and "secret" not in f"{e.value!r} {target!r} {e.getrepr(style='short')}"


def test_a_token_is_renewed_before_it_expires(front, metadata, monkeypatch):
    now = start = time.monotonic()
    monkeypatch.setattr(data.time, "monotonic", lambda: now)
    front.tokens = {"secret-1"}
    target = with_token()
    target.write("a", b"x")
    now = start + 3600 - 300
    target.write("a", b"x")
    assert metadata.count == 1
    now, front.tokens = start + 3600 - 200, {"secret-2"}
    target.write("a", b"x")
    assert metadata.count == 2 and len(front.log) == 6  # no 401
    now, metadata.status = start + 2 * 3600, 503
    monkeypatch.setenv("PATH", "")
    target.attempts = 3
    with pytest.raises(TransientError, match="no Google credentials: .*" + GAVE_UP.format(3)):
        target.write("a", b"x")
    metadata.status, front.tokens = 200, {"secret-6"}
    target.write("a", b"x")


def nothing_listens():
    with socket.create_server(("127.0.0.1", 0)) as s:
        return f"127.0.0.1:{s.getsockname()[1]}"


@pytest.fixture
def gcloud(tmp_path, monkeypatch):
    """A gcloud on the PATH that answers secret-gcloud, outside Google Cloud."""
    path = tmp_path / "bin" / "gcloud"
    path.parent.mkdir()
    path.write_text('#!/bin/sh\n[ "$*" = "auth print-access-token" ] && echo secret-gcloud\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(path.parent))
    monkeypatch.setenv("GCE_METADATA_HOST", nothing_listens())
    monkeypatch.delenv("CLOUDSDK_AUTH_ACCESS_TOKEN", raising=False)
    return path


def test_tokens_outside_google_cloud(front, gcloud, monkeypatch):
    front.tokens = {"secret-gcloud"}
    with_token().write("a", b"x")
    another_server = front.url.removeprefix("http://")
    monkeypatch.setenv("GCE_METADATA_HOST", another_server)
    with_token().write("a", b"x")
    gcloud.write_text("#!/bin/sh\necho secret-old\nexit 1\n")
    for _ in range(2):
        message = "^gs://bucket/run: no Google credentials: run `gcloud auth login`, .*"
        with pytest.raises(TransientError, match=message + GAVE_UP.format(3)):
            with_token().check()
        gcloud.unlink(missing_ok=True)
    monkeypatch.setenv("CLOUDSDK_AUTH_ACCESS_TOKEN", "secret-gcloud\n")
    with_token().write("a", b"x")


# The check at the start.

def test_check_passes(front):
    front.denied = ("GET",)  # of an object's or a bucket's own data
    bucket().check()
    bucket("gs://bucket").check()
    assert bucket("gs://bucket").list() == {}  # the probe is gone
    front.denied = ("start", "DELETE")
    bucket().check(write=False)


@pytest.mark.parametrize("denied, write", [
    ("list", True), ("media", True), ("start", True), ("DELETE", True), ("list", False), ("media", False)])
def test_check_names_a_missing_permission(front, denied, write):
    front.denied = (denied,)
    message = r"^gs://bucket/run.*: status 403 a fault, .*: the account needs the role Storage Object Admin.*"
    with pytest.raises(BucketError, match=message) as e:
        bucket().check(write=write)
    assert "\n" not in str(e.value) and len(front.log) <= 5


def test_check_of_a_missing_bucket(front):
    for write in (True, False):
        message = r"^gs://buckett/run at http://\S+: status 404: no such bucket or object$"
        with pytest.raises(BucketError, match=message):
            Bucket("gs://buckett/run").check(write)
    assert len(front.log) == 2


def test_check_without_network(monkeypatch):
    start = time.monotonic()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", nothing_listens())  # without a scheme
    message = r"^gs://bucket/run at http://127.0.0.1:\d+: ConnectionError: .*refused"
    with pytest.raises(TransientError, match=message + GAVE_UP.format(3)):
        Bucket("gs://bucket/run").check()
    assert time.monotonic() - start < 5


def test_check_of_a_server_that_does_not_answer(front):
    front.script = ["stall"] * 20
    with pytest.raises(TransientError, match="Read ?Time.*" + GAVE_UP.format(3)):
        bucket(timeout=0.2).check()
    assert len(front.log) == 3


def test_check_takes_less_than_20_seconds(monkeypatch):
    probes = []
    monkeypatch.setattr(Bucket, "_retry", lambda self, *_: probes.append(self))
    monkeypatch.setattr(Bucket, "read", lambda self, name: None)
    Bucket("gs://bucket").check(write=False)
    probe, = probes
    waits = probe.wait * sum(2 ** i for i in range(probe.attempts - 1))
    assert probe.attempts * probe.timeout + waits < 20


@pytest.mark.parametrize("call", [
    lambda target: target.check(),
    lambda target: target.list(),
    lambda target: target.download("a", "never"),
], ids=["check", "list", "download"])
def test_another_server_at_the_address(front, monkeypatch, call):
    monkeypatch.setattr(Front, "do_GET", lambda self: self.answer(200, {}, b"<html>hello</html>"))
    message = r"^gs://bucket/run\S* at http://\S+: JSONDecodeError: .*; gave up after \d+ attempts$"
    with pytest.raises(TransientError, match=message):
        call(bucket(attempts=2))


@pytest.mark.parametrize("url", [
    "gs://", "gs:///a", "gs://Bucket/a", "gs://ab", "gs://bucket//a", "gs://bucket/../a", "gs://bucket/a/..",
    "s3://bucket", "bucket/a", "gs://bu cket", "gs://bucket/a\n", ""])
def test_malformed_addresses(url):
    with pytest.raises(UserError, match="is not an address in a bucket"):
        Bucket(url)


def test_addresses(monkeypatch):
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    google = "https://storage.googleapis.com"
    url = Bucket("gs://my-bucket/a b/c")._url("d/ü")
    assert url == f"{google}/storage/v1/b/my-bucket/o/a%20b%2Fc%2Fd%2F%C3%BC"
    inserts = Bucket("gs://my-bucket/").inserts
    assert inserts == f"{google}/upload/storage/v1/b/my-bucket/o?uploadType=resumable"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "https://localhost:1/")
    assert Bucket("gs://my-bucket/a/")._url("b") == "https://localhost:1/storage/v1/b/my-bucket/o/a%2Fb"


# Data sets.

def build(path, rows=4000, seed=0):
    rng = np.random.default_rng(seed)
    splits = {}
    for split, n in (("train", rows), ("test", 10)):
        splits[split] = (n, 1, [(rng.integers(1, 5, (n, 16)), rng.integers(1, 5, (n, 16)))])
    data.write_dataset(str(path), splits, 5, {"grid": [4, 4], "kind": "sudoku"})
    return str(path)


def tree(path):
    """{relative file: content} of a folder."""
    files = [file for file in pathlib.Path(path).rglob("*") if file.is_file()]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@pytest.fixture
def uploaded(front, tmp_path, monkeypatch):
    """The folder of a data set that is at gs://bucket/data/small too; the working directory is another."""
    path = build(tmp_path / "source")
    data.upload_dataset(path, "gs://bucket/data/small")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    front.log[:], front.paths[:] = [], []
    return path


def run(*args, cwd):
    """data.py as a command: (exit code, stdout, stderr)."""
    argv = [sys.executable, data.__file__, *args]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=cwd)
    return done.returncode, done.stdout, done.stderr


def test_upload_and_download_commands(front, tmp_path, emulator, monkeypatch, capsys):
    url = "gs://bucket/sets/small"
    build(tmp_path / "data" / "small")
    assert run("upload", "data/small", url, cwd=tmp_path) == (0, f"data/small is in {url}\n", "")
    uploaded = emulator._storage.objects["bucket"].values()
    names = [item["name"] for item in sorted(uploaded, key=lambda item: int(item["generation"]))]
    assert names[-1] == "sets/small/manifest.json" and len(names) == 14
    (tmp_path / "cwd").mkdir()
    assert run("download", f"{url}/", cwd=tmp_path / "cwd") == (0, f"{url}/ is in data/small\n", "")
    assert tree(tmp_path / "cwd" / "data" / "small") == tree(tmp_path / "data" / "small")
    monkeypatch.chdir(tmp_path)
    data.main(["download", url, "there"])
    assert capsys.readouterr() == (f"{url} is in there\n", "")
    assert tree("there") == tree("data/small")
    front.log[:] = []
    data.main(["upload", "data/small", url])
    assert kinds(front).count("start") == 2  # the probe and the manifest: the rest was there


@pytest.mark.parametrize("args, line", [
    ([], "usage: python data.py upload"),
    (["up"], "usage: "),
    (["upload", "data/x"], "usage: "),
    (["download", "data/x"], "usage: "),
    (["download", "gs://bucket/x", "y", "z"], "usage: "),
    (["upload", "data/x", "gs://bucket/x"], "data/x/train: no such data set"),
    (["upload", "small", "bucket/x"], "'bucket/x' is not an address in a bucket"),
    (["download", "gs://other-bucket/x"], "gs://other-bucket/x at http"),
    (["download", "gs://bucket/none"], "gs://bucket/none has no manifest.json"),
])
def test_wrong_commands(front, tmp_path, monkeypatch, args, line):
    build(tmp_path / "small", rows=10)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"^{re.escape(line)}"):
        data.main(args)


def test_a_wrong_command_ends_in_one_line(front, tmp_path):
    code, out, err = run("download", "gs://bucket/none", cwd=tmp_path)
    assert (code, out) == (2, "") and re.fullmatch("data.py: gs://bucket/none has no manifest.json.*\n", err)


@pytest.mark.parametrize("status, code", [(503, 1), (403, 2)])
def test_exit_codes(front, tmp_path, monkeypatch, capsys, status, code):
    """A bucket that does not answer is 1, one that refuses is 2."""
    monkeypatch.chdir(tmp_path)
    front.script = [status] * 50
    with pytest.raises(SystemExit) as stop:
        command(lambda: data.main(["download", "gs://bucket/x"]), data.__file__)
    assert stop.value.code == code
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(rf"data.py: gs://bucket/x at \S+: status {status}.*\n", err)


def test_a_path_stays_a_path():
    assert local_dataset("data/x") == "data/x" and local_dataset("/a/gs://") == "/a/gs://"


def test_one_download_for_the_processes_of_a_host(front, uploaded):
    front.slow = 0.05
    code = """
from data import Dataset, local_dataset
path = local_dataset("gs://bucket/data/small")
print(path, len(Dataset(path, "train")))
"""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = [subprocess.Popen([sys.executable, "-c", code], **pipes) for _ in range(3)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert outputs == [("data/small 4000\n", "")] * 3
    assert tree("data/small") == tree(uploaded) and sorted(os.listdir("data")) == ["small", "small.lock"]
    paths = [path for kind, path in front.paths if kind == "media" and ".probe" not in path]
    counts = collections.Counter(paths)
    assert len(counts) == 14 and counts.pop("/storage/v1/b/bucket/o/data/small/manifest.json") == 3
    assert set(counts.values()) == {1}


def test_a_killed_download_resumes(front, uploaded):
    code = "import data; data.local_dataset('gs://bucket/data/small')"
    front.slow = 0.1
    sizes = []
    for _ in range(2):
        before = kinds(front).count("media")
        process = subprocess.Popen([sys.executable, "-c", code])
        while kinds(front).count("media") < before + 5:
            time.sleep(0.01)
        time.sleep(0.05)
        process.kill()
        assert process.wait(10) == -9 and not os.path.exists("data/small")
        sizes.append(sum(map(len, tree("data/small.part").values())))
    assert 0 < sizes[0] < sizes[1]
    front.slow = 0
    local_dataset("gs://bucket/data/small")
    assert tree("data/small") == tree(uploaded) and sorted(os.listdir("data")) == ["small", "small.lock"]
    from_start = collections.Counter()
    for (kind, path), (_, _, span) in zip(front.paths, front.log):
        if kind == "media" and ".npy" in path and not span:
            from_start[path] += 1
    assert sum(count > 1 for count in from_start.values()) <= 2  # killed before their first byte


def test_a_data_set_that_exists(front, uploaded):
    shutil.copytree(uploaded, "data/small")
    manifest = json.load(open("data/small/manifest.json"))
    json.dump(dict(manifest, made="by another"), open("data/small/manifest.json", "w"))
    assert local_dataset("gs://bucket/data/small") == "data/small"
    assert set(kinds(front)) == {"list", "media"} and len(front.log) == 3
    build("data/other", seed=1)
    before = tree("data/other")
    data.upload_dataset(uploaded, "gs://bucket/again/other")
    for _ in range(2):  # with another manifest, and with none
        message = "^data/other holds another data set than gs://bucket/again/other: move it away, or"
        with pytest.raises(UserError, match=message):
            local_dataset("gs://bucket/again/other")
        if os.path.exists("data/other/manifest.json"):
            os.remove("data/other/manifest.json")
    del before["manifest.json"]
    assert tree("data/other") == before


def test_an_upload_does_not_replace_another_data_set(front, uploaded, tmp_path):
    before = bucket("gs://bucket").list()
    message = "^gs://bucket/data/small holds another data set: choose another address$"
    with pytest.raises(UserError, match=message):
        data.upload_dataset(build(tmp_path / "second", seed=1), "gs://bucket/data/small")
    assert bucket("gs://bucket").list() == before
    with open(os.path.join(uploaded, "identifiers.json"), "a") as f:
        f.write(" ")
    message = r"identifiers.json does not match manifest.json \(changed or truncated\)"
    with pytest.raises(UserError, match=message):
        data.upload_dataset(uploaded, "gs://bucket/data/new")
    assert not any(name.endswith("manifest.json") for name in bucket("gs://bucket/data/new").list())


def test_a_damaged_data_set_in_the_bucket(front, uploaded):
    url = "gs://bucket/data/small"
    remote = bucket(url)
    name = "train/all__inputs.npy"
    content = remote.read(name)
    remote.write(name, content[:-1] + b"\0")
    message = f"^{url}/{name} does not match manifest.json: upload the data set again$"
    with pytest.raises(UserError, match=message):
        local_dataset(url)
    remote.delete(name)
    message = rf"^{url}/{name} at http://\S+: status 404: no such bucket or object$"
    with pytest.raises(BucketError, match=message):
        local_dataset(url)
    assert sorted(os.listdir("data")) == ["small.lock", "small.part"]
    remote.write(name, content)
    local_dataset(url)
    assert tree("data/small") == tree(uploaded)


def test_a_damaged_manifest_in_the_bucket(front, uploaded):
    url = "gs://bucket/data/small"
    remote = bucket(url)
    manifest = remote.read("manifest.json")
    contents = [b"", b"[]", b'{"sha256": 3}', b'{"sha256": {}}', manifest[:-30]]
    for outside in ("../../x.json", "/x.npy", "train/../x.npy"):
        hashes = json.loads(manifest)["sha256"] | {outside: "0"}
        contents.append(json.dumps({"sha256": hashes}).encode())
    for content in contents:
        remote.write("manifest.json", content)
        message = f"^{url} has no manifest.json, or a damaged one: upload the data set with `python"
        with pytest.raises(UserError, match=message):
            local_dataset(url)
    remote.write("manifest.json", manifest)
    local_dataset(url)
    assert tree("data/small") == tree(uploaded)


def test_disk_space(front, uploaded, monkeypatch):
    paths = []
    size = sum(len(content) for name, content in tree(uploaded).items() if name != "manifest.json")

    def disk_usage(path):
        paths.append(path)
        return SimpleNamespace(free=free)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    free = size - 1
    message = r"^gs://bucket/data/small needs 0\.00 GB in data, where 0\.00 GB are free: make room$"
    with pytest.raises(UserError, match=message):
        local_dataset("gs://bucket/data/small")
    assert paths == ["data"] and os.listdir("data") == ["small.lock"]
    free = size
    local_dataset("gs://bucket/data/small")


def test_an_unwritable_folder_ends_in_one_line(front, uploaded):
    open("data", "w").close()
    with pytest.raises(UserError, match="^data/small cannot be written: "):
        local_dataset("gs://bucket/data/small")


def test_a_data_set_of_the_official_builder(front, tmp_path, monkeypatch):
    source = build(tmp_path / "source")
    os.remove(os.path.join(source, "manifest.json"))
    data.upload_dataset(source, "gs://bucket/data/official")
    monkeypatch.chdir(tmp_path)
    assert local_dataset("gs://bucket/data/official", source) == source  # there already, without a manifest
    path = local_dataset("gs://bucket/data/official")
    assert tree(path).keys() == tree(source).keys() | {"manifest.json"}
    assert Dataset(path, "train").sha256 == Dataset(source, "test").sha256
