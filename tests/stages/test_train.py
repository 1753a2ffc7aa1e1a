"""Order, and whole runs in one process: poisoned, set aside, stopped early, overfitted, refused."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from stages.artifacts import remove
from stages.corpus import TokenSequence
from stages.draft.checkpoint import load_draft
from stages.draft.speculate import draft_blocks
from stages.engine.config import EngineConfig
from stages.hidden_states.config import HiddenStatesConfig
from stages.hidden_states.wire import HiddenBatch, HiddenStatesError
from stages.train import checkpoint, loop, stage
from stages.train.data import Order, usable
from stages.train.job import TrainError, TrainJob
from stages.train.step import Learner, Pass, run_pass
from tests.stages.draft_helpers import (
    CONFIG,
    DRAFT,
    WHY_LOST,
    greedy_sequences,
    make_job,
    packed,
    random_sequences,
    write_target,
)
from tests.stages.train_helpers import SEQUENCES, WEIGHTS, cut_one, rows, run_one, usual_job, weights


def test_order_is_a_permutation_of_every_epoch_whatever_the_split() -> None:
    order = Order(num_sequences=10, batch_sequences=4, epochs=3, max_steps=None, seed=5)
    assert (order.steps_per_epoch, order.total_steps, order.visits(9)) == (3, 9, 30)
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
    assert [order.visits(n) for n in (0, 1, 5)] == [sum(len(order.batch(step)) for step in range(n)) for n in (0, 1, 5)]


def test_sequences_without_supervision_are_dropped_and_counted() -> None:
    def sequence(name: str, mask: list[int]) -> TokenSequence:
        return TokenSequence(name, "d", np.arange(len(mask), dtype=np.int32), np.array(mask, dtype=bool))

    made = [
        sequence("good", [0, 1, 1, 1]),
        sequence("cut", [0, 0, 0, 1, 1]),
        sequence("none", [0, 0]),
        sequence("single", [0, 1, 0]),
        sequence("masked", [0, 1, 1]),
    ]
    made[-1].input_ids[1] = 77
    made[1].input_ids[4] = 77  # which is cut off
    data = usable(made, 3, mask_token_id=77)
    assert [s.id for s in data.sequences] == ["good"]
    assert len(data.sequences[0]) == 3
    assert data.counts == {
        "sequences_in": 5,
        "sequences_used": 1,
        "dropped_truncated_away": 1,
        "dropped_unsupervised": 2,
        "dropped_with_mask_token": 1,
    }
    assert data.masked == ("masked",)


def test_poisoned_states_skip_the_step_everywhere_and_are_named(tmp_path: Path) -> None:
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


def test_a_loss_that_is_not_finite_skips_the_step_though_its_gradient_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(learner: Learner, source: Iterator[HiddenBatch], count: int, key: object, **how: bool) -> Pass:
        taken = run_pass(learner, source, count, key, **how)
        endless = replace(taken.sums, total=taken.sums.total * float("inf"))
        return replace(taken, sums=endless) if key[-1] == 4 else taken

    monkeypatch.setattr(loop, "run_pass", lost)
    told = run_one(usual_job(tmp_path))
    assert told["facts"]["nonfinite_steps"][0][0] == 4
    assert (told["counts"]["steps_nonfinite"], told["counts"]["visits_skipped_nonfinite"]) == (1, 4)


def test_too_many_poisoned_steps_end_the_run_with_a_good_checkpoint(tmp_path: Path) -> None:
    job = usual_job(tmp_path, batch_sequences=1, max_nonfinite_steps=2, checkpoint_every_steps=1)
    order = Order(SEQUENCES - 1, 1, 1, None, CONFIG.seed)
    poisoned = frozenset(f"s{order.batch(step)[0]}" for step in (4, 5, 7))
    with pytest.raises(TrainError, match=r"3 steps had no finite loss and gradient \(train.max_nonfinite_steps=2\)"):
        run_one(job, poisoned=poisoned)
    found = checkpoint.newest(job.out.path / "checkpoints", "id")
    assert found is not None
    assert checkpoint.load_state(found).step == 7
    assert all(t.isfinite().all() for part in found.glob("part-*") for t in load_file(part).values())


def test_set_aside_sequences_are_counted_by_reason(tmp_path: Path) -> None:
    job = replace(usual_job(tmp_path), max_set_aside_share=0.5)
    result = run_one(job, set_aside=frozenset({"s2"}))
    assert result["counts"]["visits_set_aside"] == result["counts"]["visits_set_aside_mooncake_get"] == 3
    assert result["counts"]["visits_trained"] == 27
    assert result["facts"]["set_aside"] == [["s2", WHY_LOST]] * 3


def test_too_many_set_aside_end_the_run_also_over_a_restart(tmp_path: Path) -> None:
    """One is allowed; the second comes after a restart, which the reader knows nothing of."""
    job = usual_job(tmp_path, epochs=1)  # steps of 4, 4 and 2
    order = Order(SEQUENCES - 1, 4, 1, None, CONFIG.seed)
    first, second = (f"s{order.batch(step)[0]}" for step in (0, 2))
    run_one(job, set_aside=frozenset({first}))
    remove(job.out.path / "checkpoints" / "step-00000003")
    with pytest.raises(
        HiddenStatesError, match=rf"2 of 10 .*max_set_aside_share=0\.01; the last, {second}: 3 tries, the last: Moon"
    ):
        run_one(job, set_aside=frozenset({second}))


def test_a_finished_run_only_exports_again(tmp_path: Path) -> None:
    job = usual_job(tmp_path, epochs=1)
    first = run_one(job)
    again = run_one(job, set_aside=frozenset(f"s{i}" for i in range(10)))  # would change everything, if it trained
    assert first["facts"] == again["facts"]
    assert first["counts"] == again["counts"]


def test_early_stopping_exports_the_best_also_over_a_restart(tmp_path: Path) -> None:
    """Such a learning rate makes the draft worse after a few steps."""
    how = {"lr": 0.05, "validate_every_steps": 1, "early_stopping_validations": 3, "keep_checkpoints": 1, "epochs": 20}
    how["checkpoint_every_steps"] = 1
    job = usual_job(tmp_path / "straight", **how)
    told = run_one(job)
    best, steps = told["facts"]["exported_step"], told["counts"]["steps"]
    assert steps == best + 3 < 60
    lengths = {step: values["val_acceptance_length"] for step, values in rows(job.out.path) if "val_loss" in values}
    assert told["metrics"]["val_acceptance_length"] == lengths[best] == max(lengths.values())
    assert lengths[best] > lengths[steps]
    counts = told["counts"]
    assert counts["visits_planned"] == 200 == counts["visits_trained"] + counts["visits_stopped_early"]
    kept = job.out.path / "checkpoints"
    assert {path.name for path in kept.iterdir()} == {checkpoint.folder_name(step) for step in (best, steps)}
    fc = torch.zeros(64, 128)
    checkpoint.Saved(kept / checkpoint.folder_name(best)).fill("fc.weight", fc)
    assert torch.equal(load_file(job.out.path / WEIGHTS)["fc.weight"], fc.bfloat16())

    cut = usual_job(tmp_path / "cut", **how)
    cut_one(cut, at=4 * (best + 1))  # after the best
    again = run_one(cut)
    assert again["facts"] == told["facts"]
    assert again["counts"] == told["counts"]
    assert weights(cut) == weights(job)


def test_early_stopping_without_a_validation_split_is_refused(tmp_path: Path) -> None:
    silent = replace(random_sequences(1, 20)[0], loss_mask=np.zeros(20, dtype=bool))
    job = make_job(tmp_path, replace(CONFIG, early_stopping_validations=2), [*random_sequences(3, 20), silent])
    with pytest.raises(ValueError, match=r"early_stopping_validations=2: .* has no validation sequences"):
        _run(job)


def test_draft_memorises_four_sequences(tmp_path: Path) -> None:
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


def _run(job: TrainJob, **other: object) -> None:
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
            r"[2-9] of 11 sequences contain it, s0 first, hidden_states\.max_set_aside_share=0\.01",
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
        _run(usual_job(tmp_path, **change), **other)
