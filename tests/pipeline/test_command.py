"""Programs on terminals that lack something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["plan", "status", "run"])
def test_a_terminal_without_arrows_and_a_reader_that_leaves_end_nothing_with_a_traceback(
    name: str, tmp_path: Path
) -> None:
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-m", f"pipeline.{name}", *(["--help"] if name == "run" else [f"out={tmp_path}"])]
    told = subprocess.run(program, cwd=ROOT, env=ascii_only, capture_output=True, check=True)
    assert len(told.stdout.splitlines()) > 5
    assert b"?" in told.stdout

    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as nobody:
        left = subprocess.run(program, cwd=ROOT, env=ascii_only, stdout=nobody, stderr=subprocess.PIPE, check=False)
    assert (left.returncode, left.stderr) == (141, b"")

    closed = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *program], cwd=ROOT, env=ascii_only, check=False)
    assert closed.returncode == 0
