"""A training step as `stages.train.loop` takes it, on batches that are at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from speculators.models.dspark import DSparkDraftModel

from stages.draft.loss import LossWeights
from stages.draft.model import shared_head, trainable
from stages.hidden_states.wire import HiddenBatch
from stages.target import TargetHead
from stages.train.config import TrainConfig
from stages.train.optimizer import Gradients, Optimizer
from stages.train.step import Learner, Pass, micro_batches, run_pass

Stepper = Callable[[Sequence[HiddenBatch], int], Pass]  # micro-batches, and the number of the step


def packed(batches: Sequence[HiddenBatch], max_tokens: int) -> list[HiddenBatch]:
    """The micro-batches that a reader would give of these, which have one sequence each."""
    states = {batch.sequences[0].id: batch.states_TLD for batch in batches}
    together = micro_batches([batch.sequences[0] for batch in batches], max_tokens)
    return [HiddenBatch(tuple(part), torch.cat([states[sequence.id] for sequence in part])) for part in together]


def stepper(
    model: DSparkDraftModel, head: TargetHead, weights: LossWeights, config: TrainConfig, device: torch.device
) -> Stepper:
    """Steps of `model`, which is on `device` and prepared, at the learning rate's peak."""
    learner = Learner(model, shared_head(model, head), weights, config.anchors_per_sequence, device)
    parameters = trainable(model)
    gradients, optimizer = Gradients(parameters), Optimizer(parameters, config)

    def step(batches: Sequence[HiddenBatch], number: int) -> Pass:
        gradients.clear()
        taken = run_pass(learner, iter(batches), len(batches), (0, number), backward=True)
        gradients.clip(gradients.reduce(float(taken.sums.weight)), config.clip_norm)
        optimizer.step(1.0)
        return taken

    return step
