"""What counts as Ctrl-C, and what is said of it."""

import contextlib
import signal
from collections.abc import Iterator

import pytest

from quantmla.interrupts import (
    exit_code,
    interrupt_waits,
    interrupts_noted,
    is_interrupt,
    words,
)


@pytest.fixture(autouse=True)
def usual_ctrl_c() -> Iterator[None]:
    """A run in the background of a shell is given processes that ignore it."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, inherited)


def swallowed() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_error_after_an_interrupt_is_one_until_the_command_ends() -> None:
    with interrupts_noted():
        assert not is_interrupt(ValueError("shape"))
        swallowed()
        assert is_interrupt(ValueError("shape"))
        assert not is_interrupt(SystemExit(0))
    assert not is_interrupt(ValueError("shape"))
    assert is_interrupt(KeyboardInterrupt())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_end_is_an_interrupt_with_its_own_exit_code(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with interrupts_noted():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert exit_code() == 128 + number
        swallowed()
        assert exit_code() == 128 + number
    assert signal.getsignal(number) == before


def test_a_request_to_end_that_the_caller_handles_stays_his() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with interrupts_noted():
            signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_only_an_interrupt_speaks_for_itself() -> None:
    assert words(KeyboardInterrupt("stopped at layer 3")) == "stopped at layer 3"
    assert words(KeyboardInterrupt()) == words(ValueError("shape")) == "interrupted"


@pytest.mark.parametrize("noted", [False, True])
def test_an_interrupt_waits_for_the_end_of_the_block(noted: bool) -> None:
    done = []

    def block() -> None:
        with interrupt_waits():
            signal.raise_signal(signal.SIGINT)
            done.append("whole")

    with interrupts_noted() if noted else contextlib.nullcontext():
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            block()
        assert signal.getsignal(signal.SIGINT) is before
    assert done == ["whole"]
