"""How a draft is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stages.artifacts import resource


@dataclass(frozen=True)
class TrainConfig:
    """Optimisation, loss (DSPARK paper, section on training) and the workers that do it."""

    epochs: int = 10
    max_steps: int | None = None  # stops earlier than the epochs would
    batch_sequences: int = 512  # over all ranks
    max_sequence_tokens: int = 4096
    anchors_per_sequence: int = 512
    micro_batch_tokens: int = 8192  # most tokens of several sequences in one pass; a longer one goes alone
    attention: Literal["sdpa", "flex", "eager"] = "sdpa"  # see stages/draft/attention.py; flex trains on GPUs only
    lr: float = 6e-4
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_share: float = 0.04
    optimizer: Literal["adamw", "muon"] = "adamw"
    muon_lr_factor: float = 10.0  # learning rate of matrices under Muon, relative to `lr`
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    decay_gamma: float = 4.0  # weight of position k is exp(-(k-1)/decay_gamma)
    ce_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0
    detach_confidence: bool = False
    # Conventions of the loss: the paper's by default, those of speculators 0.9 second.
    ce_label: Literal["data", "target"] = "data"  # CE of the data token, or of the target's likeliest one
    target_support: Literal["full", "draft"] = "full"  # the target's distribution, or given draft.vocab_size's tokens
    denominator: Literal["weights", "labels"] = "weights"  # of all terms: the sum of the weights, or their number
    seed: int = 0
    validate_every_steps: int = 100
    checkpoint_every_steps: int = resource(100)
    keep_checkpoints: int = resource(2)
    num_workers: int = resource(1)
    gpus_per_worker: int = resource(0)
    cpus_per_worker: float = resource(1.0)
    max_failures: int = resource(3)  # restarts of the worker group before the stage fails
