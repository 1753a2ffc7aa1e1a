"""How a draft is evaluated."""

from __future__ import annotations

from dataclasses import dataclass

from stages.artifacts import resource


@dataclass(frozen=True)
class EvaluateConfig:
    """Served acceptance at temperature 0, on prompts that training never saw."""

    prompts_per_domain: int = 80
    max_new_tokens: int = 512
    bootstrap_samples: int = 2000
    min_acceptance_length: float | None = None  # macro; below it the stage fails
    seed: int = 0
    batch_sequences: int = resource(8)
    gpus: int = resource(0)
    cpus: float = resource(1.0)
    chunk_timeout_s: float = resource(7200.0)  # four batches at most; a server that takes longer is given up
