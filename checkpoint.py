"""Where a run begins, and checkpoints on disk: which there are, how one is read, checked and exported.

A run's folder holds ckpt_STEP.pt for the last steps and best.pt, each with a .json, written after it, that
has its hash: only the .json proves that a checkpoint is complete. run.json has the run's id, which its
checkpoints have too.
"""
import fcntl
import json
import math
import os
import platform
import re
import secrets
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

from bucket import Bucket
from configurator import TransientError, UserError
from data import file_hash, read_metrics, replacing
from model import read_torch_file

# ---------------------------------------------------------------------------------------------------------
# Where a run begins

class Start(NamedTuple):
    """Where a run begins. Ranks other than 0 only know the first three."""
    step: int = 0
    is_complete: bool = False  # nothing is left to do
    is_evaluated: bool = True  # no evaluation is left to do at this step
    state: dict = {}  # the checkpoint; its weights are in the model already
    run_id: str = ""  # the same from a run's first start to its end, and W&B's id
    init_from: str = "scratch"  # where the run began, which a resume does not change
    token: str = ""  # names this process in the bucket's run.json: whoever has it may upload
    notes: tuple = ()  # lines for the log
    lock: object = None  # holds out_dir; another process can train there once it is gone


def agree_on_start(settings, device, data, model, total_steps, should_stop):
    """Returns the Start. Rank 0 alone reads out_dir and gcs_dir; all ranks raise its error. All ranks.

    Args:
        settings: the run's settings.
        total_steps: its length.
        device: a device.Device, or an object with its methods.
        data: the Dataset that it trains on.
        model: a TRM, which takes the weights of a checkpoint.
        should_stop: a function that says whether this host is asked to stop.
    """
    # what all ranks must have in common; their disks may differ
    facts = vars(settings) | dict(dataset=data.sha256, data_path="", out_dir="")
    ranks = device.all_gather(dict(host=device.host, facts=facts))
    for rank, other in enumerate(ranks):
        differing = sorted(name for name in facts if other["facts"][name] != ranks[0]["facts"][name])
        if differing:
            raise UserError(f"host {other['host']}, rank {rank}: not as on rank 0: {', '.join(differing)}")

    # rank 0 reads; its error must reach all ranks, which would wait for it
    start = Start()
    error = None
    if device.rank == 0:
        try:
            start = find_start(settings, data, model, total_steps, should_stop)
        except KeyboardInterrupt:  # a stop was requested
            error = SystemExit(3)
        except (UserError, TransientError, OSError) as e:
            error = e

    # what the others need of it
    known = (error, start.step, start.is_complete, start.is_evaluated)
    error, step, is_complete, is_evaluated = device.all_gather(known)[0]
    if error:
        raise error
    return start._replace(step=step, is_complete=is_complete, is_evaluated=is_evaluated)


def find_start(settings, data, model, total_steps, should_stop):
    """Returns the Start by init_from, out_dir and gcs_dir, on rank 0.

    Loads its weights into the model and locks out_dir. Raises UserError where these do not fit together,
    TransientError where another process trains, and KeyboardInterrupt if a stop is requested while the bucket
    does not answer.
    """
    reads_only = bool(settings.eval_only or settings.export)
    file = settings.init_from if settings.init_from not in ("scratch", "resume", "auto") else ""

    # an evaluation or an export of a file needs no run
    if file and reads_only:
        return start_from_file(settings, data, model)

    # what out_dir and the bucket hold: names of files, and the run.json of a run
    local = os.listdir(settings.out_dir) if os.path.isdir(settings.out_dir) else []
    runs = []
    if "run.json" in local:
        runs.append(parse_run(Path(settings.out_dir, "run.json").read_bytes()))
    bucket = None
    remote = {}
    if settings.gcs_dir:
        is_patient = settings.init_from != "scratch"  # a restart has time to wait for the bucket
        bucket = Bucket(settings.gcs_dir, stop=should_stop, patient=is_patient)
        bucket.check(write=not reads_only)
        remote = bucket.list()
        runs.append(parse_run(bucket.read("run.json")))
    ids = {run["id"] for run in runs if run}
    if len(ids) > 1:
        raise UserError(f"{settings.out_dir} and {settings.gcs_dir} hold two different runs: choose another "
                        "--out_dir or --gcs_dir; to move a run, copy its folder to an empty one")

    # resume from the newest checkpoint, or begin with a file's weights, or with the first weights
    state, notes = find_checkpoint(settings, bucket, remote)
    if state:
        start = resume(settings, state, data, model, total_steps)
    else:
        start = start_from_file(settings, data, model) if file else Start()
    # a run that begins must not mix its files with another one's
    if settings.init_from == "scratch" or file and start.init_from != file:
        refuse_run(f"--out_dir={settings.out_dir}", local)
        refuse_run(f"--gcs_dir={settings.gcs_dir}", remote)

    run_id = start.run_id or min(ids, default="")
    start = start._replace(notes=[*notes, *start.notes], run_id=run_id)
    return start if reads_only else take_over(settings, start, bucket)


def resume(settings, state, data, model, total_steps):
    """Returns the Start at a checkpoint of the run; state: the checkpoint."""
    check_resume(settings, state, data, total_steps)
    load_weights(model, state["weights"], settings.out_dir)
    # what the run has done at this step; one that has ended says so in its last line
    lines = read_metrics(os.path.join(settings.out_dir, "metrics.jsonl"))
    lines = [line for line in lines if line["step"] == state["step"]]
    has_ended = any(line.get("final") for line in lines)
    return Start(
        step=state["step"],
        is_complete=has_ended and state["step"] == total_steps,
        is_evaluated=any("eval/loss" in line for line in lines),
        state=state,
        run_id=state.get("run_id", ""),
        init_from=state["settings"]["init_from"],
        notes=setting_changes(settings, state["settings"]),
    )


def start_from_file(settings, data, model):
    """Returns the Start of a new run with a file's weights, or of an evaluation or an export of the file."""
    file = settings.init_from
    if not os.path.exists(file):
        raise UserError(f"{file}: no such checkpoint; init_from is scratch, resume, auto or a file")
    state = read_checkpoint(file)
    check_task(state, data, file)
    is_averaged = load_weights(model, state["weights"], file)
    if not (settings.eval_only or settings.export):
        # a new run takes the weights and their average, and counts its own steps
        notes = []
        if is_averaged:
            notes = [f"{file} has other puzzle identifiers: all start from the mean of its embedding"]
        return Start(init_from=file, notes=notes, state={"ema": state["ema"]} if "ema" in state else {})
    if is_averaged:
        raise UserError(f"{file} has other puzzle identifiers than {settings.data_path}: it can be "
                        "trained further, but not evaluated (docs/arc.md)")
    return Start(state=state, step=state.get("step", 0))


def refuse_run(flag, names):
    """Raises UserError if a run is among the files `names` of the folder that `flag` gives."""
    if any(name.startswith(("ckpt_", "best.", "metrics.", "run.json")) for name in names):
        raise UserError(f"{flag} holds a run: --init_from=auto continues it, another "
                        f"{flag.partition('=')[0]} starts another")


def take_over(settings, start, bucket):
    """Makes this process the one that trains the run: locks out_dir and writes run.json."""
    # a run keeps its id; the token is new with each process
    run_id = start.run_id or secrets.token_hex(4)
    token = secrets.token_hex(8)
    owner = dict(id=run_id, token=token, host=platform.node(), process=os.getpid())
    content = (json.dumps(owner, indent=1) + "\n").encode()
    # the operating system frees the lock of a process that was killed; the file stays
    try:
        os.makedirs(settings.out_dir, exist_ok=True)
        lock = open(os.path.join(settings.out_dir, "run.lock"), "ab")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TransientError(f"--out_dir={settings.out_dir}: another process trains there") from None
    except OSError as e:
        raise UserError(f"--out_dir={settings.out_dir}: cannot be written to ({e.strerror})") from None
    # the token of the process that started last is the one that counts
    with replacing(os.path.join(settings.out_dir, "run.json")) as f:
        f.write(content)
    if bucket:
        bucket.write("run.json", content)
    return start._replace(run_id=run_id, token=token, lock=lock)


# ---------------------------------------------------------------------------------------------------------
# Checkpoints

NUMBERED = re.compile(r"ckpt_\d{8,}\.(pt|json)")


def numbered(names, endings=(".pt", ".json")):
    """Returns the numbered checkpoints, newest first, of which `names` has the files with these endings."""
    names = set(names)
    stems = {name.partition(".")[0] for name in names if NUMBERED.fullmatch(name)}
    complete = [stem for stem in stems if names.issuperset(stem + ending for ending in endings)]
    # by number: from step 10^8 on the names are longer
    return sorted(complete, key=step_of, reverse=True)


def outdated(names, newest, keep):
    """Returns which of the files `names` to delete, in this order.

    Args:
        names: all files in the folder.
        newest: the step of the newest good checkpoint. Newer ones were found damaged, and do not count.
        keep: how many complete checkpoints stay.
    """
    kept = [stem for stem in numbered(names) if step_of(stem) <= newest][:keep]
    old_files = []
    for name in names:
        if kept and NUMBERED.fullmatch(name) and step_of(name) < step_of(kept[-1]):
            old_files.append(name)
    # a .json before its .pt, which is no checkpoint without it, whatever happens in between
    return sorted(old_files)


def step_of(name):
    """Returns 2500 of "ckpt_00002500" and of its files."""
    return int(re.search(r"\d+", name)[0])


def checkpoint_paths(out_dir, endings=(".pt", ".json")):
    """Returns paths of the numbered checkpoints that have files with these endings, newest first."""
    names = os.listdir(out_dir) if os.path.isdir(out_dir) else []
    return [os.path.join(out_dir, stem + ".pt") for stem in numbered(names, endings)]


def newest_checkpoint(out_dir, say):
    """Returns the state of the newest complete checkpoint, or {}. Says which it skips, and why."""
    for path in checkpoint_paths(out_dir, (".pt",)):
        try:
            # the .json has the hash of what was written; without it the write was interrupted
            with open(path[:-3] + ".json", "rb") as f:
                if json.load(f)["sha256"] != file_hash(path):
                    raise ValueError("it does not match the hash in its .json")
            return read_checkpoint(path)
        except Exception as e:  # whatever it is, the one before may be whole
            say(f"skipped {path}: damaged ({e})")
    return {}


def read_checkpoint(path):
    """Returns the state in a checkpoint of ours, or {"weights": ...} of an official one. Raises UserError."""
    try:
        state = read_torch_file(path)
        # ours has "weights" among other entries; the official code saves the weights alone
        state = state if "weights" in state else {"weights": state}
        has_weights = all(map(torch.is_tensor, state["weights"].values()))
    except FileNotFoundError:
        raise UserError(f"{path}: no such checkpoint or model file") from None
    except Exception as e:  # torch has many for this
        raise UserError(f"{path}: cannot be read as a checkpoint ({type(e).__name__}): "
                        "damaged, or not one of ours or the official code's") from None
    if not has_weights:
        raise UserError(f"{path}: holds no weights by name: not a checkpoint of ours or of the official code")
    return state


def load_weights(model, named, where):
    """See TRM.load_named; where: the file of the weights. Raises UserError if they do not fit."""
    try:
        return model.load_named(named)
    except ValueError as e:
        raise UserError(f"{where}: {e}") from None


def write_model(settings, model, start, data, test, trained):
    """Writes a file for TRM.load, solve.py, init_from and, by its "weights", the official code.

    The weights are the ones of an evaluation, in forward_dtype: what the network computes with.

    Args:
        settings: the command's settings; export is the file.
        model: a TRM with the weights of the checkpoint.
        start: a Start, with the checkpoint's average.
        data, test: the Datasets; the file gets 100 test puzzles.
        trained: dict(settings=..., command=...) of the training.
    """
    # the weights that evaluations use
    weights = model.state_dict()
    if settings.ema:
        weights |= start.state.get("ema", {})
    dtype = getattr(torch, settings.forward_dtype)

    # the metrics of the evaluation at this step, from the log beside the weights
    folder = settings.out_dir
    if settings.init_from not in ("resume", "auto"):
        folder = os.path.dirname(settings.init_from)
    metrics = {}
    for line in read_metrics(os.path.join(folder, "metrics.jsonl")):
        if line["step"] == start.step and "eval/loss" in line:
            metrics = line

    # some unseen puzzles, so that solve.py and play.py need no dataset
    indices = test.subset(100, 1)[:100]
    puzzles = test.test_batch(indices, len(indices))

    # the names that the official code gives its weights
    saved = dict(
        weights={"_orig_mod.model.inner." + name: t.to(dtype, copy=True) for name, t in weights.items()},
        model=asdict(model.config),
        task=data.task,
        data=data.sha256,
        step=start.step,
        metrics=metrics,
        puzzles={name: torch.from_numpy(array) for name, array in puzzles.items()},
        **trained,
    )
    try:
        with replacing(settings.export) as f:
            torch.save(saved, f)
    except (OSError, RuntimeError) as e:  # torch.save reports a full disk by a RuntimeError
        raise UserError(f"--export={settings.export}: cannot be written ({e})") from None
    print(f"wrote {settings.export}, weights in {settings.forward_dtype}")


def find_checkpoint(settings, bucket, remote):
    """Returns the newest complete checkpoint of out_dir or the bucket, and lines for the log.

    It is {} if init_from starts without one.
    """
    notes = []
    if settings.init_from == "scratch":
        return {}, notes
    # the newest here, unless the bucket has a newer one that is whole
    local_paths = checkpoint_paths(settings.out_dir)
    state = newest_checkpoint(settings.out_dir, notes.append)
    for name in numbered(remote):
        if step_of(name) <= state.get("step", -1):
            break
        notes.append(f"fetching {name} from the bucket")
        # the logs of the machine that is gone come with its checkpoint
        logs = {"metrics.jsonl", "log.txt", "best.pt", "best.json"} & remote.keys()
        for file in [*logs, name + ".pt", name + ".json"]:
            bucket.download(file, os.path.join(settings.out_dir, file))
        state = newest_checkpoint(settings.out_dir, notes.append)
    # a run that has had a checkpoint does not silently start again
    had_one = local_paths or numbered(remote)
    if not state and (had_one or settings.init_from == "resume" or settings.eval_only or settings.export):
        hint = "another out_dir or gcs_dir" if had_one else "--init_from=auto"
        problem = f"--init_from={settings.init_from}: no complete checkpoint in {settings.out_dir}"
        raise UserError("; ".join([problem, *notes, f"{hint} starts from scratch"]))
    if state:
        notes.append(f"resuming from {settings.out_dir}/ckpt_{state['step']:08d}.pt")
    return state, notes


def check_resume(settings, state, data, total_steps):
    """Raises UserError where the settings do not fit a checkpoint of this run; state: the checkpoint."""
    # what a resume needs
    if "settings" not in state:
        raise UserError(f"the checkpoint in {settings.out_dir} is of another version of this code: it lacks "
                        "the settings; --init_from=FILE begins with its weights alone")
    if state["data"] != data.sha256:
        raise UserError(f"{settings.data_path} is not the dataset that the checkpoint in {settings.out_dir} "
                        "was trained on: choose that one, or another --out_dir")
    # what concerns only runs that train on
    if settings.eval_only or settings.export:
        return
    saved = state["settings"]
    if state["step"] > total_steps:
        raise UserError(f"{settings.out_dir} is at step {state['step']}, past the {total_steps} steps of "
                        "this run: raise max_steps or epochs")
    if saved["optimizer"] != settings.optimizer:
        raise UserError(f"{settings.out_dir} was trained with optimizer={saved['optimizer']}, not "
                        f"{settings.optimizer}: --init_from=FILE --out_dir=... begins another run with its "
                        "weights")


def setting_changes(settings, saved):
    """Returns lines for the log: the settings that differ from a checkpoint's."""
    notes = []
    for name, value in vars(settings).items():
        is_changed = name in saved and saved[name] != value
        if is_changed and name not in ("init_from", "eval_only", "export"):
            notes.append(f"{name} is {value}; the checkpoint had {saved[name]}")
    return notes


def check_task(state, data, where):
    """Raises UserError if weights were trained on another puzzle than the dataset's; where: their file.

    Attention takes other grids, so only grids of as many cells are compared.
    """
    # files of the official code do not say their task
    task = state.get("task", data.task)
    compared = ["kind", "symbols"]
    if math.prod(task["grid"]) == math.prod(data.task["grid"]):
        compared.append("grid")
    for name in compared:
        if list(task[name]) != list(data.task[name]) and task["kind"]:
            raise UserError(f"{where} was trained on puzzles with {name} {task[name]!r}, "
                            f"but {data.path} has {name} {data.task[name]!r}")


def parse_run(content):
    """Returns the object in a run.json that has an id; {} for None and for a damaged one; content: bytes."""
    with suppress(ValueError):
        run = json.loads(content or "{}")
        if "id" in run:
            return run
    return {}
