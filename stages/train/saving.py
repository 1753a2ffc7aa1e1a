"""Checkpoints written beside the training: a snapshot is taken between two steps, a thread writes it.

Ranks agree once a step on what they know (one all-reduce of three numbers): whether all parts of a
checkpoint are written, so that rank 0 completes it; whether writing one failed, so that all raise; and
whether somebody asked the run to stop.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from stages.train import checkpoint
from stages.train.checkpoint import Tensors, TrainState, own_rows
from stages.train.job import TrainError


class Saver:
    """Saves into `folder` for the run `identity`. Every rank has one and calls it equally often."""

    def __init__(self, folder: Path, identity: str, keep: int, device: torch.device) -> None:
        self._folder, self._identity, self._keep, self._device = folder, identity, keep, device
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        # Names of this group's half-written folders: one that is being killed may still write its own.
        token = [uuid4().hex[:8]]
        dist.broadcast_object_list(token, src=0)
        self._token = token[0]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[float] | None = None
        self._error: BaseException | None = None
        self._state: dict[str, Any] = {}
        self.held_s = 0.0  # how long the last save kept training waiting
        self.write_s = 0.0  # how long the thread wrote at it
        if self._rank == 0:
            checkpoint.sweep(folder)

    def save(self, state: TrainState, tensors: Tensors) -> None:
        """Take a snapshot and begin to write it, after the one before is complete."""
        started = time.monotonic()
        self.finish()
        self._state = asdict(state)
        self._writing = self._thread.submit(self._write, self._beside(), self._own(tensors))
        self.held_s = time.monotonic() - started

    def agree(self, *, stop: bool = False) -> bool:
        """Complete what is written; whether any rank was asked to `stop`.

        Raises TrainError, on all ranks, when one could not write.
        """
        busy = self._writing is not None and not self._writing.done()
        if self._writing is not None and not busy:
            self._error = self._writing.exception()
        told = torch.tensor([stop, busy, self._error is not None], dtype=torch.int32, device=self._device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        any_stop, any_busy, any_error = told.tolist()
        if any_error:
            raise self._failure()
        if self._writing is not None and not any_busy:
            self.write_s, self._writing = self._writing.result(), None
            if self._rank == 0:
                self._complete()
        return bool(any_stop)

    def finish(self) -> None:
        """Wait until the last checkpoint is complete, for everybody. Raises TrainError like `agree`."""
        if self._writing is not None:
            wait([self._writing])
            self.agree()  # all have written: rank 0 completes it,
        self.agree()  # and says how that went, also when the last call of `agree` was to complete it

    def _beside(self) -> Path:
        return self._folder / f".{checkpoint.folder_name(self._state['step'])}.{self._token}"

    def _own(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Copies of what this rank writes: its rows of sharded tensors, its share of those that every rank holds."""
        everywhere = [name for name, tensor in tensors.items() if not isinstance(tensor, DTensor)]
        everywhere.sort(key=lambda name: (-tensors[name].numel(), name))
        own = {f"{name}@0": tensors[name] for name in everywhere[self._rank :: self._world]}
        for name, tensor in tensors.items():
            first, rows = own_rows(tensor)
            if isinstance(tensor, DTensor) and len(rows):
                own[f"{name}@{first}"] = rows
        return {key: value.detach().to("cpu", copy=True) for key, value in own.items()}

    def _write(self, beside: Path, rows: Tensors) -> float:
        started = time.monotonic()
        checkpoint.write_part(beside, self._rank, self._world, rows)
        return time.monotonic() - started

    def _complete(self) -> None:
        state = self._state
        try:
            final = self._folder / checkpoint.folder_name(state["step"])
            checkpoint.complete(self._beside(), final, self._identity, self._world, state)
            checkpoint.prune(self._folder, self._identity, self._keep, state["best_step"])
        except OSError as error:  # the others learn of it when they agree the next time
            self._error = error

    def _failure(self) -> TrainError:
        """The first rank's error, on every rank."""
        found: list[str | None] = [None] * self._world
        dist.all_gather_object(found, None if self._error is None else str(self._error))
        told = next(text for text in found if text is not None)
        return TrainError(
            f"{self._folder}: a checkpoint could not be written ({told}); make room or give access there, and run "
            "again: training goes on from the last complete one"
        )
