"""How prompts become a corpus."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from stages.artifacts import resource
from stages.engine.config import EngineConfig


@dataclass(frozen=True)
class HubDataset:
    """One split of a data set on the Hub, or of a local folder laid out like one."""

    path: str  # owner/name, or a folder
    revision: str | None = None  # commit, tag or branch; needed for the Hub. What it resolves to is identity
    name: str | None = None  # configuration of the data set; None: its default
    split: str = "train"


@dataclass(frozen=True)
class DatagenConfig:
    """Sources, answers, filters and splits.

    Sources are read in the order given, files before data sets. The rows' form is told by
    `stages.datagen.conversation`. `hub` maps a name of your choice, which is the default domain and
    begins the default ids, to a data set.
    """

    prompts: tuple[str, ...] = resource(())  # JSONL or Parquet files, or folders; their contents are identity
    hub: dict[str, HubDataset] = field(default_factory=dict, metadata={"identity": False})  # contents, as above
    limit: int | None = None  # first N rows of each source
    domain_shares: dict[str, float] = field(default_factory=dict)  # of the prompts, by domain; empty: as they come
    regenerate: bool = True  # the target writes every answer; false: answers are kept as given, and no engine starts
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0
    max_new_tokens: int = 1024
    max_sequence_tokens: int = 4096  # longer regenerated sequences are dropped and counted, given ones are cut
    min_supervised_tokens: int = 16
    validation_share: float = 0.05
    calibration_share: float = 0.1
    evaluation_share: float = 0.05
    seed: int = 0
    shard_conversations: int = resource(512)  # made together; what a crash can lose
    max_failed_share: float = resource(0.01)
    thinking: Literal["template", "off"] = "template"


def check_values(config: DatagenConfig) -> None:
    """Raise ValueError naming the first key whose value cannot work with others; each alone has its bounds."""
    held_out = ("validation_share", "calibration_share", "evaluation_share")
    if config.max_sequence_tokens <= config.min_supervised_tokens:
        raise ValueError(
            f"datagen.max_sequence_tokens={config.max_sequence_tokens}: expected more than "
            f"min_supervised_tokens={config.min_supervised_tokens}"
        )
    if not all(share >= 0.0 for share in config.domain_shares.values()):
        raise ValueError(f"datagen.domain_shares={config.domain_shares}: expected shares of at least 0")
    total = sum(getattr(config, key) for key in held_out)
    if total >= 1.0:
        raise ValueError(
            f"datagen.{' + '.join(held_out)} = {total:g}: expected less than 1, so that training has prompts"
        )
    total = sum(config.domain_shares.values())
    if config.domain_shares and abs(total - 1.0) > 1e-6:
        raise ValueError(
            f"datagen.domain_shares={config.domain_shares}: expected shares that add up to 1, not {total:g}"
        )


def check_room(config: DatagenConfig, engine: EngineConfig) -> None:
    """Raise ValueError, naming both keys, when an answer may fill an engine that also has to hold its prompt."""
    if config.regenerate and config.max_new_tokens >= engine.max_model_len:
        raise ValueError(
            f"datagen.max_new_tokens={config.max_new_tokens}: expected less than"
            f" engine.max_model_len={engine.max_model_len}, which holds the prompt as well"
        )
