"""Loaded last by the fork server of `forked`: what a run says of its code and packages is found out once, not by each program.

Each program records it, and reading and hashing a hundred modules takes two seconds. A file that changes later is hashed again.
"""

from rge.identity.run_identity import software

software()
