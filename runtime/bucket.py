"""HTTP that tries again, Google Cloud Storage over it, and the mirror of a run."""
import functools
import hashlib
import io
import json
import os
import re
import subprocess
import textwrap
import threading
import time
import urllib.parse
from concurrent.futures import Future, wait
from contextlib import nullcontext, suppress
from pathlib import Path

import requests
from urllib3.exceptions import LocationValueError

from runtime.errors import TransientError, UserError, writing
from runtime.files import replacing, to_stderr

# Another machine that resumes needs them.
LOGS = ("best.pt", "best.json", "metrics.jsonl", "log.txt", "run.json")
RETRIED = {408, 429, *range(500, 600)}  # statuses of a server that may answer later
# A VM's metadata server, by number: looking up its name can hang outside Google Cloud.
METADATA_TOKEN = "http://169.254.169.254/computeMetadata/v1/instance/service-accounts/default/token"


# ---------------------------------------------------------------------------------------------------------
# HTTP

def try_again(attempt, label, attempts, stop=lambda: False):
    """Calls attempt() until it succeeds, at most `attempts` times, and returns its result.

    Args:
        attempt: a function; after a TransientError or an error of requests it is called again.
        label: the beginning of the lines on stderr and of the last error.
        attempts: the number of calls.
        stop: a function; if it returns true in a pause, SystemExit(3) is raised.

    Raises TransientError if the last call fails, and UserError for an address that cannot be one.
    """
    cause = ""
    for number in range(attempts):
        # pause, as long as a server asks for; a stop takes effect after each second
        seconds = max(backoff(number), getattr(cause, "seconds", 0))
        if seconds:
            to_stderr(f"{label}: {cause}; trying again in {seconds} s")
        for _ in range(seconds):
            if stop():
                raise SystemExit(3)
            time.sleep(1)

        try:
            return attempt()
        except TransientError as e:
            cause = e
        except (requests.RequestException, LocationValueError) as e:
            cause = network_error(e)
            # these are ValueErrors too; what the environment says does not change
            if isinstance(e, ValueError):
                raise UserError(f"{label}: {cause}: correct the address of a server or proxy in the "
                                "environment (STORAGE_EMULATOR_HOST, HF_ENDPOINT, HTTPS_PROXY, HTTP_PROXY)"
                                ) from None
    raise TransientError(f"{label}: {cause}")


def until_stop(call, stop):
    """Returns call(), or raises SystemExit(3) once stop() returns true: a server may answer byte by byte."""
    future = Future()

    def work():
        try:
            future.set_result(call())
        except Exception as e:
            future.set_exception(e)

    # a thread that does not keep the process alive; what takes less than a second is not interrupted
    threading.Thread(target=work, daemon=True).start()
    while not wait([future], 1).done:
        if stop():
            raise SystemExit(3)
    return future.result()


def backoff(failures):
    """Returns the seconds to wait after 0, 1, 2, 3, ... failures: 0, 1, 2, 4, ..., 60."""
    return min(60, 2**failures // 2)


def network_error(e):
    """Returns the cause of a network error in words, without the URL, which may hold a secret."""
    # requests wraps urllib3's error, which may name a reason; the words are at its end
    cause = getattr(e.args[0], "reason", e.args[0])
    return without_password(f"{type(e).__name__}: {str(cause).rpartition(': ')[2]}")


def without_password(text):
    """Returns a string without user:password@ in its URLs."""
    return re.sub(r"//[^/\s]*@", "//", text)


# ---------------------------------------------------------------------------------------------------------
# Google Cloud Storage

class Bucket:
    """The objects under gs://bucket/prefix in Google Cloud Storage, or in the emulator STORAGE_EMULATOR_HOST.

    An object is uploaded, downloaded and tried again as a whole. The hashes in a checkpoint's .json and in a
    dataset's manifest.json say whether it arrived. Object names are relative to the prefix. The methods are
    thread-safe. They raise UserError if the bucket refuses, and TransientError after the last attempt.

    Args:
        url: gs://bucket/prefix.
        stop: a function; if it returns true in a pause or a request, SystemExit(3) is raised.
    """

    attempts = 9  # at each request; they take three minutes

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
        """Uploads bytes."""
        # requests takes an empty file for one of unknown length
        self._upload(name, functools.partial(io.BytesIO, content) if content else nullcontext)

    def write_file(self, name, path):
        """Uploads a file, which nobody changes meanwhile, without reading it as a whole."""
        self._upload(name, functools.partial(open, path, "rb"))

    def _upload(self, name, open_body):
        params = {"uploadType": "media", "name": self.prefix + name}
        self._request("POST", name, self.uploads, check=json.loads, open_body=open_body, params=params)

    def download(self, name, path, sha256=None):
        """Downloads an object, if it exists, to path, atomically. Returns whether it exists.

        sha256: the hash of its content, if it is known; an object without it is downloaded again.
        """
        def check(content):
            if sha256 not in (None, hashlib.sha256(content).hexdigest()):
                raise ValueError("it does not match its SHA-256; upload it again if that lasts")

        content = self.read(name, check)
        if content is None:
            return False
        with writing(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with replacing(path) as f:
                f.write(content)
        return True

    def read(self, name, check=bytes):
        """Returns the bytes of an object, or None if there is none.

        check: a function of the bytes; if it raises a ValueError, the object is read again.
        """
        return self._request("GET", name, may_lack=True, check=check, params={"alt": "media"})

    def delete(self, name):
        """Deletes an object if it exists."""
        self._request("DELETE", name, may_lack=True)

    def list(self, page_token=None):
        """Returns the names of all objects under the prefix, from the page of a token on."""
        params = {"prefix": self.prefix, "fields": "nextPageToken,items(name)", "pageToken": page_token}
        page = json.loads(self._request("GET", "", self.objects, check=json.loads, params=params))
        names = [item["name"].removeprefix(self.prefix) for item in page.get("items", [])]
        # a page has at most 1000 objects
        if "nextPageToken" in page:
            names += self.list(page["nextPageToken"])
        return names

    def _request(self, method, name, url="", may_lack=False, check=bytes, open_body=nullcontext, **options):
        """Returns the answer's bytes, or None for an object that the bucket may lack and does lack.

        Args:
            method: of HTTP.
            name: of the object.
            url: if it is not the object's.
            may_lack: without it the lack of an object is an error.
            check: a function of the answer's bytes; after a ValueError the request is tried again.
            open_body: a function that opens a binary file to send, as a context.
            options: of requests.request.

        Raises UserError or TransientError.
        """
        label = f"{self.url}/{name}"
        url = url or f"{self.objects}/{urllib.parse.quote(self.prefix + name, safe='')}"

        def send():
            # requests sends a file in blocks, each with the first time limit; bytes would have one for all
            with open_body() as body:
                return requests.request(method, url, data=body, timeout=self.timeout, auth=authorize,
                                        allow_redirects=False, **options)

        def attempt():
            response = send()
            # a token can be withdrawn before it expires: one more request, with a new one
            if response.status_code == 401:
                access_token.cache_clear()
                response = send()
            status = response.status_code
            if status == 404 and may_lack:
                return None
            if status in (200, 204):
                try:
                    check(response.content)
                except ValueError as e:
                    raise TransientError(f"not the answer of a bucket, or damaged: {e}") from None
                return response.content

            # a refusal is the user's error, unless the server may answer later
            message = textwrap.shorten(re.sub(r"Bearer \S+", "***", f"status {status} {response.text}"), 300)
            if status in RETRIED:
                raise TransientError(message)
            raise UserError(f"{label}: {message}: log in (gcloud auth login), or give the account the role "
                            "Storage Object Admin in a bucket without a retention policy, and a VM the scope "
                            "cloud-platform")

        return try_again(lambda: until_stop(attempt, self.stop), label, self.attempts, self.stop)


def authorize(request):
    """Returns a request with a token in its header, unless it is for the emulator."""
    if not os.environ.get("STORAGE_EMULATOR_HOST"):
        # every source renews a token some 225 s before its end; time.monotonic() stops while a laptop sleeps
        request.headers["Authorization"] = f"Bearer {access_token(time.time() // 200)}"
    return request


@functools.lru_cache(1)
def access_token(period):
    """Returns an OAuth token: CLOUDSDK_AUTH_ACCESS_TOKEN, or a VM's, or gcloud's. Asks once in a period."""
    given = os.environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN")
    text = given

    # a VM has one, which is asked for without a proxy: that does not lead to the machine's own metadata
    if not text:
        options = dict(headers={"Metadata-Flavor": "Google"}, proxies={"http": ""}, timeout=3)
        with suppress(requests.RequestException, KeyError, TypeError):
            text = requests.get(METADATA_TOKEN, **options).json()["access_token"]

    # outside Google Cloud gcloud has one; it prints nothing if it fails
    if not text:
        with suppress(OSError, subprocess.SubprocessError):
            text = subprocess.run(["gcloud", "auth", "print-access-token"], input="", capture_output=True,
                                  text=True, errors="replace", timeout=15).stdout

    # a token is a word of ASCII; warnings may come before it
    words = text.split() if isinstance(text, str) else []
    if not words or not re.fullmatch("[!-~]+", words[-1]):
        error = UserError if given else TransientError
        raise error("no Google credentials: run `gcloud auth login`, or give the VM a service account and "
                    "the scope cloud-platform, or set CLOUDSDK_AUTH_ACCESS_TOKEN to a token")
    return words[-1]


# ---------------------------------------------------------------------------------------------------------
# The mirror of a run

class Mirror:
    """A thread that copies a run's folder to a bucket: the newest checkpoint, .pt before .json, and the logs.

    What fails costs a line of the log, and is tried again at the next update; training continues.

    Args:
        folder: the run's.
        bucket: a Bucket, whose attempts a stop does not end.
        newest: the name of the newest checkpoint, such as "ckpt_00002500".
        outdated: a function of (names in the bucket, newest) that returns the names to delete.
        say: a function for the lines of the log.
    """

    stop_seconds = 15  # for the last upload; a preempted VM has 30

    def __init__(self, folder, bucket, newest, outdated, say):
        self.folder = folder
        self.bucket = bucket
        self.newest = newest
        self.outdated = outdated
        self.say = say
        self.copied = {}  # {name of a file: its version in the bucket}
        self.error = None  # of the last copy
        self.is_closing = False
        # the thread sleeps until there is something to copy, and does not keep the process alive
        self.changed = threading.Event()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def update(self, newest):
        """Begins to copy what is new; newest: the newest complete checkpoint."""
        self.newest = newest
        self.changed.set()

    def close(self, seconds, stop):
        """Copies what is new, within the given time, or stop_seconds once stop() returns true.

        Returns whether the bucket has everything.
        """
        # say so before what may take minutes
        self.say(f"uploading to {self.bucket.url}, for {seconds} s at most")
        self.end()
        end = time.monotonic() + seconds
        while self.thread.is_alive() and time.monotonic() < end:
            self.thread.join(1)
            if stop():
                end = min(end, time.monotonic() + self.stop_seconds)
        is_complete = not (self.thread.is_alive() or self.error)
        if not is_complete:
            self.say(f"upload to {self.bucket.url} not complete; --init_from=auto uploads the rest")
        return is_complete

    def end(self):
        """Lets the thread end after a last copy; one that hangs ends with the process."""
        self.is_closing = True
        self.changed.set()

    def work(self):
        is_last = False
        while not is_last:
            # the next copy takes what changes during this one
            self.changed.wait()
            self.changed.clear()
            is_last = self.is_closing
            try:
                self.copy()
                self.error = None
            except Exception as e:  # whatever it is, training continues
                # a row of errors gets one line
                if not self.error:
                    self.say(f"upload failed, the next checkpoint tries again: {e}")
                self.error = e

    def copy(self):
        """Copies what is new."""
        # copy one checkpoint whole; a newer one may come meanwhile, and delete this one
        newest = self.newest
        with suppress(FileNotFoundError):
            # read the .json first, which proves the .pt complete: both may be deleted during the upload
            description = Path(f"{self.folder}/{newest}.json").read_bytes()
            self.copy_file(newest + ".pt")
            # a machine that resumes from it repeats none of this; best.pt comes before its line in the log
            for name in LOGS:
                with suppress(FileNotFoundError):
                    self.copy_file(name)
            self.bucket.write(newest + ".json", description)
        for name in self.outdated(self.bucket.list(), newest):
            self.bucket.delete(name)
        # copy the other files, best.pt before best.json, which has its hash
        for name in sorted(os.listdir(self.folder), reverse=True):
            if re.fullmatch(r"(best|metrics|log|submission|eval_.*)\.(pt|json|jsonl|txt|npz)", name):
                self.copy_file(name)

    def copy_file(self, name):
        """Copies a file, unless the bucket has it as it is."""
        path = f"{self.folder}/{name}"
        stat = os.stat(path)
        version = stat.st_mtime_ns, stat.st_size  # the size too: two appends can share one mtime
        if self.copied.get(name) != version:
            # a checkpoint is written once, and may be larger than the free memory; a log grows meanwhile
            if name.endswith(".pt"):
                self.bucket.write_file(name, path)
            else:
                self.bucket.write(name, Path(path).read_bytes())
            self.copied[name] = version
