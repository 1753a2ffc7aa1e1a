"""Shared by all tests."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from road_helpers import PROMPTS_PER_DOMAIN, run

from pipeline.config import ROOT

# Tests never ask a hub for anything; what they need they make.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first: worker processes share the tests by file, and the last one should not be a long one."""
    slow = {item.path for item in items if item.get_closest_marker("e2e")}
    items.sort(key=lambda item: ("road" not in item.fixturenames, item.path not in slow))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments of a run that a test can afford: few prompts, few steps."""
    folder = tmp_path_factory.mktemp("small")
    lines = (ROOT / "conf/prompts/tiny.jsonl").read_text().splitlines()
    by_domain: dict[str, list[str]] = {}
    for line in lines:
        by_domain.setdefault(json.loads(line)["domain"], []).append(line)
    chosen = [line for group in by_domain.values() for line in group[:PROMPTS_PER_DOMAIN]]
    (folder / "prompts.jsonl").write_text("\n".join(chosen) + "\n")
    return [
        "conf=tiny",
        f"datagen.prompts=[{folder / 'prompts.jsonl'}]",
        "engine.num_actors=1",
        "datagen.max_new_tokens=48",
        "target.tiny.steps=150",
        "train.max_steps=12",
        "train.checkpoint_every_steps=4",
        "calibrate.min_records=5",
        "evaluate.prompts_per_domain=1",
        "evaluate.max_new_tokens=24",
        "evaluate.min_acceptance_length=null",
    ]


@pytest.fixture(scope="session")
def road(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output folder in which the small run has finished."""
    out = tmp_path_factory.mktemp("road")
    finished = run(small, out)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    return out
