"""Order, optimiser, checkpoints, and whole runs: killed and resumed, split over ranks, poisoned, overfitted."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import operator
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from stages.artifacts import remove
from stages.corpus import TokenSequence
from stages.draft.checkpoint import load_draft
from stages.draft.model import build_draft, trainable
from stages.draft.speculate import draft_blocks
from stages.engine.config import EngineConfig
from stages.hidden_states.config import HiddenStatesConfig
from stages.hidden_states.wire import HiddenBatch, HiddenStatesError, HiddenStatesReader
from stages.train import checkpoint, stage
from stages.train.checkpoint import TrainState
from stages.train.data import Order, usable
from stages.train.fit import fit
from stages.train.loop import TrainError, TrainJob, train
from stages.train.optimizer import Gradients, Optimizer, lr_factor
from tests.stages.draft_helpers import (
    CONFIG,
    DRAFT,
    SHAPE,
    FakeReader,
    greedy_sequences,
    make_job,
    packed,
    random_sequences,
    write_target,
)

SEQUENCES = 11  # of which one validates: steps of 4, 4 and 2 sequences


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run_one(job: TrainJob, **reader: object) -> dict[str, dict[str, object]]:
    """Train in this process and return `result.json`."""
    train(job, lambda: FakeReader(job.target.folder, **reader), torch.device("cpu"))
    return json.loads((job.out.path / "result.json").read_text())


def run_ranks(root: Path, world: int, attempt: str, kill_at: int | None = None) -> list[int]:
    """Train in `world` processes; their exit codes."""
    extra = [] if kill_at is None else [str(kill_at)]
    command = [sys.executable, "-m", "tests.stages.train_worker", str(root)]
    ranks = [subprocess.Popen([*command, str(rank), str(world), attempt, *extra]) for rank in range(world)]
    return [rank.wait(timeout=300) for rank in ranks]


def test_order_is_a_permutation_of_every_epoch_whatever_the_split() -> None:
    order = Order(num_sequences=10, batch_sequences=4, epochs=3, max_steps=None, seed=5)
    assert (order.steps_per_epoch, order.total_steps, order.visits) == (3, 9, 30)
    epochs = [np.concatenate([order.batch(step) for step in range(3 * e, 3 * e + 3)]).tolist() for e in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert (
        order.batch(4).tolist()
        == Order(10, 4, 3, None, 5).batch(4).tolist()
        != Order(10, 4, 3, None, 6).batch(4).tolist()
    )
    shares = [order.batch(2)[rank::4].tolist() for rank in range(4)]
    assert sorted(functools.reduce(operator.iadd, shares, [])) == sorted(order.batch(2).tolist())
    assert [] in shares
    assert Order(10, 4, 3, 5, 5).visits == sum(len(order.batch(step)) for step in range(5))


def test_sequences_without_supervision_are_dropped_and_counted() -> None:
    def sequence(name: str, mask: list[int]) -> TokenSequence:
        return TokenSequence(name, "d", np.arange(len(mask), dtype=np.int32), np.array(mask, dtype=bool))

    made = [
        sequence("good", [0, 1, 1, 1]),
        sequence("cut", [0, 0, 0, 1, 1]),
        sequence("none", [0, 0]),
        sequence("single", [0, 1, 0]),
    ]
    data = usable(made, 3)
    assert [s.id for s in data.sequences] == ["good"]
    assert len(data.sequences[0]) == 3
    assert data.counts == {
        "sequences_in": 4,
        "sequences_used": 1,
        "dropped_truncated_away": 1,
        "dropped_unsupervised": 2,
    }


def test_learning_rate_is_a_function_of_the_step() -> None:
    cosine = [lr_factor(step, 10, 0.2, "cosine") for step in range(10)]
    assert cosine[:3] == [0.5, 1.0, 1.0]
    assert cosine == sorted(cosine[:2]) + sorted(cosine[2:], reverse=True)
    assert lr_factor(6, 10, 0.2, "cosine") == pytest.approx(0.5)
    assert lr_factor(10, 10, 0.2, "cosine") == pytest.approx(0)
    assert lr_factor(6, 10, 0.2, "linear") == pytest.approx(0.5)
    assert lr_factor(9, 10, 0.2, "constant") == 1
    assert lr_factor(0, 1, 0.0, "cosine") == 1


def test_incomplete_checkpoints_are_skipped_by_name_and_foreign_files_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = {"a": torch.arange(5.0)}
    for step in range(1, 7):
        checkpoint.save(tmp_path, "id", TrainState(step=step), tensors, {"a|step": torch.tensor(float(step))})
    (tmp_path / "step-00000006" / "state.json").unlink()
    os.truncate(tmp_path / "step-00000005" / "model.safetensors", 10)
    checkpoint.save(tmp_path, "other", TrainState(step=7), tensors, {})
    (tmp_path / "step-notes").mkdir()
    (tmp_path / "notes.txt").write_text("mine")

    with caplog.at_level(logging.WARNING):
        found = checkpoint.newest(tmp_path, "id")
    assert found == tmp_path / "step-00000004"
    assert [f"step-0000000{i}" in caplog.text for i in (4, 5, 6, 7)] == [False, True, True, True]
    state, model, optimizer = checkpoint.load(found)
    assert state.step == 4
    assert torch.equal(model["a"], tensors["a"])
    assert optimizer["a|step"] == 4
    checkpoint.prune(tmp_path, "id", keep=2)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*(f"step-0000000{i}" for i in (3, 4, 5, 6, 7)), "step-notes", "notes.txt"}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_optimizer_state_survives_a_checkpoint_bit_for_bit(kind: str, tmp_path: Path, group: None) -> None:
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

    straight, gradients, optimizer = start()
    advance(gradients, optimizer, range(6))
    assert float(gradients.flat.norm()) == pytest.approx(1.0)

    first, gradients, optimizer = start()
    advance(gradients, optimizer, range(3))
    path = checkpoint.save(
        tmp_path / "checkpoints",
        "id",
        TrainState(step=3),
        {n: p.detach() for n, p in first.items()},
        optimizer.tensors(),
    )
    second, gradients, optimizer = start()
    state, weights, moments = checkpoint.load(path)
    for name, parameter in second.items():
        parameter.data.copy_(weights[name])
    optimizer.load(moments)
    advance(gradients, optimizer, range(state.step, 6))
    assert all(torch.equal(straight[name], second[name]) for name in straight)
    assert {"adamw": "layers.0.mlp.up_proj.weight|exp_avg", "muon": "layers.0.mlp.up_proj.weight|momentum_buffer"}[
        kind
    ] in moments
    assert moments["fc.weight|step"] == 3
    assert optimizer.tensors()["fc.weight|step"] == 6


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workspace of a run of two ranks that nothing interrupted."""
    root = tmp_path_factory.mktemp("straight")
    make_job(root, CONFIG, random_sequences(SEQUENCES, 20))
    assert run_ranks(root, 2, "a") == [0, 0]
    return root / "draft.partial"


def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path, straight: Path) -> None:
    """Two ranks are killed in their fifth step; the rerun starts from step 4 and ends with the same bytes."""
    make_job(tmp_path, CONFIG, random_sequences(SEQUENCES, 20))
    # two batches a step and rank until the third step, which has one; validation (rank 0 only) another
    assert run_ranks(tmp_path, 2, "a", kill_at=8) != [0, 0]
    broken = tmp_path / "draft.partial"
    assert not (broken / "result.json").exists()
    assert [path.name for path in sorted((broken / "checkpoints").iterdir())] == ["step-00000002", "step-00000004"]
    assert run_ranks(tmp_path, 2, "b") == [0, 0]

    for file in (
        "checkpoint/model.safetensors",
        *(f"checkpoints/step-00000009/{name}" for name in ("model.safetensors", "optimizer.safetensors")),
    ):
        assert (straight / file).read_bytes() == (broken / file).read_bytes(), file
    results = [json.loads((folder / "result.json").read_text()) for folder in (straight, broken)]
    assert results[0]["counts"] == results[1]["counts"]
    assert results[0]["facts"] == results[1]["facts"]
    rows = [
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (straight, broken)
    ]
    steps = [[row["step"] for row in part] for part in rows]
    assert steps[0] == steps[1] == [1, 2, 3, 3, 4, 5, 6, 6, 7, 8, 9, 9]  # one axis, validation after steps 3, 6 and 9
    assert [row["values"].get("loss") for row in rows[0]] == [row["values"].get("loss") for row in rows[1]]


def test_two_ranks_train_as_one(tmp_path: Path, straight: Path, group: None) -> None:
    job = make_job(tmp_path, CONFIG, random_sequences(SEQUENCES, 20))
    one = run_one(job)
    two = json.loads((straight / "result.json").read_text())
    assert one["counts"] == two["counts"]
    rows = [
        [json.loads(line)["values"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (job.out.path, straight)
    ]
    steps = [(alone, split) for alone, split in zip(*rows, strict=True) if "loss" in alone]
    assert len(steps) == 9
    for key in ("loss", "grad_norm", "accept_rate_3", "val_loss"):
        for alone, split in zip(*rows, strict=True):
            assert (key in alone) == (key in split)
            assert alone.get(key, 0.0) == pytest.approx(split.get(key, 0.0), rel=1e-3), key


def test_poisoned_states_skip_the_step_everywhere_and_are_named(tmp_path: Path, group: None) -> None:
    config = replace(CONFIG, batch_sequences=1, epochs=1)
    job = make_job(tmp_path, config, random_sequences(SEQUENCES, 20))
    result = run_one(job, poisoned=frozenset({"s3", "s7"}))
    assert result["counts"]["steps_nonfinite"] == result["counts"]["visits_skipped_nonfinite"] == 2
    assert result["counts"]["visits_trained"] == 8
    assert result["counts"]["visits_planned"] == 10
    assert sorted(id_ for _, ids in result["facts"]["nonfinite_steps"] for id_ in ids) == ["s3", "s7"]
    assert all(
        torch.isfinite(tensor).all() for tensor in load_file(job.out.path / "checkpoint" / "model.safetensors").values()
    )


def test_too_many_poisoned_steps_end_the_run(tmp_path: Path, group: None) -> None:
    job = make_job(tmp_path, replace(CONFIG, batch_sequences=1, epochs=2), random_sequences(SEQUENCES, 20))
    with pytest.raises(TrainError, match="11 steps had no finite gradient"):
        run_one(job, poisoned=frozenset(f"s{i}" for i in range(6)))


def test_set_aside_sequences_are_counted_by_reason(tmp_path: Path, group: None) -> None:
    job = replace(make_job(tmp_path, CONFIG, random_sequences(SEQUENCES, 20)), max_set_aside_share=0.5)
    result = run_one(job, set_aside=frozenset({"s2"}))
    assert result["counts"]["visits_set_aside"] == result["counts"]["visits_set_aside_lost"] == 3
    assert result["counts"]["visits_trained"] == 27
    assert result["facts"]["set_aside"] == [["s2", "lost: gone for good"]] * 3


def test_too_many_set_aside_end_the_run_also_over_a_restart(tmp_path: Path, group: None) -> None:
    """One is allowed; the second comes after a restart, which the reader knows nothing of."""
    job = make_job(tmp_path, replace(CONFIG, epochs=1), random_sequences(SEQUENCES, 20))  # steps of 4, 4 and 2
    order = Order(SEQUENCES - 1, 4, 1, None, CONFIG.seed)
    first, second = (f"s{order.batch(step)[0]}" for step in (0, 2))
    run_one(job, set_aside=frozenset({first}))
    remove(job.out.path / "checkpoints" / "step-00000003")
    with pytest.raises(HiddenStatesError, match=rf"2 of 10 .*max_set_aside_share=0\.01; the last, {second}: lost"):
        run_one(job, set_aside=frozenset({second}))


def test_a_finished_run_only_exports_again(tmp_path: Path, group: None) -> None:
    job = make_job(tmp_path, replace(CONFIG, epochs=1), random_sequences(SEQUENCES, 20))
    first = run_one(job)
    again = run_one(job, set_aside=frozenset(f"s{i}" for i in range(10)))  # would change everything, if it trained
    assert first["facts"] == again["facts"]
    assert first["counts"] == again["counts"]


def test_draft_memorises_four_sequences(tmp_path: Path, group: None) -> None:
    config = replace(
        CONFIG,
        epochs=200,
        max_steps=200,
        anchors_per_sequence=16,
        checkpoint_every_steps=1000,
        validate_every_steps=1000,
    )
    sequences = greedy_sequences(write_target(tmp_path / "writer"), 4, 24)
    job = make_job(tmp_path, config, [*sequences, sequences[0]])
    result = run_one(job)
    assert result["metrics"]["val_greedy_acceptance_length"] > 4.7  # 5 is perfect: a block of 4 and the bonus token
    assert result["metrics"]["val_acceptance_length"] > 3.0

    draft = load_draft(job.out.path / "checkpoint", job.target.folder)
    anchors = torch.arange(4, 19)
    drafted = draft_blocks(draft, packed(job.target.folder, sequences[:1]), anchors).tokens_AB
    written = torch.from_numpy(sequences[0].input_ids).long()[anchors[:, None] + torch.arange(1, 5)]
    accepted = (drafted == written).long().cumprod(dim=1).sum(dim=1).float()
    assert accepted.mean() > 3.7  # free-running, from the exported files


def _checked(change: dict[str, object], tmp_path: Path, **other: object) -> None:
    job = make_job(tmp_path, replace(CONFIG, **change), random_sequences(SEQUENCES, 20))
    arguments = {"draft": DRAFT, "engine": EngineConfig(max_model_len=64), "hidden_states": HiddenStatesConfig()}
    stage.run(job.config, job.target, job.corpus, out=job.out, **(arguments | other))


@pytest.mark.parametrize(
    ("change", "other", "problem"),
    [
        ({"max_sequence_tokens": 4}, {}, "no training sequence"),
        ({}, {"engine": EngineConfig(max_model_len=29)}, "engine.max_model_len=29"),
        ({}, {"draft": replace(DRAFT, max_positions=30)}, "draft.max_positions=30"),
        (
            {},
            {"draft": replace(DRAFT, mask_token_id=int(random_sequences(1, 20)[0].input_ids[5]))},
            "sequence s0 contains it",
        ),
        # 30 tokens of 3 layers and 64 bfloat16, and the trailer; a rank of two has half of 12000 bytes
        (
            {},
            {"hidden_states": HiddenStatesConfig(segment_gib=12000 / 2**30, window_share=1.0)},
            "object of .* to 6000",
        ),
        ({}, {"draft": replace(DRAFT, mask_token_id=None)}, "draft.mask_token_id: must be set"),
    ],
)
def test_what_cannot_work_is_refused_before_any_process(
    change: dict[str, object], other: dict[str, object], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=problem):
        _checked(change, tmp_path, **other)


class KillOnce:
    """Opens readers; the first group's rank 1 (the one to take the marker) dies in its third step."""

    def __init__(self, folder: Path, marker: Path) -> None:
        self.folder, self.marker = folder, marker

    def __call__(self, num_ranks: int) -> HiddenStatesReader:
        assert num_ranks == 2
        kill_at = None
        if dist.get_rank() == 1 and not self.marker.exists():
            self.marker.touch()
            kill_at = 6
        return FakeReader(self.folder, kill_at=kill_at)


class Poisoned:
    """Opens readers of which every batch is poisoned."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, num_ranks: int) -> HiddenStatesReader:
        return FakeReader(self.folder, poisoned=frozenset(f"s{i}" for i in range(SEQUENCES)))


class Refused:
    """Opens readers of which rank 1's finds its states gone; the other one waits for rank 1 in a collective."""

    def __init__(self, target: Path, opened: Path) -> None:
        self.target, self.opened = target, opened

    def __call__(self, num_ranks: int) -> HiddenStatesReader:
        with self.opened.open("a") as file:
            file.write(f"{dist.get_rank()}\n")
        return GoneReader(self.target) if dist.get_rank() == 1 else FakeReader(self.target)


class GoneReader(FakeReader):
    def read(self, batches: Iterable[Sequence[TokenSequence]]) -> Iterator[HiddenBatch]:
        yield from itertools.islice(super().read(batches), 2)
        raise HiddenStatesError("the store\nis gone")


class Stuck:
    """Opens readers that say their process id and never give a batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, num_ranks: int) -> HiddenStatesReader:
        (self.folder / f"{dist.get_rank()}.pid").write_text(str(os.getpid()))
        time.sleep(600)
        raise AssertionError("the group outlived its cancellation")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    path = os.pathsep.join(sys.path)
    ray.init(address="local", num_cpus=2, runtime_env={"env_vars": {"PYTHONPATH": path}}, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.e2e
def test_ray_restarts_a_killed_worker_and_the_weights_are_the_same(
    tmp_path: Path, straight: Path, cluster: None
) -> None:
    job = make_job(tmp_path, CONFIG, random_sequences(SEQUENCES, 20))
    fit(job, KillOnce(job.target.folder, tmp_path / "marker"))
    assert (tmp_path / "marker").exists()
    for file in ("checkpoint/model.safetensors", "checkpoints/step-00000009/optimizer.safetensors"):
        assert (job.out.path / file).read_bytes() == (straight / file).read_bytes()


@pytest.mark.e2e
def test_an_error_that_no_restart_helps_is_raised_as_it_is(tmp_path: Path, cluster: None) -> None:
    config = replace(CONFIG, batch_sequences=2, epochs=3, checkpoint_every_steps=1000)
    job = make_job(tmp_path, config, random_sequences(SEQUENCES, 20))
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(TrainError, match="11 steps had no finite gradient"):
        fit(job, Poisoned(job.target.folder))
    assert signal.getsignal(signal.SIGINT) == handler
    assert not (job.out.path / "result.json").exists()


@pytest.mark.e2e
def test_states_that_one_rank_cannot_have_end_the_run_without_a_restart(tmp_path: Path, cluster: None) -> None:
    job = make_job(tmp_path, CONFIG, random_sequences(SEQUENCES, 20))
    started = time.monotonic()
    with pytest.raises(HiddenStatesError, match=r"^the store is gone$"):
        fit(job, Refused(job.target.folder, tmp_path / "opened"))
    assert time.monotonic() - started < 120  # rank 0 did not wait for gloo's time-out of half an hour
    assert sorted((tmp_path / "opened").read_text().split()) == ["0", "1"]


@pytest.mark.e2e
def test_cancelling_the_driver_task_ends_every_worker(tmp_path: Path, cluster: None) -> None:
    job = make_job(tmp_path, CONFIG, random_sequences(SEQUENCES, 20))
    files = [tmp_path / f"{rank}.pid" for rank in range(2)]
    task = ray.remote(num_cpus=0)(fit).remote(job, Stuck(tmp_path))
    _until(lambda: all(file.exists() and file.read_text() for file in files), 180)
    ray.cancel(task, recursive=True)
    _until(lambda: not any(Path(f"/proc/{file.read_text()}").exists() for file in files), 60)
    _until(lambda: ray.available_resources().get("CPU") == 2, 60)


def _until(true: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)
