"""One step of the learner: its packing, its conventions, and a reduced vocabulary from corpus to checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from stages.draft.checkpoint import load_draft
from stages.train.loop import TrainJob, train
from stages.train.stage import VOCAB, _vocab
from tests.stages.draft_helpers import CONFIG, DRAFT, FakeReader, make_job, random_sequences

SEQUENCES = 11  # of which one validates


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run_one(job: TrainJob) -> dict[str, dict[str, object]]:
    """Train in this process and return `result.json`."""
    train(job, lambda: FakeReader(job.target.folder), torch.device("cpu"))
    return json.loads((job.out.path / "result.json").read_text())


def test_a_resumed_stage_keeps_its_vocabulary(tmp_path: Path) -> None:
    job = make_job(tmp_path, CONFIG, random_sequences(SEQUENCES, 20))
    (job.target.folder / "generation_config.json").write_text('{"eos_token_id": [254, 253]}')
    sequences = job.corpus.sequences("train")
    first = _vocab(50, sequences, job.target, job.out)
    assert (len(first), first[-2:].tolist()) == (50, [253, 254])
    assert first.tolist() == _vocab(50, sequences[:1], job.target, job.out).tolist()
    (job.out.path / VOCAB).unlink()
    assert first.tolist() != _vocab(50, sequences[:1], job.target, job.out).tolist()


def test_a_reduced_vocabulary_is_trained_and_exported(tmp_path: Path, group: None) -> None:
    draft, vocab = replace(DRAFT, vocab_size=60), np.arange(100, 160)
    job = make_job(tmp_path, replace(CONFIG, epochs=2), random_sequences(SEQUENCES, 20), draft)
    result = run_one(replace(job, vocab_W=vocab))
    loaded = load_draft(job.out.path / "checkpoint", job.target.folder)
    assert loaded.config.draft_vocab_size == 60
    assert load_file(job.out.path / "checkpoint" / "model.safetensors")["t2d"].nonzero()[:, 0].tolist() == list(vocab)
    # the random target's tokens are mostly outside, and no draft can be accepted on those
    assert 0 < result["metrics"]["val_accept_rate_1"] < 0.3
