"""What one worker does without Ray: how it multiplies, and the errors that it tells."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
import ray.train
import torch

from stages.hidden_states.contract import ContractError
from stages.hidden_states.wire import HiddenStatesError
from stages.train import fit
from stages.train.job import TrainError, TrainJob
from tests.stages.train_helpers import usual_job


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stands for the training of rank 0 of a group that nobody started."""
    context = Mock(get_world_size=lambda: 1, get_world_rank=lambda: 0)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setattr(fit, "get_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(fit, "train", train := Mock())
    return train


def work(job: TrainJob) -> None:
    fit._worker({"job": job, "open_reader": Mock()})


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TrainError("spoilt\nby now"), TrainError),
        (ContractError("spoilt\nby now"), HiddenStatesError),
        (ValueError("spoilt\nby now"), TrainError),
    ],
)
def test_what_no_restart_helps_is_told_in_one_line(
    error: Exception, kind: type[Exception], tmp_path: Path, train: Mock
) -> None:
    job = usual_job(tmp_path)
    train.side_effect = error
    with pytest.raises(type(error)):
        work(job)
    with pytest.raises(kind, match=r"^spoilt by now$"):  # in Ray's controller, before it starts the group again
        fit._NoRestart(job.out.path / fit.FAILURE).after_exception(None, {0: error})


@pytest.mark.parametrize(
    ("precision", "gpus", "told"), [("bfloat16", 1, ["high"]), ("float32", 1, []), ("bfloat16", 0, [])]
)
def test_float32_products_are_float32_on_a_gpu_too(
    precision: str, gpus: int, told: list[str], tmp_path: Path, train: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", found.append)
    work(usual_job(tmp_path, precision=precision, gpus_per_worker=gpus))
    assert found == told
    train.assert_called_once()
