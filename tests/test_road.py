"""The whole road at its smallest size, as a user runs it: everything real, then rerun, changed, killed and resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from road_helpers import PROMPTS_PER_DOMAIN, command, config, run

from pipeline.config import ROOT
from pipeline.dag import NAMES, plan
from stages.artifacts import Layout, file_digest

pytestmark = pytest.mark.e2e


def test_release_is_whole(road: Path, small: list[str]) -> None:
    nodes = plan(config(small, road))
    assert all(node.complete for node in nodes.values())
    release = nodes["publish"].workspace.final / "release"
    for name in ("config.json", "model.safetensors", "speculative_config.json", "README.md", "provenance.json"):
        assert (release / name).stat().st_size > 0, name
    served = nodes["calibrate"].workspace.final / "checkpoint"
    assert file_digest(release / "model.safetensors") == file_digest(served / "model.safetensors")


def test_counts_are_conserved_along_the_road(road: Path, small: list[str]) -> None:
    records = {
        name: json.loads((node.workspace.final / "record.json").read_text())
        for name, node in plan(config(small, road)).items()
    }
    corpus, draft = records["datagen"]["counts"], records["train"]["counts"]
    lost = sum(n for key, n in corpus.items() if key.startswith(("dropped_", "failed_")))
    assert corpus["prompts_in"] == 9 * PROMPTS_PER_DOMAIN == corpus["kept"] + lost
    splits = ("train", "validation", "calibration", "evaluation")
    assert corpus["kept"] == sum(corpus[f"kept_{split}"] for split in splits)
    assert draft["sequences_in"] == corpus["kept_train"]


def test_rerun_keeps_everything_and_is_quick(road: Path, small: list[str]) -> None:
    began = time.monotonic()
    again = run(small, road)
    assert again.returncode == 0
    assert time.monotonic() - began < 20
    assert "nothing to make" in again.stderr


def test_changed_value_redoes_what_follows_and_says_why(road: Path, small: list[str]) -> None:
    nodes = plan(config(small, road, "train.lr=1e-3"))
    assert [name for name in NAMES if not nodes[name].complete] == ["train", "calibrate", "evaluate", "publish"]
    assert nodes["train"].reason == "train.lr 0.002 → 0.001"


def test_killed_driver_resumes_to_the_same_weights(road: Path, small: list[str], tmp_path: Path) -> None:
    nodes, layout = plan(config(small, road)), Layout(tmp_path)
    for name in ("target", "datagen"):
        made = nodes[name].workspace
        shutil.copytree(made.final, layout.artifact(name, made.identity))
    partial = layout.artifact("train", nodes["train"].workspace.identity)
    partial = partial.with_name(partial.name + ".partial")

    with subprocess.Popen(command(small, tmp_path, "stages=train"), cwd=ROOT, stderr=subprocess.DEVNULL) as driver:
        deadline = time.monotonic() + 180
        while not list(partial.glob("checkpoints/step-*/state.json")):
            assert driver.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        family = psutil.Process(driver.pid).children(recursive=True)
        os.kill(driver.pid, signal.SIGKILL)
    psutil.wait_procs(family, timeout=60)

    # Engines and the store again, but through the disk: how states travel is no part of an identity.
    resumed = run(small, tmp_path, "stages=train", "hidden_states.transport=disk")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "was interrupted; continues" in resumed.stderr
    weights = [
        plan(config(small, out))["train"].workspace.final / "checkpoint/model.safetensors" for out in (road, tmp_path)
    ]
    assert file_digest(weights[0]) == file_digest(weights[1])
