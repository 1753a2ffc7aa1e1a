"""Benchmarks run: at a size where they measure nothing."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks import quality, train_gpu
from pipeline.config import conf_path, load
from stages.train.config import TrainConfig
from tests.stages.train_helpers import group_of_one


def test_training_on_a_gpu_also_runs_on_a_cpu() -> None:
    with group_of_one():
        told = train_gpu.train(replace(train_gpu.TINY, steps=8), 60.0, torch.device("cpu"))
    assert told["steps"] == 8
    assert told["last_loss"] < told["first_loss"]
    assert told["parity"]["gradient_cosine"] > 0.9999  # by document, against dense
    assert told["tok_per_s"] > 0


def test_both_sides_of_the_quality_benchmark_differ_in_their_conventions_alone() -> None:
    ours, theirs = (
        load(conf_path("tiny"), overrides).train for overrides in quality.variants(TrainConfig().l1_weight).values()
    )
    assert ours == load(conf_path("tiny")).train
    assert theirs == replace(ours, l1_weight=0.45, ce_label="target", target_support="draft", denominator="labels")
