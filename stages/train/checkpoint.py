"""Training state on disk: `checkpoints/step-XXXXXXXX/`, safetensors and JSON only.

Every rank writes a part: whole tensors, or rows of them under `<name>@<first row>`, so that any number of
ranks reads what any other number wrote. Parts are written beside, synced, and shown by a rename;
`state.json` is the last file and lists size and SHA-256 of every part, so a folder without it, or whose
parts were cut or changed, is named and never chosen.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from stages.artifacts import file_digest, remove, write_json

logger = logging.getLogger(__name__)

STATE = "state.json"
SEAL = ".json"  # beside a part until all are written: its size and SHA-256, from whoever wrote it
NAME = re.compile(r"step-(\d{8})")
BESIDE = re.compile(r"\.step-\d{8}\.[0-9a-f]{8}")
JUDGED = "val_acceptance_length"


@dataclass
class TrainState:
    """What a run knows besides tensors: it grows with the steps and is part of every checkpoint.

    The step alone fixes the learning rate, the data that comes next and the anchors in it (they are
    drawn by step and sequence), so there is no generator whose state would have to be kept.
    """

    step: int = 0  # steps done
    visits_trained: int = 0
    visits_nonfinite: int = 0  # in batches whose loss or gradient was not finite
    set_aside: list[tuple[str, str]] = field(default_factory=list)  # (sequence id, reason)
    nonfinite: list[tuple[int, list[str]]] = field(default_factory=list)  # (step, sequence ids)
    best_step: int | None = None  # whose validation had the longest acceptance length
    best_values: dict[str, float] = field(default_factory=dict)  # what that validation measured
    validations_since_best: int = 0
    vocab_sha256: str | None = None  # of a reduced draft vocabulary

    def judge(self, values: Mapping[str, float]) -> bool:
        """Take up a validation after `step`; whether its acceptance length beats all before.

        One that cannot be compared (no block had all labels, or the value is not finite) is passed over.
        """
        found = values.get(JUDGED, math.nan)
        if not math.isfinite(found):
            return False
        if found > self.best_values.get(JUDGED, -math.inf):
            self.best_step, self.validations_since_best = self.step, 0
            self.best_values = {key: value for key, value in values.items() if math.isfinite(value)}
            return True
        self.validations_since_best += 1
        return False


Tensors = Mapping[str, torch.Tensor]


def own_rows(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    """(first row, rows) of what this rank holds of a tensor: all of it, unless it is sharded."""
    if not isinstance(tensor, DTensor):
        return 0, tensor
    size = -(-tensor.shape[0] // tensor.device_mesh.size())  # as torch.chunk cuts
    return min(size * tensor.device_mesh.get_local_rank(), tensor.shape[0]), tensor.to_local()


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def write_part(beside: Path, rank: int, world: int, rows: Tensors) -> None:
    """Write what one of `world` ranks has; keys are `<name>@<first row>`, tensors on the CPU."""
    beside.mkdir(parents=True, exist_ok=True)
    path = beside / _part(rank, world)
    save_file({key: value.contiguous() for key, value in rows.items()}, path)
    _sync(path)
    write_json(path.with_suffix(SEAL), [path.stat().st_size, file_digest(path)])


def complete(beside: Path, final: Path, identity: str, world: int, state: Mapping[str, Any]) -> None:
    """Once all parts are written: add the state (`asdict` of a TrainState), and show the folder."""
    files = {}
    for name in (_part(rank, world) for rank in range(world)):
        seal = (beside / name).with_suffix(SEAL)
        files[name] = json.loads(seal.read_text(encoding="utf-8"))
        seal.unlink()
    write_json(beside / STATE, {"identity": identity, "files": files, "state": state})
    _sync(beside)
    remove(final)
    beside.rename(final)
    _sync(final.parent)


def newest(folder: Path, identity: str) -> Path | None:
    """The newest whole checkpoint of the run `identity`; newer ones that are not are named in the log.

    Every byte is read. One whose best predecessor is gone does not count: the weights to export would be
    missing in the end.
    """
    for path in reversed(list(_checkpoints(folder))):
        problem = _problem(path, identity, contents=True)
        if problem is None:
            best = load_state(path).best_step
            if best is None or folder_name(best) == path.name:
                return path
            problem = _problem(folder / folder_name(best), identity, contents=True)
            if problem is None:
                return path
            problem = f"{folder_name(best)}, the best one so far, cannot be used: {problem}"
        logger.warning("%s: skipped, %s", path, problem)
    return None


def load_state(path: Path) -> TrainState:
    """The state of a complete checkpoint."""
    values = json.loads((path / STATE).read_text(encoding="utf-8"))["state"]
    values["set_aside"] = [(str(id_), str(reason)) for id_, reason in values["set_aside"]]
    values["nonfinite"] = [(int(step), list(ids)) for step, ids in values["nonfinite"]]
    return TrainState(**{f.name: values[f.name] for f in fields(TrainState)})


class Saved:
    """The tensors of a complete checkpoint, whoever wrote them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._index: dict[str, list[tuple[int, int | None, str]]] = {}  # name -> (first row, rows, file)
        for name in json.loads((path / STATE).read_text(encoding="utf-8"))["files"]:
            with safe_open(path / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118
                    shape = file.get_slice(key).get_shape()
                    tensor, _, first = key.rpartition("@")
                    self._index.setdefault(tensor, []).append((int(first), shape[0] if shape else None, name))

    @property
    def names(self) -> set[str]:
        return set(self._index)

    def scalar(self, name: str) -> torch.Tensor:
        """A tensor without rows."""
        (_, _, part), *_ = self._parts(name)
        with safe_open(self.path / part, framework="pt") as file:
            return file.get_tensor(f"{name}@0")

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Copy what this rank holds of `tensor`. Raises ValueError when rows of it are missing."""
        first, rows = own_rows(tensor.detach())
        end, filled = first + len(rows), 0
        for start, count, part in self._parts(name):
            low, high = max(first, start), min(end, start + (count or 0))
            if low < high:
                with safe_open(self.path / part, framework="pt") as file:
                    rows[low - first : high - first] = file.get_slice(f"{name}@{start}")[low - start : high - start]
                filled += high - low
        if filled != len(rows):
            raise ValueError(f"{self.path}: {name}: expected {len(rows)} rows from {first} on, found {filled}")

    def _parts(self, name: str) -> list[tuple[int, int | None, str]]:
        if name not in self._index:
            raise ValueError(f"{self.path}: expected a tensor {name}, found none; it is of another draft")
        return self._index[name]


def prune(folder: Path, identity: str, keep: int, best_step: int | None) -> None:
    """Delete complete checkpoints of the run `identity` but the `keep` newest and the best; touch nothing else."""
    done = [path for path in _checkpoints(folder) if _problem(path, identity) is None]
    for path in done[: -max(1, keep)]:
        if best_step is None or path.name != folder_name(best_step):
            remove(path)


def sweep(folder: Path) -> None:
    """Delete what killed processes left half-written."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if BESIDE.fullmatch(path.name):
            remove(path)


def _part(rank: int, world: int) -> str:
    return f"part-{rank:05d}-of-{world:05d}.safetensors"


def _checkpoints(folder: Path) -> Iterator[Path]:
    """Folders that are named like checkpoints, oldest first."""
    if folder.is_dir():
        yield from sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir())


def _problem(path: Path, identity: str, *, contents: bool = False) -> str | None:
    """Why a folder cannot be resumed from, or None; with `contents` its parts are read as well."""
    try:
        told = json.loads((path / STATE).read_text(encoding="utf-8"))
        if told["identity"] != identity:
            return f"it belongs to run {told['identity']}, not {identity}"
        for name, (size, sha256) in told["files"].items():
            if (found := (path / name).stat().st_size) != size:
                return f"{name} has {found} bytes, expected {size}"
            if contents and file_digest(path / name) != sha256:
                return f"{name} has other contents than were written"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"it is incomplete ({error!r})"
    return None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
