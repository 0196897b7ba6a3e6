"""The one root of errors that are the user's to mend: every command shows them as one message, without a traceback."""

USER = 2
"""Exit code of whatever the user has to mend, in every process of a run."""

SIGNALLED = 128
"""Is added to a signal's number: the exit code of what that signal ended, as shells, Kubernetes and Slurm show it."""


class UserError(ValueError):
    """Something the user gave is wrong: an option, a file, a launch. The message names it and the mend.

    Any other exception is a bug, and keeps its traceback.
    """

    exit_code = USER
