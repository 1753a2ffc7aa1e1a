"""Whole training runs for the tests next to this file: in this process, or in several that are forked."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stages.artifacts import write_whole
from stages.corpus import TokenSequence
from stages.hidden_states.wire import HiddenBatch, HiddenStatesReader
from stages.train.config import TrainConfig
from stages.train.job import TrainJob
from stages.train.loop import train
from tests.stages.draft_helpers import CONFIG, FakeReader, make_job, random_sequences

SEQUENCES = 11  # of which one validates: steps of 4, 4 and 2 sequences
WEIGHTS = "checkpoint/model.safetensors"

# Forked from one process that has imported everything and started nothing: importing costs more than training.
_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload([__name__])


class CutReader(FakeReader):
    """Ends its process's training, but not its process, instead of giving more than `cut_at` sequences."""

    def __init__(self, folder: Path, cut_at: int) -> None:
        super().__init__(folder)
        self.cut_at = cut_at

    def read(self, batches: Iterable[Sequence[TokenSequence]]) -> Iterator[HiddenBatch]:
        for batch in super().read(batches):
            if self.given > self.cut_at:
                raise KeyboardInterrupt
            yield batch


class SlowReader(FakeReader):
    """Takes its time for every sequence, and says in which process: `<rank>.pid` in `pids`."""

    def __init__(self, folder: Path, pids: Path, pause_s: float) -> None:
        super().__init__(folder)
        self.pause_s = pause_s
        pids.mkdir(exist_ok=True)
        write_whole(pids / f"{dist.get_rank()}.pid", str(os.getpid()))

    def read(self, batches: Iterable[Sequence[TokenSequence]]) -> Iterator[HiddenBatch]:
        for batch in super().read(batches):
            time.sleep(self.pause_s * len(batch.sequences))
            yield batch


def usual_job(root: Path, config: TrainConfig = CONFIG, **changes: object) -> TrainJob:
    """The usual job under `root`, with changes of its config."""
    return make_job(root, replace(config, **changes), random_sequences(SEQUENCES, 20))


@contextmanager
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_one(job: TrainJob, **reader: object) -> dict[str, dict[str, object]]:
    """Train in this process alone, and return `result.json`."""
    with group_of_one():
        train(job, lambda: FakeReader(job.target.folder, **reader), torch.device("cpu"))
    return result(job)


def cut_one(job: TrainJob, at: int) -> None:
    """Train in this process until batch number `at` of the reader."""
    with group_of_one(), pytest.raises(KeyboardInterrupt):
        train(job, lambda: CutReader(job.target.folder, at), torch.device("cpu"))
    assert not (job.out.path / "result.json").exists()


def run_ranks(
    job: TrainJob,
    world: int,
    reader: Callable[[Path], HiddenStatesReader] = FakeReader,
    run: Callable[[TrainJob, Callable[[], HiddenStatesReader], torch.device], None] = train,
) -> list[int]:
    """Train in `world` processes; their exit codes."""
    store = job.out.path.parent / f"store-{world}"
    store.unlink(missing_ok=True)
    ranks = [_FORK.Process(target=_rank, args=(job, store, rank, world, reader, run)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=300)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    return codes


def _rank(
    job: TrainJob,
    store: Path,
    rank: int,
    world: int,
    reader: Callable[[Path], HiddenStatesReader],
    run: Callable[[TrainJob, Callable[[], HiddenStatesReader], torch.device], None],
) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world)
    run(job, lambda: reader(job.target.folder), torch.device("cpu"))
    dist.destroy_process_group()


def result(job: TrainJob) -> dict[str, dict[str, object]]:
    return json.loads((job.out.path / "result.json").read_text())


def rows(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """(step, values) of every row of metrics in a workspace or an artifact."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["values"]) for line in lines]


def losses(folder: Path) -> dict[int, float]:
    """Training loss by step."""
    return {step: values["loss"] for step, values in rows(folder) if "loss" in values}


def weights(job: TrainJob) -> bytes:
    return (job.out.path / WEIGHTS).read_bytes()
