"""The worker group: Ray Train starts it, restarts it when a process dies, and ends it.

Checkpoints are our own (`checkpoint.py`), so Ray is told of none: whether it restarts the group or the
whole job starts anew, every worker resumes from the newest complete one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer, get_device

from stages.artifacts import remove, write_whole
from stages.hidden_states.wire import HiddenStatesReader
from stages.train.config import TrainConfig
from stages.train.loop import RESULT, TrainError, TrainJob, train

RAY = "ray"  # Ray Train's own folder in the workspace
FAILURE = "failure.txt"

OpenReader = Callable[[int], HiddenStatesReader]  # given the number of ranks


def fit(job: TrainJob, open_reader: OpenReader) -> None:
    """Train with `config.num_workers` processes until `result.json` is there.

    A dead process costs the steps since the last checkpoint; after `config.max_failures` of them Ray's
    error is raised. Raises TrainError as the workers did. Cancelling the calling task, recursively, ends the group.
    """
    config = job.config
    # A dead process is noticed within this time; Ray's default is 2 s.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    storage, failure = job.out.path / RAY, job.out.path / FAILURE
    remove(failure)
    remove(storage)  # Ray would take up an older run of the same name by itself
    trainer = TorchTrainer(
        _worker,
        train_loop_config={"job": job, "open_reader": open_reader},
        scaling_config=ray.train.ScalingConfig(
            num_workers=config.num_workers, use_gpu=config.gpus_per_worker > 0, resources_per_worker=_resources(config)
        ),
        torch_config=TorchConfig(backend="nccl" if config.gpus_per_worker else "gloo"),
        run_config=ray.train.RunConfig(
            name=f"train-{job.out.identity}",
            storage_path=str(storage),
            failure_config=ray.train.FailureConfig(max_failures=config.max_failures),
        ),
    )
    result = trainer.fit()
    if result.error is not None:
        raise result.error
    if failure.exists():
        raise TrainError(failure.read_text(encoding="utf-8"))
    if not (job.out.path / RESULT).exists():
        raise TrainError(f"{job.out.path / RESULT}: training ended without it; put the output root on shared storage")


def _worker(told: dict[str, Any]) -> None:
    job: TrainJob = told["job"]
    # A fixed number of threads: sums are split by thread, and their low bits with them.
    torch.set_num_threads(max(1, round(job.config.cpus_per_worker)))
    if job.config.gpus_per_worker:
        torch.set_float32_matmul_precision("high")  # TF32
    world = ray.train.get_context().get_world_size()
    try:
        train(job, lambda: told["open_reader"](world), get_device())
    except TrainError as error:  # told in a file: an error that leaves a worker makes Ray try again
        if ray.train.get_context().get_world_rank() == 0:
            write_whole(job.out.path / FAILURE, str(error))


def _resources(config: TrainConfig) -> dict[str, float]:
    gpus = {"GPU": float(config.gpus_per_worker)} if config.gpus_per_worker else {}
    return {"CPU": config.cpus_per_worker, **gpus}
