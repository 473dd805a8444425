"""Brings a run's dataset to this machine, where data_path is not there."""
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from runtime.errors import TransientError, UserError, writing
from runtime.files import locked, read_json, replacing

ROOT = str(Path(__file__).parents[1])
DATASET_FILE = r"(train|test)/(dataset\.json|all__\w+\.npy)|identifiers\.json"  # see data.hashes_of


def get_dataset(settings, should_stop):
    """Returns the folder of data_path, where it brings the dataset: from a bucket, or by data_prepare.

    One process of a host does it, while the others wait. Raises SystemExit once should_stop() returns true.
    """
    path = local_dataset(settings.data_path, should_stop)
    if os.path.exists(path):
        return path
    try:
        command = shlex.split(settings.data_prepare)
    except ValueError as e:
        raise UserError(f"data_prepare: {e}: {settings.data_prepare}") from None
    if not command:
        return path
    # the first process of the host makes the dataset; the others wait, and find it made
    with locked(os.path.normpath(path) + ".made"):
        if os.path.exists(path):
            return path
        # the script may stand beside train.py, and the current folder be another one
        if not os.path.exists(command[0]):
            command[0] = os.path.join(ROOT, command[0])
        # a stop ends the command, too: Ctrl-C reaches both processes, but SIGTERM only this one
        print(f"{path} is missing; making it: python", *command, flush=True)
        environment = os.environ | {"DATA_PREPARE": "1"}  # a prepare script then tells nobody to train
        process = subprocess.Popen([sys.executable, *command], env=environment)
        try:
            while process.poll() is None and not should_stop():
                time.sleep(0.1)
        finally:
            process.terminate()
        code = process.wait()
        if should_stop():
            raise SystemExit(3)
        # a command that fails by itself may succeed later, one that finds wrong input may not
        if not os.path.exists(path):
            error = UserError if code in (0, 2) else TransientError
            raise error(f"data_prepare did not make data_path={path}: {settings.data_prepare}")
    return path


def local_dataset(path, stop=lambda: False):
    """Returns the local folder of a dataset: for gs://bucket/.../NAME data/NAME, downloaded if it is missing.

    Any other path is returned as it is. One process of a host downloads, the others wait. Raises UserError
    and TransientError, and SystemExit(3) if stop() returns true meanwhile.
    """
    if not path.startswith("gs://"):
        return path
    from runtime.bucket import Bucket
    bucket = Bucket(path, stop)
    folder = f"data/{os.path.basename(bucket.url)}"
    with locked(folder):
        content = bucket.read("manifest.json", check=json.loads)
        if content is None:
            raise UserError(f"{path} has no manifest.json: upload the dataset with "
                            f"`gcloud storage rsync -r data/NAME {path}`")
        hashes = json.loads(content).get("sha256")
        if not hashes:
            raise UserError(f"{path}/manifest.json has no files with their hashes: upload the dataset again")
        # a name such as ../train.py would be written outside the folder
        for name, sha256 in hashes.items():
            if not re.fullmatch(DATASET_FILE, name) or not isinstance(sha256, str):
                raise UserError(f"{path}/manifest.json names {name!r}, which is no file of a dataset, or has "
                                "no hash: upload the dataset again")

        # one that is here must be the same one
        if os.path.lexists(folder):
            if read_json(f"{folder}/manifest.json").get("sha256") != hashes:
                raise UserError(f"{folder} holds another dataset than {path}: move it away, or name it")
            return folder

        # the folder gets its name once the dataset is whole; an interrupted download may have left files
        print(f"downloading {path}", flush=True)
        part = folder + ".part"
        shutil.rmtree(part, ignore_errors=True)
        for name, sha256 in hashes.items():
            if not bucket.download(name, f"{part}/{name}", sha256):
                raise UserError(f"{path}/{name} is missing: upload the dataset again")
        with writing(folder):
            with replacing(f"{part}/manifest.json") as f:
                f.write(content)
            os.rename(part, folder)
        return folder
