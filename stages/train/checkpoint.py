"""Training state on disk: `checkpoints/step-XXXXXXXX/`, safetensors and JSON only.

A checkpoint is written beside, synced, and renamed; `state.json` is its last file and lists the sizes
of the others, so a folder without it, or with other sizes, is incomplete and never chosen.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from stages.artifacts import remove, write_json

logger = logging.getLogger(__name__)

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
NAME = re.compile(r"step-(\d{8})")


@dataclass
class TrainState:
    """What a run knows besides tensors: it grows with the steps and is part of every checkpoint."""

    step: int = 0  # steps done
    best_acceptance_length: float = 0.0  # on the validation split
    visits_trained: int = 0
    visits_nonfinite: int = 0  # in batches whose gradient was not finite
    set_aside: list[tuple[str, str]] = field(default_factory=list)  # (sequence id, reason)
    nonfinite: list[tuple[int, list[str]]] = field(default_factory=list)  # (step, sequence ids)


Tensors = Mapping[str, torch.Tensor]


def save(folder: Path, identity: str, state: TrainState, model: Tensors, optimizer: Tensors) -> Path:
    """Write `folder/step-XXXXXXXX` of the run `identity` and return it."""
    final = folder / f"step-{state.step:08d}"
    beside = folder / f".{final.name}.partial"
    remove(beside)
    beside.mkdir(parents=True)
    for name, tensors in ((MODEL, model), (OPTIMIZER, optimizer)):
        save_file({key: value.cpu().contiguous() for key, value in tensors.items()}, beside / name)
        _sync(beside / name)
    sizes = {name: (beside / name).stat().st_size for name in (MODEL, OPTIMIZER)}
    write_json(beside / STATE, {"identity": identity, "sizes_bytes": sizes, "state": asdict(state)})
    _sync(beside)
    remove(final)
    beside.rename(final)
    _sync(folder)
    return final


def newest(folder: Path, identity: str) -> Path | None:
    """The newest complete checkpoint of the run `identity`; newer ones that are not are named in the log."""
    for path in reversed(list(_checkpoints(folder))):
        problem = _problem(path, identity)
        if problem is None:
            return path
        logger.warning("%s: skipped, %s", path, problem)
    return None


def load(path: Path) -> tuple[TrainState, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """State, model tensors and optimizer tensors of a complete checkpoint."""
    values = json.loads((path / STATE).read_text(encoding="utf-8"))["state"]
    values["set_aside"] = [(str(id_), str(reason)) for id_, reason in values["set_aside"]]
    values["nonfinite"] = [(int(step), list(ids)) for step, ids in values["nonfinite"]]
    state = TrainState(**{f.name: values[f.name] for f in fields(TrainState)})
    return state, load_file(path / MODEL), load_file(path / OPTIMIZER)


def prune(folder: Path, identity: str, keep: int) -> None:
    """Delete complete checkpoints of the run `identity` but the `keep` newest; touch nothing else."""
    complete = [path for path in _checkpoints(folder) if _problem(path, identity) is None]
    for path in complete[: -max(1, keep)]:
        remove(path)


def _checkpoints(folder: Path) -> Iterator[Path]:
    """Folders that are named like checkpoints, oldest first."""
    if folder.is_dir():
        yield from sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir())


def _problem(path: Path, identity: str) -> str | None:
    """Why a folder cannot be resumed from, or None."""
    try:
        told = json.loads((path / STATE).read_text(encoding="utf-8"))
        if told["identity"] != identity:
            return f"it belongs to run {told['identity']}, not {identity}"
        for name, size in told["sizes_bytes"].items():
            if (found := (path / name).stat().st_size) != size:
                return f"{name} has {found} bytes, expected {size}"
    except (OSError, ValueError, KeyError) as error:
        return f"it is incomplete ({error!r})"
    return None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
