"""A run's checkpoints: their names, how one is read, where a run begins, and what is written and pruned.

A run's folder holds ckpt_STEP.pt for the last steps and best.pt, each with a .json, written after it, that
has its hash: only the .json proves that a checkpoint is complete. run.json has the run's id. A checkpoint has
all that solve.py, play.py and export.py need, with 100 test puzzles.
"""
import fcntl
import glob
import json
import os
import re
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

import puzzles
from runtime import forks
from runtime.errors import TransientError, UserError
from runtime.files import file_hash, lock, read_json, read_metrics, replacing
from runtime.process import STOP
from weights import load_weights, read_file

# ---------------------------------------------------------------------------------------------------------
# Names of checkpoints

def stem(step):
    """Returns the name of a step's checkpoint without its ending; names are in the order of the steps."""
    return f"ckpt_{step:08d}"


def numbered(names):
    """Returns the numbered checkpoints that have a .pt and a .json among the files `names`, newest first."""
    stems = [name.removesuffix(".json") for name in names if re.fullmatch(r"ckpt_\d+\.json", name)]
    return sorted((stem for stem in stems if stem + ".pt" in names), reverse=True)


def outdated(names, newest, keep_last_n):
    """Returns which of the files `names` to delete, in this order.

    Args:
        names: all files in the folder.
        newest: the newest good checkpoint. Newer ones were found damaged, and do not count.
        keep_last_n: how many complete checkpoints stay.
    """
    good = [stem for stem in numbered(names) if stem <= newest]
    oldest = min(good[:keep_last_n], default="")  # of those that stay
    # a .json comes before its .pt, which is no checkpoint without it
    return sorted(name for name in names if name < oldest and re.fullmatch(r"ckpt_\d+\.(pt|json)", name))


def files_of(folder):
    """Returns the names of the files in a folder; [] if there is no such folder."""
    return glob.glob("*", root_dir=folder)


def checkpoint_paths(out_dir):
    """Returns the paths of the numbered checkpoints that have a .json, newest first."""
    return [f"{out_dir}/{stem}.pt" for stem in numbered(files_of(out_dir))]


# ---------------------------------------------------------------------------------------------------------
# Reading

def newest_whole(out_dir, say=lambda line: None):
    """Returns the path of the newest checkpoint with the hash in its .json, or ""; says which are damaged."""
    for path in checkpoint_paths(out_dir):
        cause = "it does not match the hash in its .json"
        try:
            if json.loads(Path(path).with_suffix(".json").read_bytes())["sha256"] == file_hash(path):
                return path
        except Exception as e:  # whatever it is, the one before may be whole
            cause = e
        say(f"skipped {path}: damaged ({cause})")
    return ""


WEIGHTS = ("state_dict", "model_state_dict", "model_state", "model")  # where other code's files have them


def read_checkpoint(path):
    """Returns the dict in a checkpoint of ours, or {"weights": ...} of an official one. Raises UserError."""
    try:
        saved = read_file(path)
        # ours has "weights" among other entries; the official code saves only the weights, others nest them,
        # and may have their average beside them
        if "weights" not in saved:
            nested = [saved[name] for name in WEIGHTS if isinstance(saved.get(name), dict)]
            saved = {"weights": [*nested, saved][0] | saved.get("ema_helper", {})}
        if not all(map(torch.is_tensor, saved["weights"].values())):
            raise ValueError("it has no weights")
    except UserError:
        raise
    except Exception as e:  # torch has many for this
        cause = str(e).removeprefix(path).strip() if isinstance(e, ValueError) else type(e).__name__
        raise UserError(f"{path}: cannot be read as a checkpoint ({cause}): damaged, or not one of ours or "
                        "the official code's; init_from: scratch, resume, auto or FILE") from None
    return saved


def load_saved_weights(model, weights, path, same_identifiers=True):
    """See weights.load_weights; the weights are of the file `path`. Raises UserError if they do not fit."""
    try:
        return load_weights(model, weights, same_identifiers)
    except ValueError as e:
        raise UserError(f"{path}: {e}") from None


def changed_attention(model, saved):
    """Returns a line for each setting of attention that differs from the checkpoint's.

    The names and shapes of the weights do not show these settings; they show all others but the cycles, which
    may change.
    """
    if model.settings.mlp_t:
        return []
    names = ["num_heads", "pos_encodings"]
    if model.has_puzzle_emb:
        names.append("puzzle_emb_len")
    # files of the official code have no settings
    return changes(model.settings, saved.get("settings", {}), names)


def changes(settings, saved_settings, names):
    """Returns a line for each of the settings `names` that has another value in a checkpoint."""
    lines = []
    for name in names:
        value = getattr(settings, name)
        saved_value = saved_settings.get(name, value)
        if value != saved_value:
            lines.append(f"{name} is {value}; the checkpoint had {saved_value}")
    return lines


def check_task(saved, train_set, path):
    """Raises UserError if the weights in the file `path` were trained on another kind of puzzle."""
    # files of the official code do not say their task
    task = saved.get("task", train_set.task)
    if task["grid"] != train_set.task["grid"]:  # weights of another size may fit
        task = puzzles.kind_of(task).resized(train_set.seq_len).task
    for name, first in ("kind", 0), ("symbols", 1):  # padding has no sign, and prepare_csv.py gives it one
        if task["kind"] and list(task[name])[first:] != list(train_set.task[name])[first:]:
            raise UserError(f"{path} was trained on puzzles with {name} {task[name]!r}, but "
                            f"{train_set.path} has {train_set.task[name]!r}: leave out the config file, or "
                            "give --data_path")


# ---------------------------------------------------------------------------------------------------------
# Where a run begins

class Start(NamedTuple):
    """Where a run begins."""
    path: str  # the checkpoint with its weights; "": new weights
    is_resume: bool  # it goes on with the run of that checkpoint
    settings: dict  # {name: value} of the checkpoint that is resumed or evaluated
    init_from: str  # scratch or the file that the run began with, which a resume does not change
    run_id: str = ""  # of the run that is resumed
    step: int = 0
    is_complete: bool = False  # nothing is left to do
    is_evaluated: bool = True  # no evaluation is left to do at this step
    notes: tuple = ()  # lines for the log


def check_folders(settings):
    """Raises UserError for settings with which no start can be found."""
    if settings.out_dir.startswith(("gs://", "~")):
        raise UserError(f"--out_dir={settings.out_dir}: must be a folder of this machine, written out; "
                        "--gcs_dir mirrors it to a bucket")
    if settings.gcs_dir:
        from runtime.bucket import Bucket
        Bucket(settings.gcs_dir)  # raises UserError for a malformed address
    if settings.eval_only and settings.init_from == "scratch":
        raise UserError("eval_only needs weights: --init_from=resume (the newest checkpoint of out_dir) "
                        "or --init_from=FILE")


def find_start(settings, device, should_stop):
    """Finds a checkpoint by init_from, out_dir and gcs_dir. All ranks.

    Args:
        settings: the run's settings.
        device: a device.Device, or an object with its methods.
        should_stop: a function that says whether this host is asked to stop.

    Returns a Start, and what the checkpoint holds: on rank 0 alone, {} elsewhere. Raises UserError where
    there is no checkpoint or another run, TransientError where the bucket does not answer, SystemExit if a
    stop is requested meanwhile.
    """
    saved = {}

    def find():
        file = "" if settings.init_from in ("scratch", "resume", "auto") else settings.init_from
        # an evaluation of a file needs no run
        newest = "" if settings.eval_only and file else find_newest(settings, should_stop)
        path = newest or file
        if not path:
            return Start("", False, {}, "scratch")
        saved.update(read_checkpoint(path))

        # a run that was interrupted goes on; with a FILE, if it has begun with that file
        if newest and not settings.eval_only:
            began_with = saved["settings"]["init_from"]
            # one file has many names
            if file and os.path.realpath(file) != os.path.realpath(began_with):
                refuse_run(f"--out_dir={settings.out_dir}", files_of(settings.out_dir))
            return Start(newest, True, saved["settings"], began_with, saved.get("run_id", ""))

        # an evaluation and a new run take only the weights and their average
        saved.pop("optimizer", None)
        saved_settings = saved.get("settings", {}) if settings.eval_only else {}
        return Start(path, False, saved_settings, file)

    return on_rank_0(device, find), saved


def on_rank_0(device, call):
    """Returns rank 0's call() on all ranks, which raise its error: they would wait for it."""
    error = result = None
    if device.rank == 0:
        try:
            result = call()
        except (Exception, SystemExit) as e:
            error = e
    error_of_rank_0, result = device.all_gather((error, result))[0]
    if error_of_rank_0:
        raise error or error_of_rank_0  # rank 0's own has a traceback
    return result


def find_newest(settings, should_stop):
    """Returns the path of the newest whole checkpoint of the bucket and out_dir, or ""; see find_start."""
    out_dir = settings.out_dir
    bucket = None
    if settings.gcs_dir:
        from runtime.bucket import Bucket
        bucket = Bucket(settings.gcs_dir, should_stop)
        bucket.check(write=not settings.eval_only)
    if settings.init_from == "scratch":
        refuse_run(f"--out_dir={out_dir}", files_of(out_dir))
        refuse_run(f"--gcs_dir={settings.gcs_dir}", bucket.list() if bucket else [])
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


def refuse_run(flag, names):
    """Raises UserError if a run is among the files `names` of the folder that `flag` gives."""
    # run.json alone: the run was killed before it wrote its first line
    if any(name.startswith(("ckpt_", "best.", "metrics.")) for name in names):
        raise UserError(f"{flag} holds a run: --init_from=auto continues it, another "
                        f"{flag.partition('=')[0]} starts another")


def pull(bucket, out_dir):
    """Brings the newest whole checkpoint of the bucket, and its logs, to out_dir, unless that has it."""
    from runtime.bucket import LOGS
    # both must be of the same run
    content = bucket.read("run.json", check=json.loads)
    if content is not None and os.path.exists(f"{out_dir}/run.json"):
        if read_json(f"{out_dir}/run.json") != json.loads(content):
            raise UserError(f"{out_dir} and {bucket.url} hold two different runs: choose another; to move a "
                            "run, copy its files to an empty one")
    for name in numbered(bucket.list()):
        # three attempts: a byte of a download may be wrong
        for _ in range(3):
            if Path(newest_whole(out_dir)).stem >= name:
                return
            print(f"fetching {name} from the bucket", flush=True)
            # the .json comes last
            for file in (*LOGS, name + ".pt", name + ".json"):
                bucket.download(file, f"{out_dir}/{file}")
        # a run that has had a checkpoint does not silently begin again, or further back
        if not os.path.exists(f"{out_dir}/{name}.json"):
            raise TransientError(f"{bucket.url}: {name} was deleted before it was read: does another machine "
                                 "train there?")


def load_start(start, saved, settings, device, model, train_set, total_steps):
    """Gives the model the weights that a run begins with, and returns the Start with its step. All ranks.

    Args:
        start, saved: of find_start.
        settings: the run's settings.
        device: a device.Device, or an object with its methods.
        model: a TRM.
        train_set: the Dataset of the training puzzles.
        total_steps: the length of the run.

    Raises UserError where settings, files and datasets do not fit together.
    """
    def load():
        if not start.path:
            return start
        if start.is_resume:
            return resume(start, saved, settings, model, train_set, total_steps)
        return load_file(start, saved, settings, model, train_set)

    check_ranks(settings, device, train_set)
    return on_rank_0(device, load)


def check_ranks(settings, device, train_set):
    """Raises UserError if ranks differ in what all must have in common; their disks may differ.

    A host with a newer checkpoint than rank 0's had rank 0 before: without a bucket that is an error, too.
    """
    facts = vars(settings) | dict(dataset=train_set.sha256, data_path="", out_dir="")
    newest = max(numbered(files_of(settings.out_dir)), default="")
    ranks = device.all_gather((device.host, facts, newest))
    _, expected, newest_of_rank_0 = ranks[0]
    for rank, (host, facts, _) in enumerate(ranks):
        differing = sorted(dict(facts.items() - expected.items()))
        if differing:
            raise UserError(f"host {host}, rank {rank}: not as on rank 0: {', '.join(differing)}")

    # a run does not silently begin again, or further back
    newest, host = max((newest, host) for host, _, newest in ranks)
    if newest > newest_of_rank_0 and not settings.eval_only:
        line = (f"--out_dir={settings.out_dir} has {newest} on host {host}, and "
                f"{newest_of_rank_0 or 'no checkpoint'} on rank 0's")
        if not settings.gcs_dir:
            raise UserError(f"{line}: choose a folder that all hosts share, or a --gcs_dir")
        if device.rank == 0:
            print(f"{line}: training goes on from rank 0's")


def resume(start, saved, settings, model, train_set, total_steps):
    """Returns the Start at a checkpoint of the run; see load_start."""
    path = start.path
    step = saved["step"]
    optimizer = start.settings["optimizer"]
    # check the dataset, the length and the optimizer
    if saved["data_sha256"] != train_set.sha256:
        raise UserError(f"{path} was trained on another dataset than {settings.data_path}: choose that one, "
                        "or another --out_dir")
    if step > total_steps:
        raise UserError(f"{path} is past the {total_steps} steps of this run: raise max_steps or epochs")
    if optimizer != settings.optimizer:
        raise UserError(f"{path} was trained with optimizer={optimizer}: another --out_dir with "
                        "--init_from=FILE begins with its weights")
    attention = changed_attention(model, saved)
    if attention:
        raise UserError(f"{path} was trained as another model: {', '.join(attention)}: leave that out, or "
                        "choose another --out_dir")
    load_saved_weights(model, saved["weights"], path)

    # tell the log what is resumed and what has changed
    notes = [f"resuming from {path}", *forks.missing(saved["forks"])]
    for name in sorted(start.settings.keys() - vars(settings).keys()):
        notes.append(f"{name} is no setting here; the checkpoint had {start.settings[name]}")
    notes += changes(settings, start.settings, [name for name in vars(settings) if name != "init_from"])
    # find the evaluations that were logged at this step; the run has ended if one of them is final
    lines = read_metrics(f"{settings.out_dir}/metrics.jsonl")
    evaluations = [line for line in lines if line["step"] == step and "eval/loss" in line]
    has_ended = step == total_steps and any(line.get("final") for line in evaluations)
    return start._replace(step=step, is_complete=has_ended, is_evaluated=bool(evaluations), notes=notes)


def load_file(start, saved, settings, model, train_set):
    """Returns the Start of a new run with a checkpoint's weights, or of its evaluation."""
    path = start.path
    check_task(saved, train_set, path)
    # files of the official code do not say what their identifiers stand for
    sha256 = train_set.identifiers_sha256
    same_identifiers = saved.get("identifiers_sha256", sha256) == sha256
    # with freeze_weights the average would drift towards the raw weights: so train on the average itself
    weights = saved["weights"]
    if settings.freeze_weights:
        weights = saved.get("ema") or weights
    is_averaged = load_saved_weights(model, weights, path, same_identifiers)
    notes = [*forks.missing(saved.get("forks", {})), *changed_attention(model, saved)]
    if is_averaged and settings.eval_only:
        raise UserError(f"{path} has other puzzle identifiers than {train_set.path}: it can be trained "
                        "further, but not evaluated (docs/arc.md)")
    if is_averaged:
        notes.append(f"{path} has other puzzle identifiers: all start from the mean of its embedding")
    # a new run counts its own steps, and evaluates before the first one
    step = saved.get("step", 0) if settings.eval_only else 0
    return start._replace(step=step, is_evaluated=False, notes=notes)


# ---------------------------------------------------------------------------------------------------------
# Saving

class Checkpoints:
    """Writes the checkpoints of a run, to out_dir and gcs_dir. All ranks call its methods, rank 0 writes.

    Args:
        settings: the run's settings.
        device: a device.Device, or an object with its methods.
        start: of load_start.
        train_set, test_set: the Datasets.
        say: a function for the lines of the log.

    run_id: on rank 0 the same from a run's first start to its end, and W&B's id. Raises TransientError where
    another process trains in out_dir, UserError where nothing can be written.
    """

    def __init__(self, settings, device, start, train_set, test_set, say):
        self.settings = settings
        self.device = device
        self.out_dir = settings.out_dir
        self.init_from = start.init_from
        self.train_set = train_set
        self.test_set = test_set
        self.say = say
        self.newest = stem(start.step)  # the last good checkpoint; a new run has none yet
        # one thread: checkpoints are written one after the other
        self.writer = ThreadPoolExecutor(1)
        self.writing = self.writer.submit(lambda: True)
        # the operating system frees the lock of a process that was killed; the file stays
        self.lock = None
        self.run_id = start.run_id or secrets.token_hex(4)
        on_rank_0(device, self.take_folder)
        # the score of best.pt, unless it is of steps that this run did not take
        self.best_score = -1.0
        with suppress(Exception):  # there is none yet, or it is damaged, however
            best = json.loads(Path(self.out_dir, "best.json").read_bytes())
            if start.is_resume and best["step"] <= start.step:
                self.best_score = float(puzzles.score(best["metrics"]))
        self.mirror = None
        if device.rank == 0 and settings.gcs_dir:
            from runtime.bucket import Bucket, Mirror
            bucket = Bucket(settings.gcs_dir)  # a stop does not end its attempts
            too_old = partial(outdated, keep_last_n=settings.keep_last_n)
            self.mirror = Mirror(self.out_dir, bucket, self.newest, too_old, say)

    def take_folder(self):
        """Locks out_dir, and reads or writes run.json. Rank 0."""
        path = f"{self.out_dir}/run.json"
        try:
            os.makedirs(self.out_dir, exist_ok=True)
            self.lock = open(f"{self.out_dir}/run.lock", "ab")
            lock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.exists(path):
                with replacing(path) as f:
                    f.write(json.dumps({"id": self.run_id}).encode())
        except BlockingIOError:
            raise TransientError(f"--out_dir={self.out_dir}: another process trains there") from None
        except OSError as e:
            raise UserError(f"--out_dir={self.out_dir}: cannot be written to ({e.strerror})") from None
        self.run_id = read_json(path)["id"]

    def save(self, step, run, metrics, name=""):
        """Begins to write a checkpoint and its .json, after the one before: memory holds one copy."""
        if self.device.rank != 0:
            return
        self.wait()
        # a stop in an evaluation comes after the checkpoint of the same step, which is whole
        if not name and self.newest == stem(step):
            return
        # copy to the host: training changes the original while the thread writes
        state = run.state_dict()
        # add what belongs to the run, which a resume checks and goes on with
        state |= dict(
            step=step,
            sizes=run.model.sizes,
            forks=dict(forks.FORKS),
            run_id=self.run_id,
            settings=vars(self.settings) | dict(init_from=self.init_from),
            data_sha256=self.train_set.sha256,
            task=self.train_set.task,
            identifiers_sha256=self.train_set.identifiers_sha256,
            test_puzzles=some_puzzles(self.test_set),
        )
        self.writing = self.writer.submit(self.write, name or stem(step), state, metrics)

    def save_if_best(self, step, run, metrics):
        """Saves best.pt, and waits for it, if the evaluation in `metrics` is the best of the run."""
        score = puzzles.score(metrics)
        if self.device.rank == 0 and score > self.best_score:
            self.save(step, run, metrics, "best")
            if self.wait():
                self.best_score = score

    def write(self, name, state, metrics):
        """Writes a checkpoint, on the thread. Returns False, and logs it, if it cannot be written."""
        try:
            os.makedirs(self.out_dir, exist_ok=True)
            path = f"{self.out_dir}/{name}"
            # if keep_last_n is lower than before, this may free the space that the checkpoint needs
            self.prune()
            # a name is there only once its content is on the disk
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
            self.mirror.update(self.newest)
        return True

    def prune(self):
        """Deletes all but the last keep_last_n complete checkpoints; a file that cannot be deleted stays."""
        names = os.listdir(self.out_dir)
        # what a process that was killed was writing
        unfinished = [name for name in names if re.fullmatch(r"(ckpt_\d+|best)\.(pt|json)\.tmp", name)]
        for name in [*unfinished, *outdated(names, self.newest, self.settings.keep_last_n)]:
            with suppress(OSError):
                os.remove(f"{self.out_dir}/{name}")

    def last_good(self):
        """Returns the path of the newest checkpoint that is whole, or "none"."""
        self.wait()
        return newest_whole(self.out_dir) or "none"

    def wait(self):
        """Waits for the checkpoint that is being written. Returns whether it could be written."""
        return self.writing.result()

    def close(self, seconds):
        """Ends the upload. Returns whether the bucket, where there is one, has everything."""
        return not self.mirror or self.mirror.close(seconds, STOP.is_set)


def some_puzzles(test_set):
    """Returns 100 test puzzles, {name: tensor [100, ...]}, the same for each call."""
    indices = test_set.subset(100, 1)[:100]
    return {name: torch.from_numpy(array) for name, array in test_set.test_batch(indices).items()}
