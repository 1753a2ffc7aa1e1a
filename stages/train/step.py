"""One training step and one validation pass of one rank among several.

Numerators are summed over documents and ranks first and divided by the global sum of weights last, so
the gradient is the global batch's whatever the split, and a sequence lost on the way leaves no bias.
Documents go through the draft packed, up to `micro_batch_tokens` in one pass, as the reader has fetched them into
one piece of memory; which ones go together is a function of the rank's share of the batch alone, so a resumed run
adds up the same numbers in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
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

    def sums(self, batch: HiddenBatch, key: tuple[int | str, ...]) -> LossSums:
        """The sums of all documents of `batch`; the anchors of each are drawn with `key` and its id."""
        packed, drawn, start = PackedBatch.from_hidden(batch), [np.zeros(0, dtype=np.int64)], 0
        for sequence in batch.sequences:
            anchors = sample_anchors(sequence.loss_mask, self.anchors_per_sequence, key=(*key, sequence.id))
            drawn.append(anchors + start)
            start += len(sequence)
        anchors_A = torch.from_numpy(np.concatenate(drawn))
        return draft_loss(self.model, self.head, packed.to(self.device), anchors_A.to(self.device), self.weights)


def micro_batches(sequences: Sequence[TokenSequence], max_tokens: int) -> list[list[TokenSequence]]:
    """What goes through the draft together, in order: as many sequences as `max_tokens` hold, at least one."""
    together: list[list[TokenSequence]] = []
    tokens = 0
    for sequence in sequences:
        if together and tokens + len(sequence) <= max_tokens:
            together[-1].append(sequence)
            tokens += len(sequence)
        else:
            together.append([sequence])
            tokens = len(sequence)
    return together


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
    count: int,
    key: tuple[int | str, ...],
    *,
    backward: bool,
) -> Pass:
    """Take `count` batches from `source`, and add up their sums over all ranks.

    With `backward` the gradients of the numerators are added to the model's. Every rank must call it
    equally often; a rank may have no batches.
    """
    predictions = num_predictions(learner.model)
    sums = LossSums.zero(predictions, learner.device)
    tokens, wait_s, taken = 0, 0.0, 0
    set_aside: list[tuple[str, str]] = []
    for _ in range(count):
        started = time.monotonic()
        batch = next(source)
        wait_s += time.monotonic() - started
        set_aside += batch.set_aside
        taken += len(batch.sequences)
        tokens += len(batch.states_TLD)
        with torch.set_grad_enabled(backward):
            part = learner.sums(batch, key)
            if part.total.requires_grad:
                part.total.backward()
            sums = sums + part.detached()
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
