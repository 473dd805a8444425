"""Buckets: against gcp-storage-emulator, behind a front that breaks requests as networks and servers do."""
import http.server
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import gcp_storage_emulator.server
import numpy as np
import pytest
import requests
from conftest import ROOT, Server, wait_for
from gcp_storage_emulator.server import Router, create_server

import bench
import bucket as bucket_module
from bucket import Bucket, local_dataset, network_error
from configurator import TransientError, UserError
from data import Dataset

CONTENT = np.random.default_rng(0).bytes(1_500_000)
gcp_storage_emulator.server._read_data = lambda handler, query: handler.body  # its own refuses empty files


class Front(http.server.BaseHTTPRequestHandler):
    """Passes requests on to the emulator, with the faults of server.script or drawn at server.rate.

    Kinds of requests: insert (an upload), media (a download), list, DELETE. server.log holds (kind, Range) of
    each. A fault is a status; or "reset", "stall" and "short": the answer breaks off half-way, by a reset, a
    silence or an orderly end; "lost": it never comes; "flip": a bit changes; "slow": the answer comes after
    half a second; "wrong start": the answer is another part; bytes: they are the answer; or a function, which
    is called before the request takes effect.
    """

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do(self):
        server = self.server
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        if len(body) < length:  # the client was killed; a bucket drops what is not whole
            return
        kind = "media" if "alt=media" in self.path else KINDS[self.command]
        with server.lock:
            fault = server.script.pop(0) if server.script else self.draw()
            server.log.append((kind, self.headers.get("Range")))

        # refused, or cut off before it takes effect
        authorization = self.headers.get("Authorization", "")
        if not authorization.endswith(server.token):
            fault = 401
        if kind in server.denied:
            fault = 403
        if isinstance(fault, int):
            return self.answer(fault, f"a fault, {authorization}".encode())
        if fault in ("reset", "stall") and kind != "media":
            return self.leave(fault)
        if fault == "slow":
            server.stop.wait(0.5)
        if callable(fault):
            fault()

        # the emulator's answer
        if fault == "flip":
            body = flipped(body)
        status, content, headers = self.emulate(body)
        if fault == "lost":
            return self.leave("reset")
        if fault == "flip" and kind == "media":
            content = flipped(content)
        if fault == "wrong start":
            headers["Content-Range"] = headers["Content-Range"].replace("bytes ", "bytes 1")
        if isinstance(fault, bytes):
            content = fault
        self.answer(status, content, headers, fault if fault in ("reset", "stall", "short") else None)

    do_GET = do_POST = do_DELETE = do

    def draw(self):
        """Returns a fault, or None."""
        if self.server.random.random() < self.server.rate:
            return self.server.random.choice([503, 429, 408, 500, "reset", "stall", "lost"])

    def emulate(self, body):
        """Returns status, content and headers of the emulator's answer."""
        server = self.server
        handler = mock.Mock(path=self.path, headers=self.headers, body=body, storage=server.storage)
        with server.lock:  # the emulator takes one request at a time
            Router(handler).handle(self.command)
        content = handler.wfile.write.call_args[0][0]
        headers = dict(call.args for call in handler.send_header.call_args_list)
        if server.etag:  # as on the hub, which states no hash
            headers |= {"ETag": server.etag, "X-Goog-Hash": ""}
        return handler.send_response.call_args[0][0], content, headers

    def leave(self, fault):
        if fault == "stall":
            self.server.stop.wait(4)
        if fault == "reset":  # instead of an orderly end
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def answer(self, status, content, headers=None, fault=None):
        self.send_response(status)
        own = {"Location": self.server.url, "Content-Length": str(len(content))}
        if self.server.retry_after:
            own["Retry-After"] = self.server.retry_after
        for key, value in ((headers or {}) | own).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(content[:len(content) // 2] if fault else content)
        if fault:
            self.leave(fault)

    def log_message(self, *args):
        pass


KINDS = {"GET": "list", "POST": "insert", "DELETE": "DELETE"}


def flipped(content):
    """Returns the bytes with another last bit."""
    return content[:-1] + bytes(byte ^ 1 for byte in content[-1:])


def serve(storage, **state):
    """Returns a Front with the attributes that it needs; storage: an emulator's."""
    attributes = dict(
        storage=storage, stop=threading.Event(), lock=threading.Lock(), log=[], script=[], rate=0.0,
        random=random.Random(0), token="", denied=(), etag=None, retry_after=None)
    return Server(Front, **attributes | state)


@pytest.fixture(scope="module")
def emulator():
    return create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")


@pytest.fixture
def front(emulator, monkeypatch):
    emulator.wipe(keep_buckets=True)
    server = serve(emulator._storage)
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
    ("list", b"<html>hello</html>", 2, "not the answer of a bucket"),
    ("write", 403, 2, "status 403 .*a fault"),
    ("download", 404, 2, "status 404 .*a fault"),
])
def test_calls_give_up(front, at_once, tmp_path, call, fault, requests, message):
    """What a bucket refuses is the user's error, and not tried again."""
    bucket().write("a", b"x")
    front.script = [fault] * 50
    error = UserError if fault in (403, 404) else TransientError
    with pytest.raises(error, match=rf"^gs://bucket/run\S*: .*{message}"):
        CALLS[call](bucket(timeout=0.1, patient=False), str(tmp_path / "file"))
    assert len(front.log) == requests and not os.listdir(tmp_path)


@pytest.mark.parametrize("script, ranges", [
    (["reset", "stall"], [None, "resumed", "resumed"]),
    (["reset"] * 7, [None] + ["resumed"] * 7),  # each receives something
    (["short", "wrong start"], [None, "resumed", None]),
    (["short", 416], [None, "resumed", None]),  # only the end of the last chunk was missing
    (["short", "flip"], [None, "resumed", None]),
    ([503], [None] * 2),
])
def test_downloads_go_on_where_they_broke_off(front, at_once, script, ranges):
    target = bucket(timeout=0.5)
    target.write("a", CONTENT)
    front.script, front.log[:] = list(script), []
    assert target.read("a") == CONTENT
    assert [span and "resumed" for _, span in front.log] == ranges


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


def test_an_upload_over_a_slow_network_has_time(front, emulator, at_once):
    """The network takes 300 kB at once and half a second to pass them on."""
    front.script = ["slow"] * 9
    bucket(timeout=0.1).write("a", CONTENT[:300_000])
    assert stored(emulator, "run/a") == CONTENT[:300_000] and len(front.log) == 1


def test_a_list_of_two_pages():
    target = bucket()
    pages = [{"items": [{"name": "run/a", "size": "1"}], "nextPageToken": "t"},
             {"items": [{"name": "run/b", "size": "2"}]}]
    target._json = mock.Mock(side_effect=pages)
    assert target.list() == {"a": 1, "b": 2}
    assert target._json.call_args.kwargs["params"]["pageToken"] == "t"


def test_list_read_delete(front):
    target = bucket()
    names = ["ckpt_00000001.json", "sub/deep", "ü #?%2F.txt"]
    for name in names:
        target.write(name, name.encode())
        assert target.read(name) == name.encode()
    bucket("gs://bucket/run2").write("other", b"x")
    assert target.list() == {name: len(name.encode()) for name in names}
    for _ in range(2):  # what is gone can be deleted
        target.delete("sub/deep")
    assert "sub/deep" not in target.list() and target.read("sub/deep") is None


# Tokens.

@pytest.fixture
def cloud_bucket(front, monkeypatch):
    """A bucket that needs the token secret, as the real service does; the environment has none."""
    monkeypatch.delenv("CLOUDSDK_AUTH_ACCESS_TOKEN", raising=False)
    bucket_module.access_token.cache_clear()
    front.token = "secret"
    target = bucket()
    target.emulator = ""
    return target


def test_tokens_of_a_vm(front, cloud_bucket, monkeypatch):
    """One for many requests, and a fresh one before it expires."""
    answer = mock.Mock(json=lambda: {"access_token": front.token})
    get = mock.Mock(return_value=answer)
    monkeypatch.setattr(requests, "get", get)
    clock = mock.Mock(return_value=1000)
    monkeypatch.setattr(bucket_module.time, "monotonic", clock)
    cloud_bucket.write("a", b"x")
    cloud_bucket.write("a", b"x")
    assert get.call_count == 1 and get.call_args.kwargs["headers"] == {"Metadata-Flavor": "Google"}
    clock.return_value = 1200
    front.token = "secret-2"
    cloud_bucket.write("a", b"x")
    assert get.call_count == 2
    front.token = "another"
    with pytest.raises(UserError, match="status 401.*log in") as e:
        cloud_bucket.write("a", b"x")
    assert "***" in str(e.value) and "secret" not in str(e.value)  # the front's answer holds the token


def test_tokens_outside_google_cloud(cloud_bucket, monkeypatch, tmp_path):
    """From gcloud, or from the environment; a warning may come before them."""
    with socket.create_server(("127.0.0.1", 0)) as nothing:
        monkeypatch.setattr(bucket_module, "METADATA_TOKEN", f"http://127.0.0.1:{nothing.getsockname()[1]}")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TransientError, match="no Google credentials: run `gcloud auth login`, "):
        cloud_bucket.check()
    gcloud = tmp_path / "gcloud"
    gcloud.write_text('#!/bin/sh\n[ "$*" = "auth print-access-token" ] && echo a warning && echo secret\n')
    gcloud.chmod(0o755)
    cloud_bucket.check()
    gcloud.unlink()
    bucket_module.access_token.cache_clear()
    monkeypatch.setenv("CLOUDSDK_AUTH_ACCESS_TOKEN", "secret\n")
    cloud_bucket.check()


def test_no_password_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(bucket_module.time, "sleep", lambda seconds: None)
    hub = "http://user:secret@127.0.0.1:1"  # nothing listens there
    with pytest.raises(requests.ConnectionError) as e:
        bucket_module.session(hub, 3).get(hub)
    error = requests.exceptions.InvalidURL("Failed to parse: https://user:secret@hub:x")
    printed = capsys.readouterr().err
    assert "http://127.0.0.1:1: NewConnectionError: [Errno 111] Connection refused; trying again" in printed
    assert "secret" not in f"{printed} {network_error(e.value)} {network_error(error)}"


# The check at the start, and addresses.

def test_the_check_needs_the_rights_that_a_run_needs(front):
    bucket().check()
    assert bucket("gs://bucket").list() == {}
    front.denied = ("insert", "DELETE")
    bucket().check(write=False)
    for denied in ("list", "insert", "DELETE"):
        front.denied = (denied,)
        with pytest.raises(UserError, match="status 403 .* give the account the role Storage Object Admin"):
            bucket().check()
    for url in ("gs://", "gs://Bucket/a", "s3://bucket", "bucket/a"):
        with pytest.raises(UserError, match="is not an address in a bucket"):
            Bucket(url)


# Datasets.

URL = "gs://bucket/data/small"


def upload(folder, url):
    """Copies the files of a dataset to url, as `gcloud storage rsync` does."""
    for path in Path(folder).rglob("*.*"):
        Bucket(url).upload(path, str(path.relative_to(folder)))


@pytest.fixture
def uploaded(front, random_puzzles, tmp_path, monkeypatch):
    """The folder of a dataset that is at URL too; the working directory is another."""
    path = shutil.copytree(random_puzzles, tmp_path / "source")
    upload(path, URL)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    front.log[:] = []
    return path


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
    assert [process.communicate(timeout=60)[0].split()[-1] for process in processes] == ["data/small"] * 2
    assert Dataset("data/small", "test").sha256 == Dataset(uploaded, "train").sha256
    assert len(front.log) == 13 + 3  # each file once; and the manifest, which each process reads
    assert os.listdir("data") == ["small"]


def test_a_dataset_that_exists_is_not_replaced_by_another_one(front, uploaded):
    assert local_dataset("/a/gs://") == "/a/gs://"
    shutil.copytree(uploaded, "data/small")
    assert local_dataset(URL) == "data/small" and front.log == [("media", None)]
    shutil.rmtree("data/small")
    os.rename(bench.dataset_path(SimpleNamespace(data_path="6x6"), "data")[0], "data/small")
    with pytest.raises(UserError, match=f"^data/small holds another dataset than {URL}: move it away"):
        local_dataset(URL)


def test_a_damaged_dataset_in_the_bucket_is_named(uploaded):
    remote = bucket(URL)
    name = "train/all__inputs.npy"
    remote.write(name, remote.read(name)[:-1] + b"\0")
    with pytest.raises(UserError, match=f"^data/small.part/{name} is missing or does not match"):
        local_dataset(URL)
    assert os.listdir("data") == ["small.part"]
    remote.delete("manifest.json")
    with pytest.raises(UserError, match=f"^{URL} has no manifest.json: upload"):
        local_dataset(URL)
