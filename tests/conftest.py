"""One thread a process: two test files run at a time (pytest.ini), and more threads than cores slow both down many times."""
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
