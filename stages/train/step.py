"""One training step and one validation pass of one rank among several.

Numerators are summed over documents and ranks first and divided by the global sum of weights last, so
the gradient is the global batch's whatever the split, and a sequence lost on the way leaves no bias.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from speculators.models.dspark import DSparkDraftModel

from stages.corpus import TokenSequence
from stages.draft.anchors import sample_anchors
from stages.draft.batch import PackedBatch
from stages.draft.loss import LossSums, LossWeights, draft_loss
from stages.draft.model import num_predictions
from stages.hidden_states.wire import HiddenBatch
from stages.target import TargetHead


@dataclass(frozen=True)
class Learner:
    """The draft with what its loss needs, on `device`."""

    model: DSparkDraftModel
    head: TargetHead
    weights: LossWeights
    anchors_per_sequence: int
    device: torch.device

    def sums(self, batch: HiddenBatch, key: tuple[int | str, ...]) -> Iterator[LossSums]:
        """The sums of every document of `batch`; its anchors are drawn with `key` and its id."""
        for document in PackedBatch.from_hidden(batch).documents():
            anchors = sample_anchors(
                document.loss_mask_T.numpy(), self.anchors_per_sequence, key=(*key, document.ids[0])
            )
            yield draft_loss(
                self.model, self.head, document.to(self.device), torch.from_numpy(anchors).to(self.device), self.weights
            )


@dataclass(frozen=True)
class Pass:
    """What all ranks did together. Times are means over ranks."""

    sums: LossSums
    sequences: int
    tokens: int
    wait_s: float
    set_aside: tuple[tuple[str, str], ...]  # (sequence id, reason)


def run_pass(
    learner: Learner,
    source: Iterator[HiddenBatch],
    sequences: Sequence[TokenSequence],
    key: tuple[int | str, ...],
    *,
    backward: bool,
) -> Pass:
    """Take `sequences`, one a batch, from `source`, and add up their sums over all ranks.

    With `backward` the gradients of the numerators are added to the model's. Every rank must call it
    equally often; a rank may have no sequences.
    """
    predictions = num_predictions(learner.model)
    sums = LossSums.zero(predictions, learner.device)
    tokens, wait_s, taken = 0, 0.0, 0
    set_aside: list[tuple[str, str]] = []
    for _ in sequences:
        started = time.monotonic()
        batch = next(source)
        wait_s += time.monotonic() - started
        set_aside += batch.set_aside
        taken += len(batch.sequences)
        tokens += sum(len(sequence) for sequence in batch.sequences)
        with torch.set_grad_enabled(backward):
            for document in learner.sums(batch, key):
                if backward and document.total.requires_grad:
                    document.total.backward()
                sums = sums + document.detached()
    told = torch.tensor([taken, tokens, wait_s, len(set_aside)], dtype=torch.float64, device=learner.device)
    flat = torch.cat([sums.flat(), told])
    dist.all_reduce(flat)
    *_, all_taken, all_tokens, all_wait_s, all_set_aside = flat.tolist()
    names = tuple(gather(set_aside)) if all_set_aside else ()
    return Pass(
        LossSums.from_flat(flat[:-4], predictions),
        int(all_taken),
        int(all_tokens),
        all_wait_s / dist.get_world_size(),
        names,
    )


def gather(values: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The lists of all ranks, joined in the order of ranks."""
    parts: list[list[tuple[str, str]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, values)
    return [value for part in parts for value in part]
