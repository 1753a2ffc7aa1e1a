"""Arguments of the engines that generate or extract; `serving.py` makes those that serve a draft."""

from __future__ import annotations

from typing import Any

from stages.engine.config import EngineConfig
from stages.target import Target


def check_engine(config: EngineConfig) -> None:
    """Raise ValueError for engine settings that cannot work, naming the key."""
    if config.gpus_per_actor not in (0, config.tensor_parallel):
        raise ValueError(
            f"engine.gpus_per_actor={config.gpus_per_actor}: expected 0 (CPU) or "
            f"engine.tensor_parallel={config.tensor_parallel}"
        )
    if config.gpus_per_actor == 0 and config.kv_cache_gib is None:
        raise ValueError("engine.kv_cache_gib: a CPU engine needs a number of GiB, found none")


def engine_args(target: Target, config: EngineConfig) -> dict[str, Any]:
    """Keyword arguments of `AsyncEngineArgs` for an engine that generates, and nothing else."""
    check_engine(config)
    executor = "WorkersExecutor" if config.tensor_parallel > 1 else "InCoreExecutor"
    args: dict[str, Any] = {
        "model": target.model,
        "revision": target.revision,
        "trust_remote_code": target.trust_remote_code,
        "dtype": config.dtype,
        "max_model_len": min(config.max_model_len, target.shape.max_positions),
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": config.max_num_seqs,
        "enforce_eager": config.enforce_eager,
        "tensor_parallel_size": config.tensor_parallel,
        "enable_expert_parallel": config.expert_parallel,
        "enable_prefix_caching": False,  # bits would depend on what came before, and states of a prefix be missing
        "enable_chunked_prefill": True,
        "disable_log_stats": True,
        # Not left to vLLM, whose Ray executor wants bundles of one GPU each.
        "distributed_executor_backend": f"stages.engine.executor.{executor}",
    }
    if config.kv_cache_gib is not None:
        args["kv_cache_memory_bytes"] = int(config.kv_cache_gib * 2**30)
    if config.gpus_per_actor:
        args["gpu_memory_utilization"] = config.gpu_memory_utilization
    return args


def extractor_args(
    target: Target, config: EngineConfig, layer_ids: tuple[int, ...], kv_transfer_config: dict[str, Any]
) -> dict[str, Any]:
    """The same for an engine whose states can be read; it should only prefill.

    To vLLM capturing is a way of speculating, whose draft of every sequence is the token just sampled
    (`vllm/v1/spec_decode/extract_hidden_states.py`); verified, in vain, it doubles the positions of every step
    of generation. `layer_ids`: captured layers, numbered as vLLM does (k: the input of layer k; the number of
    layers: the state before the final norm). `kv_transfer_config`: the connector that stores them.
    """
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}},
    }
    transfer = {"kv_role": "kv_producer", **kv_transfer_config}
    return engine_args(target, config) | {
        # A prefill-only request samples one token, so the longest sequence needs one position more.
        "max_model_len": min(config.max_model_len + 1, target.shape.max_positions),
        "speculative_config": speculative,
        "kv_transfer_config": transfer,
    }
