"""The one root of errors that are the user's to mend: every command shows them as one message, without a traceback."""


class UserError(ValueError):
    """Something the user gave is wrong: an option, a file, a launch. The message names it and the mend.

    Any other exception is a bug, and keeps its traceback.
    """


def explain(error: Exception) -> str:
    """The message alone, also where a data worker has wrapped it in its own traceback."""
    message = str(error).strip()
    if message.startswith("Caught "):
        message = message.rpartition(f"{type(error).__name__}: ")[2]
    return message
