"""How prompts become a corpus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stages.artifacts import resource


@dataclass(frozen=True)
class DatagenConfig:
    """Sources, sampling and splits."""

    prompts: tuple[str, ...] = resource(())  # JSONL or Parquet files, or folders; their contents are identity
    limit: int | None = None  # first N prompts of each file
    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 1024
    max_sequence_tokens: int = 4096  # longer conversations are dropped and counted
    min_supervised_tokens: int = 16
    validation_share: float = 0.05
    calibration_share: float = 0.1
    evaluation_share: float = 0.05
    seed: int = 0
    shard_conversations: int = resource(512)  # generated together; what a crash can lose
    max_failed_share: float = resource(0.01)
    thinking: Literal["template", "off"] = "template"


def check_values(config: DatagenConfig) -> None:
    """Raise ValueError naming the first key whose value cannot work."""
    held_out = ("validation_share", "calibration_share", "evaluation_share")
    rules = [
        ("limit", config.limit is None or config.limit >= 1, "at least 1, or null for all"),
        ("temperature", config.temperature >= 0.0, "at least 0"),
        ("top_p", 0.0 < config.top_p <= 1.0, "in (0, 1]"),
        ("max_new_tokens", config.max_new_tokens >= 1, "at least 1"),
        ("min_supervised_tokens", config.min_supervised_tokens >= 1, "at least 1"),
        (
            "max_sequence_tokens",
            config.max_sequence_tokens > config.min_supervised_tokens,
            f"more than min_supervised_tokens={config.min_supervised_tokens}",
        ),
        *((key, 0.0 <= getattr(config, key) < 1.0, "in [0, 1)") for key in held_out),
        ("shard_conversations", config.shard_conversations >= 1, "at least 1"),
        ("max_failed_share", 0.0 <= config.max_failed_share <= 1.0, "in [0, 1]"),
    ]
    for key, holds, expected in rules:
        if not holds:
            raise ValueError(f"datagen.{key}={getattr(config, key)}: expected {expected}")
    total = sum(getattr(config, key) for key in held_out)
    if total >= 1.0:
        raise ValueError(
            f"datagen.{' + '.join(held_out)} = {total:g}: expected less than 1, so that training has prompts"
        )
