"""How a vLLM engine is run. Only what changes the target's numbers is part of an identity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stages.artifacts import resource


@dataclass(frozen=True)
class EngineConfig:
    """One vLLM engine, and how many of them make a pool."""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    max_model_len: int = 8192
    max_num_batched_tokens: int = 8192  # prompts longer than this are prefilled in chunks
    max_num_seqs: int = resource(64)
    num_actors: int = resource(1)
    tensor_parallel: int = resource(1)
    gpus_per_actor: int = resource(0)
    cpus_per_actor: float = resource(1.0)
    kv_cache_gib: float | None = resource(None)  # None: vLLM's own choice (GPU only)
    gpu_memory_utilization: float = resource(0.9)
    enforce_eager: bool = resource(True)
    expert_parallel: bool = resource(False)
    start_timeout_s: float = resource(1800.0)
