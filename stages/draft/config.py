"""The shape of a DSpark draft."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DraftConfig:
    """Architecture of the draft. Everything here is part of the exported checkpoint's config."""

    num_layers: int = 5
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    intermediate_size: int = 6144
    block_size: int = 8
    num_speculative_tokens: int = 8  # block_size with sample_from_anchor, else block_size - 1
    sample_from_anchor: bool = True
    aux_layer_ids: tuple[int, ...] = ()  # target layers whose states are injected; supervision adds the final one
    mask_token_id: int | None = None  # must be set: a token that never occurs in text
    markov_rank: int = 256  # of the vanilla Markov head, the only variant that vLLM serves
    confidence_head: bool = True
    confidence_with_markov: bool = True
    sliding_window: int | None = None  # None: full attention over the context
    causal: bool = False  # inside a block; vLLM serves causal blocks only with a sliding window
    rope_theta: float = 1_000_000.0
    max_positions: int = 40_960
    rms_norm_eps: float = 1e-6
