"""Checkpoints on disk, the thread that writes them, what is kept, and who can read them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from concurrent.futures import wait
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from stages.draft.model import build_draft, trainable
from stages.train import checkpoint
from stages.train.checkpoint import Saved, TrainState
from stages.train.job import TrainError
from stages.train.optimizer import Gradients, Optimizer, lr_factor
from stages.train.saving import Saver
from tests.stages.draft_helpers import CONFIG, DRAFT, SHAPE, write_target
from tests.stages.train_helpers import group_of_one

TENSORS = {"a": torch.arange(5.0), "a|step": torch.tensor(3.0)}
CPU = torch.device("cpu")


def save(folder: Path, identity: str, state: TrainState, tensors: Mapping[str, torch.Tensor] = TENSORS) -> Path:
    """What a run of one rank leaves."""
    final = folder / checkpoint.folder_name(state.step)
    checkpoint.write_part(folder / ".new", 0, 1, {f"{name}@0": tensor for name, tensor in tensors.items()})
    checkpoint.complete(folder / ".new", final, identity, 1, asdict(state))
    return final


def filled(saved: Saved, name: str, like: torch.Tensor) -> torch.Tensor:
    tensor = torch.full_like(like, torch.nan)
    saved.fill(name, tensor)
    return tensor


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_incomplete_checkpoints_are_skipped_by_name_and_foreign_files_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in range(1, 7):
        save(tmp_path, "id", TrainState(step=step, nonfinite=[(0, ["x"])], set_aside=[("y", "lost")]))
    (tmp_path / "step-00000006" / "state.json").unlink()
    os.truncate(tmp_path / "step-00000005" / "part-00000-of-00001.safetensors", 10)
    save(tmp_path, "id", TrainState(step=8))
    damaged = tmp_path / "step-00000008" / "part-00000-of-00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")  # of equal size
    save(tmp_path, "other", TrainState(step=7))
    (tmp_path / ".step-00000009.0123abcd").mkdir()
    (tmp_path / "step-notes").mkdir()
    (tmp_path / "notes.txt").write_text("mine")

    with caplog.at_level(logging.WARNING):
        found = checkpoint.newest(tmp_path, "id")
    assert found == tmp_path / "step-00000004"
    assert [f"step-0000000{i}" in caplog.text for i in (4, 5, 6, 7, 8)] == [False, True, True, True, True]
    assert "step-00000008: skipped, part-00000-of-00001.safetensors has other contents" in caplog.text
    assert checkpoint.load_state(found) == TrainState(step=4, nonfinite=[(0, ["x"])], set_aside=[("y", "lost")])
    assert torch.equal(filled(Saved(found), "a", TENSORS["a"]), TENSORS["a"])
    assert Saved(found).scalar("a|step") == 3
    checkpoint.sweep(tmp_path)
    checkpoint.prune(tmp_path, "id", keep=2, best_step=1)  # looks at sizes only
    assert names(tmp_path) == {*(f"step-0000000{i}" for i in (1, 4, 5, 6, 7, 8)), "step-notes", "notes.txt"}
    assert names(found) == {"state.json", "part-00000-of-00001.safetensors"}


def test_a_checkpoint_without_its_best_predecessor_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, "id", TrainState(step=2, best_step=2))
    best = save(tmp_path, "id", TrainState(step=4, best_step=4))
    newest = save(tmp_path, "id", TrainState(step=6, best_step=4))
    assert checkpoint.newest(tmp_path, "id") == newest
    (best / "part-00000-of-00001.safetensors").unlink()
    assert checkpoint.newest(tmp_path, "id") == tmp_path / "step-00000002"
    assert "step-00000006: skipped, step-00000004, the best one so far, cannot be used" in caplog.text


def test_rows_of_three_writers_are_read_by_any_number(tmp_path: Path) -> None:
    whole = torch.arange(14.0).view(7, 2)
    for rank, first in enumerate((0, 3, 6)):
        checkpoint.write_part(tmp_path / ".new", rank, 3, {f"w@{first}": whole[first : first + 3]})
    checkpoint.complete(tmp_path / ".new", tmp_path / "step-00000001", "id", 3, asdict(TrainState(step=1)))
    saved = Saved(tmp_path / "step-00000001")
    assert torch.equal(filled(saved, "w", whole), whole)
    with pytest.raises(ValueError, match="w: expected 8 rows from 0 on, found 7"):
        filled(saved, "w", torch.zeros(8, 2))
    with pytest.raises(ValueError, match="expected a tensor v, found none"):
        filled(saved, "v", whole)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_optimizer_state_survives_a_checkpoint_bit_for_bit(kind: str, tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    config = replace(CONFIG, optimizer=kind, weight_decay=0.01)

    def start() -> tuple[dict[str, torch.nn.Parameter], Gradients, Optimizer]:
        parameters = trainable(build_draft(DRAFT, SHAPE, tmp_path / "target", verifier="x", seed=0))
        return parameters, Gradients(parameters), Optimizer(parameters, config)

    def advance(gradients: Gradients, optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            gradients.flat.copy_(torch.randn(gradients.flat.shape, generator=torch.Generator().manual_seed(step)))
            gradients.clip(gradients.reduce(1.0), 1.0)
            optimizer.step(lr_factor(step, 6, 0.2, "cosine"))

    with group_of_one():
        straight, gradients, optimizer = start()
        advance(gradients, optimizer, range(6))
        assert float(gradients.flat.norm()) == pytest.approx(1.0)

        first, gradients, optimizer = start()
        advance(gradients, optimizer, range(3))
        tensors = {**{name: parameter.detach() for name, parameter in first.items()}, **optimizer.tensors()}
        saved = Saved(save(tmp_path, "id", TrainState(step=3), tensors))
        second, gradients, optimizer = start()
        for name, parameter in second.items():
            saved.fill(name, parameter)
        optimizer.load(saved)
        advance(gradients, optimizer, range(3, 6))
    assert all(torch.equal(straight[name], second[name]) for name in straight)
    moment = {"adamw": "exp_avg", "muon": "momentum_buffer"}[kind]
    assert f"layers.0.mlp.up_proj.weight|{moment}" in saved.names
    assert saved.scalar("fc.weight|step") == 3
    assert optimizer.tensors()["fc.weight|step"] == 6
    some = {name: tensor for name, tensor in tensors.items() if not name.startswith("fc.weight|")}
    with pytest.raises(ValueError, match=r"fc\.weight: expected its optimizer state, found none"):
        optimizer.load(Saved(save(tmp_path, "id", TrainState(step=4), some)))


def test_a_checkpoint_is_written_while_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write, write = threading.Event(), checkpoint.write_part

    def held(*args: object) -> None:
        assert may_write.wait(30)
        write(*args)

    monkeypatch.setattr(checkpoint, "write_part", held)
    weight = torch.zeros(3)
    with group_of_one():
        saver = Saver(tmp_path, "id", 1, CPU)
        saver.save(TrainState(step=1), {"w": weight})
        weight += 1
        assert not saver.agree()
        assert checkpoint.newest(tmp_path, "id") is None  # still being written, from a copy
        may_write.set()
        saver.save(TrainState(step=2), {"w": weight})  # waits for the first
        assert names(tmp_path) >= {"step-00000001"}
        assert torch.equal(filled(Saved(tmp_path / "step-00000001"), "w", weight), torch.zeros(3))
        assert saver.agree(stop=True)
        saver.finish()
    assert names(tmp_path) == {"step-00000002"}
    assert torch.equal(filled(Saved(tmp_path / "step-00000002"), "w", weight), torch.ones(3))


@pytest.mark.parametrize("which", ["write_part", "complete"])
def test_an_error_while_writing_is_raised_at_the_next_step(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, which, full)
    with group_of_one():
        saver = Saver(tmp_path, "id", 1, CPU)
        saver.save(TrainState(step=1), TENSORS)
        with pytest.raises(TrainError, match=r"a checkpoint could not be written \(\[Errno 28\] No space left"):
            saver.finish()


def test_a_checkpoint_that_could_not_be_completed_when_asked_to_stop_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "complete", full)
    with group_of_one():
        saver = Saver(tmp_path, "id", 1, CPU)
        saver.save(TrainState(step=1), TENSORS)
        wait([saver._writing])
        assert saver.agree(stop=True)
        with pytest.raises(TrainError, match=r"a checkpoint could not be written \(\[Errno 28\] No space left"):
            saver.finish()
