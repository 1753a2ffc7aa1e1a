"""How a draft is released."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stages.artifacts import resource


@dataclass(frozen=True)
class PublishConfig:
    """The release folder, and the Hub repository when one is named."""

    name: str = ""  # title of the model card; empty: <target>-speculator.dspark
    license: str = "apache-2.0"  # the Hub's identifier
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    rejection_sample_method: Literal["standard", "block"] = "standard"
    # None: local folder only. Written into the card and the serving config; the token comes from HF_TOKEN.
    repo_id: str | None = None
    private: bool = resource(True)
