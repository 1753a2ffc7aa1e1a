"""Reference greedy drafting: what vLLM's DSpark speculator does, in plain PyTorch.

Legend: A anchors, B predictions of a block, D hidden size, W draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from speculators.models.dspark import DSparkDraftModel

from stages.draft.batch import PackedBatch
from stages.draft.model import backbone, heads
from stages.draft.vocab import vocab_ids


@dataclass(frozen=True)
class DraftedBlocks:
    """Greedy drafts of several anchors; all tensors are [A, B]."""

    tokens_AB: torch.Tensor  # int64, the target's ids
    confidence_logits_AB: torch.Tensor | None  # None without a confidence head


@torch.no_grad()
def draft_blocks(model: DSparkDraftModel, batch: PackedBatch, anchors_A: torch.Tensor) -> DraftedBlocks:
    """Draft every block left to right; each Markov bias is of the draft's own previous token."""
    hidden_ABD, ids_W = backbone(model, batch, anchors_A), vocab_ids(model)
    previous_A = batch.input_ids_T[anchors_A]
    tokens, confidences = [], []
    for hidden_AD in hidden_ABD.unbind(dim=1):
        output = heads(model, hidden_AD[:, None], previous_A[:, None])
        best_A = output.logits_ABW[:, 0].argmax(dim=-1)
        previous_A = best_A if ids_W is None else ids_W[best_A]
        tokens.append(previous_A)
        if output.confidence_AB is not None:
            confidences.append(output.confidence_AB[:, 0])
    return DraftedBlocks(torch.stack(tokens, dim=1), torch.stack(confidences, dim=1) if confidences else None)
