"""Files that an evaluation leaves in out_dir: the arrays of eval_save_outputs, and ARC's answers."""
import io
import os

import numpy as np

from runtime.errors import TransientError, UserError
from runtime.files import replacing, to_stderr


def save_outputs(settings, device, name, indices, arrays, should_stop):
    """Saves this rank's part of eval_save_outputs."""
    wanted = {key: arrays[key] for key in settings.eval_save_outputs.split(",") if key}
    content = io.BytesIO()
    np.savez_compressed(content, indices=indices, **wanted)
    part = f".{device.rank}" if device.world > 1 else ""
    save_file(settings, should_stop, f"{name}{part}.npz", content.getvalue())


def save_file(settings, should_stop, name, content):
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
