"""Under speculators' conventions our loss and gradients are speculators' own, at one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from speculators.losses import resolve_loss_config
from speculators.losses.eager import tv_loss

from stages.draft.config import DraftConfig
from stages.draft.loss import LossWeights, draft_loss
from stages.draft.model import build_draft, shared_head, trainable
from stages.target import load_head
from tests.stages.draft_helpers import DRAFT, FILL_IN, SHAPE, as_speculators, packed, random_sequences, write_target

# speculators' {"ce": 0.1, "tv": 0.9}: its tv is half of L1
THEIRS = LossWeights(0.1, 0.45, 1.0, 4.0, ce_label="target", target_support="draft", denominator="labels")
VOCAB = np.arange(3, 243, 4)


@pytest.mark.parametrize(
    "config",
    [DRAFT, FILL_IN, replace(DRAFT, vocab_size=60), replace(DRAFT, confidence_head=False)],
    ids=["anchor", "fill_in", "reduced", "no_confidence"],
)
def test_loss_and_gradients_equal_speculators(
    config: DraftConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_target(tmp_path)
    model = build_draft(config, SHAPE, target, verifier="x", seed=0, vocab_W=VOCAB)
    with torch.no_grad():
        model.markov_head.markov_w2.weight.mul_(30)
    batch = packed(target, random_sequences(3, 20))
    # Blocks whose labels, and whose slots, are supervised throughout: speculators masks by slots.
    anchors = torch.tensor([4, 9, 14, 26, 29, 33, 47, 51])
    monkeypatch.setattr(
        "speculators.models.dflash.core.select_anchors",
        lambda *_: (anchors, torch.ones(len(anchors), dtype=torch.bool)),
    )
    with as_speculators(model):
        _, theirs, metrics = model(
            hidden_states=batch.aux_TLD.flatten(1)[None],
            input_ids=batch.input_ids_T[None],
            loss_mask=batch.loss_mask_T[None].float(),
            verifier_last_hidden_states=batch.final_TD[None],
            document_ids=batch.documents_T[None],
            position_ids=batch.positions_T[None],
            loss_config=resolve_loss_config('{"ce": 0.1, "tv": 0.9}', "eager"),
            tv_loss_fn=tv_loss,
            gamma=4.0,
            max_anchors=len(anchors),
            confidence_head_alpha=1.0,
        )
    sums = draft_loss(model, shared_head(model, load_head(target)), batch, anchors, THEIRS)
    ours = sums.total / sums.weight
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=0)
    assert float(sums.accepted / sums.whole_blocks) == pytest.approx(
        float(metrics["accept_len_sum"] / metrics["accept_len_total"]), rel=1e-5
    )
    assert float(sums.greedy_accepted / sums.whole_blocks) == pytest.approx(
        float(metrics["eal_sum"] / metrics["eal_total"])
    )

    names, parameters = zip(*trainable(model).items(), strict=True)
    expected = torch.autograd.grad(theirs, parameters)
    for name, gradient, other in zip(names, torch.autograd.grad(ours, parameters), expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-3, atol=1e-7, msg=name)
        assert other.any()
