"""Buckets: against gcp-storage-emulator, behind a front that breaks requests as networks and servers do."""
import collections
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
from configurator import TransientError, UserError
from conftest import ROOT, Server, wait_for
from gcp_storage_emulator.server import create_server
from urllib3.util import Retry

import bench
import bucket as bucket_module
import data
from bucket import Bucket, local_dataset, upload_dataset
from data import Dataset

CONTENT = np.random.default_rng(0).bytes(1_500_000)


class Front(http.server.BaseHTTPRequestHandler):
    """Passes requests on to the emulator, with the faults of server.script or drawn at server.rate.

    Kinds of requests: insert (an upload), media (a download), list, GET, DELETE. server.log holds (kind,
    fault, Range, path) of each. A fault is a status; or "reset" and "stall": the connection breaks half-way;
    "lost": it breaks after the request took effect; "short": the answer ends half-way; "flip": a bit of the
    upload changes; "slow": the answer comes after half a second; or bytes, which are the answer.

    It is a VM's metadata server too, with the tokens secret-1, secret-2, ...
    """

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do(self):
        server = self.server
        if self.path == "/computeMetadata/v1/instance/service-accounts/default/token":
            server.count += self.headers["Metadata-Flavor"] == "Google"
            token = {"access_token": f"secret-{server.count}", "expires_in": 3600, "token_type": "Bearer"}
            return self.answer(server.metadata, json.dumps(token).encode())
        url = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(url.query)
        length = int(self.headers.get("Content-Length", 0))
        kind = "insert" if self.command == "POST" else self.command
        if kind == "GET":
            kind = "media" if "alt" in query else "list" if url.path.endswith("/o") else kind
        with server.lock:
            fault = server.script.pop(0) if server.script else self.draw(kind, length)
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
        with server.lock:  # the emulator takes one request at a time
            name = urllib.parse.quote(query.get("name", [""])[0], "")
            path = url.path.replace("/upload/", "/") + "/" + name
            if query.get("ifGenerationMatch") == ["0"] and self.forward("GET", path)[0] == 200:
                return self.answer(412, b"{}")
            status, content, span = self.forward(self.command, self.path, body)
        if fault == "lost":
            return self.leave("reset")
        if kind == "list" and status == 200:
            content = self.page(json.loads(content), query)
        if fault == "ignore range" and status == 206:
            status, content, span = 200, CONTENT, None
        content = fault if isinstance(fault, bytes) else content
        breaks_off = fault in ("reset", "stall", "short") and content
        self.answer(status, content, fault if breaks_off else None, span)

    do_GET = do_POST = do_PUT = do_DELETE = do

    def draw(self, kind, length):
        """A fault for a request of length bytes, or None."""
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
        return response.status, content, response.headers.get("Content-Range")

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

    def answer(self, status, content, fault=None, span=None):
        self.send_response(status)
        headers = {"Content-Range": span, "Retry-After": self.server.retry_after, "Location": self.server.url}
        for key, value in headers.items():
            if value:
                self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        try:
            self.wfile.write(content[:len(content) // 2] if fault else content)
            if fault:
                self.leave(fault)
        except OSError:  # the client was killed
            self.close_connection = True

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
        token=None, denied=(), page=1000, retry_after=None, count=0, metadata=200) | state)


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
    "write": lambda target: target.write("a", b"x"),
    "list": lambda target: target.list(),
    "download": lambda target: target.download("a", "never"),
}


def test_faults_lose_nothing(front, emulator, at_once, tmp_path):
    """Uploads and downloads while a third of the requests fails."""
    rng = np.random.default_rng(1)
    target = bucket(timeout=0.1)
    front.rate = 0.3
    sent = {}
    for i in range(60):
        name = f"ckpt_{i % 45:08d} ü+%.pt"  # the last 15 overwrite
        sent[name] = rng.bytes(rng.integers(1, 2000) if i % 2 else rng.integers(10_000, 200_000))
        (tmp_path / "file").write_bytes(sent[name])
        target.upload(str(tmp_path / "file"), name)
        if i % 3 == 2:
            target.download(name, str(tmp_path / "new" / "file"))
            assert (tmp_path / "new" / "file").read_bytes() == sent[name] == target.read(name)
            assert os.listdir(tmp_path / "new") == ["file"]
    faults = collections.Counter(fault for _, fault, *_ in front.log)
    front.rate = 0.0
    assert {503, 429, 408, 500, "reset", "stall", "lost"} <= faults.keys()
    assert target.list() == {name: len(content) for name, content in sent.items()}
    assert all(stored(emulator, f"run/{name}") == content for name, content in sent.items())


@pytest.mark.parametrize("call, fault, message", [
    ("write", 503, "status 503 .*a fault, None"),
    ("write", "stall", "Read timed out"),
    ("download", "short", "ChunkedEncodingError"),  # half of a byte is nothing
    ("write", "flip", "the upload arrived damaged"),
    ("list", 302, "status 302"),  # as a proxy's or a hotel's
    *((call, content, "not the answer of a bucket: " + re.escape(repr(content.decode())))
      for call in ("write", "list") for content in (b"<html>hello</html>", b"[]")),
    *((call, content, "not the answer of a bucket") for call, content in (
        ("write", b"{}"), ("write", b'{"md5Hash": "x"}'), ("list", b'{"items": 3}'),
        ("list", b'{"items": [{"size": "3"}]}'), ("list", b'{"items": [{"name": "run/a"}]}'))),
    *((call, status, f"status {status} .*a fault") for call in CALLS for status in (400, 403, 404, 412)),
])
def test_calls_give_up(front, at_once, tmp_path, monkeypatch, call, fault, message):
    """What a bucket refuses is the user's error, and not tried again."""
    monkeypatch.chdir(tmp_path)
    bucket().write("a", b"x")
    front.script, refused = [fault] * 50, fault in (400, 403, 404, 412)
    error = UserError if refused else TransientError
    with pytest.raises(error, match=rf"^gs://bucket/run\S* at http://\S+: .*{message}") as e:
        CALLS[call](bucket(timeout=0.1, patient=False))
    assert "\n" not in str(e.value) and not os.listdir()
    assert len(front.log) == 1 + (3 if fault in (503, "stall", "short") else 1)


def test_a_large_file_is_sent_as_it_was(front, emulator, monkeypatch, tmp_path):
    """It is written between two attempts, and has more time than the time-out."""
    path = tmp_path / "log.txt"
    path.write_bytes(CONTENT)
    monkeypatch.setattr(Retry, "get_backoff_time", lambda self: path.write_bytes(b"later") and 0.0)
    front.script = [503, "lost", "slow"]
    bucket(timeout=0.1).upload(str(path), "log.txt")
    assert stored(emulator, "run/log.txt") == CONTENT and kinds(front) == ["insert"] * 3


def test_a_new_object_has_one_author(front, at_once):
    front.script = [None, "lost"]
    for content in (b"mine", b"another's", b"mine"):
        assert bucket().write("claim", content, new=True) is (content == b"mine")
    front.script = ["lost"]
    assert bucket().write("other", b"x", new=True) and bucket().read("claim") == b"mine"


@pytest.mark.parametrize("script, ranges", [
    ([], [None]),
    (["reset", "stall"], [None, "resumed", "resumed"]),
    (["reset"] * 7, [None] + ["resumed"] * 7),  # each receives something
    (["short", "ignore range"], [None, "resumed"]),
    ([503, 401], [None] * 3),
])
def test_downloads_resume(front, at_once, tmp_path, script, ranges):
    bucket().write("a", CONTENT)
    for get in (lambda: bucket(timeout=0.5).download("a", str(tmp_path / "file")),
                lambda: (tmp_path / "file").write_bytes(bucket(timeout=0.5).read("a"))):
        front.script, front.log[:] = list(script), []
        get()
        assert (tmp_path / "file").read_bytes() == CONTENT and os.listdir(tmp_path) == ["file"]
        assert ["resumed" if span else None for kind, _, span, _ in front.log if kind == "media"] == ranges


def test_list_read_delete(front):
    target = bucket()
    front.page = 10
    names = [f"ckpt_{i:08d}.json" for i in range(25)] + ["sub/deep", "ü #?%2F.txt"]
    for name in names:
        target.write(name, name.encode())
    bucket("gs://bucket/run2").write("other", b"x")
    bucket("gs://bucket").write("run/", b"")
    front.log[:] = []
    assert target.list() == {name: len(name.encode()) for name in names}
    assert kinds(front) == ["list"] * 3
    assert bucket("gs://bucket").list().keys() == {f"run/{name}" for name in names} | {"run2/other"}
    assert [target.read(name) for name in names] == [name.encode() for name in names]
    for name in names[:20] * 2:  # as old checkpoints are pruned
        target.delete(name)
    assert target.list().keys() == set(names[20:]) and target.read(names[0]) is None


# Waits.

def test_waits_are_announced_and_capped(front, monkeypatch, capsys):
    """Retry-After is obeyed, for a minute at most; its line has no secret."""
    waited = []
    monkeypatch.setattr(data.time, "sleep", waited.append)
    front.script = [503] * 3
    bucket().write("a", b"x")
    assert 1 <= sum(waited) <= 5
    front.script, front.retry_after, waited[:] = [429], "7200", []
    bucket().write("a", b"x")
    assert sum(waited) == 60 and max(waited) == 1
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"gs://bucket/run at \S+: status 503; trying again in \d s", lines[0])
    assert lines[-1].endswith(": status 429; trying again in 60 s")


@pytest.fixture
def nothing():
    """An address where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as s:
        return f"127.0.0.1:{s.getsockname()[1]}"


def test_a_host_that_does_not_answer(nothing, monkeypatch, at_once):
    """It is given up within 20 s at the start of a run, and a stop takes effect within 12."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{nothing}")
    hasty, patient = Bucket("gs://bucket/run", patient=False), Bucket("gs://bucket/run")
    assert hasty.timeout * hasty.attempts + 2 < 20 and patient.timeout <= 10
    with pytest.raises(TransientError, match="^gs://bucket/run at .*: ConnectionError: .*refused"):
        patient.check()


# Tokens.

def with_token():
    target = bucket()
    target.emulator = ""  # as for the real service
    return target


def test_tokens_of_a_vm(front, monkeypatch, tmp_path, emulator, nothing):
    """One for many requests, a fresh one before it expires, and once after a 401."""
    (tmp_path / ".netrc").write_text("default login somebody password else\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("http_proxy", f"http://{nothing}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")  # the front, not the metadata server
    monkeypatch.setenv("GCE_METADATA_HOST", front.url.replace("http://127.0.0.1", "localhost"))
    now = start = time.monotonic()
    monkeypatch.setattr(bucket_module.time, "monotonic", lambda: now)
    target = with_token()
    for seconds, token in ((0, 1), (3600 - 300, 1), (3600 - 200, 2)):
        now = start + seconds
        front.token = f"secret-{token}"
        target.write("a", b"x")
        assert front.count == token
    assert len(front.log) == 3  # no 401
    front.token = "secret-3"
    target.write("big", CONTENT)
    assert front.count == 3 and len(front.log) == 5 and stored(emulator, "run/big") == CONTENT
    front.token, front.log[:] = "another", []
    with pytest.raises(UserError, match="status 401.*log in again") as e:
        target.write("a", b"x")
    assert front.count == 4 and len(front.log) == 2
    # The front's answer holds the token.
    assert "***" in str(e.value) and "secret" not in f"{e.value!r} {target!r} {e.getrepr(style='short')}"


def test_tokens_outside_google_cloud(front, monkeypatch, tmp_path, nothing):
    """From gcloud, also where another server is at the metadata's address, or from the environment."""
    gcloud = tmp_path / "gcloud"
    gcloud.write_text('#!/bin/sh\n[ "$*" = "auth print-access-token" ] && echo secret-gcloud\n')
    gcloud.chmod(gcloud.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CLOUDSDK_AUTH_ACCESS_TOKEN", raising=False)
    front.token = "secret-gcloud"
    for front.metadata in (404, 503):
        for host in (nothing, front.url.removeprefix("http://")):
            monkeypatch.setenv("GCE_METADATA_HOST", host)
            with_token().write("a", b"x")
    gcloud.write_text("#!/bin/sh\necho secret-old\nexit 1\n")
    for _ in range(2):
        with pytest.raises(TransientError, match="no Google credentials: run `gcloud auth login`, "):
            with_token().check()
        gcloud.unlink(missing_ok=True)
    monkeypatch.setenv("CLOUDSDK_AUTH_ACCESS_TOKEN", "secret-gcloud\n")
    with_token().write("a", b"x")


# The check at the start, and addresses.

def test_check(front):
    front.denied = ("GET",)  # of an object's or a bucket's own data
    bucket().check()
    assert bucket("gs://bucket").list() == {}  # the probe is gone
    front.denied = ("insert", "DELETE")
    bucket().check(write=False)
    for denied, write in (("list", True), ("insert", True), ("DELETE", True), ("list", False)):
        front.denied, front.log[:] = (denied,), []
        message = r"^gs://bucket/run.*: status 403 .*a fault, .*: the account needs the role Storage Object"
        with pytest.raises(UserError, match=message):
            bucket().check(write=write)
        assert len(front.log) <= 3
    front.denied, front.log[:] = (), []
    message = r"^gs://buckett/run at http://\S+: status 404.*: no such bucket or object$"
    with pytest.raises(UserError, match=message):
        Bucket("gs://buckett/run").check()
    assert len(front.log) == 1


def test_addresses(monkeypatch):
    for url in ("gs://", "gs:///a", "gs://Bucket/a", "gs://ab", "gs://bucket//a", "gs://bucket/../a",
                "gs://bucket/a/..", "s3://bucket", "bucket/a", "gs://bu cket", "gs://bucket/a\n", ""):
        with pytest.raises(UserError, match="is not an address in a bucket"):
            Bucket(url)
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    for server in ("https://storage.googleapis.com", "https://localhost:1"):
        target = Bucket("gs://my-bucket/a b/c/")
        assert target._url("d/ü") == f"{server}/storage/v1/b/my-bucket/o/a%20b%2Fc%2Fd%2F%C3%BC"
        assert target.uploads == f"{server}/upload/storage/v1/b/my-bucket/o"
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", "https://localhost:1/")


# Datasets.

URL = "gs://bucket/data/small"


def tree(path):
    """{relative file: content} of a folder."""
    files = [file for file in pathlib.Path(path).rglob("*") if file.is_file()]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@pytest.fixture
def uploaded(front, random_puzzles, tmp_path, monkeypatch):
    """The folder of a dataset that is at URL too; the working directory is another."""
    path = shutil.copytree(random_puzzles, tmp_path / "source")
    upload_dataset(path, URL)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    front.log[:] = []
    return path


def test_the_upload_command(front, random_puzzles, emulator):
    for args, line in (
        ([], "usage: python bucket.py upload"),
        (["upload", "data/x", "gs://bucket/x"], "data/x/train: no such dataset"),
        (["upload", random_puzzles, "bucket/x"], "'bucket/x' is not an address in a bucket"),
        (["upload", random_puzzles, "gs://other-bucket/x"], "gs://other-bucket/x/test/dataset.json at http"),
    ):
        with pytest.raises(UserError, match=f"^{re.escape(line)}"):
            bucket_module.main(args)
    for _ in range(2):  # again
        argv = [sys.executable, bucket_module.__file__, "upload", random_puzzles, URL]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{random_puzzles} is in {URL}\n", "")
    uploaded = emulator._storage.objects["bucket"].values()
    names = [item["name"] for item in sorted(uploaded, key=lambda item: int(item["generation"]))]
    assert names[-1] == "data/small/manifest.json" and len(names) == 14


def test_one_download_for_the_processes_of_a_host(front, uploaded):
    """And another one after a kill."""
    code = """
from bucket import local_dataset
from data import Dataset
path = local_dataset("gs://bucket/data/small")
print(path, len(Dataset(path, "train")))
"""
    front.script = [None] * 4 + ["stall"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    killed = subprocess.Popen([sys.executable, "-c", code], **pipes)
    wait_for(lambda: len(front.log) == 5)
    killed.kill()
    assert killed.communicate() and not os.path.exists("data/small") and os.path.exists("data/small.part")
    front.log[:] = []
    processes = [subprocess.Popen([sys.executable, "-c", code], **pipes) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert outputs == [("data/small 1000\n", "")] * 2
    assert tree("data/small") == tree(uploaded) and sorted(os.listdir("data")) == ["small"]
    counts = collections.Counter(path for kind, _, _, path in front.log if kind == "media")
    assert counts.pop("/storage/v1/b/bucket/o/data/small/manifest.json") == 3
    assert set(counts.values()) == {1} and len(counts) == 13


def test_a_dataset_that_exists(front, uploaded, tmp_path):
    """Here or in the bucket, it is not replaced by another one."""
    shutil.copytree(uploaded, "data/small")
    manifest = json.load(open("data/small/manifest.json"))
    json.dump(dict(manifest, made="by another"), open("data/small/manifest.json", "w"))
    assert local_dataset(URL) == "data/small" and kinds(front) == ["media"]
    shutil.rmtree("data/small")
    os.rename(bench.dataset_path(SimpleNamespace(data_path="6x6"), "data")[0], "data/small")
    objects = bucket("gs://bucket").list()
    with pytest.raises(UserError, match=f"^{URL} holds another dataset: choose another address$"):
        upload_dataset("data/small", URL)
    assert bucket("gs://bucket").list() == objects
    before = tree("data/small")
    for name in ("manifest.json", "identifiers.json"):  # with another manifest, and with none
        with pytest.raises(UserError, match=f"^data/small holds another dataset than {URL}: move it away"):
            local_dataset(URL)
        assert tree("data/small") == before
        os.remove(f"data/small/{name}")
        del before[name]
    with open(os.path.join(uploaded, "identifiers.json"), "a") as f:
        f.write(" ")
    with pytest.raises(UserError, match=r"identifiers.json does not match manifest.json \(changed or trunc"):
        upload_dataset(uploaded, "gs://bucket/data/new")
    assert not any(name.endswith("manifest.json") for name in bucket("gs://bucket/data/new").list())


def test_a_damaged_dataset_in_the_bucket(front, uploaded):
    remote, name = bucket(URL), "train/all__inputs.npy"
    content = remote.read(name)
    remote.write(name, content[:-1] + b"\0")
    message = f"^{URL}/{name} does not match manifest.json: upload the dataset again$"
    with pytest.raises(UserError, match=message):
        local_dataset(URL)
    remote.delete(name)
    message = rf"^{URL}/{name} at http://\S+: status 404.*: no such bucket or object$"
    with pytest.raises(UserError, match=message):
        local_dataset(URL)
    assert sorted(os.listdir("data")) == ["small.part"]
    remote.write(name, content)
    manifest = remote.read("manifest.json")
    for damaged in (None, b"", b"[]", b"<html>hello</html>", manifest[:-30]):
        remote.delete("manifest.json") if damaged is None else remote.write("manifest.json", damaged)
        message = f"^{URL} has no manifest.json, or a damaged one: upload the dataset with `python"
        with pytest.raises(UserError, match=message):
            local_dataset(URL)
    hashes = json.loads(manifest)["sha256"] | {"../../x.json": "0", "/x.npy": "0"}  # which lead out of it
    remote.write("manifest.json", json.dumps({"sha256": hashes}).encode())
    local_dataset(URL)
    assert tree("data/small").keys() == tree(uploaded).keys()


def test_a_dataset_of_the_official_builder(front, uploaded):
    os.remove(os.path.join(uploaded, "manifest.json"))
    upload_dataset(uploaded, "gs://bucket/data/official")
    path = local_dataset("gs://bucket/data/official")
    assert tree(path).keys() == tree(uploaded).keys() | {"manifest.json"}
    assert Dataset(path, "train").sha256 == Dataset(uploaded, "test").sha256
    os.remove(os.path.join(path, "manifest.json"))
    assert local_dataset("gs://bucket/data/official") == path  # there already, without a manifest
    assert local_dataset("/a/gs://") == "/a/gs://"
