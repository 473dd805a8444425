"""Files that an evaluation leaves in out_dir: the arrays of eval_save_outputs, and ARC's answers."""
import io
import json
import os

import numpy as np

from puzzles.arc import submission
from runtime.errors import TransientError, UserError
from runtime.files import replacing, to_stderr


def save_outputs(settings, device, name, indices, arrays, should_stop):
    """Saves this rank's part of eval_save_outputs."""
    wanted = {key: arrays[key] for key in settings.eval_save_outputs.split(",") if key}
    content = io.BytesIO()
    np.savez_compressed(content, indices=indices, **wanted)
    part = f".{device.rank}" if device.world > 1 else ""
    save_file(settings, f"{name}{part}.npz", content.getvalue(), should_stop)


def save_submission(settings, test, votes, should_stop):
    """Saves ARC's answers in submission.json; those of a part of the tasks do not replace it."""
    num_tasks = len({group for group, _ in votes})
    if num_tasks < test.total_groups:
        to_stderr(f"submission.json is not written: {num_tasks} of {test.total_groups} tasks were evaluated")
        return
    save_file(settings, "submission.json", json.dumps(submission(test, votes)).encode(), should_stop)


def save_file(settings, name, content, should_stop):
    """Writes a file of out_dir, and uploads it: the mirror has only rank 0's folder, and none in eval_only.

    What fails costs a line on stderr, and not the evaluation.
    """
    path = f"{settings.out_dir}/{name}"
    try:
        os.makedirs(settings.out_dir, exist_ok=True)
        with replacing(path) as f:
            f.write(content)
        if settings.gcs_dir:
            from runtime.bucket import Bucket
            Bucket(settings.gcs_dir, should_stop).write(name, content)
    except (OSError, UserError, TransientError, SystemExit) as e:  # SystemExit: a stop was requested
        to_stderr(f"{path}: not saved: {e}")
