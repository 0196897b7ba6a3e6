"""Base class of user-fixable errors: every command shows them as one message, without a traceback."""

import pickle
import traceback

USER = 2
"""Exit code of a user-fixable error, in every process of a run."""

SIGNALLED = 128
"""Is added to a signal's number: the exit code of what that signal ended, as shells, Kubernetes and Slurm show it."""


class UserError(ValueError):
    """Something the user gave is wrong: an option, a file, a launch. The message names it and the fix.

    Any other exception is a bug, and keeps its traceback.
    """

    exit_code = USER


def portable(error: Exception) -> Exception:
    """The error as it may travel to another process, with where it came from."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - whatever its class makes of that
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error if type(again) is type(error) else RuntimeError(f"{type(error).__name__}: {error}")
