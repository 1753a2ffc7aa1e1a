"""Runs that are killed, go on with other numbers of ranks or other layouts, and end as if nothing had been."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stages.train import checkpoint
from stages.train.checkpoint import Saved, load_state
from stages.train.job import TrainJob
from tests.stages.draft_helpers import FakeReader
from tests.stages.train_helpers import cut_one, losses, result, rows, run_one, run_ranks, usual_job, weights

# Two batches a step and rank until the third step of an epoch, which has one; validation (rank 0 only) another.
FIFTH_STEP = 8
DIES = functools.partial(FakeReader, kill_at=FIFTH_STEP)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    """A run of two ranks that nothing interrupted."""
    made = usual_job(tmp_path_factory.mktemp("straight"))
    assert run_ranks(made, 2) == [0, 0]
    return made


def killed(root: Path, **changes: object) -> TrainJob:
    """A run of two ranks that are killed in their fifth step, after the checkpoint of the second at least."""
    made = usual_job(root, **changes)
    assert 0 not in run_ranks(made, 2, DIES)
    assert not (made.out.path / "result.json").exists()
    assert checkpoint.newest(made.out.path / "checkpoints", "id") is not None
    return made


def last(made: TrainJob) -> Saved:
    path = made.out.path / "checkpoints" / "step-00000009"
    assert load_state(path).step == 9
    return Saved(path)


def same_tensors(one: Saved, other: Saved, parameters: dict[str, torch.Tensor]) -> None:
    """Equal in every bit: weights, moments, and Adam's steps."""
    assert one.names == other.names
    for name in one.names:
        if name.endswith("|step"):
            assert one.scalar(name) == other.scalar(name)
        else:
            shape = parameters[name.split("|")[0]].shape
            pair = [torch.full(shape, torch.nan) for _ in range(2)]
            one.fill(name, pair[0])
            other.fill(name, pair[1])
            assert torch.equal(*pair), name


def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path, straight: TrainJob) -> None:
    broken = killed(tmp_path)
    assert run_ranks(broken, 2) == [0, 0]
    assert weights(broken) == weights(straight)
    same_tensors(last(straight), last(broken), load_file(straight.out.path / "checkpoint/model.safetensors"))
    for part in ("counts", "facts"):
        assert result(broken)[part] == result(straight)[part]
    axis = [step for step, _ in rows(broken.out.path)]
    assert axis == [1, 2, 3, 3, 4, 5, 6, 6, 7, 8, 9, 9]  # one axis, validation after steps 3, 6 and 9
    assert losses(broken.out.path) == losses(straight.out.path)


def test_parts_of_two_ranks_go_on_in_one_with_the_same_batches(tmp_path: Path, straight: TrainJob) -> None:
    broken = killed(tmp_path)
    told = run_one(broken)
    assert told["counts"] == result(straight)["counts"]
    assert losses(broken.out.path) == pytest.approx(losses(straight.out.path), rel=1e-5)
    assert losses(broken.out.path) != losses(
        straight.out.path
    )  # sums over ranks round otherwise: this did train in one


def test_one_rank_goes_on_in_two(tmp_path: Path, straight: TrainJob) -> None:
    made = usual_job(tmp_path)
    cut_one(made, at=16)
    assert run_ranks(made, 2) == [0, 0]
    assert result(made)["counts"] == result(straight)["counts"]
    assert losses(made.out.path) == pytest.approx(losses(straight.out.path), rel=1e-5)


def test_two_ranks_train_as_one(tmp_path: Path, straight: TrainJob) -> None:
    made = usual_job(tmp_path)
    assert run_one(made)["counts"] == result(straight)["counts"]
    for (step, alone), (also, split) in zip(rows(made.out.path), rows(straight.out.path), strict=True):
        assert step == also
        for key in ("loss", "grad_norm", "accept_rate_3", "val_loss"):
            assert (key in alone) == (key in split)
            assert alone.get(key, 0.0) == pytest.approx(split.get(key, 0.0), rel=1e-3), key


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_sharded_training_equals_replicated_and_itself_when_killed(
    optimizer: str, tmp_path: Path, straight: TrainJob
) -> None:
    whole = straight if optimizer == "adamw" else usual_job(tmp_path / "whole", optimizer=optimizer)
    if whole is not straight:
        assert run_ranks(whole, 2) == [0, 0]
    sharded = killed(tmp_path / "sharded", optimizer=optimizer, sharding="fsdp")
    assert run_ranks(sharded, 2) == [0, 0]
    if optimizer == "adamw":  # element by element, so the layout changes nothing
        assert losses(sharded.out.path) == losses(whole.out.path)
        assert weights(sharded) == weights(whole)
    else:  # products of matrices are summed in another order, in bf16
        assert losses(sharded.out.path) == pytest.approx(losses(whole.out.path), rel=1e-3)
    parts = sorted((sharded.out.path / "checkpoints/step-00000009").glob("part-*"))
    assert len(parts) == 2
    assert [load_file(part)[f"fc.weight@{first}"].shape for part, first in zip(parts, (0, 32), strict=True)] == [
        (32, 128)
    ] * 2  # each rank wrote its half

    again = usual_job(tmp_path / "again", optimizer=optimizer, sharding="fsdp")
    assert run_ranks(again, 2) == [0, 0]
    assert weights(again) == weights(sharded)


def test_shards_go_on_as_replicas(tmp_path: Path, straight: TrainJob) -> None:
    broken = killed(tmp_path, sharding="fsdp")
    assert run_one(usual_job(tmp_path))["counts"] == result(straight)["counts"]
    assert losses(broken.out.path) == pytest.approx(losses(straight.out.path), rel=1e-5)
