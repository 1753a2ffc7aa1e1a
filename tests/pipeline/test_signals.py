"""Signals that stop a run, and one that was told not to."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, signal
from pipeline.signals import StopFlag, Stopped
with StopFlag() as stop:
    os.kill(os.getpid(), signal.SIGHUP)
    try:
        stop.check()
    except Stopped as error:
        print(error)
"""


@pytest.mark.parametrize(("nohup", "said"), [(True, ""), (False, "SIGHUP\n")])
def test_a_run_under_nohup_outlives_its_session(nohup: bool, said: str) -> None:
    inherited = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    try:
        told = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
    finally:
        signal.signal(signal.SIGHUP, inherited)
    assert told.stdout == said
