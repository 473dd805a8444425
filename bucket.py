"""Google Cloud Storage over HTTP, and datasets in buckets.

    python bucket.py upload data/NAME gs://bucket/data/NAME
"""
import base64
import hashlib
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.parse

import requests

# isort: off
from configurator import TransientError, UserError, command
from data import (
    FILES, RETRIED, Dataset, Progress, file_hash, locked, network_error, receive, replacing, session)


class Bucket:
    """The objects under gs://bucket/prefix in Google Cloud Storage, or in the emulator STORAGE_EMULATOR_HOST.

    stop: a function; if it returns true in a wait, KeyboardInterrupt is raised. patient: whether to try for
    two minutes or, at the start of a run, for less than 20 s. Object names are relative to the prefix. The
    methods are thread-safe; they raise UserError if the bucket refuses, TransientError after the last attempt
    or for an answer that is not a bucket's.
    """

    def __init__(self, url, stop=lambda: False, patient=True):
        address = r"gs://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])/((?:[^/\r\n]+/)*)"
        match = re.fullmatch(address, url.removesuffix("/") + "/")
        if not match or {".", ".."} & set(match[2].split("/")):
            raise UserError(f"{url!r} is not an address in a bucket: write gs://bucket/folder")
        self.bucket, self.prefix = match.groups()
        self.emulator = os.environ.get("STORAGE_EMULATOR_HOST", "").rstrip("/")
        server = self.emulator or "https://storage.googleapis.com"
        self.objects = f"{server}/storage/v1/b/{self.bucket}/o"
        self.uploads = f"{server}/upload/storage/v1/b/{self.bucket}/o"
        self.token, self.token_expiry = None, 0
        self.attempts, self.timeout = (9, 10) if patient else (3, 5)  # seconds without a byte
        self.session = session(self._address(""), self.attempts, stop)
        self.session.auth = lambda request: request  # otherwise requests replaces the token with ~/.netrc's

    def check(self, write=True):
        """Tries what a run will do: list and, with write, write and delete an object."""
        self.list()
        if write:
            name = f".probe-{os.urandom(8).hex()}"
            self.write(name, b"probe")
            self.delete(name)

    def upload(self, path, name):
        """Uploads a file, all of it or nothing, as it is when this begins."""
        with open(path, "rb") as f:
            self.write(name, f.read())

    def write(self, name, content, new=False):
        """Uploads bytes and returns True. new: returns False if there is an object with other content."""
        params = {"uploadType": "media", "name": self.prefix + name}
        if new:
            params["ifGenerationMatch"] = 0
        patience = self.timeout + len(content) / 1e6  # what networks still hold has to arrive first
        options = dict(params=params, content=content, timeout=(self.timeout, patience))
        response = self._request("POST", self.uploads, name, (200, 412) if new else (200,), **options)
        if response.status_code == 412:
            return self.read(name) == content  # as an attempt whose answer was lost has written it
        md5 = self._parse(response, lambda item: base64.b64decode(item["md5Hash"]))
        if md5 != hashlib.md5(content).digest():
            raise TransientError(f"{self._address(name)}: the upload arrived damaged")
        return True

    def read(self, name):
        """The bytes of an object, or None if there is none."""
        content = io.BytesIO()
        found = self._receive(name, content, (200, 206, 404)).status_code != 404
        return content.getvalue() if found else None

    def delete(self, name):
        """Deletes an object if it exists."""
        self._request("DELETE", self._url(name), name, (200, 204, 404))

    def list(self):
        """{name: size in bytes} of all objects under the prefix."""
        found, params = {}, {"prefix": self.prefix, "fields": "nextPageToken,items(name,size)"}
        while True:
            response = self._request("GET", self.objects, "", params=params)
            items, params["pageToken"] = self._parse(response, lambda page: (
                {item["name"].removeprefix(self.prefix): int(item["size"]) for item in page.get("items", [])},
                page.get("nextPageToken")))
            found |= items
            if not params["pageToken"]:  # without the folders of the web console
                return {name: size for name, size in found.items() if name and not name.endswith("/")}

    def download(self, name, path):
        """Downloads an object to path, atomically."""
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with replacing(path) as f:
            self._receive(name, f, (200, 206))

    def _receive(self, name, f, ok):
        options = dict(params={"alt": "media"}, stream=True)
        return receive(
            lambda headers: self._request("GET", self._url(name), name, ok, headers=headers, **options),
            f, self._address(name))

    def _request(self, method, url, name, ok=(200,), content=b"", headers=None, **options):
        """The response, whose status is one of ok; raises UserError or TransientError."""
        options = dict(timeout=self.timeout, allow_redirects=False) | options
        for fresh in (False, True):  # once with a fresh token after a 401
            if not self.emulator and (fresh or time.monotonic() >= self.token_expiry):
                self.token, seconds = access_token()
                self.token_expiry = time.monotonic() + seconds
            headers = dict(headers or {})
            if self.token:
                headers["Authorization"] = f"Bearer {self.token}"
            # A file is sent in blocks, of which each has the time-out; bytes would have one for all.
            body = content and io.BytesIO(content)
            try:
                response = self.session.request(method, url, headers=headers, data=body, **options)
            except requests.RequestException as e:
                raise TransientError(f"{self._address(name)}: {network_error(e)}") from None
            status = response.status_code
            if status in ok:
                return response
            if status != 401:
                break
        text = " ".join(response.text.replace(self.token or "***", "***").split())
        message = f"{self._address(name)}: status {status} {text[:300]}".strip()
        if status < 400 or status in RETRIED:  # a redirect is a proxy's, not a bucket's
            raise TransientError(message)
        hint = {
            401: ": log in again (gcloud auth login)",
            403: ": the account needs the role Storage Object Admin, and a VM the scope cloud-platform",
            404: ": no such bucket or object",
        }.get(status, "")
        raise UserError(message + hint)

    def _parse(self, response, read):
        """read(the response's JSON)."""
        try:
            return read(response.json())
        except (ValueError, KeyError, TypeError, AttributeError):
            start = " ".join(response.text.split())[:80]
            raise TransientError(f"{self._address('')}: not the answer of a bucket: {start!r}") from None

    def _url(self, name):
        return f"{self.objects}/{urllib.parse.quote(self.prefix + name, safe='')}"

    def _address(self, name):
        address = f"gs://{self.bucket}/{self.prefix}{name}".rstrip("/")
        return f"{address} at {self.emulator}" if self.emulator else address


def access_token():
    """(OAuth token, seconds to use it) from CLOUDSDK_AUTH_ACCESS_TOKEN, a VM's metadata server or gcloud."""
    if os.environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN"):
        return os.environ["CLOUDSDK_AUTH_ACCESS_TOKEN"].strip(), math.inf
    # By number: looking up the name can hang outside Google Cloud.
    host = os.environ.get("GCE_METADATA_HOST") or "169.254.169.254"
    url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
    no_proxy = {"http": ""}  # a proxy does not lead to the machine's own metadata
    try:
        response = requests.get(url, headers={"Metadata-Flavor": "Google"}, proxies=no_proxy, timeout=3)
        response.raise_for_status()
        token = response.json()
        return token["access_token"], token["expires_in"] - 225  # a new one is there 4 minutes before the end
    except (requests.RequestException, KeyError):
        pass
    gcloud = ["gcloud", "auth", "print-access-token"]
    try:
        done = subprocess.run(gcloud, input="", capture_output=True, check=True, text=True, timeout=15)
        return done.stdout.strip(), 600  # it may be an old one, which is replaced after a 401
    except (OSError, subprocess.SubprocessError):
        hint = "run `gcloud auth login`, or give the VM a service account and the scope cloud-platform"
        raise TransientError(f"no Google credentials: {hint}, or set CLOUDSDK_AUTH_ACCESS_TOKEN") from None


# Datasets in buckets.

def local_dataset(path):
    """The local folder of a dataset: path itself; for gs://bucket/.../NAME data/NAME, downloaded if missing.

    One process of a host downloads, the others wait. Raises UserError and TransientError.
    """
    if not path.startswith("gs://"):
        return path
    bucket = Bucket(path)
    folder = os.path.join("data", path.rstrip("/").rpartition("/")[2])
    with locked(folder):
        try:
            hashes = json.loads(bucket.read("manifest.json") or "")["sha256"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} has no manifest.json, or a damaged one: "
                            f"upload the dataset with `python bucket.py upload data/NAME {path}`") from None
        if os.path.lexists(folder):
            if Dataset(folder, "train").hashes() != hashes:
                raise UserError(f"{folder} holds another dataset than {path}: move it away, or name it")
            return folder
        part = folder + ".part"
        shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
        names = [name for name in FILES if name in hashes]
        progress = Progress(f"downloading {path}", len(names), "files")
        for name in names:
            file = os.path.join(part, name)
            bucket.download(name, file)
            if file_hash(file) != hashes[name]:
                raise UserError(f"{path}/{name} does not match manifest.json: upload the dataset again")
            progress.add(1)
        bucket.download("manifest.json", os.path.join(part, "manifest.json"))
        os.rename(part, folder)
        return folder


def upload_dataset(folder, url):
    """Uploads a dataset, checked, manifest.json last; raises UserError if url holds another dataset."""
    dataset = Dataset(folder, "train")
    Dataset(folder, "test")
    manifest = dataset.manifest or {"sha256": dataset.hashes()}
    content = (json.dumps(manifest, indent=2) + "\n").encode()
    bucket = Bucket(url)
    if bucket.read("manifest.json") not in (None, content):
        raise UserError(f"{url} holds another dataset: choose another address")
    progress = Progress(f"uploading to {url}", len(manifest["sha256"]), "files")
    for name in manifest["sha256"]:
        dataset.check_file(name)
        bucket.upload(os.path.join(folder, name), name)
        progress.add(1)
    bucket.write("manifest.json", content)


def main(argv):
    """Runs `upload`; raises UserError."""
    if len(argv) != 3 or argv[0] != "upload":
        raise UserError("usage: python bucket.py upload data/NAME gs://bucket/data/NAME")
    upload_dataset(*argv[1:])
    print(f"{argv[1]} is in {argv[2]}")


if __name__ == "__main__":
    command(lambda: main(sys.argv[1:]), __file__)
