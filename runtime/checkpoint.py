"""A run's checkpoints: their names, where a run begins, and what is written and pruned.

A run's folder has ckpt_STEP.pt of the last steps, and best.pt. A .json with its hash is written after each.
Only this .json proves that a checkpoint is complete. run.json has the run's id. A checkpoint has all that
solve.py, play.py and export.py need, with at most 100 test puzzles.
"""
import copy
import fcntl
import glob
import json
import os
import re
import secrets
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from runtime.errors import TransientError, UserError, writing
from runtime.files import file_hash, lock, read_json, read_metrics, replacing
from runtime.process import STOP
from runtime.saved import read_checkpoint

# Another machine that resumes needs them.
LOGS = ("best.pt", "best.json", "metrics.jsonl", "log.txt", "run.json")
UNFINISHED = r"(ckpt_\d+|best)\.(pt|json)\.tmp"  # what a process that was killed was writing

# ---------------------------------------------------------------------------------------------------------
# Names of checkpoints, and which are whole

def stem(step):
    """Returns the name of a step's checkpoint without its ending."""
    return f"ckpt_{step:08d}"


def step_of(name):
    """Returns the step of a checkpoint's name or path, -1 for another; as text, 9 digits sort before 8."""
    match = re.fullmatch(r"ckpt_(\d+)", Path(name).stem)
    return int(match[1]) if match else -1


def numbered(names):
    """Returns the numbered checkpoints that have a .pt and a .json among the files `names`, newest first."""
    stems = [name.removesuffix(".json") for name in names if re.fullmatch(r"ckpt_\d+\.json", name)]
    return sorted((stem for stem in stems if stem + ".pt" in names), key=step_of, reverse=True)


def outdated(names, newest, keep_last_n):
    """Returns the files to delete, in order; keeps the newest keep_last_n complete checkpoints.

    names: all files. newest: the newest good checkpoint. Newer ones were found damaged, and do not count.
    """
    steps = [step for step in map(step_of, numbered(names)) if step <= step_of(newest)]
    oldest = min(steps[:keep_last_n], default=0)  # of those that stay
    older = [name for name in names if re.fullmatch(r"ckpt_\d+\.(pt|json)", name) and step_of(name) < oldest]
    unfinished = [name for name in names if re.fullmatch(UNFINISHED, name)]
    # a .json comes before its .pt, which is no checkpoint without it
    return sorted(older + unfinished)


def files_of(folder):
    """Returns the names of the files in a folder; [] if there is no such folder."""
    return glob.glob("*", root_dir=folder)


def checkpoint_paths(out_dir):
    """Returns the paths of the numbered checkpoints that have a .json, newest first."""
    return [f"{out_dir}/{stem}.pt" for stem in numbered(files_of(out_dir))]


def newest_whole(out_dir, say=lambda line: None, newer_than=""):
    """Returns the path of the newest checkpoint with the hash in its .json, or ""; says which are damaged.

    newer_than: the name of a checkpoint. It and older ones are passed over.
    """
    for path in checkpoint_paths(out_dir):
        if step_of(path) <= step_of(newer_than):
            break
        cause = "it does not match the hash in its .json"
        try:
            if read_json(path.removesuffix("pt") + "json")["sha256"] == file_hash(path):
                return path
        except Exception as e:  # whatever it is, the one before may be whole
            cause = e
        say(f"skipped {path}: damaged ({cause})")
    return ""


# ---------------------------------------------------------------------------------------------------------
# Where a run begins

class Start(NamedTuple):
    """Where a run begins, the same on all ranks."""
    path: str  # the checkpoint with its weights; "": new weights
    is_resume: bool  # it goes on with the run of that checkpoint
    run_id: str  # of the run that is resumed, or ""
    step: int
    evaluation: dict  # the last one that was logged at this step
    saved_settings: dict  # of the run that is resumed or evaluated
    init_sha256: str  # hash of the file that the run began with, or ""


def open_start(settings, device):
    """Returns the Start that the settings lead to, and on rank 0 its checkpoint's content. All ranks."""
    # only rank 0's host may have the checkpoint
    start, saved = on_rank_0(device, partial(find_start, settings)) or (None, {})
    return device.all_gather(start)[0], saved


def find_start(settings):
    """Finds and reads the checkpoint, if there is one; returns a Start and the content. Raises UserError."""
    out_dir = settings.out_dir
    file = "" if settings.init_from in ("scratch", "resume", "auto") else settings.init_from
    # an evaluation of a file needs no run
    newest = "" if settings.eval_only and file else find_newest(settings)
    path = newest or file
    saved = read_checkpoint(path) if path else {}
    is_resume = newest != "" and not settings.eval_only

    # a new run counts its own steps, and has settings and an id of its own
    facts = saved if is_resume or settings.eval_only else {}
    start = Start(
        path=path,
        is_resume=is_resume,
        run_id=facts.get("run_id", ""),
        step=facts.get("step", 0),
        evaluation={},
        saved_settings=facts.get("settings", {}),
        init_sha256=saved.get("init_sha256", "") if is_resume else path and file_hash(path),
    )
    if not is_resume:
        # an evaluation and a new run take only the weights and their average
        return start, {name: value for name, value in saved.items() if name not in ("optimizer", "kept")}

    # a run goes on with a FILE if it began with that
    if file and not has_begun_with(start, file):
        refuse_run("--out_dir", out_dir, files_of(out_dir))
    for line in read_metrics(f"{out_dir}/metrics.jsonl"):
        if line["step"] == start.step and "eval/loss" in line:
            start = start._replace(evaluation=line)
    return start, saved


def has_begun_with(start, file):
    """Returns True if the run that is resumed began with a file, which may have moved since."""
    return (os.path.realpath(file) == os.path.realpath(start.saved_settings["init_from"])
            or os.path.isfile(file) and file_hash(file) == start.init_sha256)


def settings_of(start, settings, not_resumed):
    """Returns the command's settings; what it has not assigned is the checkpoint's, but for not_resumed."""
    saved = {name: value for name, value in start.saved_settings.items() if name not in not_resumed}
    # --epochs sets the length of the run, and not the checkpoint's max_steps
    if any(flag.startswith("--epochs=") for flag in settings.argv):
        saved.pop("max_steps", None)
    settings = copy.copy(settings)  # replicas may be threads
    settings.fill(saved)
    # what the run began with
    if start.is_resume:
        settings.init_from = start.saved_settings["init_from"]
    elif not start.path:
        settings.init_from = "scratch"
    return settings


def check_settings(settings):
    """Raises UserError for settings of a command with which no start can be found."""
    if settings.out_dir.startswith(("gs://", "~")):
        raise UserError(f"--out_dir={settings.out_dir}: must be a folder of this machine, written out; "
                        "--gcs_dir mirrors it to a bucket")
    open_bucket(settings)  # raises UserError for a malformed address
    if settings.eval_only and settings.init_from == "scratch":
        raise UserError("eval_only needs weights: --init_from=resume (the newest checkpoint of out_dir) "
                        "or --init_from=FILE")


def open_bucket(settings, stop=lambda: False):
    """Returns the Bucket of gcs_dir; None without one. stop: see Bucket."""
    if settings.gcs_dir:
        from runtime.bucket import Bucket
        return Bucket(settings.gcs_dir, stop)


def on_rank_0(device, call):
    """Returns what call() returns on rank 0, elsewhere None. All ranks raise its error: they would wait."""
    result = None
    error = None
    if device.rank == 0:
        try:
            result = call()
        except (Exception, SystemExit) as e:
            error = e
    error_of_rank_0 = device.all_gather(error)[0]
    if error_of_rank_0:
        raise error or error_of_rank_0  # rank 0's own has a traceback
    return result


def find_newest(settings):
    """Returns the path of the newest whole checkpoint of the bucket and out_dir, or "". Raises UserError."""
    out_dir = settings.out_dir
    bucket = open_bucket(settings, STOP.is_set)
    if bucket:
        bucket.check(write=not settings.eval_only)
    if settings.init_from == "scratch":
        refuse_run("--out_dir", out_dir, files_of(out_dir))
        refuse_run("--gcs_dir", settings.gcs_dir, bucket.list() if bucket else [])
        return ""
    if bucket:
        pull(bucket, out_dir)
    newest = newest_whole(out_dir, print)
    # a run that has had a checkpoint does not silently start again
    must_exist = settings.init_from == "resume" or settings.eval_only or checkpoint_paths(out_dir)
    if must_exist and not newest:
        raise UserError(f"--init_from={settings.init_from}: no complete checkpoint in {out_dir}; "
                        "--init_from=auto starts from scratch where out_dir and gcs_dir hold none")
    return newest


def refuse_run(flag, folder, names):
    """Raises UserError if a run is among the files `names` of the folder that `flag` gives."""
    # run.json alone: the run was killed before it wrote its first line
    if any(name.startswith(("ckpt_", "best.", "metrics.")) for name in names):
        raise UserError(f"{flag}={folder} holds a run: --init_from=auto continues it, another {flag} starts "
                        "another")


def pull(bucket, out_dir):
    """Brings the newest whole checkpoint of the bucket, and its logs, to out_dir, unless that has it."""
    # both must be of the same run
    theirs = bucket.read("run.json", json.loads)
    own = f"{out_dir}/run.json"
    if theirs and os.path.exists(own) and read_json(own) != theirs:
        raise UserError(f"{out_dir} and {bucket.url} hold two different runs: choose another; to move a run, "
                        "copy its files to an empty one")
    for name in numbered(bucket.list()):
        # three attempts: a byte of a download may be wrong
        for _ in range(3):
            if step_of(newest_whole(out_dir)) >= step_of(name):
                return
            print(f"fetching {name} from the bucket", flush=True)
            # the .json comes last
            for file in (*LOGS, name + ".pt", name + ".json"):
                bucket.download(file, f"{out_dir}/{file}")
        # a run that has had a checkpoint does not silently begin again, or further back
        if not os.path.exists(f"{out_dir}/{name}.json"):
            raise TransientError(f"{bucket.url}: {name} was deleted before it was read: does another machine "
                                 "train there?")


def check_ranks(settings, train_set, device):
    """Raises UserError if ranks differ in what all must have in common; their disks may differ."""
    facts = vars(settings) | dict(dataset=train_set.sha256, data_path="", out_dir="")
    ranks = device.all_gather((device.host, facts))
    _, expected = ranks[0]
    for rank, (host, facts) in enumerate(ranks):
        differing = sorted(dict(facts.items() - expected.items()))
        if differing:
            raise UserError(f"host {host}, rank {rank}: not as on rank 0: {', '.join(differing)}")


def check_hosts(start, settings, device):
    """Raises UserError if a host has a newer checkpoint than rank 0's: a run does not go back in silence.

    That host had rank 0 before. With a bucket it is a line on the terminal.
    """
    if settings.eval_only:
        return
    own = Path(start.path).stem if start.is_resume else ""
    newer = Path(newest_whole(settings.out_dir, newer_than=own)).stem
    _, newer, host = max(device.all_gather((step_of(newer), newer, device.host)))
    if not newer:
        return
    line = (f"--out_dir={settings.out_dir} has {newer} on host {host}, and {own or 'no checkpoint'} on rank "
            "0's")
    if not settings.gcs_dir:
        raise UserError(f"{line}: choose a folder that all hosts share, or a --gcs_dir")
    if device.rank == 0:
        print(f"{line}: training goes on from rank 0's")


# ---------------------------------------------------------------------------------------------------------
# Saving

class Checkpoints:
    """Writes the checkpoints of a run, to out_dir and gcs_dir. All ranks call its methods, rank 0 writes.

    score: a function that ranks evaluations, {"eval/...": number}. say: a function for the lines of the log.
    run_id: kept across resumes and also used by W&B. is_written: whether the last save has its file.
    The with block locks out_dir.
    """

    def __init__(self, start, settings, run, train_set, test_set, score, say):
        self.start = start
        self.settings = settings
        self.run = run
        self.out_dir = settings.out_dir
        self.outdated = partial(outdated, keep_last_n=settings.keep_last_n)
        self.score = score
        self.say = say
        self.newest = stem(start.step)  # the last good checkpoint; a new run has none yet
        self.run_id = start.run_id or secrets.token_hex(4)
        self.is_written = True
        self.best_score = -1.0
        self.lock = None
        self.mirror = None
        # what belongs to the run, which a resume checks and goes on with
        self.facts = dict(
            sizes=run.model.sizes,
            forks=settings.forks,
            init_sha256=start.init_sha256,
            settings=vars(settings),
            data_sha256=train_set.sha256,
            task=train_set.task,
            identifiers_sha256=train_set.identifiers_sha256,
            test_puzzles=some_puzzles(test_set),
        )

    def __enter__(self):
        on_rank_0(self.run.device, self.take_folder)
        return self

    def __exit__(self, kind, *error):
        """Lets another run have out_dir: a notebook keeps this object with an error."""
        # after wrong input or a loss that is not finite a restart would end here again: upload what there is
        if kind and issubclass(kind, UserError):
            self.close(60)
        if self.lock:
            self.lock.close()

    def take_folder(self):
        """Locks out_dir, keeps the id in run.json, and begins to mirror the folder. Rank 0."""
        path = f"{self.out_dir}/run.json"
        if os.path.exists(path):
            self.run_id = read_json(path)["id"]
        with writing(f"--out_dir={self.out_dir}"):
            os.makedirs(self.out_dir, exist_ok=True)
            # the operating system frees the lock of a process that was killed; the file stays
            self.lock = open(f"{self.out_dir}/run.lock", "ab")
            try:
                lock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TransientError(f"--out_dir={self.out_dir}: another process trains there") from None
            with replacing(path) as f:
                f.write(json.dumps({"id": self.run_id}).encode())
        # the score of best.pt, unless it is of steps that this run did not take
        with suppress(Exception):  # there is none yet, or it is damaged, however
            best = read_json(f"{self.out_dir}/best.json")
            if self.start.is_resume and best["step"] <= self.start.step:
                self.best_score = float(self.score(best["metrics"]))
        bucket = open_bucket(self.settings)  # a stop does not end its attempts
        if bucket:
            from runtime.bucket import Mirror
            self.mirror = Mirror(self, bucket)

    def save(self, step, metrics, name=""):
        """Writes a checkpoint and its .json, unless this step has one."""
        name = name or stem(step)
        if self.run.device.rank == 0:
            self.is_written = name == self.newest or self.write(name, step, metrics)

    def save_if_best(self, step, metrics):
        """Saves best.pt if the evaluation in `metrics` is the best of the run."""
        score = self.score(metrics)
        if score > self.best_score:
            self.save(step, metrics, "best")
            if self.is_written:
                self.best_score = score

    def write(self, name, step, metrics):
        """Writes a checkpoint. Returns False, and logs it, if it cannot be written."""
        state = self.run.state_dict() | self.facts | dict(step=step, run_id=self.run_id)
        try:
            os.makedirs(self.out_dir, exist_ok=True)
            # if keep_last_n is lower than before, this may free the space that the checkpoint needs
            self.prune()
            # a name is there only once its content is on the disk
            path = f"{self.out_dir}/{name}"
            with replacing(path + ".pt") as f:
                torch.save(state, f)
            # the .json comes last, and proves that the .pt is complete
            description = dict(sha256=file_hash(path + ".pt"), metrics=metrics)
            description |= {key: state[key] for key in ("step", "run_id", "data_sha256", "settings")}
            with replacing(path + ".json") as f:
                f.write(json.dumps(description, indent=1).encode())
        except (OSError, RuntimeError) as e:  # torch.save reports a full disk by a RuntimeError
            self.say(f"checkpoint not written (is the disk full?): {e}")
            return False
        # older checkpoints go once the new one is whole; best.pt does not count towards keep_last_n
        if name != "best":
            self.newest = name
            self.prune()
        if self.mirror:
            self.mirror.update()
        return True

    def prune(self):
        """Deletes all but the last keep_last_n complete checkpoints; a file that cannot be deleted stays."""
        for name in self.outdated(os.listdir(self.out_dir), self.newest):
            with suppress(OSError):
                os.remove(f"{self.out_dir}/{name}")

    def close(self, seconds):
        """Ends the upload. Returns whether the bucket, where there is one, has everything."""
        return not self.mirror or self.mirror.close(seconds, STOP.is_set)


def some_puzzles(test_set):
    """Returns 100 test puzzles or fewer, {name: tensor [n, ...]}, the same for each call."""
    indices = test_set.subset(100, 1)[:100]
    return {name: torch.from_numpy(array) for name, array in test_set.test_batch(indices).items()}
