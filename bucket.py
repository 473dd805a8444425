"""HTTP that tries again, Google Cloud Storage over it, and datasets in buckets."""
import base64
import functools
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import textwrap
import time
import urllib.parse
from contextlib import suppress

import requests
from urllib3.util import Retry

# isort: off
from configurator import TransientError, UserError
from data import FILES, Dataset, locked, replacing

RETRIED = {408, 429, *range(500, 600)}  # statuses of a server that may answer later
# A VM's metadata server, by number: looking up its name can hang outside Google Cloud.
METADATA_TOKEN = "http://169.254.169.254/computeMetadata/v1/instance/service-accounts/default/token"


# ---------------------------------------------------------------------------------------------------------
# HTTP

def session(label, attempts, stop=lambda: False):
    """Returns a requests.Session that repeats requests after network errors and the statuses RETRIED.

    Args:
        label: the beginning of its lines on stderr.
        attempts: how often it sends a request before it returns the last response or raises the last error.
        stop: a function; if it returns true in a wait, KeyboardInterrupt is raised.
    """
    class PatientRetry(Retry):
        def sleep(self, response=None):
            # a server may ask for more patience than ours
            seconds = backoff(len(self.history) - 1)
            if response:
                seconds = max(seconds, min(60, int(self.get_retry_after(response) or 0)))
            if seconds:
                last = self.history[-1]
                cause = network_error(last.error) if last.error else f"status {last.status}"
                print(f"{without_password(label)}: {cause}; trying again in {seconds} s", file=sys.stderr)

            # a stop takes effect after each second
            for _ in range(seconds):
                if stop():
                    raise KeyboardInterrupt
                time.sleep(1)

    # all methods may be repeated: an upload replaces the object as a whole
    retry = PatientRetry(attempts - 1, status_forcelist=RETRIED, allowed_methods=None, raise_on_status=False)
    http = requests.Session()
    http.headers["Accept-Encoding"] = "identity"  # sizes are the file's, not a compressed copy's
    for scheme in ("http://", "https://"):
        http.mount(scheme, requests.adapters.HTTPAdapter(max_retries=retry))
    return http


def backoff(attempt):
    """Returns the seconds to wait after attempt 0, 1, 2, ...: 0, 1, 3, 7, ..., 60."""
    return min(60, 2**attempt - 1)


def receive(get, f, label, progress=None):
    """Downloads a file into f and returns the last response.

    Where a response breaks off, the next one goes on. If that one does not fit, since the file has changed on
    the server, or if the content does not have the hash that the server states, the download starts again.

    Args:
        get: a function of request headers that returns a streamed response. One whose status is not 200, 206
            or 416 (there is no such part) is returned as it is.
        f: an empty binary file.
        label: the beginning of errors.
        progress: a Progress that counts bytes, or None.

    Raises TransientError after three responses in a row that brought the download no further.
    """
    failures = 0
    while failures < 3:
        begin = f.tell()
        response = get({"Range": f"bytes={begin}-"} if begin else {})
        headers = response.headers
        if response.status_code not in (200, 206, 416):
            return response

        # the whole file, or the rest of the one that f holds the beginning of
        if response.status_code == 200:
            whole = headers
            md5 = hashlib.md5()
            f.truncate(f.seek(0))
            fits = True
        else:
            is_rest = headers.get("Content-Range", "").startswith(f"bytes {begin}-")
            fits = is_rest and headers.get("ETag") == whole.get("ETag")

        # What has arrived stays in f if the connection breaks, but not if all of it is there and wrong.
        try:
            for block in response.iter_content(1 << 15) if fits else ():
                f.write(block)
                md5.update(block)
                if progress:
                    progress.add(len(block))
            expected_hash = whole.get("x-goog-hash", "")
            if fits and ("md5=" not in expected_hash or base64_of(md5) in expected_hash):
                return response
            cause = "the download arrived damaged, or the file changed meanwhile"
            f.truncate(f.seek(0))
        except requests.RequestException as e:
            cause = network_error(e)
        failures = 0 if f.tell() > begin else failures + 1
    raise TransientError(f"{label}: {cause}")


def network_error(e):
    """Returns the cause of a network error in words, without the URL, which may hold a secret."""
    # requests wraps urllib3's error, which may name a reason; the words are at its end
    cause = getattr(e.args[0], "reason", e.args[0])
    return without_password(f"{type(e).__name__}: {str(cause).rpartition(': ')[2]}")


def without_password(text):
    """Returns a text without user:password@ in its URLs."""
    return re.sub(r"//[^/\s]*@", "//", text)


def base64_of(digest):
    """Returns a hashlib object's digest as Cloud Storage writes it."""
    return base64.b64encode(digest.digest()).decode()


# ---------------------------------------------------------------------------------------------------------
# Google Cloud Storage

class Bucket:
    """The objects under gs://bucket/prefix in Google Cloud Storage, or in the emulator STORAGE_EMULATOR_HOST.

    Object names are relative to the prefix. The methods are thread-safe. They raise UserError if the bucket
    refuses, and TransientError after the last attempt or for an answer that is not a bucket's.

    Args:
        url: gs://bucket/prefix.
        stop: a function; if it returns true in a wait, KeyboardInterrupt is raised.
        patient: True tries for three minutes; False three times, for the start of a run.
    """

    timeout = 10  # seconds without a byte

    def __init__(self, url, stop=lambda: False, patient=True):
        self.url = url.rstrip("/")
        match = re.fullmatch(r"gs://([a-z0-9][a-z0-9._-]+)/(.*)", self.url + "/")
        if not match:
            raise UserError(f"{url!r} is not an address in a bucket: write gs://bucket/folder")
        bucket, self.prefix = match.groups()

        # endpoints of the JSON API, and the token for them
        self.emulator = os.environ.get("STORAGE_EMULATOR_HOST")
        server = self.emulator or "https://storage.googleapis.com"
        self.objects = f"{server}/storage/v1/b/{bucket}/o"
        self.uploads = f"{server}/upload/storage/v1/b/{bucket}/o"
        self.token = "***"
        self.session = session(self.url, 9 if patient else 3, stop)
        self.session.auth = self._authorize

    def check(self, write=True):
        """Tries what a run will do: list and, with write, write and delete an object."""
        self.list()
        if write:
            self.write(".probe", b"probe")
            self.delete(".probe")

    def upload(self, path, name):
        """Uploads a file, all of it or nothing, as it is when this begins."""
        with open(path, "rb") as f:
            self.write(name, f.read())

    def write(self, name, content):
        """Uploads bytes, all of them or nothing."""
        params = {"uploadType": "media", "name": self.prefix + name}
        answer = self._json("POST", name, self.uploads, params=params, content=content)
        if answer["md5Hash"] != base64_of(hashlib.md5(content)):
            raise TransientError(f"{self.url}/{name}: the upload arrived damaged")

    def read(self, name, ok=(404,)):
        """Returns the bytes of an object, or None if there is none."""
        def get(headers):
            return self._request("GET", name, ok=ok, headers=headers, params={"alt": "media"}, stream=True)

        content = io.BytesIO()
        response = receive(get, content, f"{self.url}/{name}")
        return content.getvalue() if response.status_code != 404 else None

    def download(self, name, path):
        """Downloads an object to path, atomically. Raises UserError if there is none."""
        content = self.read(name, ok=())
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with replacing(path) as f:
            f.write(content)

    def delete(self, name):
        """Deletes an object if it exists."""
        self._request("DELETE", name, ok=(404,))

    def list(self):
        """Returns {name: size in bytes} of all objects under the prefix."""
        sizes = {}
        params = {"prefix": self.prefix, "fields": "nextPageToken,items(name,size)"}
        while True:
            # a page of at most 1000 objects
            page = self._json("GET", "", self.objects, params=params)
            for item in page.get("items", []):
                sizes[item["name"].removeprefix(self.prefix)] = int(item["size"])
            if "nextPageToken" not in page:
                return sizes
            params["pageToken"] = page["nextPageToken"]

    def _json(self, method, name, url, **options):
        """Returns the object in the answer to a _request."""
        response = self._request(method, name, url, **options)
        try:
            return response.json()
        except ValueError:
            raise TransientError(f"{self.url}: not the answer of a bucket") from None

    def _request(self, method, name, url="", ok=(), content=b"", **options):
        """Returns the response, whose status is a success or one of ok; raises UserError or TransientError.

        Args:
            name: of the object.
            url: if it is not the object's.
            content: bytes to send.
            options: of requests.Session.request.
        """
        # A file is sent in blocks, each with the first time limit; bytes would have one for all. What a slow
        # network still holds of it has to arrive before the answer: 3 s for each megabyte.
        body = content and io.BytesIO(content)
        url = url or f"{self.objects}/{urllib.parse.quote(self.prefix + name, safe='')}"
        timeout = (self.timeout, self.timeout + min(len(content) / 3e5, 600))
        try:
            response = self.session.request(method, url, data=body, timeout=timeout, allow_redirects=False,
                                            **options)
        except requests.RequestException as e:
            raise TransientError(self._message(name, network_error(e))) from None
        status = response.status_code
        if status in (200, 204, 206, 416, *ok):
            return response

        # A refusal is the user's error, unless the server may answer later.
        message = self._message(name, f"status {status} {response.text}")
        if status < 400 or status in RETRIED:  # a redirect is a proxy's, not a bucket's
            raise TransientError(message)
        raise UserError(f"{message}: log in (gcloud auth login), or give the account the role Storage Object "
                        "Admin, and a VM the scope cloud-platform")

    def _authorize(self, request):
        """Returns a request with a token in its header, unless it is for the emulator."""
        if not self.emulator:
            # every source renews a token some 225 s before its end
            self.token = access_token(time.monotonic() // 200)
            request.headers["Authorization"] = f"Bearer {self.token}"
        return request

    def _message(self, name, text):
        """Returns an error's text on a line, without the token."""
        return f"{self.url}/{name}: {textwrap.shorten(text.replace(self.token, '***'), 300)}"


@functools.lru_cache(1)
def access_token(period):
    """Returns an OAuth token: CLOUDSDK_AUTH_ACCESS_TOKEN, or a VM's, or gcloud's. Asks once in a period."""
    text = os.environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN")

    # a VM's, without a proxy, which does not lead to the machine's own metadata
    if not text:
        options = dict(headers={"Metadata-Flavor": "Google"}, proxies={"http": ""}, timeout=3)
        with suppress(requests.RequestException, KeyError):
            text = requests.get(METADATA_TOKEN, **options).json()["access_token"]

    # outside Google Cloud: gcloud's, which prints nothing if it fails
    if not text:
        gcloud = ["gcloud", "auth", "print-access-token"]
        with suppress(OSError, subprocess.SubprocessError):
            text = subprocess.run(gcloud, input="", capture_output=True, text=True, timeout=15).stdout
    if not text:
        raise TransientError("no Google credentials: run `gcloud auth login`, or give the VM a service "
                             "account and the scope cloud-platform, or set CLOUDSDK_AUTH_ACCESS_TOKEN")
    return text.split()[-1]  # warnings may come before it


# ---------------------------------------------------------------------------------------------------------
# Datasets in buckets

def local_dataset(path):
    """Returns the local folder of a dataset: for gs://bucket/.../NAME data/NAME, downloaded if it is missing.

    Any other path is returned as it is. One process of a host downloads, the others wait. Raises UserError
    and TransientError.
    """
    if not path.startswith("gs://"):
        return path
    bucket = Bucket(path)
    folder = os.path.join("data", os.path.basename(bucket.url))
    with locked(folder):
        manifest = bucket.read("manifest.json")
        if not manifest:
            raise UserError(f"{path} has no manifest.json: upload the dataset with "
                            f"`gcloud storage rsync -r data/NAME {path}`")
        hashes = json.loads(manifest)["sha256"]
        # A dataset that is here must be the same one.
        if os.path.lexists(folder):
            if Dataset(folder, "train").hashes() != hashes:
                raise UserError(f"{folder} holds another dataset than {path}: move it away, or name it")
            return folder

        # It gets its name once all of it is there, and loads, which checks the hashes.
        part = folder + ".part"
        for name in ["manifest.json", *(hashes.keys() & FILES)]:
            print(f"downloading {path}/{name}", flush=True)
            bucket.download(name, os.path.join(part, name))
        for split in ("train", "test"):
            Dataset(part, split)
        os.rename(part, folder)
        return folder
