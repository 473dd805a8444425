"""HTTP that tries again, Google Cloud Storage over it, and the mirror of a run."""
import functools
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

from runtime.errors import TransientError, UserError, writing
from runtime.files import replacing, to_stderr

ATTEMPTS = 9  # at each request; they take three minutes
RETRIED = {408, 429, *range(500, 600)}  # statuses of a server that may answer later
# A VM's metadata server, by number: looking up its name can hang outside Google Cloud.
METADATA_TOKEN = "http://169.254.169.254/computeMetadata/v1/instance/service-accounts/default/token"


# ---------------------------------------------------------------------------------------------------------
# HTTP

def try_again(attempt, label):
    """Calls attempt() until it succeeds, at most ATTEMPTS times, and returns its result.

    Args:
        attempt: a function; after a TransientError or an error of requests it is called again.
        label: the beginning of the lines on stderr and of the last error.

    Raises TransientError if the last call fails, and UserError for an address or a token that cannot be one.
    """
    cause = ""
    for failures in range(ATTEMPTS):
        seconds = backoff(failures)
        if seconds:
            to_stderr(f"{label}: {cause}; trying again in {seconds} s")
            time.sleep(seconds)

        # an error of requests is told by its name: its text has the URL, which may hold a password
        try:
            return attempt()
        except TransientError as e:
            cause = e
        except ValueError as e:
            raise UserError(f"{label}: {type(e).__name__}: correct the address of a server or proxy, or the "
                            "token, in the environment (STORAGE_EMULATOR_HOST, HF_ENDPOINT, HTTPS_PROXY, "
                            "HTTP_PROXY, HF_TOKEN, CLOUDSDK_AUTH_ACCESS_TOKEN)") from None
        except requests.RequestException as e:
            cause = type(e).__name__
    raise TransientError(f"{label}: {cause}")


def until_stop(call, stop):
    """Returns call(), or raises SystemExit(3) once stop() returns true: a large file takes minutes."""
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


# ---------------------------------------------------------------------------------------------------------
# Google Cloud Storage

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
        params = {"prefix": self.prefix, "fields": "nextPageToken,items(name)", "pageToken": page_token}
        page = self._request("GET", "", self.objects, json.loads, params)
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
            # a token can be withdrawn before it expires: one more request, with a new one
            if response.status_code == 401:
                access_token.cache_clear()
                response = send()

            status = response.status_code
            if status in (200, 204):
                try:
                    return parse(response.content)
                except ValueError as e:
                    raise TransientError(f"not the answer of a bucket, or damaged: {e}") from None
            if status == 404 and not endpoint:
                return None
            # a refusal is the user's error, unless the server may answer later
            message = textwrap.shorten(re.sub(r"Bearer \S+", "***", f"status {status} {response.text}"), 300)
            if status in RETRIED:
                raise TransientError(message)
            raise UserError(f"{label}: {message}: log in (gcloud auth login), or give the account the role "
                            "Storage Object Admin in a bucket without a retention policy, and a VM the scope "
                            "cloud-platform")

        return until_stop(lambda: try_again(attempt, label), self.stop)


def authorize(request):
    """Returns a request with a token in its header, unless it is for the emulator."""
    if not os.environ.get("STORAGE_EMULATOR_HOST"):
        # every source renews a token some 225 s before its end; time.monotonic() stops while a laptop sleeps
        request.headers["Authorization"] = f"Bearer {access_token(time.time() // 200)}"
    return request


@functools.lru_cache(1)
def access_token(period):
    """Returns an OAuth token: CLOUDSDK_AUTH_ACCESS_TOKEN, or a VM's, or gcloud's. Asks once in a period."""
    token = os.environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN")

    # a VM has one, which is asked for without a proxy: that does not lead to the machine's own metadata
    if not token:
        options = dict(headers={"Metadata-Flavor": "Google"}, proxies={"http": ""}, timeout=3)
        with suppress(requests.RequestException, KeyError):
            token = requests.get(METADATA_TOKEN, **options).json()["access_token"]

    # outside Google Cloud gcloud has one; it prints nothing if it fails
    if not token:
        command = ["gcloud", "auth", "print-access-token"]
        with suppress(OSError, subprocess.SubprocessError):
            token = subprocess.run(command, input="", capture_output=True, text=True, timeout=15).stdout
    if not token:
        raise TransientError("no Google credentials: run `gcloud auth login`, or give the VM a service "
                             "account and the scope cloud-platform, or set CLOUDSDK_AUTH_ACCESS_TOKEN")
    return token.strip()


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
        self.copied = set()  # versions of files that the bucket has had
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

        Returns whether the bucket has everything. The thread ends, or with the process if it hangs.
        """
        # say so before what may take minutes
        self.say(f"uploading to {self.bucket.url}, for {seconds} s at most")
        self.is_closing = True
        self.changed.set()
        while self.thread.is_alive() and seconds > 0:
            self.thread.join(1)
            seconds -= 1
            if stop():
                seconds = min(seconds, self.stop_seconds)
        is_complete = not (self.thread.is_alive() or self.error)
        if not is_complete:
            self.say(f"upload to {self.bucket.url} not complete; --init_from=auto uploads the rest")
        return is_complete

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
        newest = self.newest
        wanted = rf"({newest}|best|metrics|log|run|submission|eval_.*)\.(pt|json|jsonl|txt|npz)"
        names = [name for name in os.listdir(self.folder) if re.fullmatch(wanted, name)]
        # a .json comes after its .pt, which it proves complete, and the newest checkpoint's after all that a
        # machine needs to resume from it
        names.sort(key=lambda name: (name.endswith(".json"), name == newest + ".json"))
        for name in names:
            with suppress(FileNotFoundError):  # a newer checkpoint may delete this one meanwhile, .json first
                self.copy_file(name)
        for name in self.outdated(self.bucket.list(), newest):
            self.bucket.delete(name)

    def copy_file(self, name):
        """Copies a file, unless the bucket has it as it is."""
        content = Path(self.folder, name)
        stat = content.stat()
        version = (name, stat.st_mtime_ns, stat.st_size)  # the size too: two appends can share one mtime
        if version in self.copied:
            return
        # a log grows meanwhile; the others are written once, and may be larger than the free memory
        if content.suffix in (".txt", ".jsonl"):
            content = content.read_bytes()
        self.bucket.write(name, content)
        self.copied.add(version)
