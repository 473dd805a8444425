"""The mirror of a run in a bucket: what comes from there before it begins, and goes there while it trains."""
import json
import os
from contextlib import suppress
from multiprocessing.pool import ThreadPool
from pathlib import Path

from runtime.bucket import Bucket
from runtime.errors import TransientError, UserError
from runtime.files import complete_checkpoints, newest_complete, outdated, read_json, step_of

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
