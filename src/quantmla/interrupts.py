"""Ctrl-C and SIGTERM, also where a library swallows them or makes another error of them."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# what Python does where nobody asked for anything else
ALONE: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}
_noted: list[int] = []  # signals since the command began


def _note(number: int, frame: FrameType | None) -> None:
    _noted.append(number)
    signal.default_int_handler(number, frame)


def is_interrupt(error: BaseException) -> bool:
    """An interrupt, or any error after one: safetensors, say, fails of it with a ValueError."""
    return isinstance(error, KeyboardInterrupt) or (isinstance(error, Exception) and bool(_noted))


def exit_code() -> int:
    """Of a command that was interrupted: 128 and the number of the first signal."""
    return 128 + (_noted[0] if _noted else signal.SIGINT)


def words(error: BaseException) -> str:
    """What an interrupt says of itself; nothing of an error that one led to."""
    return (str(error) if isinstance(error, KeyboardInterrupt) else "") or "interrupted"


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def interrupts_noted() -> Iterator[None]:
    """Notes every Ctrl-C, as a library may swallow one and fail later of what it left half
    imported; one that Python drops, as it came while an object was deleted, is sent again. SIGTERM
    is taken for one, so that what is temporary goes away."""
    shown = sys.unraisablehook

    def hook(dropped: "sys.UnraisableHookArgs") -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            again = (threading.main_thread().ident, signal.SIGINT)
            threading.Timer(0.01, signal.pthread_kill, again).start()  # at once it is dropped, too
        else:
            shown(dropped)

    ours = [number for number, alone in ALONE.items() if signal.getsignal(number) == alone]
    ours = ours if _is_main_thread() else []  # else they are ignored, or the caller's affair
    for number in ours:
        signal.signal(number, _note)
    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = shown
        _noted.clear()
        for number in ours:
            signal.signal(number, ALONE[number])


@contextmanager
def interrupt_waits() -> Iterator[None]:
    """The first Ctrl-C takes effect when the block ends: torch's C++ may make other errors of it.

    The second one takes effect at once.
    """
    before = signal.getsignal(signal.SIGINT)
    if before not in (signal.default_int_handler, _note) or not _is_main_thread():
        yield  # ignored, or somebody else's matter
        return
    came = threading.Event()

    def later(*_: object) -> None:
        came.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came.is_set():
            raise KeyboardInterrupt
