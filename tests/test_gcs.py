"""A bucket in trouble costs time and no data; one that refuses says what to do; no secret is printed.

Against gcp-storage-emulator, behind a server that breaks requests as networks and servers do.
"""
import os
import shutil
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from fork_server import PipedProcess
from helpers import run, wait_for
from servers import Hub, Server, stored, upload

from data import Dataset
from puzzles.download import local_dataset
from runtime import bucket as bucket_module
from runtime.bucket import Bucket
from runtime.errors import TransientError, UserError

CONTENT = np.random.default_rng(0).bytes(1_500_000)


@pytest.fixture
def bucket(bucket_server, at_once, monkeypatch):
    """A bucket that waits half a second for an answer."""
    monkeypatch.setattr(Bucket, "timeout", (10, 0.5))
    return Bucket("gs://bucket/run")


# Uploads, downloads, lists.

@pytest.mark.parametrize("fault", ["short", "stall"])
def test_an_upload_and_a_download_are_tried_again(bucket, bucket_server, fault):
    Path("file").write_bytes(CONTENT)
    bucket_server.script = [fault, None] * 3
    bucket.write("a", CONTENT)
    bucket.write("b", Path("file"))
    assert stored(bucket_server, "run/a") == stored(bucket_server, "run/b") == bucket.read("b") == CONTENT
    assert not bucket_server.script


@pytest.mark.parametrize("fault, faults, error, message", [
    (503, 9, TransientError, "status 503 a fault"),
    (200, 9, TransientError, "not the answer of a bucket"),
    # the answer of a proxy, or of a hotel
    (302, 1, UserError, "status 302 .*give the account the role Storage Object Admin"),
])
def test_what_a_bucket_refuses_is_the_users_error_and_not_tried_again(
        bucket, bucket_server, fault, faults, error, message):
    """The bucket would grant one more attempt."""
    bucket_server.script = [fault] * faults
    with pytest.raises(error, match=f"^gs://bucket/run/a: {message}"):
        bucket.write("a", b"x")


def test_a_bucket_lists_reads_and_deletes_what_is_in_its_folder(bucket):
    names = ["ckpt_00000001.json", "sub/deep", "ü #?%2F.txt"]
    for name in names:
        bucket.write(name, name.encode())
        assert bucket.read(name) == name.encode()
    Bucket("gs://bucket/run2").write("other", b"")  # not in the folder run
    assert sorted(bucket.list()) == sorted(names)

    # an object that is gone can be deleted once more, and is read as None
    for _ in range(2):
        bucket.delete("sub/deep")
    assert "sub/deep" not in bucket.list() and bucket.read("sub/deep") is None
    assert not bucket.download("sub/deep", "file") and os.listdir() == []


@pytest.mark.parametrize("address, error, message", [
    ("me:secret@localhost:9023", UserError, "InvalidSchema: correct the address "),
    ("http://me:secret@127.0.0.1:1", TransientError, "ConnectionError$"),  # is away
])
def test_a_wrong_address_is_named_without_its_password(address, error, message, at_once, monkeypatch, capsys):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
    with pytest.raises(error, match=f"^gs://bucket/run/: {message}") as e:
        Bucket("gs://bucket/run").list()
    assert "secret" not in f"{capsys.readouterr().err} {e.value}"


def test_a_list_of_two_pages(monkeypatch):
    path = "/storage/v1/b/bucket/o?prefix=run%2F&fields=nextPageToken%2Citems%28name%29"
    files = {path: b'{"items": [{"name": "run/a"}], "nextPageToken": "t"}',
             path + "&pageToken=t": b'{"items": [{"name": "run/b"}]}'}
    with Server(Hub, files=files) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        assert Bucket("gs://bucket/run").list() == ["a", "b"]


def test_a_run_that_ends_with_an_error_uploads_its_last_checkpoint(bucket_server, data, monkeypatch):
    monkeypatch.setattr("optim.norm", mock.Mock(side_effect=[torch.ones(1), MemoryError]))
    bucket_server.faults = {"ckpt_": "slow"}  # the checkpoint is on its way when the run ends
    with pytest.raises(UserError, match="out of memory"):
        run(data, "run", "--gcs_dir=gs://bucket/run", "--checkpoint_interval=1")
    assert stored(bucket_server, "run/ckpt_00000001.json") == Path("run/ckpt_00000001.json").read_bytes()
    assert stored(bucket_server, "run/log.txt")


# Tokens and passwords.

@pytest.fixture
def cloud_bucket(bucket, bucket_server, monkeypatch):
    """A bucket that needs the token secret, as the real service does; nothing here has one."""
    monkeypatch.delenv("CLOUDSDK_AUTH_ACCESS_TOKEN", raising=False)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "")
    monkeypatch.setenv("PATH", f"{os.getcwd()}:/bin")  # without gcloud
    monkeypatch.setattr(bucket_module, "METADATA_TOKEN", "http://127.0.0.1:1/token")  # nobody listens
    bucket_module.access_token.cache_clear()
    bucket_server.token = "secret"
    return bucket


@pytest.fixture
def metadata(cloud_bucket, monkeypatch):
    """A VM's metadata server; metadata.files["/token"] is its answer. Its token is secret."""
    with Server(Hub, files={"/token": b'{"access_token": "secret"}'}) as server:
        monkeypatch.setattr(bucket_module, "METADATA_TOKEN", server.url + "/token")
        yield server


def write_gcloud(commands):
    Path("gcloud").write_text(f'#!/bin/sh\n[ "$*" = "auth print-access-token" ] || exit 9\n{commands}\n')
    Path("gcloud").chmod(0o755)


def test_a_token_that_is_refused_is_replaced_once(cloud_bucket, bucket_server, metadata):
    """It may have expired, or have been withdrawn. Until then a VM asks its metadata server only once."""
    for _ in range(2):
        cloud_bucket.write("a", b"x")
    assert len(metadata.log) == 1

    # the bucket takes a new token alone, and the metadata server has it
    bucket_server.token = "renewed"
    metadata.files["/token"] = b'{"access_token": "renewed"}'
    cloud_bucket.write("a", CONTENT)
    assert stored(bucket_server, "run/a") == CONTENT

    # the metadata server has no better one
    bucket_server.token = "another"
    with pytest.raises(UserError, match="status 401 a fault, .*log in") as e:
        cloud_bucket.write("a", b"x")
    assert "renewed" not in str(e.value)  # although the answer holds it


def test_a_metadata_server_that_is_busy_is_asked_again(cloud_bucket, metadata):
    metadata.faults["/token"] = [503]
    cloud_bucket.list()


def test_outside_google_cloud_a_token_comes_from_gcloud_or_the_environment(
        cloud_bucket, metadata, monkeypatch):
    metadata.files.clear()  # as in another cloud, or a VM without an account

    # gcloud is missing, or has no login
    no_credentials = pytest.raises(UserError, match="^no Google credentials: run `gcloud auth login`, ")
    with no_credentials:
        cloud_bucket.list()
    write_gcloud("echo You do not currently have an active account selected. >&2; exit 1")
    with no_credentials:
        cloud_bucket.list()

    # gcloud cannot reach its server at first
    write_gcloud("[ ! -e asked ] || exec echo secret; touch asked; echo no name server >&2; exit 1")
    cloud_bucket.list()

    # the environment has a token
    write_gcloud("exit 9")
    bucket_module.access_token.cache_clear()
    monkeypatch.setenv("CLOUDSDK_AUTH_ACCESS_TOKEN", "secret\n")
    cloud_bucket.list()


# Datasets.

URL = "gs://bucket/data/small"


@pytest.fixture
def uploaded(bucket_server, random_puzzles, monkeypatch):
    """The folder of a dataset that is at URL too; the working directory is another."""
    path = os.path.abspath(shutil.copytree(random_puzzles, "source"))
    upload(path, URL)
    Path("work").mkdir()
    monkeypatch.chdir("work")
    bucket_server.log[:] = []
    return path


def test_one_process_of_a_host_downloads_also_after_a_kill(bucket_server, uploaded):
    download = partial(PipedProcess, local_dataset, [URL])
    # kill a process while it downloads the labels
    bucket_server.faults = {"all__labels": "stall"}
    killed = download()
    wait_for(lambda: not bucket_server.faults)
    killed.kill()
    killed.wait()
    assert set(os.listdir("data")) == {"small.lock", "small.part"}

    # two others share one download
    printed = [process.output() for process in (download(), download())]
    assert sorted(text.count("downloading") for text in printed) == [0, 1]
    assert Dataset("data/small", "test").sha256 == Dataset(uploaded, "train").sha256


def test_a_dataset_that_exists_is_not_replaced_by_another_one(bucket_server, uploaded, data):
    assert local_dataset("/a/gs://") == "/a/gs://"

    # the same dataset is used as it is: its manifest is all that is downloaded
    shutil.copytree(uploaded, "data/small")
    assert local_dataset(URL) == "data/small" and bucket_server.log == ["media"]

    # another one
    shutil.rmtree("data/small")
    shutil.copytree(data, "data/small")
    with pytest.raises(UserError, match=f"^data/small holds another dataset than {URL}: move it away"):
        local_dataset(URL)


@pytest.mark.parametrize("name, content, error, words", [
    ("train/all__inputs.npy", b"x", TransientError, " does not match its manifest.json: upload"),
    ("train/all__inputs.npy", None, UserError, "/train/all__inputs.npy is missing: upload"),
    ("manifest.json", b"{}", UserError, "/manifest.json is missing, or names .* upload"),
    # it writes only files of a dataset
    ("manifest.json", b'{"sha256": {"train/all__x/../../../train.py": "0"}}', UserError,
     "/manifest.json .* names what is no file of a"),
])
def test_a_dataset_that_is_damaged_in_the_bucket_is_named(uploaded, at_once, name, content, error, words):
    if content is None:
        Bucket(URL).delete(name)
    else:
        Bucket(URL).write(name, content)
    with pytest.raises(error, match=f"^{URL}{words}"):
        local_dataset(URL)
    assert set(os.listdir("data")) <= {"small.lock", "small.part"}
