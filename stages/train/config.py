"""How a draft is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stages.artifacts import resource

STOP = "stop"  # file in the workspace: whoever makes it asks training to save a checkpoint and to leave
TRAINING = "train"  # label of the progress that is told after every step, and before the first by nobody


@dataclass(frozen=True)
class TrainConfig:
    """Optimisation, loss (DSPARK paper, section on training) and the workers that do it."""

    epochs: int = 10
    max_steps: int | None = None  # stops earlier than the epochs would
    # Over all ranks. A rank goes through its part piece by piece and adds gradients up: this is the
    # gradient accumulation, and memory does not grow with the batch.
    batch_sequences: int = 512
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
    # Matrix products of the layers and the LM head; weights, gradients, optimizer state and loss are fp32 always.
    precision: Literal["float32", "bfloat16"] = "float32"
    init_from: str | None = resource(None)  # folder or Hub id of a draft to start from; its content is identity
    init_revision: str | None = None  # commit, tag or branch; needed for a Hub id
    # Validations judge the acceptance length; the weights of the best one are exported.
    validate_every_steps: int = 100
    early_stopping_validations: int | None = None  # stop after so many in a row without a better one
    checkpoint_every_steps: int = resource(100)
    keep_checkpoints: int = resource(2)  # the newest; the best is kept besides
    max_nonfinite_steps: int = resource(10)  # steps skipped for a loss or gradient that is not finite, before it fails
    grace_s: float = resource(3.0)  # how long a run that is stopped waits for a checkpoint at the next step
    num_workers: int = resource(1)
    gpus_per_worker: int = resource(0)
    cpus_per_worker: float = resource(1.0)
    max_failures: int = resource(3)  # restarts of the worker group before the stage fails
    # fsdp: each rank keeps a part of the weights and of the optimizer state, and all weights only during a step
    sharding: Literal["replicated", "fsdp"] = resource("replicated")
    activation_checkpointing: bool = resource(False)  # layers are computed again in the backward pass
    compile: bool = resource(False)  # layers, with torch.compile; on a GPU only


def check_train(config: TrainConfig) -> None:
    """Raise ValueError, naming the key, when nothing could be trained like this."""
    if config.compile and not config.gpus_per_worker:
        raise ValueError(
            "train.compile=true: compiles for GPUs, found train.gpus_per_worker=0; set it to false, or train on GPUs"
        )
    if config.attention == "flex" and not config.gpus_per_worker:
        raise ValueError(
            "train.attention=flex: torch has no backward pass of it on a CPU, found train.gpus_per_worker=0; set it to "
            "sdpa, or train on GPUs"
        )
