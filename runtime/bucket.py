"""Reads and writes Google Cloud Storage. mirror.py copies a run with it."""
import functools
import json
import os
import re
import subprocess
import textwrap
import urllib.parse
from contextlib import nullcontext, suppress
from multiprocessing import TimeoutError
from multiprocessing.pool import ThreadPool
from pathlib import Path

import requests

from runtime.errors import TransientError, UserError, writing
from runtime.files import replacing
from runtime.retry import RETRIED, try_again

# A VM's metadata server, by number: looking up its name can hang outside Google Cloud.
METADATA_TOKEN = "http://169.254.169.254/computeMetadata/v1/instance/service-accounts/default/token"


class Bucket:
    """The objects under gs://bucket/prefix in Google Cloud Storage, or in the emulator STORAGE_EMULATOR_HOST.

    An object is uploaded, downloaded and tried again as a whole. The hashes in a checkpoint's .json and in a
    dataset's manifest.json say whether it arrived. Object names are relative to the prefix. The methods are
    thread-safe. They raise UserError if the bucket refuses, and TransientError after the last attempt.

    Args:
        url: gs://bucket/prefix.
        stop: a function; once it returns true, a request that takes long raises SystemExit(3).
    """

    # Seconds to connect or to send a block; and from the last block to the answer, since a slow network may
    # still hold 4 MB then.
    timeout = (10, 20)

    def __init__(self, url, stop=lambda: False):
        self.url = url.rstrip("/")
        match = re.fullmatch(r"gs://([a-z0-9][a-z0-9._-]+)/(.*)", self.url + "/")
        if not match:
            raise UserError(f"{url!r} is not an address in a bucket: write gs://bucket/folder")
        bucket, self.prefix = match.groups()
        self.stop = stop

        # endpoints of the JSON API
        server = os.environ.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com"
        self.objects = f"{server}/storage/v1/b/{bucket}/o"
        self.uploads = f"{server}/upload/storage/v1/b/{bucket}/o"

    def check(self, write):
        """Tries what a run will do: list and, if it will write, write and delete an object.

        A bucket of Google's in which one cannot delete refuses to replace an object as well.
        """
        self.list()
        if write:
            self.write(".probe", b"probe")
            self.delete(".probe")

    def write(self, name, content):
        """Uploads bytes, or the file at a Path, which may be large and which nobody changes meanwhile."""
        params = {"uploadType": "media", "name": self.prefix + name}
        self._request("POST", name, self.uploads, json.loads, params, content)

    def download(self, name, path):
        """Downloads an object, if it exists, to path, atomically. Returns whether it exists."""
        content = self.read(name)
        if content is None:
            return False
        with writing(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with replacing(path) as f:
                f.write(content)
        return True

    def read(self, name, parse=bytes):
        """Returns the content of an object, or None if there is none.

        parse: a function that makes the result of the bytes; if it raises a ValueError, they are read again.
        """
        return self._request("GET", name, parse=parse, params={"alt": "media"})

    def delete(self, name):
        """Deletes an object if it exists."""
        self._request("DELETE", name)

    def list(self, page_token=None):
        """Returns the names of all objects under the prefix, from the page of a token on."""
        page = self._request("GET", "", self.objects, json.loads, {
            "prefix": self.prefix, "fields": "nextPageToken,items(name)", "pageToken": page_token})
        names = [item["name"].removeprefix(self.prefix) for item in page.get("items", [])]
        # a page has at most 1000 objects
        if "nextPageToken" in page:
            names += self.list(page["nextPageToken"])
        return names

    def _request(self, method, name, endpoint=None, parse=bytes, params=None, content=None):
        """Returns what the answer says, or None for an object that the bucket lacks.

        Args:
            method: of HTTP.
            name: of the object.
            endpoint: the URL, if it is not the object's.
            parse: a function that makes the result of the answer's bytes; after a ValueError the request is
                tried again.
            params: of the URL.
            content: bytes to send, or the Path of a file.

        Raises UserError or TransientError.
        """
        label = f"{self.url}/{name}"
        url = endpoint or f"{self.objects}/{urllib.parse.quote(self.prefix + name, safe='')}"

        def send():
            # requests sends a file in blocks, each with the first time limit; bytes have one for all
            with content.open("rb") if isinstance(content, Path) else nullcontext(content) as body:
                return requests.request(method, url, params=params, data=body, auth=authorize,
                                        timeout=self.timeout, allow_redirects=False)

        def attempt():
            response = send()
            if response.status_code == 401:  # the token has expired, maybe: a new one serves or is wrong
                access_token.cache_clear()
                response = send()
            status = response.status_code
            if status < 300:
                return parse(response.content)
            if status == 404 and not endpoint:
                return None
            message = textwrap.shorten(re.sub(r"Bearer \S+", "***", f"status {status} {response.text}"), 300)
            # a refusal is the user's error, unless the server may answer later
            if status in RETRIED:
                raise TransientError(message)
            raise UserError(f"{label}: {message}: log in (gcloud auth login), or give the account the role "
                            "Storage Object Admin in a bucket without a retention policy, and a VM the scope "
                            "cloud-platform")

        return until_stop(lambda: try_again(attempt, label), self.stop)


def until_stop(call, stop):
    """Returns call(), or raises SystemExit(3) once stop() returns true: a large file takes minutes."""
    # a thread that keeps neither this block nor the process from ending
    with ThreadPool(1) as pool:
        result = pool.apply_async(call)
        while True:
            with suppress(TimeoutError):
                return result.get(1)
            if stop():
                raise SystemExit(3)


def authorize(request):
    """Returns a request with a token in its header, unless it is for the emulator."""
    if not os.environ.get("STORAGE_EMULATOR_HOST"):
        request.headers["Authorization"] = f"Bearer {access_token()}"
    return request


@functools.cache
def access_token():
    """Returns an OAuth token: CLOUDSDK_AUTH_ACCESS_TOKEN, or a VM's, or gcloud's.

    It serves until it is refused. Raises UserError if there is none, and what try_again tries again.
    """
    token = os.environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN") or token_of_vm() or token_of_gcloud()
    if not token:
        raise UserError("no Google credentials: run `gcloud auth login`, or give the VM a service account "
                        "and the scope cloud-platform, or set CLOUDSDK_AUTH_ACCESS_TOKEN")
    return token.strip()


def token_of_vm():
    """Returns the token of a VM's service account; None without one, or without a metadata server."""
    # where no server listens, it is a ConnectionError at once; no proxy leads to the machine's own server
    with suppress(requests.ConnectionError):
        options = dict(headers={"Metadata-Flavor": "Google"}, proxies={"http": ""}, timeout=3)
        response = requests.get(METADATA_TOKEN, **options)
        if response.status_code in RETRIED:
            raise TransientError(f"status {response.status_code} of the metadata server")
        if response.ok:
            return response.json()["access_token"]


def token_of_gcloud():
    """Returns the token of gcloud's login; None without gcloud, and "" without a login."""
    with suppress(FileNotFoundError):
        gcloud = subprocess.run(["gcloud", "auth", "print-access-token"], input="", capture_output=True,
                                text=True, timeout=15)
        # it may also fail to renew the token of a login, over a bad network
        if gcloud.returncode and "active account" not in gcloud.stderr:
            raise TransientError(f"gcloud: {textwrap.shorten(gcloud.stderr, 300)}")
        return gcloud.stdout
