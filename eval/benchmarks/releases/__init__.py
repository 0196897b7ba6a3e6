"""The benchmarks, one file each: reading the release, and the protocol."""
