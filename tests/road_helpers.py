"""How tests run the pipeline as a user does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pipeline.config import ROOT, PipelineConfig, load

PROMPTS_PER_DOMAIN = 12


def command(small: list[str], out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "pipeline.run", *small, f"out={out}", *more]


def run(small: list[str], out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(small, out, *more), capture_output=True, text=True, cwd=ROOT, timeout=1100)


def config(small: list[str], out: Path, *more: str) -> PipelineConfig:
    return load(ROOT / "conf/tiny.yaml", [*small[1:], f"out={out}", *more])
