"""The one root of errors that are the user's to mend: every command shows them as one message, without a traceback."""


class UserError(ValueError):
    """Something the user gave is wrong: an option, a file, a launch. The message names it and the mend.

    Any other exception is a bug, and keeps its traceback.
    """
