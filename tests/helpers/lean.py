"""What costs every test and every program of `forked` time and shows nobody anything; imported by both."""

from transformers import PreTrainedConfig

# transformers makes the text of every config that it reads, for a log that is off: a tenth of a short run's CPU time.
PreTrainedConfig.__repr__ = object.__repr__
