"""Ports for processes that are told a number before they listen."""

import random
import socket


def free_port() -> int:
    """A port that nobody listens on, and that nobody is given by chance until the process that needs it does.

    `bind` to 0, which is also what `--main_process_port 0` means, gives a port of the range from which every outgoing
    connection takes one (32768 and up on Linux): some other test may have it a second later.
    """
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
