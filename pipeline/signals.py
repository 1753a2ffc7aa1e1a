"""How a person stops a run."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """One of the STOPPING signals reached the driver."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class StopFlag:
    """Remembers the first stopping signal; more of them do not disturb the clean-up.

    A handler that raised would do so inside Ray's compiled code, which turns it into a SystemError.
    """

    def __init__(self) -> None:
        self._signum: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {name: signal.getsignal(name) for name in STOPPING}
            if self._before[signal.SIGHUP] == signal.SIG_IGN:  # under nohup the end of a session ends nothing
                del self._before[signal.SIGHUP]
            self.arm()
        return self

    def arm(self) -> None:
        """Take the signals (again): libraries install handlers of their own when they start."""
        for name in self._before:
            signal.signal(name, self._set)

    def __exit__(self, *_: object) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)

    def _set(self, signum: int, frame: FrameType | None) -> None:
        self._signum = self._signum or signum

    def check(self) -> None:
        """Raise Stopped once a signal has come."""
        if self._signum is not None:
            raise Stopped(self._signum)
