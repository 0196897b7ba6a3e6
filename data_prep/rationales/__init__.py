"""Oracle rationales for training records: written by a model that sees the answer, checked one by one."""
