"""What costs every test and every program of `forked` time and shows nobody anything; imported by both."""

import functools
import ssl

from transformers import PreTrainedConfig

# transformers makes the text of every config that it reads, for a log that is off: a tenth of a short run's CPU time.
PreTrainedConfig.__repr__ = object.__repr__

# Every `httpx.get`, and every client of a library, reads the certificates of the world, for addresses of this machine.
ssl.create_default_context = functools.cache(ssl.create_default_context)
