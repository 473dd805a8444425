"""HTTP that tries again, Google Cloud Storage over it, and datasets in buckets.

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
from contextlib import contextmanager

import requests

# isort: off
from configurator import TransientError, UserError, command
from data import FILES, Dataset, Progress, file_hash, locked, replacing

RETRIED = {408, 429, *range(500, 600)}  # statuses of a server that may answer later


# HTTP

class PatientAdapter(requests.adapters.HTTPAdapter):
    """Repeats requests after network errors and the statuses RETRIED; see session().

    A request's time-out is a pair, seconds to connect and seconds without a byte; its body is a file or None.
    """

    def __init__(self, label, attempts, stop):
        super().__init__()
        self.label = label
        self.attempts = attempts
        self.stop = stop

    def send(self, request, timeout=None, **options):
        connect_seconds, read_seconds = timeout
        upload_seconds = int(request.headers.get("Content-Length", 0)) / 1e6
        for attempt in range(self.attempts):
            is_last = attempt == self.attempts - 1
            seconds = backoff(attempt)

            # What slow networks still hold of an upload has to arrive before the answer can.
            patience = read_seconds + min(upload_seconds * 2**attempt, 600)
            if request.body:
                request.body.seek(0)

            # The last attempt returns or raises what comes; the others go on to the wait.
            try:
                response = super().send(request, timeout=(connect_seconds, patience), **options)
                if response.status_code not in RETRIED or is_last:
                    return response
                response.close()
                cause = f"status {response.status_code}"
                asked_seconds = response.headers.get("Retry-After", "")
                if asked_seconds.isdigit():
                    seconds = max(seconds, min(60, int(asked_seconds)))
            except (requests.ConnectionError, requests.Timeout) as e:
                if is_last:
                    raise
                cause = network_error(e)

            # Wait in steps of a second, between which a stop takes effect.
            if seconds >= 1:
                print(f"{self.label}: {cause}; trying again in {seconds} s", file=sys.stderr, flush=True)
            for second in range(seconds + 1):
                if self.stop():
                    raise KeyboardInterrupt
                time.sleep(second > 0)


def backoff(attempt):
    """Returns the seconds to wait after attempt 0, 1, 2, ...: 0, 1, 3, 7, ..., 60."""
    return min(60, 2**attempt - 1)


def session(label, attempts, stop=lambda: False):
    """Returns a requests.Session that repeats requests after network errors and the statuses RETRIED.

    Args:
        label: the beginning of its lines on stderr.
        attempts: how often it sends a request before it returns the last response or raises the last error.
        stop: a function; if it returns true in a wait, KeyboardInterrupt is raised.
    """
    http = requests.Session()
    http.headers["Accept-Encoding"] = "identity"  # sizes are the file's, not a compressed copy's
    for scheme in ("http://", "https://"):
        http.mount(scheme, PatientAdapter(without_password(label), attempts, stop))
    return http


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
    size = 0
    etag = None
    failures = 0
    while failures < 3:
        failures += 1
        begin = f.tell()
        response = get({"Range": f"bytes={begin}-"} if begin else {})
        if response.status_code not in (200, 206, 416):
            return response

        # the whole file, or the rest of the one that f holds the beginning of
        headers = response.headers
        rest = f"bytes {begin}-{size - 1}/{size}"
        if response.status_code == 200:
            size = int(headers.get("Content-Length", 0))
            etag = headers.get("ETag")
            expected_hash = headers.get("x-goog-hash", "")
            md5 = hashlib.md5()
            f.truncate(f.seek(0))
        elif headers.get("Content-Range") != rest or headers.get("ETag") != etag:
            cause = "the file changed during the download"
            response.close()
            f.truncate(f.seek(0))
            continue

        # What has arrived stays in f if the connection breaks, but not if all of it is there and wrong.
        try:
            for block in response.iter_content(1 << 15):
                f.write(block)
                md5.update(block)
                if progress:
                    progress.add(len(block))
            if size in (0, f.tell()) and ("md5=" not in expected_hash or base64_of(md5) in expected_hash):
                return response
            cause = "the download arrived damaged"
            f.truncate(f.seek(0))
        except requests.RequestException as e:
            cause = network_error(e)
        if f.tell() > begin:
            failures = 1
    raise TransientError(f"{label}: {cause}")


def network_error(e):
    """Returns the cause of a network error in words, without the URL, which may hold a secret."""
    # requests wraps urllib3's error, which may name a reason; the words are at its end
    cause = e.args[0] if isinstance(e, requests.RequestException) and e.args else e
    cause = getattr(cause, "reason", None) or cause
    return without_password(f"{type(e).__name__}: {str(cause).rpartition(': ')[2]}")


def without_password(text):
    """Returns a text without user:password@ in its URLs."""
    return re.sub(r"//[^/\s]*@", "//", text)


def base64_of(digest):
    """Returns a hashlib object's digest as Cloud Storage writes it."""
    return base64.b64encode(digest.digest()).decode()


# Google Cloud Storage

class Bucket:
    """The objects under gs://bucket/prefix in Google Cloud Storage, or in the emulator STORAGE_EMULATOR_HOST.

    Object names are relative to the prefix. The methods are thread-safe. They raise UserError if the bucket
    refuses, and TransientError after the last attempt or for an answer that is not a bucket's.

    Args:
        url: gs://bucket/prefix.
        stop: a function; if it returns true in a wait, KeyboardInterrupt is raised.
        patient: True tries for three minutes; False for less than 20 s, for the start of a run.
    """

    def __init__(self, url, stop=lambda: False, patient=True):
        address = r"gs://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])/((?:(?!\.\.?/)[^/\r\n]+/)*)"
        match = re.fullmatch(address, url.removesuffix("/") + "/")
        if not match:
            raise UserError(f"{url!r} is not an address in a bucket: write gs://bucket/folder")
        self.bucket, self.prefix = match.groups()

        # endpoints of the JSON API, and the token for them
        self.emulator = os.environ.get("STORAGE_EMULATOR_HOST", "").rstrip("/")
        server = self.emulator or "https://storage.googleapis.com"
        self.objects = f"{server}/storage/v1/b/{self.bucket}/o"
        self.uploads = f"{server}/upload/storage/v1/b/{self.bucket}/o"
        self.token = None
        self.token_expiry = 0

        # how long a call may take
        self.attempts = 9 if patient else 3
        self.timeout = 10 if patient else 5  # seconds without a byte
        self.session = session(self._address(""), self.attempts, stop)
        self.session.auth = self._authorize

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

    def write(self, name, content):
        """Uploads bytes, all of them or nothing."""
        params = {"uploadType": "media", "name": self.prefix + name}
        response = self._request("POST", self.uploads, name, params=params, content=content)
        # what the bucket has received
        with self._answer(response) as item:
            arrived = item["md5Hash"]
        if arrived != base64_of(hashlib.md5(content)):
            raise TransientError(f"{self._address(name)}: the upload arrived damaged")

    def read(self, name):
        """Returns the bytes of an object, or None if there is none."""
        content = io.BytesIO()
        response = self._receive(name, content, (200, 206, 416, 404))
        return content.getvalue() if response.status_code != 404 else None

    def delete(self, name):
        """Deletes an object if it exists."""
        self._request("DELETE", self._url(name), name, (200, 204, 404))

    def list(self):
        """Returns {name: size in bytes} of all objects under the prefix, but the web console's folders."""
        sizes = {}
        params = {"prefix": self.prefix, "fields": "nextPageToken,items(name,size)"}
        while True:
            response = self._request("GET", self.objects, "", params=params)
            # a page of at most 1000 objects
            with self._answer(response) as page:
                for item in page.get("items", []):
                    name = item["name"].removeprefix(self.prefix)
                    if name and not name.endswith("/"):
                        sizes[name] = int(item["size"])
                params["pageToken"] = page.get("nextPageToken")
            if not params["pageToken"]:
                return sizes

    def download(self, name, path):
        """Downloads an object to path, atomically."""
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with replacing(path) as f:
            self._receive(name, f, (200, 206, 416))

    def _receive(self, name, f, ok):
        def get(headers):
            options = dict(headers=headers, params={"alt": "media"}, stream=True)
            return self._request("GET", self._url(name), name, ok, **options)

        return receive(get, f, self._address(name))

    def _request(self, method, url, name, ok=(200,), content=b"", **options):
        """Returns the response, whose status is one of ok; raises UserError or TransientError.

        Args:
            name: of the object, for errors.
            content: bytes to send.
            options: of requests.Session.request.
        """
        for _ in range(2):
            # A file is sent in blocks, each with the time-out; bytes would have one for all.
            body = content and io.BytesIO(content)
            try:
                response = self.session.request(method, url, data=body, timeout=(self.timeout, self.timeout),
                                                allow_redirects=False, **options)
            except requests.RequestException as e:
                raise TransientError(self._message(name, network_error(e))) from None
            status = response.status_code
            if status in ok:
                return response
            if status != 401:
                break
            self.token_expiry = 0  # the second attempt has a fresh token

        # A refusal is the user's error, unless the server may answer later.
        message = self._message(name, f"status {status} {response.text}")
        if status < 400 or status in RETRIED:  # a redirect is a proxy's, not a bucket's
            raise TransientError(message)
        hints = {
            401: ": log in again (gcloud auth login)",
            403: ": the account needs the role Storage Object Admin, and a VM the scope cloud-platform",
            404: ": no such bucket or object",
        }
        raise UserError(message + hints.get(status, ""))

    def _authorize(self, request):
        """Returns a request with a token in its header, unless it is for the emulator."""
        if not self.emulator:
            if time.monotonic() >= self.token_expiry:
                self.token, seconds = access_token()
                self.token_expiry = time.monotonic() + seconds
            if len(self.token.split()) != 1:  # an error about the header would print it
                raise UserError("the Google token holds white space: CLOUDSDK_AUTH_ACCESS_TOKEN, or what "
                                "`gcloud auth print-access-token` prints, must be one token alone")
            request.headers["Authorization"] = f"Bearer {self.token}"
        return request

    @contextmanager
    def _answer(self, response):
        """Yields the response's JSON; raises TransientError if it is not what the block expects."""
        try:
            yield response.json()
        except (ValueError, KeyError, TypeError, AttributeError):
            start = " ".join(response.text.split())[:80]
            raise TransientError(f"{self._address('')}: not the answer of a bucket: {start!r}") from None

    def _message(self, name, text):
        """Returns an error's text on a line, without the token."""
        text = text.replace(self.token or "***", "***")
        return f"{self._address(name)}: {' '.join(text.split())[:300]}"

    def _url(self, name):
        return f"{self.objects}/{urllib.parse.quote(self.prefix + name, safe='')}"

    def _address(self, name):
        address = f"gs://{self.bucket}/{self.prefix}{name}".rstrip("/")
        return without_password(f"{address} at {self.emulator}") if self.emulator else address


def access_token():
    """Returns (OAuth token, seconds to use it): CLOUDSDK_AUTH_ACCESS_TOKEN, or a VM's, or gcloud's."""
    if os.environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN"):
        return os.environ["CLOUDSDK_AUTH_ACCESS_TOKEN"].strip(), math.inf

    # The metadata server by number: looking up its name can hang outside Google Cloud.
    host = os.environ.get("GCE_METADATA_HOST") or "169.254.169.254"
    url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
    no_proxy = {"http": ""}  # a proxy does not lead to the machine's own metadata
    try:
        response = requests.get(url, headers={"Metadata-Flavor": "Google"}, proxies=no_proxy, timeout=3)
        response.raise_for_status()
        answer = response.json()
        # a new one is there 4 minutes before the end
        return answer["access_token"], answer["expires_in"] - 225
    except (requests.RequestException, KeyError):
        pass

    # outside Google Cloud: gcloud's
    gcloud = ["gcloud", "auth", "print-access-token"]
    try:
        done = subprocess.run(gcloud, input="", capture_output=True, check=True, text=True, timeout=15)
        return done.stdout.strip(), 600  # it may be an old one, which is replaced after a 401
    except (OSError, subprocess.SubprocessError):
        hint = "run `gcloud auth login`, or give the VM a service account and the scope cloud-platform"
        raise TransientError(f"no Google credentials: {hint}, or set CLOUDSDK_AUTH_ACCESS_TOKEN") from None


# Datasets in buckets

def local_dataset(path):
    """Returns the local folder of a dataset: for gs://bucket/.../NAME data/NAME, downloaded if it is missing.

    Any other path is returned as it is. One process of a host downloads, the others wait. Raises UserError
    and TransientError.
    """
    if not path.startswith("gs://"):
        return path
    bucket = Bucket(path)
    folder = os.path.join("data", path.rstrip("/").rpartition("/")[2])
    with locked(folder):
        try:
            hashes = json.loads(bucket.read("manifest.json") or "")["sha256"]
            expected = {name: hashes[name] for name in FILES if name in hashes}  # only ARC has versions
            expected["train/dataset.json"]  # KeyError: the manifest is of something else
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} has no manifest.json, or a damaged one: "
                            f"upload the dataset with `python bucket.py upload data/NAME {path}`") from None
        # A dataset that is here must be the same one.
        if os.path.lexists(folder):
            if Dataset(folder, "train").hashes() != hashes:
                raise UserError(f"{folder} holds another dataset than {path}: move it away, or name it")
            return folder

        # It gets its name once all of it is there.
        part = folder + ".part"
        shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
        progress = Progress(f"downloading {path}", len(expected), "files")
        for name, expected_hash in expected.items():
            file = os.path.join(part, name)
            bucket.download(name, file)
            if file_hash(file) != expected_hash:
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
    # The manifest comes last: nothing downloads a dataset without one.
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
