"""Loaded last by the fork server of `forked`: what a run says of its code and packages is found out once, not by each program.

Each program records it, and reading and hashing a hundred modules takes two seconds. A file that changes later is hashed again.
What is imported by now is left out of the programs' garbage collections, which would take a third of a second each.
"""

import gc

from rge.identity.run_identity import software
from tests.helpers import lean  # noqa: F401 - for its effect

software()
gc.collect()
gc.freeze()
