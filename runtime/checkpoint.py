"""A run's checkpoints: where a run begins, and what is written and pruned.

A run's folder has ckpt_STEP.pt of the last steps, and best.pt. A .json with its hash is written after each.
Only this .json proves that a checkpoint is complete. run.json has the run's id. A checkpoint has all that
solve.py, play.py and export.py need, with at most 100 test puzzles. files.py knows the names of checkpoints.
"""
import copy
import fcntl
import json
import os
import secrets
from contextlib import suppress
from typing import NamedTuple

import torch

from runtime.errors import TransientError, UserError, writing
from runtime.files import (
    checkpoint_name,
    checkpoint_paths,
    file_hash,
    files_of,
    lock,
    newest_complete,
    outdated,
    read_json,
    read_metrics,
    replacing,
    step_of,
)
from runtime.process import STOP
from runtime.saved import read_checkpoint

# ---------------------------------------------------------------------------------------------------------
# Where a run begins, in the order of the calls: check_start_settings() before there are replicas, then
# open_start(), settings_of() and check_hosts() in each replica

def check_start_settings(settings):
    """Raises UserError for settings of a command with which no start can be found."""
    if settings.out_dir.startswith(("gs://", "~")):
        raise UserError(f"--out_dir={settings.out_dir}: must be a folder of this machine, written out; "
                        "--gcs_dir mirrors it to a bucket")
    if settings.gcs_dir:
        from runtime.bucket import Bucket
        Bucket(settings.gcs_dir)  # raises UserError for a malformed address
    if settings.eval_only and settings.init_from == "scratch":
        raise UserError("eval_only needs weights: --init_from=resume (the newest checkpoint of out_dir) "
                        "or --init_from=FILE")


class Start(NamedTuple):
    """Where a run begins, the same on all ranks."""
    path: str  # the checkpoint with its weights; "": new weights
    is_resume: bool  # it goes on with the run of that checkpoint
    run_id: str  # the id of the resumed run, or ""
    step: int
    evaluation: dict  # the last one that was logged at this step
    saved_settings: dict  # the settings of the resumed or evaluated run
    init_sha256: str  # hash of the file that the run began with, or ""


def open_start(settings, device):
    """Returns the Start that the settings lead to, and on rank 0 its checkpoint's content. All ranks."""
    # the other hosts need not have the checkpoint
    start, saved = device.call_on_rank_0(lambda: find_start(settings)) or (None, {})
    return device.all_gather(start)[0], saved


def find_start(settings):
    """Finds and reads the checkpoint, if there is one; returns a Start and the content. Raises UserError."""
    # the newest checkpoint of the run, or else the FILE of init_from; to evaluate a FILE needs no run
    file = "" if settings.init_from in ("scratch", "resume", "auto") else settings.init_from
    newest = "" if settings.eval_only and file else find_newest(settings)
    path = newest or file
    saved = read_checkpoint(path) if path else {}
    is_resume = newest != "" and not settings.eval_only

    # a new run counts its own steps, and has settings and an id of its own
    facts = saved if is_resume or settings.eval_only else {}
    # the hash of the file that the run began with
    init_sha256 = saved.get("init_sha256", "")
    if path and not is_resume:
        init_sha256 = file_hash(path)
    start = Start(
        path=path,
        is_resume=is_resume,
        run_id=facts.get("run_id", ""),
        step=facts.get("step", 0),
        evaluation={},
        saved_settings=facts.get("settings", {}),
        init_sha256=init_sha256,
    )
    if not is_resume:
        # an evaluation and a new run take only the weights and their average
        saved.pop("optimizer", None)
        saved.pop("kept", None)
        return start, saved

    # with a FILE, only the run that began with it is resumed; it may have moved since
    if file:
        is_same_path = os.path.realpath(file) == os.path.realpath(start.saved_settings["init_from"])
        if not (is_same_path or os.path.isfile(file) and file_hash(file) == start.init_sha256):
            refuse_run("--out_dir", settings.out_dir, files_of(settings.out_dir))
    # an evaluation that the log has is not repeated
    for line in read_metrics(f"{settings.out_dir}/metrics.jsonl"):
        if line["step"] == start.step and "eval/loss" in line:
            start = start._replace(evaluation=line)
    return start, saved


def find_newest(settings):
    """Returns the newest complete checkpoint of the bucket and out_dir, a path, or "". Raises UserError."""
    # try the bucket now, before hours of training
    out_dir = settings.out_dir
    bucket = None
    if settings.gcs_dir:
        from runtime.bucket import Bucket
        from runtime.mirror import pull
        bucket = Bucket(settings.gcs_dir, STOP.is_set)
        bucket.check(write=not settings.eval_only)

    # a new run must not write among the files of another one
    if settings.init_from == "scratch":
        refuse_run("--out_dir", out_dir, files_of(out_dir))
        if bucket:
            refuse_run("--gcs_dir", settings.gcs_dir, bucket.list())
        return ""

    # bring the bucket's newest to out_dir, if it is newer; then that has the newest of both
    if bucket:
        pull(bucket, out_dir)
    newest = newest_complete(out_dir, print)
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


def settings_of(start, settings, not_resumed):
    """Returns the command's settings, with the checkpoint's where it assigns none; not_resumed stay as is."""
    saved = {name: value for name, value in start.saved_settings.items() if name not in not_resumed}
    settings = copy.copy(settings)  # replicas may be threads
    # --epochs sets the length of the run, and not the max_steps of the checkpoint or of a config file
    flags = [flag.partition("=")[0] for flag in settings.argv]
    if "--epochs" in flags and "--max_steps" not in flags:
        saved.pop("max_steps", None)
        settings.max_steps = 0
    settings.fill(saved)
    # what the run began with
    if start.is_resume:
        settings.init_from = start.saved_settings["init_from"]
    elif not start.path:
        settings.init_from = "scratch"
    return settings


def check_hosts(start, settings, device):
    """Raises UserError if a host has a newer checkpoint than rank 0's: a run does not go back in silence.

    The ranks were numbered anew, and that host had rank 0 before. With a bucket it only prints a line.
    """
    if settings.eval_only:
        return
    # the newest checkpoint of all hosts, if it is newer than the one that is resumed
    own_step = step_of(newest_complete(settings.out_dir, newer_than=start.step))
    newest_step, host = max(device.all_gather((own_step, device.host)))
    if newest_step < 0:
        return
    resumed = checkpoint_name(start.step) if start.is_resume else "no checkpoint"
    line = (f"--out_dir={settings.out_dir} has {checkpoint_name(newest_step)} on host {host}, and {resumed} "
            "on rank 0's")
    if not settings.gcs_dir:
        raise UserError(f"{line}: choose a folder that all hosts share, or a --gcs_dir")
    if device.rank == 0:
        print(f"{line}: training goes on from rank 0's")


# ---------------------------------------------------------------------------------------------------------
# Saving

class Checkpoints:
    """Writes the checkpoints of a run, to out_dir and gcs_dir. All ranks call save, save_if_best and close.

    score: a function that ranks evaluations, {"eval/...": number}. say: a function for the lines of the log.
    run_id: kept across resumes and also used by W&B. is_written: whether the last save has its file.
    The with block locks out_dir.
    """

    def __init__(self, start, settings, run, train_set, test_set, score, say):
        self.start = start
        self.settings = settings
        self.run = run
        self.out_dir = settings.out_dir
        self.score = score
        self.say = say
        self.newest = checkpoint_name(start.step)  # the last good checkpoint; step 0 counts as saved
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
        self.run.device.call_on_rank_0(self.take_folder)
        return self

    def __exit__(self, kind, *error):
        """Unlocks out_dir: a notebook keeps an error and its objects, and with them the lock."""
        # after a UserError no restart will upload the rest, since it would end here again
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
        # the score of best.pt, unless best.pt is newer than where this run begins
        with suppress(Exception):  # best.json is missing, or damaged in whatever way
            best = read_json(f"{self.out_dir}/best.json")
            if self.start.is_resume and best["step"] <= self.start.step:
                self.best_score = float(self.score(best["metrics"]))
        if self.settings.gcs_dir:
            from runtime.mirror import Mirror
            self.mirror = Mirror(self)

    def save(self, step, metrics, name=""):
        """Writes a checkpoint and its .json, unless this step has one."""
        name = name or checkpoint_name(step)
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
            # replacing() gives a file its name once its content is on the disk
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
        # older checkpoints go once the new one is complete; best.pt does not count towards keep_last_n
        if name != "best":
            self.newest = name
            self.prune()
        if self.mirror:
            self.mirror.update()
        return True

    def prune(self):
        """Deletes all but the last keep_last_n complete checkpoints; a file that cannot be deleted stays."""
        for name in outdated(os.listdir(self.out_dir), self.newest, self.settings.keep_last_n):
            with suppress(OSError):
                os.remove(f"{self.out_dir}/{name}")

    def close(self, seconds):
        """Ends the upload. Returns whether the bucket, where there is one, has everything."""
        return not self.mirror or self.mirror.close(seconds, STOP.is_set)


def some_puzzles(test_set):
    """Returns 100 test puzzles or fewer, {name: tensor [n, ...]}, the same for each call."""
    indices = test_set.subset(100, 1)[:100]
    return {name: torch.from_numpy(array) for name, array in test_set.test_batch(indices).items()}
