"""A training keeps SIGTERM and Ctrl-C to itself no longer than it runs."""

import signal

import pytest
import torch

from rge import train
from rge.distributed import stop_signals


@pytest.fixture
def handlers(monkeypatch):
    """The handlers of both signals, which are there again after the test."""
    monkeypatch.setattr(stop_signals, "_received", {})
    before = {number: signal.getsignal(number) for number in stop_signals.SIGNALS}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


def handlers_now():
    return {number: signal.getsignal(number) for number in stop_signals.SIGNALS}


def test_a_program_that_goes_on_after_a_training_can_be_stopped_as_before(handlers):
    with stop_signals.restoring_handlers():
        stop_signals.stop_after_this_step_at_signals()
        signal.raise_signal(signal.SIGTERM)
        assert stop_signals.received_by_any(torch.device("cpu")) == signal.SIGTERM
    assert handlers_now() == handlers
    # The next training does not stop at once.
    assert stop_signals.received_by_any(torch.device("cpu")) is None


@pytest.mark.parametrize("error", [FloatingPointError(), SystemExit(130)])
def test_so_can_one_whose_training_failed_or_was_stopped(handlers, error):
    def train() -> None:
        with stop_signals.restoring_handlers():
            stop_signals.stop_after_this_step_at_signals()
            signal.raise_signal(signal.SIGINT)
            raise error

    with pytest.raises(type(error)):
        train()
    assert handlers_now() == handlers
    assert stop_signals.received_by_any(torch.device("cpu")) is None


def test_a_training_called_from_a_program_gives_them_back(handlers, monkeypatch):
    monkeypatch.setattr(train, "run_recipe", lambda words: stop_signals.stop_after_this_step_at_signals())
    train.main([])
    assert handlers_now() == handlers
