"""The loss by hand, its independence of how a batch is split, and what the confidence head may move."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from speculators.models.dspark import DSparkDraftModel

import stages.draft.vocab_loss as vocab_loss_module
from stages.draft.anchors import sample_anchors
from stages.draft.batch import PackedBatch
from stages.draft.config import DraftConfig
from stages.draft.loss import LossSums, LossWeights, block_sums, draft_loss, metrics, position_weights
from stages.draft.model import build_draft, trainable
from stages.draft.vocab_loss import Answers, Factors, prediction_terms
from stages.target import TargetHead, load_head
from tests.stages.draft_helpers import DRAFT, SHAPE, packed, random_sequences, write_target

WEIGHTS = LossWeights(ce=0.1, l1=0.9, confidence=1.0, decay_gamma=4.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def head(target: Path) -> TargetHead:
    return load_head(target)


@pytest.fixture(scope="module")
def documents(target: Path) -> list[PackedBatch]:
    return packed(target, random_sequences(4, 18)).documents()


def make(target: Path, config: DraftConfig = DRAFT) -> DSparkDraftModel:
    return build_draft(config, SHAPE, target, verifier="x", seed=0)


def anchors_of(batch: PackedBatch) -> torch.Tensor:
    return torch.from_numpy(sample_anchors(batch.loss_mask_T.numpy(), 5, key=(batch.ids[0],)))


def gradients(model: DSparkDraftModel, total: torch.Tensor) -> dict[str, torch.Tensor]:
    parameters = trainable(model)
    found = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(parameters.items(), found, strict=True)
    }


def block_loss(
    logits_ABW: torch.Tensor,
    target_ABW: torch.Tensor,
    confidence_AB: torch.Tensor,
    data_AB: torch.Tensor,
    labels_AB: torch.Tensor,
    weights: LossWeights,
) -> LossSums:
    """The sums of `draft_loss` from what its parts would say of every prediction."""
    flat = labels_AB.flatten().nonzero()[:, 0]
    factors = Factors(weights.ce, weights.l1, weights.ce_label == "data")
    target = target_ABW.flatten(0, 1)[flat]
    terms = prediction_terms(
        logits_ABW.flatten(0, 1)[flat].clone(),
        Answers(target, 1 - target.sum(-1), target.argmax(-1)),
        data_AB.flatten()[flat],
        weights_N := position_weights(flat % labels_AB.shape[1], weights.decay_gamma),
        factors,
    )
    total = ((weights.ce * terms.ce_N + weights.l1 * terms.l1_N) * weights_N).sum()
    return block_sums(total, terms, confidence_AB.flatten()[flat], flat, labels_AB, weights)


def test_loss_by_hand() -> None:
    """One block of two predictions over two tokens: p_d = (3/4, 1/4), (1/2, 1/2); p_t = (1/2, 1/2), (1, 0)."""
    logits = torch.tensor([[[math.log(3.0), 0.0], [0.0, 0.0]]])
    target = torch.tensor([[[0.5, 0.5], [1.0, 0.0]]])
    confidence = torch.tensor([[0.0, math.log(3.0)]])  # 1/2 and 3/4
    data, labels = torch.tensor([[0, 1]]), torch.tensor([[True, True]])
    sums = block_loss(logits, target, confidence, data, labels, replace(WEIGHTS, decay_gamma=2.0))

    second = math.exp(-0.5)
    assert sums.weight.item() == pytest.approx(1 + second)
    assert sums.ce.item() == pytest.approx(-math.log(0.75) + second * math.log(2))
    assert sums.l1.item() == pytest.approx(0.5 + second * 1.0)  # accept rates 3/4 and 1/2
    bce = math.log(2) + second * -(0.5 * math.log(0.75) + 0.5 * math.log(0.25))
    assert sums.confidence.item() == pytest.approx(bce, rel=1e-6)
    assert sums.total.item() == pytest.approx(0.1 * sums.ce.item() + 0.9 * sums.l1.item() + bce, rel=1e-6)
    assert sums.accept_rate_B.tolist() == pytest.approx([0.75, 0.5])
    assert sums.accepted.item() == pytest.approx(1 + 0.75 + 0.75 * 0.5)
    assert sums.greedy_accepted.item() == 3  # ties go to the first token, in draft and target alike
    assert sums.accuracy_B.tolist() == [1, 0]
    assert sums.confidence_error.item() == pytest.approx(0.25 + 0.25)
    assert metrics(sums, WEIGHTS)["loss_l1"] == pytest.approx((0.5 + second) / (1 + second))


def test_unlabelled_predictions_count_for_nothing() -> None:
    labels, target = torch.tensor([[True, False]]), torch.tensor([[[0.5, 0.5], [1.0, 0.0]]])
    made = []
    for unlabelled in (0.0, 5.0):
        logits = torch.tensor([[[1.0, 0.0], [unlabelled, 0.0]]])
        made.append(
            block_loss(logits, target, torch.tensor([[0.0, unlabelled]]), torch.tensor([[0, 1]]), labels, WEIGHTS)
        )
    sums = made[0]
    assert torch.equal(sums.flat(), made[1].flat())
    assert sums.weight.item() == 1
    assert sums.labels_B.tolist() == [1, 0]
    assert sums.whole_blocks.item() == 0
    assert sums.accepted.item() == 0
    assert "acceptance_length" not in metrics(sums, WEIGHTS)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_gradients_do_not_depend_on_the_split(
    world: int, target: Path, head: TargetHead, documents: list[PackedBatch]
) -> None:
    """Whole batch in one packed pass against documents dealt to ranks, each with its local numerator."""
    model = make(target)
    joined = packed(target, random_sequences(4, 18))
    offsets = [int((joined.documents_T < i).sum()) for i in range(4)]
    all_anchors = torch.cat([anchors_of(d) + o for d, o in zip(documents, offsets, strict=True)])
    whole = draft_loss(model, head, joined, all_anchors, WEIGHTS)
    expected = gradients(model, whole.total / whole.weight)

    dealt = [draft_loss(model, head, document, anchors_of(document), WEIGHTS) for document in documents]
    denominator = sum(sums.weight for sums in dealt)
    torch.testing.assert_close(denominator, whole.weight)
    found = {name: torch.zeros_like(p) for name, p in trainable(model).items()}
    for rank in range(world):
        for sums in dealt[rank::world]:
            for name, gradient in gradients(model, sums.total / denominator).items():
                found[name] += gradient
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-7)
    assert max(g.abs().max() for g in expected.values()) > 1e-3


def test_the_denominator_is_not_the_ranks_own(target: Path, head: TargetHead, documents: list[PackedBatch]) -> None:
    """Ranks with unequal supervision: the mean of local means is another loss."""
    model, few, many = make(target), documents[0], documents[1]
    a = draft_loss(model, head, few, torch.tensor([15]), WEIGHTS)
    b = draft_loss(model, head, many, anchors_of(many), WEIGHTS)
    pooled, local = (a + b).total / (a + b).weight, (a.total / a.weight + b.total / b.weight) / 2
    assert abs((pooled - local).item()) > 1e-4


def test_a_rank_without_anchors_contributes_zero(target: Path, head: TargetHead, documents: list[PackedBatch]) -> None:
    model, none = make(target), torch.zeros(0, dtype=torch.long)
    empty = draft_loss(model, head, documents[0], none, WEIGHTS)
    assert not empty.flat().any()
    some = draft_loss(model, head, documents[1], anchors_of(documents[1]), WEIGHTS)
    assert torch.equal((some + empty).flat(), some.flat())
    again = LossSums.from_flat(some.flat(), 4)
    assert torch.equal(again.flat(), some.flat())
    assert metrics(again, WEIGHTS)["loss"] == pytest.approx((some.total / some.weight).item())


def test_confidence_weight_zero_equals_no_head(target: Path, head: TargetHead, documents: list[PackedBatch]) -> None:
    off = replace(WEIGHTS, confidence=0.0)
    with_head, without = make(target), make(target, replace(DRAFT, confidence_head=False))
    values = trainable(with_head)
    for name, parameter in trainable(without).items():
        parameter.data.copy_(values[name])
    batch, anchors = documents[0], anchors_of(documents[0])
    a, b = draft_loss(with_head, head, batch, anchors, off), draft_loss(without, head, batch, anchors, off)
    assert torch.equal(a.total, b.total)
    grads_a, grads_b = gradients(with_head, a.total), gradients(without, b.total)
    assert all(torch.equal(grads_a[name], grads_b[name]) for name in grads_b)


def test_a_detached_confidence_head_moves_only_itself(
    target: Path, head: TargetHead, documents: list[PackedBatch]
) -> None:
    model, batch, anchors = make(target), documents[0], anchors_of(documents[0])
    only = LossWeights(ce=0.0, l1=0.0, confidence=1.0, decay_gamma=4.0)
    moved = {n for n, g in gradients(model, draft_loss(model, head, batch, anchors, only).total).items() if g.any()}
    assert "fc.weight" in moved
    detached = gradients(model, draft_loss(model, head, batch, anchors, replace(only, detach_confidence=True)).total)
    assert {n for n, g in detached.items() if g.any()} == {"confidence_head.proj.weight", "confidence_head.proj.bias"}


def test_pieces_give_the_same_gradients(
    target: Path, head: TargetHead, documents: list[PackedBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch, anchors = make(target), documents[0], anchors_of(documents[0])
    whole = draft_loss(model, head, batch, anchors, WEIGHTS)
    expected = gradients(model, whole.total)
    monkeypatch.setattr(vocab_loss_module, "PIECE_LOGITS", 2 * SHAPE.vocab_size)
    pieces = draft_loss(model, head, batch, anchors, WEIGHTS)
    torch.testing.assert_close(pieces.flat(), whole.flat(), rtol=1e-5, atol=1e-5)
    for name, gradient in gradients(model, pieces.total).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
