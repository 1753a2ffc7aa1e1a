"""Rotary positions of a draft: what may be configured, and how a checkpoint says it.

A kind is allowed when speculators' layers (transformers' tables) and vLLM compute the same cos and sin from
the same `rope_parameters`. Others fail loudly or, worse, silently: part of a head (vLLM rotates it, the
layers whole heads), entries by layer type (vLLM's DSpark takes one for all), `dynamic` and `longrope` (the
tables follow the length of a batch in one and `max_position_embeddings` in the other).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stages.draft.config import DraftConfig

NEEDED: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings"},
}
OPTIONAL: dict[str, set[str]] = {
    "yarn": {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
}
WHY_NOT = {
    "rope_theta": "give it as draft.rope_theta",
    "partial_rotary_factor": "speculators' layers rotate whole heads; leave it out",
    "sliding_attention": "vLLM takes one entry for all layers; give that entry itself",
    "full_attention": "vLLM takes one entry for all layers; give that entry itself",
}


def rope_parameters(config: DraftConfig) -> dict[str, Any]:
    """Hugging Face's `rope_parameters` of a draft. The factor is a float: vLLM's linear scaling takes no int."""
    given = config.rope_parameters
    factor = {"factor": float(given["factor"])} if "factor" in given else {}
    return {"rope_type": "default", "rope_theta": config.rope_theta, **given, **factor}


def rope_problem(config: DraftConfig) -> str | None:
    """Why these `draft.rope_parameters` could not be trained and served alike, or None."""
    given = config.rope_parameters
    kind = given.get("rope_type", "default")
    if refused := sorted(given.keys() & WHY_NOT.keys()):
        return f"draft.rope_parameters.{refused[0]}: {WHY_NOT[refused[0]]}"
    if kind not in NEEDED:
        return f"draft.rope_parameters.rope_type={kind}: expected one of {', '.join(NEEDED)}"
    found = given.keys() - {"rope_type"}
    if missing := NEEDED[kind] - found:
        return f"draft.rope_parameters: rope_type={kind} needs {', '.join(sorted(missing))}, found {sorted(found)}"
    if unknown := found - NEEDED[kind] - OPTIONAL.get(kind, set()):
        return f"draft.rope_parameters: rope_type={kind} does not read {', '.join(sorted(unknown))}; leave it out"
    if odd := sorted(key for key in found if not isinstance(given[key], (int, float))):
        return f"draft.rope_parameters.{odd[0]}={given[odd[0]]!r}: expected a number"
    if found and not given["factor"] >= 1:
        return f"draft.rope_parameters.factor={given['factor']}: expected at least 1"
    if kind == "llama3" and not given["low_freq_factor"] < given["high_freq_factor"]:
        return (
            f"draft.rope_parameters.low_freq_factor={given['low_freq_factor']}: expected less than "
            f"high_freq_factor={given['high_freq_factor']}"
        )
    rows = int(given["original_max_position_embeddings"] * given["factor"]) if kind == "yarn" else config.max_positions
    if rows < config.max_positions:
        return (
            f"draft.max_positions={config.max_positions}: vLLM's yarn table has {rows} positions "
            "(original_max_position_embeddings x factor); lower it or raise one of those"
        )
    return None
