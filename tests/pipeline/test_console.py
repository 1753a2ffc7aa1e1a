"""What a person sees: bars on a terminal, and elsewhere a line when a stage begins and one when it ends."""

from __future__ import annotations

import io
import os
import pty
from contextlib import suppress
from pathlib import Path

import pytest

from pipeline.console import Console
from stages.artifacts import Artifact, Workspace
from stages.events import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_progress_is_drawn_on_a_terminal_alone(stream: io.StringIO, tmp_path: Path) -> None:
    with Workspace(tmp_path / "made", "x").locked() as out:
        record = out.commit(Artifact, counts={}, metrics={"release_bytes": 1200}, facts={}).record
    console = Console(stream)
    console.begin("publish", "never made")
    for done in range(100):
        console.follow("publish", Progress("checking", done, 100, "steps", "a note"))
    console.made("publish", record)
    console.close()
    assert ("checking" in stream.getvalue()) == stream.isatty()
    if not stream.isatty():
        begins, ends = stream.getvalue().splitlines()
        assert begins == "publish    starts: never made"
        assert ends.startswith("publish    took ")
        assert ends.endswith(" s: 1,200 bytes")


def test_a_terminal_that_hangs_up_ends_nothing() -> None:
    person, line = pty.openpty()
    stream = os.fdopen(line, "w")
    console = Console(stream)
    console.begin("train", "never made")
    console.follow("train", Progress("train", 1, 3, "step", ""))
    os.close(person)
    with pytest.raises(OSError, match="Input/output"):
        os.write(line, b"x")
    for done in (2, 3):
        console.follow("train", Progress("validate", done, 4, "step", ""))
    console.say("done")
    console.close()
    with suppress(OSError):
        stream.close()


def test_a_caller_that_closed_stderr_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    console = Console()
    console.begin("train", "never made")
    console.close()
