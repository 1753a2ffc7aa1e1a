"""The shape and training of the tiny target."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stages.tiny_target.domains import PROMPT_SEED


@dataclass(frozen=True)
class TinyTargetConfig:
    """A Qwen3-type chat model of about a million weights; everything here changes its weights."""

    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 256
    vocab_size: int = 1024
    max_position_embeddings: int = 512
    steps: int = 1200
    batch_rows: int = 8
    lr: float = 3e-3
    warmup_steps: int = 30
    seed: int = 0

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding: `vocab_size` tokens, which its sentences always give, rounded up."""
        return math.ceil(self.vocab_size / 64) * 64


def check_tiny(config: TinyTargetConfig) -> None:
    """Raise ValueError, naming the key, when such a target could not be built."""
    if config.seed == PROMPT_SEED:
        raise ValueError(f"target.tiny.seed={config.seed}: is the prompt file's own; choose another seed")
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"target.tiny.num_heads={config.num_heads}: expected a multiple of "
            f"target.tiny.num_kv_heads={config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise ValueError(
            f"target.tiny.head_dim={config.head_dim}: expected an even number: positions rotate pairs of dimensions"
        )
