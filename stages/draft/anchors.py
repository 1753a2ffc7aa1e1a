"""Where blocks start, and which of their predictions are supervised.

Legend: T tokens of one sequence or of a packed batch, A anchors, B predictions of a block.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from stages.draft.batch import PackedBatch


def anchor_candidates(loss_mask_T: np.ndarray) -> np.ndarray:
    """Positions p of one sequence where tokens p and p+1 are both supervised (DSpark paper), int64 [A]."""
    return np.flatnonzero(loss_mask_T[:-1] & loss_mask_T[1:])


def sample_anchors(loss_mask_T: np.ndarray, limit: int, *, key: tuple[int | str, ...]) -> np.ndarray:
    """At most `limit` anchors of one sequence, uniform without replacement, sorted, int64 [A].

    A pure function of the mask and `key` (seed, epoch, step, sequence id): no global generator is
    read or moved, so a resumed or a differently split run draws the same anchors.
    """
    candidates = anchor_candidates(loss_mask_T)
    if len(candidates) <= limit:
        return candidates
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:16], "big")
    return np.sort(np.random.Generator(np.random.PCG64(seed)).choice(candidates, size=limit, replace=False))


def label_mask(batch: PackedBatch, anchors_A: torch.Tensor, num_predictions: int) -> torch.Tensor:
    """Bool [A, B]: prediction j of anchor p counts when tokens p+1 … p+j+1 are all supervised.

    Supervision stops at the first unsupervised token and at the end of the anchor's document.
    """
    labels_AB = anchors_A[:, None] + 1 + torch.arange(num_predictions, device=anchors_A.device)
    inside_AB = labels_AB < len(batch)
    labels_AB = labels_AB.clamp(max=max(len(batch) - 1, 0))
    same_AB = batch.documents_T[labels_AB] == batch.documents_T[anchors_A][:, None]
    good_AB = inside_AB & same_AB & batch.loss_mask_T[labels_AB]
    return good_AB.long().cumprod(dim=1).bool()
