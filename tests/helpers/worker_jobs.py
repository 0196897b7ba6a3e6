"""What workers of `rge.distributed.workers` do in its tests; a worker imports it by name."""

import os
import time

from rge.common.errors import UserError
from rge.common.prompt_profiles import PROFILES


def make(device):
    """Work on numbers: its square, the device and the process; some numbers mean trouble."""
    if device == "broken":
        raise UserError("no such device: broken")
    if device == "gone":
        os._exit(3)

    def work(job, say):
        if job == "fail":
            raise FileNotFoundError(2, "no such picture", "a.png")
        if job == "die":
            os.kill(os.getpid(), 9)
        if job == "sleep":
            time.sleep(600)
        say(1)
        return job**2, device, os.getpid()

    return work


def make_reader(device):
    """Says whether there is a prompt profile of that name."""
    return lambda job, say: job in PROFILES
