"""Base class of user-fixable errors: every command shows them as one message, without a traceback."""

import pickle
import signal
import traceback

USER = 2
"""Exit code of a user-fixable error, in every process of a run."""

SIGNALLED = 128
"""Added to a signal's number, this is the exit code of a process that the signal ended, as in shells, Kubernetes and Slurm."""


class UserError(ValueError):
    """Something the user gave is wrong: an option, a file, a launch. The message names it and the fix.

    Any other exception is a bug, and keeps its traceback.
    """

    exit_code = USER


def how_it_ended(code: int) -> str:
    """What an exit code of `subprocess` or `multiprocessing` says, for messages."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


def portable(error: Exception) -> Exception:
    """The error in a form that pickles, with its traceback as a note."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - its class decides what pickling raises
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error if type(again) is type(error) else RuntimeError(f"{type(error).__name__}: {error}")
