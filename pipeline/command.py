"""How a program of this package meets the shell it was called from."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from typing import NoReturn

HELP = {"-h", "--help", "help"}


def command(main: Callable[[Sequence[str]], int], told: str) -> NoReturn:
    """Run `main` on the command line's arguments and exit with what it returns, or tell whoever asks for help.

    No terminal that lacks a character ends it, and a reader that has seen enough (`| head`) ends it without a
    traceback, with the status of a process that SIGPIPE has ended.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # None when it was closed by the caller
            stream.reconfigure(errors="replace")
    try:
        if HELP.intersection(sys.argv[1:]):
            print(told, end="")
            code = 0
        else:
            code = main(sys.argv[1:])
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                os.dup2(nowhere, stream.fileno())  # it is flushed once more at the end
        code = 128 + signal.SIGPIPE
    sys.exit(code)
