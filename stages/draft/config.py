"""The shape of a DSpark draft."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stages.draft.rope import rope_problem
from stages.target import TargetShape


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
    # Tokens that can be drafted, the ones the target writes most often in the training data; None: all of the target's.
    vocab_size: int | None = None
    # Of the Markov head. It is "vanilla": vLLM 0.32's qwen3_dspark has markov_w1 and markov_w2 of it, and neither the
    # gate nor the recurrence of speculators' other two kinds.
    markov_rank: int = 256
    confidence_head: bool = True
    confidence_with_markov: bool = True
    sliding_window: int | None = None  # None: full attention over the context
    causal: bool = False  # inside a block; vLLM serves causal blocks only with a sliding window
    rope_theta: float = 1_000_000.0
    # As in a Hugging Face config: scaled positions, part of a head (stages/draft/rope.py); its rope_theta counts.
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    max_positions: int = 40_960
    rms_norm_eps: float = 1e-6


def captured_layers(config: DraftConfig, shape: TargetShape) -> tuple[int, ...]:
    """Target layers whose states are captured: the draft's aux layers and, last, the final one."""
    return (*config.aux_layer_ids, shape.num_layers)


def check_draft(config: DraftConfig, shape: TargetShape) -> None:
    """Raise ValueError, naming the key, when such a draft of such a target could not be trained and served."""
    ids = config.aux_layer_ids
    rope = rope_problem(config)
    proposed = config.block_size if config.sample_from_anchor else config.block_size - 1
    checks = (
        (
            config.mask_token_id is not None,
            "draft.mask_token_id: must be set to a token that no text has, found null; a pad or end-of-text token "
            "would be learnt as mask",
        ),
        (
            config.mask_token_id is None or config.mask_token_id < shape.vocab_size,
            f"draft.mask_token_id={config.mask_token_id}: expected 0 to {shape.vocab_size - 1}, the rows of the "
            "target's embedding",
        ),
        (
            config.vocab_size is None or config.vocab_size < shape.vocab_size,
            f"draft.vocab_size={config.vocab_size}: expected 1 to {shape.vocab_size - 1}, or null to draft all of the "
            f"target's {shape.vocab_size} tokens",
        ),
        (
            bool(ids) and list(ids) == sorted(set(ids)) and ids[0] >= 1 and ids[-1] < shape.num_layers,
            f"draft.aux_layer_ids={list(ids)}: expected ascending layers from 1 to {shape.num_layers - 1}; "
            f"layer {shape.num_layers}, the final one, is added by itself",
        ),
        (
            proposed >= 1,
            f"draft.block_size={config.block_size}: with draft.sample_from_anchor={config.sample_from_anchor} nothing "
            "is proposed; expected at least 2",
        ),
        (
            config.num_speculative_tokens == proposed,
            f"draft.num_speculative_tokens={config.num_speculative_tokens}: draft.block_size={config.block_size} with "
            f"draft.sample_from_anchor={config.sample_from_anchor} proposes {proposed}; set it to {proposed}",
        ),
        (
            config.num_heads % config.num_kv_heads == 0,
            f"draft.num_heads={config.num_heads}: expected a multiple of draft.num_kv_heads={config.num_kv_heads}",
        ),
        (
            config.causal == (config.sliding_window is not None),
            f"draft.causal={config.causal} with draft.sliding_window={config.sliding_window}: vLLM serves blocks of "
            "speculators checkpoints causal with a sliding window and bidirectional without; set both or neither",
        ),
        (rope is None, str(rope)),
    )
    for good, problem in checks:
        if not good:
            raise ValueError(problem)
