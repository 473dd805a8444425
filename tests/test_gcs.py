"""The bucket: against gcp-storage-emulator on loopback, behind a front that breaks requests as networks and servers do."""
import base64
import collections
import hashlib
import http.client
import http.server
import json
import os
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

import numpy as np
import pytest
from gcp_storage_emulator.server import create_server

import data
from configurator import UserError
from data import Bucket, BucketError, Dataset, local_dataset

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STEP = 1 << 18  # what chunks are multiples of
CONTENT = np.random.default_rng(0).bytes(6 * STEP + 1234)


class Front(http.server.BaseHTTPRequestHandler):
    """Passes requests on to the emulator, with the faults of server.script (one a request, in order) or drawn at server.rate.

    server.log holds (what, fault, Content-Range or Range) of each request. Where the emulator differs from the real service, the
    answer is the real one's: nothing arrived has no Range, and the session of a finished upload still knows its object.
    """

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do(self):
        server, url = self.server, urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(url.query)
        session, span = query.get("upload_id", [None])[0], self.headers.get("Content-Range", "")
        length = int(self.headers.get("Content-Length", 0))
        what = ("query" if "*/" in span else "chunk") if session else "start" if self.command == "POST" else \
            "media" if query.get("alt") == ["media"] else "list" if url.path.endswith("/o") else self.command
        with server.lock:
            fault = server.script.pop(0) if server.script else self.draw(what, length)
            server.log.append((what, fault, span or self.headers.get("Range")))
            server.paths.append((what, urllib.parse.unquote(url.path)))
        if server.tokens is not None and self.headers.get("Authorization") not in [f"Bearer {token}" for token in server.tokens]:
            fault = 401
        if fault in ("reset", "stall") and what != "media":
            self.rfile.read(length // 2)
            return self.leave(fault)
        body = self.rfile.read(length)
        if fault == "gone" and what in ("chunk", "query"):
            fault = 404
        if what in server.denied:
            fault = 403
        if what == "chunk":
            first, last, total = map(int, re.findall(r"\d+", span))
            if len(body) != last - first + 1 or last >= total or (last + 1 < total and len(body) % STEP):
                fault = 400
        if isinstance(fault, int):
            return self.answer(fault, {}, json.dumps({"error": {"message": f"a fault, {self.headers.get('Authorization')}"}}).encode())
        if fault in ("less", "reset after some") and what == "chunk" and length > STEP:
            first = int(re.match(r"bytes (\d+)", span)[1])
            body, span = body[:STEP], f"bytes {first}-{first + STEP - 1}/{span.rpartition('/')[2]}"
        if fault == "flip" and length:
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1:]
        with server.lock:  # the emulator takes one request at a time
            status, headers, content = self.forward(body, span, session)
        if what == "list" and status == 200:
            content = self.page(json.loads(content), query)
        if fault == "other md5" or (what == "GET" and server.composite):
            value = json.loads(content)
            value["md5Hash"] = base64.b64encode(bytes(16)).decode()
            if server.composite:
                del value["md5Hash"]
            content = json.dumps(value).encode()
        if fault in ("lost", "reset after some"):
            return self.leave("reset")
        if fault == "ignore range" and status == 206:
            status, headers, content = 200, {}, server.whole
        self.answer(status, headers, content, fault if fault in ("reset", "stall", "short") and content else None)

    do_GET = do_POST = do_PUT = do_DELETE = do

    def draw(self, what, length):
        if self.server.random.random() >= self.server.rate:
            return None
        faults = [503, 429, 408, 401, 500, "reset", "stall", "lost"] + (["gone", "less", "reset after some", "flip"] if what == "chunk" else [])
        fault = self.server.random.choice(faults)
        return 503 if fault == 401 and self.server.log and self.server.log[-1][1] == 401 else fault  # 401 once, not twice in a row

    def forward(self, body, span, session):
        server = self.server
        if session in server.finished and "*/" in span:
            return 200, {}, server.finished[session]
        connection = http.client.HTTPConnection("127.0.0.1", server.emulator)
        headers = {key: value for key, value in self.headers.items() if key.lower() not in ("content-range", "content-length", "connection")}
        connection.request(self.command, self.path, body, headers | ({"Content-Range": span} if span else {}))
        response = connection.getresponse()
        content = response.read()
        connection.close()
        if session and response.status == 200:
            server.finished[session] = content
        headers = {key: value for key, value in response.getheaders() if key.lower() in ("location", "range", "content-range")}
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
        else:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, no orderly end
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
    vars(server).update(state, stop=threading.Event(), lock=threading.Lock(), url=f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return server


@pytest.fixture
def front(emulator, monkeypatch):
    emulator.wipe(keep_buckets=True)
    server = serve(Front, emulator=emulator._api._httpd.server_port, script=[], log=[], paths=[], rate=0.0, random=random.Random(0), tokens=None,
                   finished={}, denied=(), page=1000, composite=False, slow=0, whole=CONTENT)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    monkeypatch.setenv("PYTHONPATH", ROOT)
    yield server
    server.stop.set()
    server.shutdown()
    server.server_close()


def bucket(url="gs://bucket/run", **knobs):
    return Bucket(url, **dict(attempts=12, wait=0.001, timeout=10, chunk=2 * STEP) | knobs)


def stored(emulator, name):
    return emulator._storage.get_file("bucket", name)


def kinds(front):
    return [what for what, _, _ in front.log]


# Uploads.

def test_200_uploads_lose_nothing(front, emulator, tmp_path):
    rng, sent = np.random.default_rng(1), {}
    front.rate, target = 0.3, bucket(timeout=0.3)
    for i in range(200):
        size = int(rng.integers(0, 2000)) if i % 2 else int(rng.integers(2 * STEP + 1, 6 * STEP))
        content = rng.bytes(size)
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
    assert {503, 429, 408, 401, "reset", "stall", "lost", "gone", "less", "reset after some", "flip"} <= faults.keys()
    assert target.list() == {name: (len(content), hashlib.md5(content).hexdigest()) for name, content in sent.items()}
    assert all(stored(emulator, f"run/{name}") == content for name, content in sent.items())
    print(len(front.log), "requests", dict(faults))


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
def test_session(front, emulator, script, expected):
    front.script = list(script)
    bucket(timeout=1 if "stall" in script else 10).write("big", CONTENT)
    text = {"query": "q"}
    steps = [f"c{int(re.match(r'bytes ([0-9]+)', span)[1]) // STEP}" if what == "chunk" else text.get(what, what) for what, _, span in front.log]
    assert " ".join(steps) == expected
    assert stored(emulator, "run/big") == CONTENT


@pytest.mark.parametrize("content, script", [
    (b"x", [503] * 50), (CONTENT, [None] + [503] * 50), (CONTENT, [None] + [308] * 50), (CONTENT, [None, "gone"] * 50),
    (CONTENT, [None, None, "gone"] * 50), (CONTENT, [None, None, "flip", None, None] * 50)])
def test_gives_up(front, content, script):
    front.script = script
    with pytest.raises(BucketError, match=r"^gs://bucket/run/a at http://\S+: (status \d+|nothing of what).*; gave up after 4 attempts$"):
        bucket(attempts=4).write("a", content)
    front.script = []
    assert bucket().list() == {}  # nothing half-uploaded or damaged is seen


def test_a_slow_upload_does_not_give_up(front, emulator):
    front.script = [None] + ["reset after some", None] * 5
    bucket(attempts=2).write("big", CONTENT)
    assert front.script == [] and stored(emulator, "run/big") == CONTENT


def test_a_file_that_grows_is_sent_as_it_was(front, emulator, tmp_path, monkeypatch):
    path, measure = tmp_path / "log.txt", data.file_md5

    def then_append(f):
        result = measure(f)
        with open(path, "ab") as more:
            more.write(b"later" * 1000)
        return result

    monkeypatch.setattr(data, "file_md5", then_append)
    for size in (100, 2 * STEP, 3 * STEP + 1):
        path.write_bytes(CONTENT[:size])
        bucket().upload(str(path), "log.txt")
        assert stored(emulator, "run/log.txt") == CONTENT[:size]


@pytest.mark.parametrize("status", [400, 403, 404, 412])
def test_what_cannot_pass_fails_at_once(front, status):
    for call in (lambda: bucket().write("a", b"x"), lambda: bucket().list(), lambda: bucket().download("a", "never")):
        front.script, front.log[:] = [status], []
        with pytest.raises(BucketError, match=f"status {status} a fault"):
            call()
        assert len(front.log) == 1


# Downloads, lists.

def test_downloads_lose_nothing(front, tmp_path):
    target, sizes = bucket(timeout=0.3), [0, 1, 5000, len(CONTENT)]
    for size in sizes:
        target.write(str(size), CONTENT[:size])
    front.rate = 0.3
    for i in range(60):
        size, path = sizes[i % 4], tmp_path / "new" / str(i)
        target.download(str(size), str(path))
        assert path.read_bytes() == CONTENT[:size] and os.listdir(path.parent) == [path.name]
        os.remove(path)
        assert target.read("5000") == CONTENT[:5000]
    assert any(span and span.startswith("bytes=") for what, _, span in front.log if what == "media")


@pytest.mark.parametrize("script, part, ranges", [
    ([], None, [None]),
    ([None, "reset", "stall"], None, [None, "resumed", "resumed"]),
    ([None, "reset"] + ["reset"] * 6, None, [None] + ["resumed"] * 7),  # each brings something: no giving up
    ([None, "short"], None, [None, "resumed"]),
    ([], CONTENT[:70000], ["resumed"]),
    ([], b"x" * 70000, ["resumed", None]),  # of another object
    ([], CONTENT + b"x", [None]),
    ([], CONTENT, []),
    ([None, "ignore range"], CONTENT[:70000], ["resumed"]),
])
def test_download_goes_on(front, tmp_path, script, part, ranges):
    target, path = bucket(attempts=4, timeout=1 if "stall" in script else 10), tmp_path / "file"
    target.write("a", CONTENT)
    if part:
        (tmp_path / "file.part").write_bytes(part)
    front.script, front.log[:] = list(script), []
    target.download("a", str(path))
    assert path.read_bytes() == CONTENT and os.listdir(tmp_path) == ["file"]
    assert ["resumed" if span else None for what, _, span in front.log if what == "media"] == ranges


def test_download_gives_up(front, tmp_path):
    target = bucket(attempts=4)
    target.write("a", CONTENT)
    for script, text in (([None] + [503] * 50, "status 503.*; gave up after 4 attempts"), ([404], "status 404.*: no such bucket or object"),
                         (["other md5"], "another size or MD5 than the object; gave up after 4 attempts")):
        front.script = list(script)
        with pytest.raises(BucketError, match=text):
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
    target, front.page = bucket(), 10
    names = [f"ckpt_{i:08d}.json" for i in range(25)] + ["sub/deep", "ü #?%2F.txt"]
    for name in names:
        target.write(name, name.encode())
    bucket("gs://bucket/run2").write("other", b"")
    bucket("gs://bucket").write("run/", b"")
    front.log[:] = []
    assert target.list() == {name: (len(name.encode()), hashlib.md5(name.encode()).hexdigest()) for name in names}
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
    """The metadata server of a VM: tokens secret-1, secret-2, ... that live server.seconds."""

    def do_GET(self):
        assert self.path == "/computeMetadata/v1/instance/service-accounts/default/token" and self.headers["Metadata-Flavor"] == "Google"
        self.server.count += 1
        content = json.dumps({"access_token": f"secret-{self.server.count}", "expires_in": self.server.seconds, "token_type": "Bearer"}).encode()
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


def with_token(**knobs):
    target = bucket(**knobs)
    target.emulator = ""  # as for the real service
    return target


def test_one_token_for_many_requests(front, metadata, monkeypatch, tmp_path):
    (tmp_path / ".netrc").write_text("default login somebody password else\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("http_proxy", f"http://{nothing_listens()}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")  # the front, not the metadata server
    monkeypatch.setenv("GCE_METADATA_HOST", metadata.url.replace("http://127.0.0.1", "localhost"))
    front.tokens, target = {"secret-1"}, with_token()
    for i in range(10):
        target.write(f"{i}", b"x")
    target.write("big", CONTENT)
    assert metadata.count == 1 and len(front.log) == 25


def test_a_401_brings_a_fresh_token_once(front, metadata):
    front.tokens, target = {"secret-1"}, with_token()
    target.write("a", b"x")
    front.tokens = {"secret-2"}
    target.write("big", CONTENT)
    assert metadata.count == 2 and kinds(front) == ["start", "chunk", "start", "start"] + ["chunk"] * 4
    front.tokens, front.log[:] = set(), []
    with pytest.raises(BucketError, match="status 401.*log in again") as e:
        target.write("a", b"x")
    assert metadata.count == 3 and len(front.log) == 2
    assert "***" in str(e.value) and "secret" not in f"{e.value!r} {target!r} {e.getrepr(style='short')}"  # the front's answer holds it


def test_a_token_is_renewed_ahead_of_its_end(front, metadata, monkeypatch):
    now = time.monotonic()
    clock = now
    monkeypatch.setattr(data.time, "monotonic", lambda: now)
    front.tokens, target = {"secret-1"}, with_token()
    target.write("a", b"x")
    now = clock + 3600 - 300
    target.write("a", b"x")
    assert metadata.count == 1
    now, front.tokens = clock + 3600 - 200, {"secret-2"}
    target.write("a", b"x")
    assert metadata.count == 2 and len(front.log) == 6  # no 401
    now, metadata.status = clock + 2 * 3600, 503
    monkeypatch.setenv("PATH", "")
    target.attempts = 3
    with pytest.raises(BucketError, match="no Google credentials: .*; gave up after 3 attempts"):
        target.write("a", b"x")
    metadata.status, front.tokens = 200, {"secret-6"}
    target.write("a", b"x")


def nothing_listens():
    with socket.create_server(("127.0.0.1", 0)) as s:
        return f"127.0.0.1:{s.getsockname()[1]}"


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """A gcloud on the PATH that answers secret-gcloud, off Google Cloud."""
    path = tmp_path / "bin" / "gcloud"
    path.parent.mkdir()
    path.write_text('#!/bin/sh\n[ "$*" = "auth print-access-token" ] && echo secret-gcloud\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(path.parent))
    monkeypatch.setenv("GCE_METADATA_HOST", nothing_listens())
    monkeypatch.delenv("CLOUDSDK_AUTH_ACCESS_TOKEN", raising=False)
    return path


def test_tokens_off_google_cloud(front, stub, monkeypatch):
    front.tokens = {"secret-gcloud"}
    with_token().write("a", b"x")
    monkeypatch.setenv("GCE_METADATA_HOST", front.url.removeprefix("http://"))  # another server at that address
    with_token().write("a", b"x")
    stub.write_text("#!/bin/sh\necho secret-old\nexit 1\n")
    for _ in range(2):
        with pytest.raises(UserError, match=r"^gs://bucket/run: no Google credentials: run `gcloud auth login`, .*; gave up after 3 attempts$"):
            with_token().check()
        stub.unlink(missing_ok=True)
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


@pytest.mark.parametrize("denied, write", [("list", True), ("media", True), ("start", True), ("DELETE", True), ("list", False), ("media", False)])
def test_check_names_a_lack_of_permission(front, denied, write):
    front.denied = (denied,)
    with pytest.raises(UserError, match=r"^gs://bucket/run.*: status 403 a fault, .*: the account needs the role Storage Object Admin.*") as e:
        bucket().check(write=write)
    assert "\n" not in str(e.value) and len(front.log) <= 5


def test_check_of_a_bucket_that_is_not_there(front):
    for write in (True, False):
        with pytest.raises(UserError, match=r"^gs://buckett/run at http://\S+: status 404: no such bucket or object$"):
            Bucket("gs://buckett/run").check(write)
    assert len(front.log) == 2


def test_check_without_network(front, monkeypatch):
    start = time.monotonic()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", nothing_listens())  # without a scheme
    with pytest.raises(UserError, match=r"^gs://bucket/run at http://127.0.0.1:\d+: ConnectionError: .*refused; gave up after 3 attempts$"):
        Bucket("gs://bucket/run").check()
    assert time.monotonic() - start < 5
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", front.url)
    front.script = ["stall"] * 20
    with pytest.raises(UserError, match="Read ?Time.*; gave up after 3 attempts"):
        bucket(timeout=0.3).check()
    assert len(front.log) == 3
    knobs = []
    monkeypatch.setattr(Bucket, "_retry", lambda self, name, attempt: knobs.append((self.attempts, self.wait, self.timeout)))
    monkeypatch.setattr(Bucket, "read", lambda self, name: None)
    Bucket("gs://bucket").check(write=False)
    (attempts, wait, timeout), = knobs
    assert attempts * timeout + wait * sum(2 ** i for i in range(attempts - 1)) < 20


def test_another_server_at_the_address(front, monkeypatch):
    monkeypatch.setattr(Front, "do_GET", lambda self: self.answer(200, {}, b"<html>hello</html>"))
    target = bucket(attempts=2)
    for call in (target.check, target.list, lambda: target.download("a", "never")):
        with pytest.raises(UserError, match=r"^gs://bucket/run\S* at http://\S+: JSONDecodeError: .*; gave up after \d+ attempts$"):
            call()


@pytest.mark.parametrize("url", ["gs://", "gs:///a", "gs://Bucket/a", "gs://ab", "gs://bucket//a", "gs://bucket/../a", "gs://bucket/a/..",
                                 "s3://bucket", "bucket/a", "gs://bu cket", "gs://bucket/a\n", ""])
def test_malformed_addresses(url):
    with pytest.raises(UserError, match="is no address in a bucket"):
        Bucket(url)


def test_addresses(monkeypatch):
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    assert Bucket("gs://my-bucket/a b/c")._url("d/ü") == "https://storage.googleapis.com/storage/v1/b/my-bucket/o/a%20b%2Fc%2Fd%2F%C3%BC"
    assert Bucket("gs://my-bucket/").inserts == "https://storage.googleapis.com/upload/storage/v1/b/my-bucket/o?uploadType=resumable"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "https://localhost:1/")
    assert Bucket("gs://my-bucket/a/")._url("b") == "https://localhost:1/storage/v1/b/my-bucket/o/a%2Fb"


# Data sets.

def build(path, rows=4000, seed=0):
    rng = np.random.default_rng(seed)
    blocks = lambda n: iter([(rng.integers(1, 5, (n, 16)), rng.integers(1, 5, (n, 16)))])
    data.write_dataset(str(path), {split: (n, 1, blocks(n)) for split, n in (("train", rows), ("test", 10))}, 5, {"grid": [4, 4], "kind": "sudoku"})
    return str(path)


def tree(path):
    files = [os.path.join(at, name) for at, _, names in os.walk(path) for name in names]
    return {os.path.relpath(file, path): open(file, "rb").read() for file in files}


@pytest.fixture
def uploaded(front, tmp_path, monkeypatch):
    """The folder of a data set that is at gs://bucket/data/small; the working directory is another."""
    path = build(tmp_path / "source")
    data.upload_dataset(path, "gs://bucket/data/small")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    front.log[:], front.paths[:] = [], []
    return path


def command(*args, cwd=None):
    return subprocess.run([sys.executable, os.path.join(ROOT, "data.py"), *args], capture_output=True, text=True, timeout=60, cwd=cwd)


def test_upload_and_download_commands(front, tmp_path, emulator):
    build(tmp_path / "data" / "small")
    done = command("upload", "data/small", "gs://bucket/sets/small", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "data/small is in gs://bucket/sets/small\n", "")
    names = [item["name"] for item in sorted(emulator._storage.objects["bucket"].values(), key=lambda item: int(item["generation"]))]
    assert names[-1] == "sets/small/manifest.json" and len(names) == 14
    for args, folder in ((["gs://bucket/sets/small", str(tmp_path / "there")], tmp_path / "there"), (["gs://bucket/sets/small/"], "data/small")):
        os.makedirs(tmp_path / "cwd", exist_ok=True)
        done = command("download", *args, cwd=tmp_path / "cwd")
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{args[0]} is in {folder}\n", "")
        assert tree(tmp_path / "cwd" / folder) == tree(tmp_path / "data" / "small")
    front.log[:] = []
    assert command("upload", "data/small", "gs://bucket/sets/small", cwd=tmp_path).returncode == 0
    assert kinds(front).count("start") == 2  # the probe and the manifest: the rest was there


@pytest.mark.parametrize("args, line", [
    ([], "usage: python data.py upload"), (["up"], "usage: "), (["upload", "data/x"], "usage: "), (["download", "data/x"], "usage: "),
    (["download", "gs://bucket/x", "y", "z"], "usage: "), (["upload", "data/x", "gs://bucket/x"], "data/x/train: no such data set"),
    (["upload", "small", "bucket/x"], "'bucket/x' is no address in a bucket"), (["download", "gs://other-bucket/x"], "gs://other-bucket/x at http"),
    (["download", "gs://bucket/none"], "gs://bucket/none holds no manifest.json"),
])
def test_wrong_commands(front, tmp_path, monkeypatch, args, line):
    build(tmp_path / "small", rows=10)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"^{re.escape(line)}"):
        data.main(args)


def test_a_wrong_command_ends_in_one_line(front, tmp_path):
    done = command("download", "gs://bucket/none", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and re.fullmatch("data.py: gs://bucket/none holds no .*\n", done.stderr)


def test_a_path_stays_a_path():
    assert local_dataset("data/x") == "data/x" and local_dataset("/a/gs://") == "/a/gs://"


def test_one_download_for_the_processes_of_a_host(front, uploaded):
    front.slow = 0.1
    code = "import data; path = data.local_dataset('gs://bucket/data/small'); print(path, len(data.Dataset(path, 'train')))"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    ends = [process.communicate(timeout=60) for process in processes]
    assert [out for out, _ in ends] == ["data/small 4000\n"] * 3
    assert [err for _, err in ends] == [""] * 3
    assert tree("data/small") == tree(uploaded) and sorted(os.listdir("data")) == ["small", "small.lock"]
    fetched = collections.Counter(path for what, path in front.paths if what == "media" and ".probe" not in path)
    assert len(fetched) == 14 and fetched.pop("/storage/v1/b/bucket/o/data/small/manifest.json") == 3 and set(fetched.values()) == {1}


def test_a_killed_download_goes_on(front, uploaded):
    front.slow, lengths = 0.2, []
    for kill in (True, True, False):
        process = subprocess.Popen([sys.executable, "-c", "import data; data.local_dataset('gs://bucket/data/small')"])
        if kill:
            start = len([what for what in kinds(front) if what == "media"])
            while len([what for what in kinds(front) if what == "media"]) < start + 5:
                time.sleep(0.01)
            time.sleep(0.1)
            process.kill()
            assert process.wait(10) == -9 and not os.path.exists("data/small")
            lengths.append(sum(map(len, tree("data/small.part").values())))
    front.slow = 0
    assert process.wait(30) == 0 and tree("data/small") == tree(uploaded) and sorted(os.listdir("data")) == ["small", "small.lock"]
    assert 0 < lengths[0] < lengths[1]
    whole = collections.Counter(path for (what, path), (_, _, span) in zip(front.paths, front.log) if what == "media" and not span)
    assert sum(count > 1 for path, count in whole.items() if ".npy" in path) <= 2  # only what a kill stopped before its first byte


def test_a_data_set_that_is_there(front, uploaded):
    shutil.copytree(uploaded, "data/small")
    manifest = json.load(open("data/small/manifest.json"))
    json.dump(dict(manifest, made="by another"), open("data/small/manifest.json", "w"))
    assert local_dataset("gs://bucket/data/small") == "data/small"
    assert all(what in ("list", "media") for what in kinds(front)) and len(front.log) == 3
    build("data/other", seed=1)
    before = tree("data/other")
    data.upload_dataset(uploaded, "gs://bucket/again/other")
    for _ in range(2):  # with another manifest, and with none
        with pytest.raises(UserError, match="^data/other holds another data set than gs://bucket/again/other: move it away, or"):
            local_dataset("gs://bucket/again/other")
        if os.path.exists("data/other/manifest.json"):
            os.remove("data/other/manifest.json")
    del before["manifest.json"]
    assert tree("data/other") == before


def test_an_upload_does_not_replace_another_data_set(front, uploaded, tmp_path):
    before = bucket("gs://bucket").list()
    with pytest.raises(UserError, match="^gs://bucket/data/small holds another data set: choose another address$"):
        data.upload_dataset(build(tmp_path / "second", seed=1), "gs://bucket/data/small")
    assert bucket("gs://bucket").list() == before
    with open(os.path.join(uploaded, "identifiers.json"), "a") as f:
        f.write(" ")
    with pytest.raises(UserError, match=r"identifiers.json does not match manifest.json \(changed or cut off\)"):
        data.upload_dataset(uploaded, "gs://bucket/data/new")
    assert not any(name.endswith("manifest.json") for name in bucket("gs://bucket/data/new").list())


def test_faults_in_the_bucket(front, uploaded):
    remote = bucket("gs://bucket/data/small")
    good = remote.read("train/all__inputs.npy")
    remote.write("train/all__inputs.npy", good[:-1] + b"\0")
    with pytest.raises(UserError, match="^gs://bucket/data/small/train/all__inputs.npy does not match manifest.json: upload the data set again$"):
        local_dataset("gs://bucket/data/small")
    remote.delete("train/all__inputs.npy")
    with pytest.raises(UserError, match=r"^gs://bucket/data/small/train/all__inputs.npy at http://\S+: status 404: no such bucket or object$"):
        local_dataset("gs://bucket/data/small")
    assert sorted(os.listdir("data")) == ["small.lock", "small.part"]
    remote.write("train/all__inputs.npy", good)
    manifest = remote.read("manifest.json")
    outside = [json.dumps({"sha256": json.loads(manifest)["sha256"] | {name: "0"}}).encode() for name in ("../../x.json", "/x.npy", "train/../x.npy")]
    for damaged in (b"", b"[]", b'{"sha256": 3}', b'{"sha256": {}}', manifest[:-30], *outside):
        remote.write("manifest.json", damaged)
        with pytest.raises(UserError, match="^gs://bucket/data/small holds no manifest.json, or a damaged one: upload one with `python"):
            local_dataset("gs://bucket/data/small")
    remote.write("manifest.json", manifest)
    local_dataset("gs://bucket/data/small")
    assert tree("data/small") == tree(uploaded)


def test_disk_space(front, uploaded, monkeypatch):
    asked = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or shutil._ntuple_diskusage(10, 10, 1000))
    with pytest.raises(UserError, match=r"^gs://bucket/data/small needs 0\.00 GB in data, where 0\.00 GB are free: make room$"):
        local_dataset("gs://bucket/data/small")
    assert asked == ["data"] and os.listdir("data") == ["small.lock"]
    size = sum(len(content) for name, content in tree(uploaded).items() if name != "manifest.json")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, size))
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
