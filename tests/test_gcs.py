"""Buckets: against gcp-storage-emulator, behind a front that breaks requests as networks and servers do."""
import http.client
import http.server
import json
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
from types import SimpleNamespace

import numpy as np
import pytest
import requests
from conftest import ROOT, Server, wait_for
from gcp_storage_emulator.server import create_server

import bench
import bucket as bucket_module
from bucket import Bucket, local_dataset, network_error, upload_dataset
from configurator import TransientError, UserError
from data import Dataset

CONTENT = np.random.default_rng(0).bytes(1_500_000)


class Front(http.server.BaseHTTPRequestHandler):
    """Passes requests on to the emulator, with the faults of server.script or drawn at server.rate.

    Kinds of requests: insert (an upload), media (a download), list, GET, DELETE. server.log holds (kind,
    fault, Range, path) of each. A fault is a status; or "reset" and "stall": the connection breaks half-way;
    "lost": it breaks after the request took effect; "short": the answer ends half-way; "flip": a bit changes;
    "slow": the answer comes after half a second; "wrong start": the answer is another part;
    bytes: they are the answer; or a function, which is called before the request takes effect.

    It is a VM's metadata server too, with the tokens secret-1, secret-2, ...
    """

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do(self):
        server = self.server
        if self.path == "/computeMetadata/v1/instance/service-accounts/default/token":
            server.count += self.headers["Metadata-Flavor"] == "Google"
            token = {"access_token": f"secret-{server.count}", "expires_in": 3600, "token_type": "Bearer"}
            return self.answer(200, json.dumps(token).encode())
        url = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(url.query)
        length = int(self.headers.get("Content-Length", 0))
        kind = "insert" if self.command == "POST" else self.command
        if kind == "GET":
            kind = "media" if "alt" in query else "list" if url.path.endswith("/o") else kind
        with server.lock:
            fault = server.script.pop(0) if server.script else self.draw(kind)
            server.log.append((kind, fault, self.headers.get("Range"), urllib.parse.unquote(url.path)))
        if fault in ("reset", "stall") and kind != "media":
            self.rfile.read(length // 2)
            return self.leave(fault)
        body = self.rfile.read(length)
        if len(body) < length:  # the client was killed; a bucket drops what is not whole
            return self.leave("reset")
        if fault == "slow":
            server.stop.wait(0.5)
        refused = server.token is not None and self.headers.get("Authorization") != f"Bearer {server.token}"
        status = 403 if kind in server.denied else 401 if refused else fault
        if isinstance(status, int):
            message = f"a fault, {self.headers.get('Authorization')}"
            return self.answer(status, json.dumps({"error": {"message": message}}).encode())
        if fault == "flip" and length:
            body = body[:-1] + bytes([body[-1] ^ 1])
        if callable(fault):
            fault()
        with server.lock:  # the emulator takes one request at a time
            status, content, headers = self.forward(self.command, self.path, body)
        if fault == "lost":
            return self.leave("reset")
        if kind == "list" and status == 200:
            content = self.page(json.loads(content), query)
        if kind == "media" and fault == "flip":
            content = content[:-1] + bytes([content[-1] ^ 1])
        if fault == "wrong start":
            headers["Content-Range"] = headers["Content-Range"].replace("bytes ", "bytes 1")
        content = fault if isinstance(fault, bytes) else content
        breaks_off = fault in ("reset", "stall", "short") and content
        self.answer(status, content, fault if breaks_off else None, headers)

    do_GET = do_POST = do_PUT = do_DELETE = do

    def draw(self, kind):
        """A fault for a request of this kind, or None."""
        server = self.server
        if server.random.random() >= server.rate:
            return None
        return server.random.choice([503, 429, 408, 500, "reset", "stall", "lost"])

    def forward(self, method, path, body=b""):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.emulator)
        headers = {key: value for key, value in self.headers.items() if key.lower() in ("range", "host")}
        headers["Content-Type"] = "application/octet-stream"
        if method == "POST" and not body:  # which the emulator refuses as media
            headers["Content-Type"] = "multipart/related; boundary=b"
            path = path.replace("=media", "=multipart")
            body = b"--b\r\nContent-Type: application/json\r\n\r\n{}\r\n--b\r\n\r\n\r\n--b--"
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        names = ["Content-Range"] if self.server.etag else ["Content-Range", "x-goog-hash"]
        return response.status, content, {name: response.headers[name] for name in names}

    def page(self, listing, query):
        start = int(query.get("pageToken", ["0"])[0])
        end = start + self.server.page
        more = {"nextPageToken": str(end)} if end < len(listing["items"]) else {}
        return json.dumps({"items": listing["items"][start:end]} | more).encode()

    def leave(self, fault):
        if fault == "stall":
            self.server.stop.wait(4)
        else:  # a reset instead of an orderly end
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def answer(self, status, content, fault=None, headers=None):
        self.send_response(status)
        server = self.server
        own = {"Location": server.url, "ETag": server.etag, "Retry-After": server.retry_after}
        for key, value in (own | (headers or {})).items():
            if value:
                self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[:len(content) // 2] if fault else content)
        if fault:
            self.leave(fault)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def emulator():
    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    server.start()
    while not server._api._httpd:
        time.sleep(0.01)
    yield server
    server.stop()


def serve(handler, **state):
    """A server with the attributes that Front needs."""
    return Server(handler, **dict(
        stop=threading.Event(), lock=threading.Lock(), script=[], rate=0.0, random=random.Random(0), log=[],
        token=None, denied=(), page=1000, etag=None, retry_after=None, count=0) | state)


@pytest.fixture
def front(emulator, monkeypatch):
    emulator.wipe(keep_buckets=True)
    server = serve(Front, emulator=emulator._api._httpd.server_port)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    monkeypatch.setenv("PYTHONPATH", ROOT)
    yield server
    server.stop.set()
    server.server_close()


def bucket(url="gs://bucket/run", timeout=10, **options):
    target = Bucket(url, **options)
    target.timeout = timeout
    return target


def stored(emulator, name):
    return emulator._storage.get_file("bucket", name)


def kinds(front):
    return [call[0] for call in front.log]


# Uploads, downloads, lists.

CALLS = {
    "write": lambda target, path: target.write("a", b"x"),
    "list": lambda target, path: target.list(),
    "download": lambda target, path: target.download("a", path),
}


@pytest.mark.parametrize("call, fault, requests, message", [
    ("write", 503, 4, "status 503 .*a fault"),
    ("write", "stall", 4, "Read timed out"),
    ("write", "flip", 2, "the upload arrived damaged"),
    ("download", "flip", 4, "the download arrived damaged"),
    ("list", 302, 2, "status 302"),  # as a proxy's or a hotel's
    ("list", b"<html>hello</html>", 2, "not the answer of a bucket: '<html>hello</html>'"),
    ("list", b'{"items": [{"name": "run/a"}]}', 2, "not the answer of a bucket"),
    ("write", 403, 2, "status 403 .*a fault"),
    ("download", 404, 2, "status 404 .*a fault"),
])
def test_calls_give_up(front, at_once, tmp_path, call, fault, requests, message):
    """What a bucket refuses is the user's error, and not tried again."""
    bucket().write("a", b"x")
    front.script = [fault] * 50
    error = UserError if fault in (403, 404) else TransientError
    with pytest.raises(error, match=rf"^gs://bucket/run\S* at http://\S+: .*{message}"):
        CALLS[call](bucket(timeout=0.1, patient=False), str(tmp_path / "file"))
    assert len(front.log) == requests and not os.listdir(tmp_path)


@pytest.mark.parametrize("script, ranges", [
    (["reset", "stall"], [None, "resumed", "resumed"]),
    (["reset"] * 7, [None] + ["resumed"] * 7),  # each receives something
    (["short", "wrong start"], [None, "resumed", None]),
    (["short", 416], [None, "resumed", None]),  # only the end of the last chunk was missing
    (["short", "flip"], [None, "resumed", None]),
    ([503, 401], [None] * 3),
])
def test_downloads_go_on_where_they_broke_off(front, at_once, script, ranges):
    target = bucket(timeout=0.5)
    target.write("a", CONTENT)
    front.script, front.log[:] = list(script), []
    assert target.read("a") == CONTENT
    assert [span and "resumed" for _, _, span, _ in front.log] == ranges


@pytest.mark.parametrize("etag, replaced", [
    (None, b"shorter"),
    (None, CONTENT[::-1]),  # its hash is another one
    ("first", CONTENT[::-1]),  # as on the hub, which states no hash
])
def test_an_object_that_is_replaced_during_a_download(front, at_once, etag, replaced):
    bucket().write("a", CONTENT)

    def replace():
        front.etag = etag and "second"
        bucket().write("a", replaced)

    front.etag, front.script = etag, ["short", replace]
    assert bucket().read("a") == replaced


def test_an_upload_over_a_slow_network_has_more_time_at_each_attempt(front, emulator, at_once):
    """The network takes 300 kB at once and half a second to pass them on."""
    front.script = ["slow"] * 9
    bucket(timeout=0.1).write("a", CONTENT[:300_000])
    assert stored(emulator, "run/a") == CONTENT[:300_000] and 2 <= len(front.log) < 9


def test_list_read_delete(front):
    target = bucket()
    front.page = 10
    names = {f"ckpt_{i:08d}.json" for i in range(25)} | {"sub/deep", "ü #?%2F.txt"}
    for name in names:
        target.write(name, name.encode())
        assert target.read(name) == name.encode()
    bucket("gs://bucket/run2").write("other", b"x")
    assert target.list() == {name: len(name.encode()) for name in names}
    for _ in range(2):  # what is gone can be deleted
        target.delete("sub/deep")
    assert "sub/deep" not in target.list() and target.read("sub/deep") is None


# Waits.

def test_waits_between_attempts_grow(front, monkeypatch, capsys):
    waited = []
    monkeypatch.setattr(bucket_module.time, "sleep", waited.append)
    front.script = [503] * 8
    bucket().write("a", b"x")
    lines = capsys.readouterr().err.splitlines()
    assert [int(line.split()[-2]) for line in lines] == [1, 3, 7, 15, 31, 60, 60]
    assert sum(waited) == 177 and max(waited) == 1  # a stop takes effect between two


@pytest.fixture
def nothing():
    """An address where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as s:
        return f"127.0.0.1:{s.getsockname()[1]}"


# Tokens.

def with_token():
    target = bucket()
    target.emulator = ""  # as for the real service
    return target


def test_tokens_of_a_vm(front, monkeypatch):
    """One for many requests, a fresh one before it expires, and once after a 401."""
    monkeypatch.setenv("GCE_METADATA_HOST", front.url.removeprefix("http://"))
    now = start = time.monotonic()
    monkeypatch.setattr(bucket_module.time, "monotonic", lambda: now)
    target = with_token()
    for seconds, token in ((0, 1), (3600 - 300, 1), (3600 - 200, 2)):
        now = start + seconds
        front.token = f"secret-{token}"
        target.write("a", b"x")
    assert front.count == 2 and len(front.log) == 3  # no 401
    front.token = "secret-3"
    target.write("a", b"x")
    assert front.count == 3 and len(front.log) == 5
    front.token = "another"
    with pytest.raises(UserError, match="status 401.*log in again") as e:
        target.write("a", b"x")
    # The front's answer holds the token.
    assert "***" in str(e.value) and "secret" not in f"{e.value!r} {target!r} {e.getrepr(style='short')}"


def test_tokens_outside_google_cloud(front, monkeypatch, tmp_path, nothing):
    """From gcloud, or from the environment."""
    gcloud = tmp_path / "gcloud"
    gcloud.write_text('#!/bin/sh\n[ "$*" = "auth print-access-token" ] && echo secret-gcloud\n')
    gcloud.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("GCE_METADATA_HOST", nothing)
    monkeypatch.delenv("CLOUDSDK_AUTH_ACCESS_TOKEN", raising=False)
    front.token = "secret-gcloud"
    with_token().write("a", b"x")
    gcloud.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(TransientError, match="no Google credentials: run `gcloud auth login`, "):
        with_token().check()
    monkeypatch.setenv("CLOUDSDK_AUTH_ACCESS_TOKEN", "secret-gcloud\n")
    with_token().write("a", b"x")


def test_no_secret_is_printed(front, monkeypatch, capsys):
    """A token with gcloud's warnings before it, and a password in an address."""
    monkeypatch.setenv("CLOUDSDK_AUTH_ACCESS_TOKEN", "Your active configuration is: [x]\nya29.secret")
    with pytest.raises(UserError, match="^the Google token holds white space") as e:
        with_token().check()
    assert "secret" not in str(e.value)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", front.url.replace("//", "//user:secret@"))
    front.script = [503, 503, 400]
    with pytest.raises(UserError, match=f"^gs://bucket/run at {front.url}: status 400") as e:
        bucket().list()
    error = requests.exceptions.InvalidURL("Failed to parse: https://user:secret@hub:x")
    printed = capsys.readouterr().err
    assert "trying again" in printed and "secret" not in f"{printed} {e.value} {network_error(error)}"


# The check at the start, and addresses.

def test_the_check_needs_the_rights_that_a_run_needs(front):
    bucket().check()
    assert bucket("gs://bucket").list() == {}
    front.denied = ("insert", "DELETE")
    bucket().check(write=False)
    for denied in ("list", "insert", "DELETE"):
        front.denied = (denied,)
        with pytest.raises(UserError, match="status 403 .*: the account needs the role Storage Object"):
            bucket().check()
    for url in ("gs://", "gs://Bucket/a", "gs://bucket/../a", "s3://bucket", "bucket/a"):
        with pytest.raises(UserError, match="is not an address in a bucket"):
            Bucket(url)


# Datasets.

URL = "gs://bucket/data/small"


@pytest.fixture
def uploaded(front, random_puzzles, tmp_path, monkeypatch):
    """The folder of a dataset that is at URL too; the working directory is another."""
    path = shutil.copytree(random_puzzles, tmp_path / "source")
    upload_dataset(path, URL)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    front.log[:] = []
    return path


def test_the_upload_command_can_be_repeated_and_adds_a_manifest(emulator, uploaded):
    """The official builder makes none."""
    os.remove(os.path.join(uploaded, "manifest.json"))
    url = "gs://bucket/data/official"
    for _ in range(2):
        bucket_module.main(["upload", uploaded, url])
    newest = max(emulator._storage.objects["bucket"].values(), key=lambda item: int(item["generation"]))
    assert newest["name"] == "data/official/manifest.json"  # it comes last
    assert Dataset(local_dataset(url), "train").manifest["sha256"] == Dataset(uploaded, "train").hashes()
    with pytest.raises(UserError, match="^usage: python bucket.py upload"):
        bucket_module.main([])


def test_one_process_of_a_host_downloads_also_after_a_kill(front, uploaded):
    command = [sys.executable, "-c", f"import bucket; print(bucket.local_dataset('{URL}'))"]
    front.script = [None] * 4 + ["stall"]
    killed = subprocess.Popen(command)
    wait_for(lambda: len(front.log) == 5)
    killed.kill()
    killed.wait()
    assert not os.path.exists("data/small")
    front.log[:] = []
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=60)[0] for process in processes] == ["data/small\n"] * 2
    assert Dataset("data/small", "test").sha256 == Dataset(uploaded, "train").sha256
    assert len(front.log) == 13 + 3  # each file once; and the manifest, which each process reads
    assert os.listdir("data") == ["small"]


def test_a_dataset_that_exists_is_not_replaced_by_another_one(front, uploaded):
    assert local_dataset("/a/gs://") == "/a/gs://"
    shutil.copytree(uploaded, "data/small")
    assert local_dataset(URL) == "data/small" and kinds(front) == ["media"]
    shutil.rmtree("data/small")
    os.rename(bench.dataset_path(SimpleNamespace(data_path="6x6"), "data")[0], "data/small")
    with pytest.raises(UserError, match=f"^{URL} holds another dataset: choose another address$"):
        upload_dataset("data/small", URL)
    with pytest.raises(UserError, match=f"^data/small holds another dataset than {URL}: move it away"):
        local_dataset(URL)


def test_a_damaged_dataset_in_the_bucket_is_named(front, uploaded):
    remote, name = bucket(URL), "train/all__inputs.npy"
    content = remote.read(name)
    manifest = remote.read("manifest.json")
    remote.write(name, content[:-1] + b"\0")
    with pytest.raises(UserError, match=f"^{URL}/{name} does not match manifest.json: upload the dataset"):
        local_dataset(URL)
    assert os.listdir("data") == ["small.part"]
    remote.write(name, content)
    for damaged in (b"", b'{"sha256": {}}', b'{"sha256": null}', manifest[:-30]):
        remote.write("manifest.json", damaged)
        with pytest.raises(UserError, match=f"^{URL} has no manifest.json, or a damaged one: upload"):
            local_dataset(URL)
