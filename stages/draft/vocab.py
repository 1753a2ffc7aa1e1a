"""A reduced draft vocabulary: the tokens of the target that a draft can propose.

In a checkpoint it is two tables, as speculators and vLLM read them: `t2d`, true for the target's tokens
that are in it, and `d2t`, the target's id of column j minus j. Columns are in ascending order of ids.

Legend: V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch
from speculators.models.dspark import DSparkDraftModel

from stages.corpus import TokenSequence


def choose_vocab(
    sequences: Iterable[TokenSequence], size: int, *, target_size: int, required: Iterable[int]
) -> np.ndarray:
    """Ids of the `size` tokens that the target wrote most often, ascending, int64 [W].

    Only supervised tokens count, since no other is ever predicted; of equally frequent ones the lower id
    comes first. `required` ids (the ends of a turn) are always among them: a draft that cannot propose an
    end is cut off at every one. Raises ValueError when they alone are too many, or not the target's.
    """
    must = np.unique(np.fromiter(required, dtype=np.int64))
    if len(must) > size or (len(must) and not 0 <= must[0] <= must[-1] < target_size):
        raise ValueError(
            f"draft.vocab_size={size}: must hold the target's end tokens {must.tolist()}, ids from 0 to "
            f"{target_size - 1}; raise it, or correct eos_token_id in the target's folder"
        )
    counts_V = np.zeros(target_size, dtype=np.int64)
    for sequence in sequences:
        ids, counts = np.unique(sequence.input_ids[sequence.loss_mask], return_counts=True)
        counts_V[ids] += counts
    counts_V[must] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-counts_V, kind="stable")[:size])


def vocab_digest(ids_W: np.ndarray) -> str:
    """SHA-256 (hex) of the ids as little-endian int64."""
    return hashlib.sha256(np.ascontiguousarray(ids_W, dtype="<i8").tobytes()).hexdigest()


def set_vocab(model: DSparkDraftModel, ids_W: torch.Tensor) -> None:
    """Fill the model's `t2d` and `d2t`. Raises ValueError unless the ids are W ascending ones of the target's."""
    size, target_size = int(model.draft_vocab_size), int(model.verifier_vocab_size)
    good = len(ids_W) == size and bool((ids_W.diff() > 0).all()) and 0 <= int(ids_W[0]) <= int(ids_W[-1]) < target_size
    if not good:
        raise ValueError(
            f"draft vocabulary: expected {size} different ids in ascending order, from 0 to {target_size - 1}, "
            f"found {len(ids_W)} ids, {ids_W[:4].tolist()} …"
        )
    model.t2d.zero_()
    model.t2d[ids_W] = True
    model.d2t.copy_(ids_W - torch.arange(size))


def vocab_ids(model: DSparkDraftModel) -> torch.Tensor | None:
    """The target's ids of the draft's columns, int64 [W]; None when they are the same."""
    if not model.use_draft_vocab:
        return None
    return model.d2t + torch.arange(len(model.d2t), device=model.d2t.device)
