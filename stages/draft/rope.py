"""Rotary positions of a draft: what may be configured, and how a checkpoint says it.

A kind is allowed when transformers' tables, with which a draft is trained, and vLLM's have the same cos and
sin. Not so `dynamic` and `longrope`: the tables follow the length of a batch in one and
`max_position_embeddings` in the other. Entries by layer type, as some targets have them, are reduced to the
one of this draft's layers, since vLLM's DSpark takes one for all. Part of a head is rotated as vLLM does it;
speculators' own layers rotate whole heads, so such a checkpoint is not to be trained further there.
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
FOR_ALL = {"rope_type", "rope_theta", "partial_rotary_factor"}
LEAST = {"rope_theta": 1.001, "factor": 1, "low_freq_factor": 1e-6, "original_max_position_embeddings": 1}
LARGEST = 1e12
LAYER_TYPES = {"full_attention", "sliding_attention"}


def rope_parameters(config: DraftConfig) -> dict[str, Any]:
    """Hugging Face's `rope_parameters` of a draft. The factor is a float: vLLM's linear scaling takes no int."""
    given = _entry(config)
    factor = {"factor": float(given["factor"])} if "factor" in given else {}
    return {"rope_type": "default", "rope_theta": config.rope_theta, **given, **factor}


def _entry(config: DraftConfig) -> dict[str, Any]:
    """What is given for the draft's layers, which are all of one type."""
    given = config.rope_parameters
    if not given or given.keys() - LAYER_TYPES:
        return given
    entry = given.get("full_attention" if config.sliding_window is None else "sliding_attention", {})
    return dict(entry) if isinstance(entry, dict) else {"rope_type": entry}  # which is no kind, and refused as one


def rope_problem(config: DraftConfig) -> str | None:
    """Why these `draft.rope_parameters` could not be trained and served alike, or None."""
    given = _entry(config)
    kind = given.get("rope_type", "default")
    if config.rope_parameters and not given:
        return (
            f"draft.rope_parameters has {', '.join(config.rope_parameters)}: expected an entry for the draft's layers, "
            f"which are full with draft.sliding_window=null and sliding otherwise"
        )
    if given.keys() & LAYER_TYPES:
        return "draft.rope_parameters: expected entries by layer type or one for all, found both"
    if kind not in list(NEEDED):  # a kind may be anything, a list too
        return f"draft.rope_parameters.rope_type={kind}: expected one of {', '.join(NEEDED)}"
    found = given.keys() - FOR_ALL
    if missing := NEEDED[kind] - found:
        return f"draft.rope_parameters: rope_type={kind} needs {', '.join(sorted(missing))}, found {sorted(found)}"
    if unknown := found - NEEDED[kind] - OPTIONAL.get(kind, set()):
        return f"draft.rope_parameters: rope_type={kind} does not read {', '.join(sorted(unknown))}; leave it out"
    for key in sorted(given.keys() - {"rope_type"}):
        value, least = given[key], LEAST.get(key, 0)
        if not isinstance(value, (int, float)) or not least <= value <= LARGEST:
            return f"draft.rope_parameters.{key}={value!r}: expected a number from {least:g} to {LARGEST:g}"
    if config.head_dim % 2 and "partial_rotary_factor" not in given:
        return f"draft.head_dim={config.head_dim}: expected an even number, since positions rotate pairs of dimensions"
    rotated = config.head_dim * given.get("partial_rotary_factor", 1.0)
    if rotated % 2 or not 0 < rotated <= config.head_dim:
        return (
            f"draft.rope_parameters.partial_rotary_factor={given['partial_rotary_factor']}: expected an even number of "
            f"rotated dimensions, up to draft.head_dim={config.head_dim}, found {rotated:g}"
        )
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
