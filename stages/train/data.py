"""Which sequences are trained on, and in which order: pure functions, so that a resumed run sees the same batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from stages.corpus import TokenSequence
from stages.draft.anchors import anchor_candidates


@dataclass(frozen=True)
class Usable:
    """Sequences with something to learn, and what became of the others (`counts` is conserved)."""

    sequences: tuple[TokenSequence, ...]
    counts: dict[str, int]
    masked: tuple[str, ...]  # ids of sequences that hold the mask token


def usable(sequences: Sequence[TokenSequence], max_tokens: int, mask_token_id: int | None) -> Usable:
    """Cut to `max_tokens`; drop what then has no anchor (two supervised tokens in a row), or has the mask token.

    Nobody keeps a user from writing a special token; a draft that met it as text would unlearn what it stands for.
    """
    kept, masked = [], []
    unsupervised = truncated_away = 0
    for sequence in sequences:
        cut = sequence.truncated(max_tokens)
        if (cut.input_ids == mask_token_id).any():
            masked.append(sequence.id)
        elif len(anchor_candidates(cut.loss_mask)):
            kept.append(cut)
        elif len(anchor_candidates(sequence.loss_mask)):
            truncated_away += 1
        else:
            unsupervised += 1
    counts = {
        "sequences_in": len(sequences),
        "sequences_used": len(kept),
        "dropped_truncated_away": truncated_away,
        "dropped_unsupervised": unsupervised,
        "dropped_with_mask_token": len(masked),
    }
    return Usable(tuple(kept), counts, tuple(masked))


@dataclass(frozen=True)
class Order:
    """Every step's global batch, of `num_sequences` sequences for `epochs` epochs.

    The last batch of an epoch is smaller when the batch size does not divide it: nothing is left out.
    """

    num_sequences: int
    batch_sequences: int
    epochs: int
    max_steps: int | None
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_sequences // self.batch_sequences)

    @property
    def total_steps(self) -> int:
        steps = self.steps_per_epoch * self.epochs
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def epoch(self, step: int) -> int:
        """The epoch of a 0-based step."""
        return step // self.steps_per_epoch

    def batch(self, step: int) -> np.ndarray:
        """Indices of the global batch of a 0-based step. Rank r of w takes `[r::w]`."""
        permutation = _permutation(self.seed, self.epoch(step), self.num_sequences)
        first = step % self.steps_per_epoch * self.batch_sequences
        return permutation[first : first + self.batch_sequences]

    def visits(self, steps: int) -> int:
        """Sequences of the first `steps` steps together; a sequence counts once an epoch."""
        whole, rest = divmod(steps, self.steps_per_epoch) if self.num_sequences else (0, 0)
        return whole * self.num_sequences + rest * self.batch_sequences


@lru_cache(maxsize=2)  # of the epoch that is trained and the one that is fetched ahead
def _permutation(seed: int, epoch: int, length: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(length)
