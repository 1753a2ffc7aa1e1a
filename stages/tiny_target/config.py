"""The shape and training of the tiny target."""

from __future__ import annotations

from dataclasses import dataclass


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
