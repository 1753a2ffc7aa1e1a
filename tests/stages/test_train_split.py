"""The same global batches shared by one, two and four real ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from stages.hidden_states.wire import HiddenStatesReader
from stages.train import checkpoint
from stages.train.job import CHECKPOINTS, TrainError, TrainJob
from stages.train.loop import Worker
from tests.stages.train_helpers import result, rows, run_one, run_ranks, usual_job

# Adam divides by the size of a gradient, so that what rounding left of a zero moves a weight as far as any other: only
# the first step's loss and gradient can be equal to rounding.
FIRST, LATER = 1e-6, 1e-3


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    made = usual_job(tmp_path_factory.mktemp("alone"), epochs=1)
    run_one(made)
    return made


@pytest.mark.parametrize(("world", "sharding"), [(2, "replicated"), (4, "replicated"), (4, "fsdp")])
def test_ranks_take_the_steps_that_one_takes(world: int, sharding: str, alone: TrainJob, tmp_path: Path) -> None:
    """Steps of 4, 4 and 2 sequences: in the last two of four ranks have none, and in the validation three."""
    made = usual_job(tmp_path, epochs=1, sharding=sharding)
    assert run_ranks(made, world) == [0] * world
    assert result(made)["counts"] == result(alone)["counts"]
    steps = 0
    for (step, one), (also, split) in zip(rows(alone.out.path), rows(made.out.path), strict=True):
        assert step == also
        steps += "loss" in one
        for key in ("loss", "grad_norm", "acceptance_length", "accept_rate_3", "val_loss"):
            assert (key in one) == (key in split)
            if key in one:
                assert split[key] == pytest.approx(one[key], rel=FIRST if step == 1 else LATER), (step, key)
    assert steps == 3


def train_with_a_weight_that_is_off(
    job: TrainJob, open_reader: Callable[[], HiddenStatesReader], device: torch.device
) -> None:
    """The second rank's copy of the draft is not the first's; what each says of it is kept."""
    with closing(open_reader()) as reader:
        worker = Worker(job, reader, device)
        if worker.rank == 1:
            with torch.no_grad():
                worker.parameters["fc.weight"][3, 5] += 1e-4
        try:
            worker.run()
        except TrainError as error:
            (job.out.path / f"error-{worker.rank}").write_text(str(error))
            raise


def test_ranks_whose_weights_differ_stop_and_save_nothing(tmp_path: Path) -> None:
    made = usual_job(tmp_path, epochs=1)
    assert 0 not in run_ranks(made, 2, run=train_with_a_weight_that_is_off)
    told = {(made.out.path / f"error-{rank}").read_text() for rank in range(2)}
    assert len(told) == 1
    assert "expected the same weights on every rank, found sums " in told.pop()
    assert checkpoint.newest(made.out.path / CHECKPOINTS, made.out.identity) is None
