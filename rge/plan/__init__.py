"""What a run will take: FLOPs, memory, communication, time. ``python -m rge.plan recipe=NAME``."""
