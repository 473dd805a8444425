"""Buckets: against gcp-storage-emulator, behind a front that breaks requests as networks and servers do."""
import os
import shutil
import socket
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import requests
from helpers import stored, upload, wait_for

import bench
import bucket as bucket_module
from bucket import Bucket, local_dataset, network_error
from configurator import TransientError, UserError
from data import Dataset

CONTENT = np.random.default_rng(0).bytes(1_500_000)


def bucket(url="gs://bucket/run", timeout=10, **options):
    target = Bucket(url, **options)
    target.timeout = timeout
    return target


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
    assert sorted(os.listdir("data")) == ["small", "small.lock"]


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
    assert sorted(os.listdir("data")) == ["small.lock", "small.part"]
    remote.delete("manifest.json")
    with pytest.raises(UserError, match=f"^{URL} has no manifest.json: upload"):
        local_dataset(URL)
