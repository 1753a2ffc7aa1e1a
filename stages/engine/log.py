"""The log file of one engine, and what it says of the engine's end."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

# "ValueError: text" as the last line of a traceback, with or without vLLM's prefix before it.
_RAISED = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?:: .+)?)$")
_TAIL_BYTES = 64 * 1024


def redirect_output(log: Path) -> int:
    """Send this process' stdout and stderr, and those of its children, to the end of `log`.

    Returns the log's size before: what an earlier life of the engine wrote.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab", buffering=0) as file:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        return file.tell()


def tail(log: Path, lines: int = 20, since: int = 0) -> str:
    """The last lines of a log after byte `since`; empty when there is none."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(since, log.stat().st_size - _TAIL_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def root_cause(log: Path, since: int, otherwise: str) -> str:
    """The last exception in an engine's log, else `otherwise`; always with the log's path.

    vLLM's frontend only says that the engine process failed; the reason is in that process' output.
    """
    raised = [match[1] for line in tail(log, 200, since).splitlines() if (match := _RAISED.search(line))]
    causes = [line for line in raised if "EngineDeadError" not in line]
    return f"{causes[-1] if causes else otherwise} (log: {log})"
