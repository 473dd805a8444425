"""Reads and writes Google Cloud Storage, and mirrors a run there."""
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
from runtime.files import complete_checkpoints, newest_complete, outdated, read_json, replacing, step_of
from runtime.retry import RETRIED, try_again

# A VM's metadata server, by number: looking up its name can hang outside Google Cloud.
METADATA_TOKEN = "http://169.254.169.254/computeMetadata/v1/instance/service-accounts/default/token"


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


# ---------------------------------------------------------------------------------------------------------
# The mirror of a run: what comes from the bucket before it begins, and what goes there while it trains

# Another machine that resumes needs them.
LOGS = ("best.pt", "best.json", "metrics.jsonl", "log.txt", "run.json")


def pull(bucket, out_dir):
    """Brings the newest complete checkpoint of the bucket, and its logs, to out_dir, unless that has it."""
    # both must be of the same run
    theirs = bucket.read("run.json", json.loads)
    own = f"{out_dir}/run.json"
    if theirs and os.path.exists(own) and read_json(own) != theirs:
        raise UserError(f"{out_dir} and {bucket.url} hold two different runs: choose another; to move a run, "
                        "copy its files to an empty one")
    for name in complete_checkpoints(bucket.list()):
        # three attempts: a byte of a download may be wrong
        for _ in range(3):
            if step_of(newest_complete(out_dir)) >= step_of(name):
                return
            print(f"fetching {name} from the bucket", flush=True)
            # the .json comes last
            for file in (*LOGS, name + ".pt", name + ".json"):
                bucket.download(file, f"{out_dir}/{file}")
        # a run that has had a checkpoint does not silently begin again, or further back
        if not os.path.exists(f"{out_dir}/{name}.json"):
            raise TransientError(f"{bucket.url}: {name} was deleted before it was read: does another machine "
                                 "train there?")


class Mirror:
    """Copies a run's folder to gcs_dir: the newest checkpoint, .pt before .json, and the logs.

    What fails costs a line of the log, and is tried again at the next update; training continues.
    checkpoints: the run's checkpoint.Checkpoints.
    """

    stop_seconds = 15  # for the last upload; a preempted VM has 30

    def __init__(self, checkpoints):
        self.checkpoints = checkpoints
        self.bucket = Bucket(checkpoints.settings.gcs_dir)  # a stop does not end its attempts
        self.copied = set()  # versions of files that the bucket has had
        self.error = None  # of the last copy
        self.pool = ThreadPool(1)  # its thread, which does not keep the process alive, copies

    def update(self):
        """Begins to copy what is new, once the copies before have ended."""
        self.last_copy = self.pool.apply_async(self.try_copy)

    def close(self, seconds, stop):
        """Copies what is new, within the given time, or stop_seconds once stop() returns true.

        Returns whether the bucket has everything.
        """
        # say so before what may take minutes
        self.checkpoints.say(f"uploading to {self.bucket.url}, for {seconds} s at most")
        self.update()
        while not self.last_copy.ready() and seconds > 0:
            self.last_copy.wait(1)
            seconds -= 1
            if stop():
                seconds = min(seconds, self.stop_seconds)
        is_complete = self.last_copy.ready() and not self.error
        if not is_complete:
            self.checkpoints.say("upload not complete; --init_from=auto uploads the rest")
        return is_complete

    def try_copy(self):
        try:
            self.copy()
            self.error = None
        except Exception as e:  # whatever it is, training continues
            # a row of errors gets one line
            if not self.error:
                self.checkpoints.say(f"upload failed, the next checkpoint tries again: {e}")
            self.error = e

    def copy(self):
        """Copies what is new."""
        newest = self.checkpoints.newest
        # a log comes first: it is small, and finds out whether the token has expired. A .json comes after its
        # .pt, which it proves complete, and the newest checkpoint's after all that a machine needs to resume.
        files = ("log.txt", "metrics.jsonl", "run.json",
                 "submission.json", "eval_????????.npz", "eval_*.0.npz",  # other ranks upload theirs
                 "best.pt", "best.json", f"{newest}.pt", f"{newest}.json")
        for pattern in files:
            for path in Path(self.checkpoints.out_dir).glob(pattern):
                with suppress(FileNotFoundError):  # a newer checkpoint may delete it meanwhile, .json first
                    self.copy_file(path)
        for name in outdated(self.bucket.list(), newest, self.checkpoints.settings.keep_last_n):
            self.bucket.delete(name)

    def copy_file(self, path):
        """Copies a file, unless the bucket has it as it is."""
        stat = path.stat()
        version = (path, stat.st_mtime_ns, stat.st_size)  # the size too: two appends can share one mtime
        if version not in self.copied:
            # a log grows meanwhile; the others are written once, and may be larger than the free memory
            is_log = path.suffix in (".txt", ".jsonl")
            self.bucket.write(path.name, path.read_bytes() if is_log else path)
            self.copied.add(version)
