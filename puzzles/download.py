"""Downloads: the datasets in buckets, and the files on Hugging Face that prepare scripts read."""
import json
import os
import re
import shutil

import requests

from puzzles.writer import hashes_of, write_json
from runtime.bucket import Bucket
from runtime.errors import TransientError, UserError, writing
from runtime.files import Progress, locked, read_json, replacing
from runtime.retry import RETRIED, try_again

DATASET_FILE = r"(train|test)/(dataset\.json|all__\w+\.npy)|identifiers\.json"  # see writer.hashes_of


def local_dataset(path, stop=lambda: False):
    """Returns the folder of a dataset: for gs://bucket/.../NAME data/NAME, which it downloads if missing.

    One process of a host downloads, the others wait. Raises UserError and TransientError, and SystemExit(3)
    if stop() returns true meanwhile.
    """
    if not path.startswith("gs://"):
        return path
    bucket = Bucket(path, stop)
    folder = f"data/{os.path.basename(bucket.url)}"
    with locked(folder):
        manifest = bucket.read("manifest.json", json.loads) or {}
        hashes = manifest.get("sha256")
        # a name such as ../train.py would be written outside the folder
        if not hashes or not all(re.fullmatch(DATASET_FILE, name) for name in hashes):
            raise UserError(f"{path}/manifest.json is missing, or names what is no file of a dataset: upload "
                            f"the dataset with `gcloud storage rsync -r data/NAME {path}`")

        # one that is here must be the same one
        if os.path.lexists(folder):
            if read_json(f"{folder}/manifest.json").get("sha256") != hashes:
                raise UserError(f"{folder} holds another dataset than {path}: move it away, or name it")
            return folder

        # the folder gets its name once the dataset is whole; an interrupted download may have left files
        print(f"downloading {path}", flush=True)
        part = folder + ".part"
        shutil.rmtree(part, ignore_errors=True)
        for name in hashes:
            if not bucket.download(name, f"{part}/{name}"):
                raise UserError(f"{path}/{name} is missing: upload the dataset again")
        # they differ if somebody uploads another dataset meanwhile
        if hashes_of(part) != hashes:
            raise TransientError(f"{path} does not match its manifest.json: upload the dataset again if that "
                                 "lasts")
        with writing(folder):
            write_json(f"{part}/manifest.json", manifest)
            os.rename(part, folder)
        return folder


def csv_paths(settings, hub):
    """Returns the paths of the training and test puzzles: your own files, or a dataset's on the hub."""
    train_path = settings.train_csv or download(hub, "train.csv")
    test_path = settings.test_csv or download(hub, "test.csv")
    return train_path, test_path


def download(hub, name):
    """Downloads a file of a dataset on Hugging Face to data/downloads, unless it is there; returns its path.

    One process of a host does it, and the others wait. The hub gets the token HF_TOKEN. Other hosts, to which
    it redirects, do not: requests takes it away.
    """
    label = f"{hub}/{name}"
    path = f"data/downloads/{os.path.basename(hub)}/{name}"
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    url = f"{endpoint}/datasets/{hub}/resolve/main/{name}"
    token = os.environ.get("HF_TOKEN", "").strip()
    headers = {"Authorization": f"Bearer {token}"} if token else {}

    def attempt():
        response = requests.get(url, headers=headers, stream=True, timeout=(10, 30))
        cause = f"status {response.status_code}"
        if response.status_code in RETRIED:
            raise TransientError(cause)
        if response.status_code >= 400:
            raise UserError(f"{label} cannot be downloaded ({cause}): set HF_TOKEN, or use files of your own "
                            "with --source=csv")

        # each attempt gets the whole file
        progress = Progress(f"downloading {label}, bytes")
        with writing(path), replacing(path) as f:
            for block in response.iter_content(1 << 15):
                f.write(block)
                progress.add(len(block))

    with locked(path):
        if not os.path.exists(path):
            try_again(attempt, label)
    return path
