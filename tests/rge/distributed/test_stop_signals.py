"""A training keeps SIGTERM and Ctrl-C to itself no longer than it runs."""

import signal

import pytest
import torch

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
    assert (
        stop_signals.received_by_any(torch.device("cpu")) is None
    )  # the next training does not stop at once

    with pytest.raises(FloatingPointError):
        train_until(FloatingPointError())
    assert handlers_now() == handlers


def test_a_process_that_a_signal_ends_is_not_disturbed_by_the_launcher_that_sends_it_again(handlers):
    with pytest.raises(SystemExit):
        train_until(SystemExit(143))
    assert handlers_now() != handlers
    signal.raise_signal(signal.SIGTERM)


def train_until(error: BaseException) -> None:
    with stop_signals.restoring_handlers():
        stop_signals.stop_after_this_step_at_signals()
        raise error
