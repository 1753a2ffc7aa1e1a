"""How a draft is released."""

from __future__ import annotations

from dataclasses import dataclass

from stages.artifacts import resource


@dataclass(frozen=True)
class PublishConfig:
    """The release folder, and the Hub repository when one is named."""

    name: str = ""  # title of the model card; empty: <target>-speculator.dspark
    license: str = "apache-2.0"
    draft_sample_method: str = "greedy"
    rejection_sample_method: str = "standard"
    repo_id: str | None = resource(None)  # None: local folder only; the token comes from HF_TOKEN
    private: bool = resource(True)
