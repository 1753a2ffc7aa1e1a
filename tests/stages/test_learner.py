"""One step of the learner: its packing, its conventions, and a reduced vocabulary from corpus to checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from stages.corpus import TokenSequence
from stages.draft.anchors import sample_anchors
from stages.draft.batch import PackedBatch
from stages.draft.checkpoint import load_draft
from stages.draft.vocab import vocab_digest
from stages.train.job import TrainError
from stages.train.loop import Worker
from stages.train.stage import VOCAB, _vocab
from stages.train.step import Pass, micro_batches, run_pass
from tests.stages.draft_helpers import CONFIG, DRAFT, FakeReader, make_job, random_sequences
from tests.stages.train_helpers import SEQUENCES, group_of_one, run_one


@pytest.fixture
def group() -> Iterator[None]:
    with group_of_one():
        yield


def lengths(*tokens: int) -> list[TokenSequence]:
    return [TokenSequence(str(n), "", np.zeros(n, np.int32), np.ones(n, bool)) for n in tokens]


def test_micro_batches_hold_what_fits_in_the_order_given() -> None:
    def counts(*tokens: int) -> list[int]:
        sequences = lengths(*tokens)
        together = micro_batches(sequences, 10)
        assert [sequence for part in together for sequence in part] == sequences
        return [len(part) for part in together]

    assert counts(4, 4, 4, 9, 1, 8, 2) == [2, 1, 2, 2]
    assert counts(30, 30) == [1, 1]
    assert micro_batches([], 10) == []


@pytest.fixture
def worker(tmp_path: Path, group: None) -> Worker:
    """A rank whose batches hold sequences of 20 to 30 tokens, one of them without an anchor."""
    sequences = random_sequences(SEQUENCES, 20)
    sequences[2].loss_mask[:] = np.arange(22) % 2 == 0
    job = make_job(tmp_path, CONFIG, sequences)
    return Worker(job, FakeReader(job.target.folder), torch.device("cpu"))


def step(worker: Worker, sequences: list[TokenSequence], micro_batch_tokens: int = 8192) -> tuple[Pass, torch.Tensor]:
    """Sums of one pass, and the gradients of its numerator."""
    worker.weights.gradients.clear()
    together = micro_batches(sequences, micro_batch_tokens)
    taken = run_pass(worker.learner, worker.reader.read(together), len(together), (0,), backward=True)
    return taken, worker.weights.gradients.flat.clone()


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to 1e-6 of the largest value."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


def test_packing_changes_no_sum_and_no_gradient(worker: Worker) -> None:
    sequences = random_sequences(5, 20)
    alone, expected = step(worker, sequences, micro_batch_tokens=1)
    assert expected.abs().max() > 0
    for tokens in (50, 8192):
        taken, gradients = step(worker, sequences, tokens)
        close(taken.sums.flat(), alone.sums.flat())
        close(gradients, expected)
        again, same = step(worker, sequences, tokens)
        assert torch.equal(again.sums.flat(), taken.sums.flat())
        assert torch.equal(same, gradients)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_add_up_to_the_whole_batch(world: int, worker: Worker) -> None:
    """Five sequences: one rank of two has three, one of four has two; a last one has none that counts."""
    sequences = random_sequences(5, 20)
    whole, expected = step(worker, sequences)
    parts = [step(worker, sequences[rank::world]) for rank in range(world)]
    sums, gradients = parts[0][0].sums, sum(flat for _, flat in parts)
    for part, _ in parts[1:]:
        sums = sums + part.sums
    close(sums.flat(), whole.sums.flat())
    close(gradients / sums.weight, expected / whole.sums.weight)


def test_a_rank_without_an_anchor_takes_part_and_changes_nothing(worker: Worker) -> None:
    unanchored = random_sequences(3, 20)[2:]
    unanchored[0].loss_mask[:] = np.arange(22) % 2 == 0
    for share in ([], unanchored):
        taken, gradients = step(worker, share)
        assert taken.sequences == len(share)
        assert not taken.sums.flat().any()
        assert not gradients.any()


def test_every_supervised_token_after_a_supervised_one_is_a_label_of_some_block() -> None:
    """The first token of an answer never is: the target writes it in the prefill, before any draft."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        mask = rng.random(30) < 0.7
        anchors = sample_anchors(mask, 30, key=(0,))
        supervised = np.flatnonzero(mask[1:] & mask[:-1]) + 1
        assert (anchors + 1).tolist() == supervised.tolist()  # each is already the first label of its own block


def test_confidence_weight_zero_trains_as_without_a_head(tmp_path: Path) -> None:
    """Bit for bit, clipping included, from initialisation to the last step."""
    config = replace(CONFIG, confidence_weight=0.0, clip_norm=0.05)
    found = []
    for name, draft in (("with", DRAFT), ("without", replace(DRAFT, confidence_head=False))):
        job = make_job(tmp_path / name, config, random_sequences(SEQUENCES, 20), draft)
        run_one(job)
        (part,) = (job.out.path / "checkpoints/step-00000009").glob("part-*")
        found.append({name: tensor for name, tensor in load_file(part).items() if "|" not in name})
    with_head, without = found
    assert with_head.keys() - without.keys() == {f"confidence_head.proj.{name}@0" for name in ("weight", "bias")}
    assert all(torch.equal(with_head[name], tensor) for name, tensor in without.items())


def test_a_resumed_stage_keeps_its_vocabulary(tmp_path: Path) -> None:
    job = make_job(tmp_path, CONFIG, random_sequences(SEQUENCES, 20))
    (job.target.folder / "generation_config.json").write_text('{"eos_token_id": [254, 253]}')
    sequences = job.corpus.sequences("train")
    first = _vocab(50, sequences, job.target, job.out)
    assert (len(first), first[-2:].tolist()) == (50, [253, 254])
    assert first.tolist() == _vocab(50, sequences[:1], job.target, job.out).tolist()
    (job.out.path / VOCAB).unlink()
    assert first.tolist() != _vocab(50, sequences[:1], job.target, job.out).tolist()


def test_a_reduced_vocabulary_is_trained_and_exported(tmp_path: Path) -> None:
    draft, vocab = replace(DRAFT, vocab_size=60), np.arange(100, 160)
    job = make_job(tmp_path, replace(CONFIG, epochs=2), random_sequences(SEQUENCES, 20), draft)
    job = replace(job, vocab_W=vocab)
    result = run_one(job)
    loaded = load_draft(job.out.path / "checkpoint", job.target.folder)
    assert loaded.config.draft_vocab_size == 60
    assert load_file(job.out.path / "checkpoint" / "model.safetensors")["t2d"].nonzero()[:, 0].tolist() == list(vocab)
    # the random target's tokens are mostly outside, and no draft can be accepted on those
    assert 0 < result["metrics"]["val_accept_rate_1"] < 0.3
    with pytest.raises(TrainError, match=f"expected a draft vocabulary of digest .*, found {vocab_digest(vocab)}"):
        run_one(replace(job, vocab_W=vocab + 1))


def test_states_of_a_micro_batch_are_read_together_and_not_copied(worker: Worker) -> None:
    asked = list(worker._from(0))
    assert [len(together) for together in asked[:3]] == [4, 4, 1]  # a step each
    [batch] = worker.reader.read(asked[:1])
    packed = PackedBatch.from_hidden(batch)
    assert packed.aux_TLD.data_ptr() == batch.states_TLD.data_ptr()
    assert packed.final_TD.untyped_storage().data_ptr() == batch.states_TLD.untyped_storage().data_ptr()
