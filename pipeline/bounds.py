"""Where every number of a config may lie, so that nonsense is refused before anything starts.

Intervals as in mathematics: `[1, 64]` has its ends, `(0, inf)` has not. A key that may be null is
checked when it has a value; NaN lies nowhere. Bounds between keys are in `checks.py` and beside
the dataclasses. A test holds this table to naming every number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COUNT, _SIZE, _SEED = "[1, 1e9]", "[1, 1e7]", "[0, 4294967295]"
_SHARE, _PART = "[0, 1]", "[0, 1)"
_GIB, _SECONDS, _POSITIVE = "(0, 1e6]", "(0, 1e9]", "(0, 1e9]"

BOUNDS: dict[str, str] = {
    **dict.fromkeys(("target.tiny.num_layers", "target.tiny.num_heads", "target.tiny.num_kv_heads"), "[1, 64]"),
    **dict.fromkeys(("target.tiny.hidden_size", "target.tiny.head_dim", "target.tiny.intermediate_size"), _SIZE),
    "target.tiny.vocab_size": "[512, 1280]",  # its sentences have no more words to make tokens of
    "target.tiny.max_position_embeddings": _SIZE,
    "target.tiny.steps": _COUNT,
    "target.tiny.batch_rows": _COUNT,
    "target.tiny.lr": "(0, 1]",
    "target.tiny.warmup_steps": _COUNT,
    "target.tiny.seed": _SEED,
    "target.shape.num_layers": "[1, 1e4]",
    "target.shape.hidden_size": _SIZE,
    "target.shape.vocab_size": _SIZE,
    "target.shape.max_positions": "[1, 1e9]",
    "engine.max_model_len": "[2, 1e9]",
    "engine.max_num_batched_tokens": "[1, 1e9]",
    "engine.max_num_seqs": "[1, 1e5]",
    "engine.num_actors": "[1, 1e5]",
    "engine.tensor_parallel": "[1, 1e3]",
    "engine.gpus_per_actor": "[0, 1e3]",
    "engine.cpus_per_actor": "(0, 1e4]",
    "engine.kv_cache_gib": _GIB,
    "engine.gpu_memory_utilization": "(0, 1]",
    "engine.start_timeout_s": _SECONDS,
    "hidden_states.segment_gib": _GIB,
    "hidden_states.writer_threads": "[1, 1e3]",
    "hidden_states.window_share": "(0, 1]",
    "hidden_states.attempts": "[1, 1e3]",
    "hidden_states.sample_timeout_s": _SECONDS,
    "hidden_states.max_set_aside_share": _SHARE,
    "datagen.limit": _COUNT,
    "datagen.temperature": "[0, 100]",
    "datagen.top_p": "(0, 1]",
    "datagen.top_k": "[0, 1e9]",
    "datagen.min_p": _PART,
    "datagen.max_new_tokens": "[1, 1e9]",
    "datagen.max_sequence_tokens": "[2, 1e9]",
    "datagen.min_supervised_tokens": "[1, 1e9]",
    "datagen.validation_share": _PART,
    "datagen.calibration_share": _PART,
    "datagen.evaluation_share": _PART,
    "datagen.seed": _SEED,
    "datagen.shard_conversations": _COUNT,
    "datagen.max_failed_share": _SHARE,
    "draft.num_layers": "[1, 1e3]",
    "draft.num_heads": "[1, 1e4]",
    "draft.num_kv_heads": "[1, 1e4]",
    "draft.head_dim": "[2, 1e4]",
    "draft.intermediate_size": _SIZE,
    "draft.block_size": "[1, 128]",
    "draft.num_speculative_tokens": "[1, 128]",
    "draft.vocab_size": _SIZE,
    "draft.mask_token_id": "[0, 1e9]",
    "draft.markov_rank": "[1, 1e5]",  # vLLM's DSpark always has a Markov head
    "draft.sliding_window": "[1, 1e9]",
    "draft.rope_theta": "(1, 1e12]",
    "draft.max_positions": "[2, 1e9]",
    "draft.rms_norm_eps": "(0, 1)",
    "train.epochs": _COUNT,
    "train.max_steps": _COUNT,
    "train.batch_sequences": _COUNT,
    "train.max_sequence_tokens": "[2, 1e9]",
    "train.anchors_per_sequence": _COUNT,
    "train.micro_batch_tokens": _COUNT,
    "train.lr": "(0, 1]",
    "train.warmup_share": _SHARE,
    "train.muon_lr_factor": "(0, 1e4]",
    "train.weight_decay": "[0, 10]",
    "train.clip_norm": _POSITIVE,
    "train.decay_gamma": _POSITIVE,
    "train.ce_weight": "[0, 1e6]",
    "train.l1_weight": "[0, 1e6]",
    "train.confidence_weight": "[0, 1e6]",
    "train.seed": _SEED,
    "train.validate_every_steps": _COUNT,
    "train.checkpoint_every_steps": _COUNT,
    "train.early_stopping_validations": _COUNT,
    "train.keep_checkpoints": "[1, 1e4]",
    "train.max_nonfinite_steps": "[0, 1e9]",
    "train.grace_s": "[0, 1e6]",
    "train.num_workers": "[1, 1e5]",
    "train.gpus_per_worker": "[0, 1]",
    "train.cpus_per_worker": "(0, 1e4]",
    "train.max_failures": "[0, 1e6]",
    "calibrate.fit_share": "(0, 1)",
    "calibrate.bins": "[1, 1e5]",
    "calibrate.min_records": "[1, 1e9]",
    "calibrate.max_anchors_per_sequence": _COUNT,
    "calibrate.temperature_min": "(0, 1]",
    "calibrate.temperature_max": "[1, 1e6]",
    "calibrate.temperature_steps": "[2, 1e6]",
    "calibrate.seed": _SEED,
    "calibrate.threads": "[1, 1e4]",
    "evaluate.prompts_per_domain": _COUNT,
    "evaluate.max_new_tokens": "[1, 1e9]",
    "evaluate.bootstrap_samples": "[1, 1e7]",
    "evaluate.min_acceptance_length": "[1, 129]",
    "evaluate.seed": _SEED,
    "evaluate.batch_sequences": "[1, 1e5]",
    "evaluate.gpus": "[0, 1e3]",
    "evaluate.cpus": "(0, 1e4]",
    "evaluate.chunk_timeout_s": _SECONDS,
    "ray.num_cpus": "(0, 1e6]",
}


def check_bounds(values: Mapping[str, Any]) -> None:
    """Raise ValueError for the first of the `values`, by dotted key, that lies outside its interval."""
    for key, interval in BOUNDS.items():
        value = values.get(key)
        if value is not None and not _inside(value, interval):
            raise ValueError(f"{key}={value}: expected a number in {interval}")


def _inside(value: float, interval: str) -> bool:
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return above and below
