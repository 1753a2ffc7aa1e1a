"""A reduced draft vocabulary: how it is chosen, what the loss makes of tokens outside, and what is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel
from speculators.models.dspark import DSparkDraftModel

from stages.corpus import TokenSequence
from stages.draft.anchors import label_mask
from stages.draft.attention import NAMES
from stages.draft.batch import PackedBatch
from stages.draft.checkpoint import check_checkpoint, export_draft, load_draft
from stages.draft.loss import LossSums, LossWeights, draft_loss
from stages.draft.model import block_positions, build_draft, num_predictions, shared_head, trainable
from stages.draft.speculate import draft_blocks
from stages.draft.vocab import choose_vocab, vocab_digest
from stages.target import TargetHead, load_head
from tests.stages.draft_helpers import DRAFT, FILL_IN, SHAPE, block_forward, packed, random_sequences, write_target

SIZE = 40
REDUCED = replace(DRAFT, vocab_size=SIZE)
IDS = np.sort(np.random.default_rng(3).permutation(255)[:SIZE])
PAPER = LossWeights(ce=0.1, l1=0.9, confidence=1.0, decay_gamma=4.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def make(target: Path, config: object = REDUCED) -> DSparkDraftModel:
    model = build_draft(config, SHAPE, target, verifier=str(target), seed=0, vocab_W=IDS)
    with torch.no_grad():  # a fresh Markov head is nearly zero
        for seed, parameter in enumerate(trainable(model).values()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return model


def sequence(tokens: list[int], mask: list[int]) -> TokenSequence:
    return TokenSequence("s", "d", np.array(tokens, dtype=np.int32), np.array(mask, dtype=bool))


def test_the_most_frequent_supervised_tokens_are_chosen() -> None:
    made = [sequence([9, 5, 5, 7, 7, 3], [0, 1, 1, 1, 1, 1]), sequence([9, 9, 9, 3, 2], [0, 0, 0, 1, 1])]
    counts = {5: 2, 7: 2, 3: 2, 2: 1}
    assert choose_vocab(made, 3, target_size=10, required=()).tolist() == [3, 5, 7]
    assert choose_vocab(made, 2, target_size=10, required=()).tolist() == [3, 5]  # of equals the lower ids
    assert choose_vocab(made, 3, target_size=10, required=(8, 5)).tolist() == [3, 5, 8]
    # what was never seen fills up, lowest ids first
    assert choose_vocab(made, 6, target_size=10, required=()).tolist() == [0, 1, *sorted(counts)]
    assert choose_vocab(made[::-1], 3, target_size=10, required=(8, 5)).tolist() == [3, 5, 8]
    assert choose_vocab(made, 10, target_size=10, required=()).tolist() == list(range(10))


@pytest.mark.parametrize("required", [(1, 2, 3), (1, 10), (-1,)])
def test_end_tokens_that_do_not_fit_are_refused(required: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"draft\.vocab_size=2: must hold the target's end tokens"):
        choose_vocab([sequence([1, 2], [1, 1])], 2, target_size=10, required=required)


def test_the_digest_is_of_the_ids_alone() -> None:
    assert vocab_digest(IDS) == vocab_digest(IDS.astype(np.int32)) != vocab_digest(IDS[1:])
    assert vocab_digest(np.array([1])) == "7c9fa136d4413fa6173637e883b6998d32e1d675f88cddff9dcbcf331820f4b8"


@pytest.mark.parametrize("ids", [None, IDS[1:], IDS[::-1].copy(), np.arange(SIZE) + 300])
def test_a_vocabulary_that_does_not_fit_is_refused(ids: np.ndarray | None, target: Path) -> None:
    with pytest.raises(ValueError, match="draft vocabulary: expected 40 different ids"):
        build_draft(REDUCED, SHAPE, target, verifier="x", seed=0, vocab_W=ids)


def plain_loss(
    model: DSparkDraftModel, head: TargetHead, batch: PackedBatch, anchors: torch.Tensor, weights: LossWeights
) -> torch.Tensor:
    """The formulas of `loss.py`, all at once, over the target's vocabulary, left to autograd."""
    predictions = num_predictions(model)
    out = block_forward(model, batch, anchors)
    shape = (*out.logits_ABW.shape[:2], SHAPE.vocab_size)
    ids = torch.from_numpy(IDS)
    inside = torch.zeros(SHAPE.vocab_size, dtype=torch.bool).scatter(0, ids, True)
    log_draft = torch.full(shape, -torch.inf).index_copy(2, ids, out.logits_ABW.log_softmax(-1))
    logits = head.logits(batch.final_TD[block_positions(batch, anchors, predictions)])
    if weights.target_support == "draft":
        logits = logits.masked_fill(~inside, -torch.inf)
    p_t, data = logits.softmax(-1), batch.input_ids_T[block_positions(batch, anchors + 1, predictions)]
    label = data if weights.ce_label == "data" else logits.argmax(-1)
    log_label = log_draft.gather(-1, label[..., None])[..., 0]
    ce = -torch.where(inside[label], log_label, torch.zeros(()))
    l1 = (log_draft.exp() - p_t).abs().sum(-1)
    bce = F.binary_cross_entropy_with_logits(out.confidence_AB, 1 - l1.detach() / 2, reduction="none")
    labels = label_mask(batch, anchors, predictions)
    decay = torch.exp(-torch.arange(predictions) / weights.decay_gamma) * labels
    total = ((weights.ce * ce + weights.l1 * l1 + weights.confidence * bce) * decay).sum()
    return total / (decay.sum() if weights.denominator == "weights" else labels.sum())


@pytest.mark.parametrize(
    "weights",
    [
        PAPER,
        replace(PAPER, ce_label="target"),
        replace(PAPER, target_support="draft"),
        replace(PAPER, ce_label="target", target_support="draft", denominator="labels"),
    ],
    ids=["paper", "argmax", "renormalised", "speculators"],
)
def test_loss_and_gradients_are_those_of_the_formula(weights: LossWeights, target: Path) -> None:
    model = make(target)
    head = shared_head(model, load_head(target))
    batch, anchors = packed(target, random_sequences(2, 22)), torch.tensor([3, 9, 10, 20, 26, 43])
    batch.loss_mask_T[12] = False
    parameters = list(trainable(model).values())

    sums = draft_loss(model, head, batch, anchors, weights)
    expected = plain_loss(model, head, batch, anchors, weights)
    torch.testing.assert_close(sums.total / sums.weight, expected, rtol=1e-6, atol=1e-6)
    found = torch.autograd.grad(sums.total / sums.weight, parameters)
    for name, ours, plain in zip(trainable(model), found, torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-7, msg=name)


def test_what_is_outside_cannot_be_accepted(target: Path) -> None:
    """By hand: p_d = (1/4, 3/4) on tokens 1 and 2; p_t = (1/2, 1/8, 1/8, 1/4) on tokens 0 to 3."""
    p_t = torch.tensor([0.5, 0.125, 0.125, 0.25])
    by_hand = {"full": (0.125 + 0.625 + 0.75, 0.25), "draft": (0.25 + 0.25, 0.75)}  # L1 and the acceptance rate
    for support, (l1, accepted) in by_hand.items():
        sums = four_tokens(p_t, replace(PAPER, target_support=support), data=2)
        assert sums.l1.item() == pytest.approx(l1)
        assert sums.accept_rate_B[0].item() == pytest.approx(accepted)
        assert sums.ce.item() == pytest.approx(-np.log(0.75))
        assert sums.accuracy_B[0] == 1
        # the target's likeliest token of all is 0, which the draft does not have
        assert sums.greedy_B[0].item() == 0
    assert four_tokens(p_t, PAPER, data=3).ce == 0
    assert four_tokens(p_t, PAPER, data=3).weight == 1


def four_tokens(p_t: torch.Tensor, weights: LossWeights, data: int) -> LossSums:
    """One prediction of a draft that has tokens 1 and 2 of a target of four."""
    from stages.draft.loss import block_sums
    from stages.draft.vocab_loss import Factors, Labels, VocabHead, vocab_loss

    # states before the norm whose normed values, times this LM head, are the logits
    state, eye = torch.ones(1, 4), torch.diag(p_t.log())
    head = TargetHead(eye, torch.ones(4), eye, 0.0)
    ids = torch.tensor([1, 2])
    total, terms = vocab_loss(
        torch.zeros(1, 4), torch.tensor([[1.0]]), torch.tensor([[0.0], [np.log(3.0)]]).float(),
        VocabHead(eye[ids], head, ids, weights.target_support == "draft"),
        Labels(state, torch.tensor([0]), torch.tensor([data]), torch.ones(1)),
        Factors(weights.ce, weights.l1),
    )  # fmt: skip
    return block_sums(total, terms, None, torch.tensor([0]), torch.tensor([[True]]), weights)


@pytest.mark.parametrize("config", [REDUCED, replace(FILL_IN, vocab_size=SIZE)], ids=["anchor", "fill_in"])
def test_drafting_gives_the_targets_ids_and_equals_teacher_forcing(config: object, target: Path) -> None:
    model, batch, anchors = make(target, config).eval(), packed(target, random_sequences(1, 24)), torch.tensor([6, 15])
    drafted = draft_blocks(model, batch, anchors)
    assert set(drafted.tokens_AB.flatten().tolist()) <= set(IDS.tolist())
    assert len(set(drafted.tokens_AB.flatten().tolist())) > 1
    for row, anchor in enumerate(anchors.tolist()):
        ids = batch.input_ids_T.clone()
        ids[anchor + 1 : anchor + 1 + num_predictions(model)] = drafted.tokens_AB[row]
        forced = block_forward(model, replace(batch, input_ids_T=ids), anchors[row : row + 1])
        assert IDS[forced.logits_ABW[0].argmax(-1)].tolist() == drafted.tokens_AB[row].tolist()
        torch.testing.assert_close(forced.confidence_AB[0], drafted.confidence_logits_AB[row])


def test_export_holds_what_vllm_and_speculators_read(target: Path, tmp_path: Path) -> None:
    model, folder = make(target), tmp_path / "draft"
    export_draft(model, folder)
    stored = load_file(folder / "model.safetensors")
    assert stored["t2d"].nonzero()[:, 0].tolist() == (stored["d2t"] + torch.arange(SIZE)).tolist() == IDS.tolist()
    assert torch.equal(stored["lm_head.weight"], load_head(target).lm_head_VD[IDS])  # not a bit is lost
    assert stored["markov_head.markov_w1.weight"].shape[0] == SHAPE.vocab_size
    assert stored["markov_head.markov_w2.weight"].shape[0] == SIZE
    assert "embed_tokens.weight" not in stored

    ours, theirs = load_draft(folder, target), SpeculatorModel.from_pretrained(str(folder), dtype=torch.float32).eval()
    assert torch.equal(theirs.verifier_lm_head.weight, ours.lm_head.weight)
    theirs.config.transformer_layer_config._attn_implementation = NAMES["sdpa"]
    batch, anchors = packed(target, random_sequences(1, 20)), torch.tensor([5, 10])
    logits = block_forward(ours, batch, anchors).logits_ABW
    assert torch.equal(logits, block_forward(theirs, batch, anchors).logits_ABW)
    assert torch.equal(draft_blocks(ours, batch, anchors).tokens_AB, draft_blocks(theirs, batch, anchors).tokens_AB)


def test_tables_that_disagree_and_a_foreign_target_are_refused(target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    export_draft(make(target), folder)
    file = folder / "model.safetensors"
    stored = load_file(file)
    save_file({**stored, "t2d": stored["t2d"].roll(1)}, file)
    with pytest.raises(ValueError, match="t2d and d2t name different tokens"):
        check_checkpoint(folder)
    save_file({name: tensor for name, tensor in stored.items() if name != "d2t"}, file)
    with pytest.raises(ValueError, match=r"d2t: expected \[40\], found None"):
        check_checkpoint(folder)
    save_file({**stored, "lm_head.weight": stored["lm_head.weight"] * 2}, file)
    with pytest.raises(ValueError, match="rows of the LM head are not those of"):
        load_draft(folder, target)


def test_a_full_vocabulary_writes_no_tables(target: Path, tmp_path: Path) -> None:
    export_draft(build_draft(DRAFT, SHAPE, target, verifier="x", seed=0), tmp_path / "draft")
    assert not load_file(tmp_path / "draft" / "model.safetensors").keys() & {"t2d", "d2t", "lm_head.weight"}
