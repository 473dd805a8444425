"""Repeats network requests that fail."""
import subprocess
import time

import requests

from runtime.errors import TransientError, UserError
from runtime.files import to_stderr

WAITS = (0, 1, 2, 4, 8, 16, 32, 60, 60)  # seconds before each attempt; three minutes in all
RETRIED = {408, 429, *range(500, 600)}  # statuses of a server that may answer later


def try_again(attempt, label):
    """Calls attempt() until it succeeds, at most once for each of WAITS, and returns its result.

    Args:
        attempt: a function; it is called again after a TransientError, an error of requests, and a
            ValueError, which says that an answer is damaged.
        label: the beginning of the lines on stderr and of the last error.

    Raises TransientError if the last call fails, and UserError for an address or a token that cannot be one.
    """
    cause = ""
    for seconds in WAITS:
        if cause:
            to_stderr(f"{label}: {cause}; trying again in {seconds} s")
            time.sleep(seconds)

        # an error of requests is told by its name: its text has the URL, which may hold a password
        try:
            return attempt()
        except (requests.RequestException, UnicodeEncodeError) as e:
            cause = type(e).__name__
            if isinstance(e, ValueError):
                raise UserError(f"{label}: {cause}: correct the address of a server or proxy, or the token, "
                                "in the environment (STORAGE_EMULATOR_HOST, HF_ENDPOINT, HTTPS_PROXY, "
                                "HTTP_PROXY, HF_TOKEN, CLOUDSDK_AUTH_ACCESS_TOKEN)") from None
        except ValueError as e:
            cause = f"not the answer of a bucket, or damaged: {e}"
        except (TransientError, subprocess.TimeoutExpired) as e:
            cause = e
    raise TransientError(f"{label}: {cause}")
