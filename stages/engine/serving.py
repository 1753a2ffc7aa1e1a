"""Serving in unmodified vLLM, with a DSpark draft or without, and what the engine counted.

Owns the environment under which vLLM serves `method="dspark"` with and without a GPU. Knows nothing
of corpora or reports. Every server is a process of its own (a Ray actor), because vLLM reads its
environment at import and gives memory back only when its process ends.

vLLM 0.32 serves dspark through its V2 model runner alone, and that needs Triton. Without a GPU
Triton's interpreter runs the same kernels: about 35 ms a round and sequence at a vocabulary of 1024,
so this is a gate and an oracle there, not a speed measurement.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray

from stages.end_tokens import end_token_ids
from stages.engine.config import EngineConfig
from stages.engine.cpu import cpu_environment
from stages.engine.log import redirect_output
from stages.engine.requests import EngineError
from stages.target import Target


@dataclass(frozen=True)
class ServingSpec:
    """Everything a server needs to start. `draft` None: no speculation."""

    model: str
    revision: str | None
    trust_remote_code: bool
    stop_token_ids: tuple[int, ...]
    max_model_len: int
    engine: EngineConfig
    log: Path  # everything the process prints
    draft: Path | None = None
    num_speculative_tokens: int = 0
    batch_sequences: int = 8
    gpus: int = 0  # more than one: tensor parallel inside a node
    cpus: float = 1.0
    slot: int = 0  # which of the `servers` side by side this is: they share the machine's cores
    servers: int = 1
    runner_up: bool = False  # also return the second best token of every position


@dataclass(frozen=True)
class ServedAnswer:
    """What came back for one prompt.

    `rounds_by_accepted[j]` counts the verification rounds in which j drafted tokens were accepted;
    empty without a draft. The first token comes from the prefill and belongs to no round; the last
    round may have accepted tokens after the stop token, which `token_ids` no longer holds.
    """

    token_ids: tuple[int, ...]  # the stop token, when there was one, is the last
    rounds_by_accepted: tuple[int, ...] = ()
    drafted: int = 0
    runner_up: tuple[tuple[int, float], ...] = ()  # per position: second best token, and nats below the best

    @property
    def rounds(self) -> int:
        return sum(self.rounds_by_accepted)

    @property
    def accepted(self) -> int:
        return sum(count * accepted for accepted, count in enumerate(self.rounds_by_accepted))


@dataclass(frozen=True)
class SpeculationCounters:
    """vLLM's `vllm:spec_decode_*` counters over some span of serving."""

    rounds: int = 0  # num_drafts
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()

    def since(self, before: SpeculationCounters) -> SpeculationCounters:
        """The difference; positions that `before` had not seen count from zero."""
        earlier = before.accepted_per_position or (0,) * len(self.accepted_per_position)
        return SpeculationCounters(
            self.rounds - before.rounds,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            tuple(now - then for now, then in zip(self.accepted_per_position, earlier, strict=True)),
        )


@dataclass(frozen=True)
class Served:
    """Answers in the order of the prompts, and the engine's own counters over the same call."""

    answers: tuple[ServedAnswer, ...]
    counters: SpeculationCounters
    seconds: float


def serving_spec(target: Target, engine: EngineConfig, log: Path, **options: Any) -> ServingSpec:
    """A spec for `target`; `options` are the fields of ServingSpec after `log`."""
    return ServingSpec(
        target.model,
        target.revision,
        target.trust_remote_code,
        end_token_ids(target),
        min(engine.max_model_len, target.shape.max_positions),
        engine,
        log,
        **options,
    )


class Server:
    """One vLLM engine. Raises EngineError with vLLM's own message when it cannot start.

    Runs in a process of its own, which `serving` starts and ends.
    """

    def __init__(self, spec: ServingSpec) -> None:
        redirect_output(spec.log)
        if spec.gpus == 0:
            os.environ |= cpu_environment(spec.slot, spec.servers, 1)
            if spec.draft is not None:
                _admit_triton_interpreter()
        from vllm import LLM

        self.spec = spec
        try:
            self.llm = LLM(**engine_arguments(spec))
        except Exception as error:
            raise EngineError(f"serving {spec.draft or spec.model} did not start: {error} (log: {spec.log})") from error

    def describe(self) -> dict[str, Any]:
        """Versions and hardware of this server, for a report. Answers once the engine is up."""
        import torch
        import vllm

        gpus = [torch.cuda.get_device_name(i) for i in range(self.spec.gpus)]
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "dtype": self.spec.engine.dtype,
            "cpu": _cpu_name(),
            "cpu_cores": os.cpu_count() or 0,
            "gpus": gpus,
            "kernels": "GPU" if gpus else "CPU (drafting and sampling in Triton's interpreter)",
        }

    def serve(self, prompts: Sequence[tuple[Sequence[int], int]]) -> Served:
        """Continue each prompt of (token ids, new tokens at most) greedily until a stop token or that length."""
        from vllm import SamplingParams

        spec, before, started = self.spec, self._counters(), time.monotonic()
        shared: dict[str, Any] = {"temperature": 0.0, "detokenize": False, "logprobs": 2 if spec.runner_up else None}
        stop = list(spec.stop_token_ids)
        params = [SamplingParams(max_tokens=limit, stop_token_ids=stop, **shared) for _, limit in prompts]
        outputs = self.llm.generate([{"prompt_token_ids": list(ids)} for ids, _ in prompts], params, use_tqdm=False)
        return Served(
            tuple(self._answer(output.outputs[0]) for output in outputs),
            self._counters().since(before),
            time.monotonic() - started,
        )

    def _answer(self, completion: Any) -> ServedAnswer:
        metrics = completion.spec_decode_metrics
        return ServedAnswer(
            tuple(completion.token_ids),
            () if metrics is None else tuple(metrics.histogram),
            0 if metrics is None else metrics.num_draft_tokens,
            tuple(_runner_up(position) for position in completion.logprobs or ()),
        )

    def _counters(self) -> SpeculationCounters:
        found = {m.name: m for m in self.llm.get_metrics() if m.name.startswith("vllm:spec_decode_num_")}

        def value(name: str) -> int:
            metric: Any = found.get(f"vllm:spec_decode_num_{name}")
            return 0 if metric is None else int(metric.value)

        per_position: Any = found.get("vllm:spec_decode_num_accepted_tokens_per_pos")
        return SpeculationCounters(
            value("drafts"),
            value("draft_tokens"),
            value("accepted_tokens"),
            () if per_position is None else tuple(int(v) for v in per_position.values),
        )


def engine_arguments(spec: ServingSpec) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` for `spec`."""
    engine = spec.engine
    arguments: dict[str, Any] = {
        "model": spec.model,
        "revision": spec.revision,
        "trust_remote_code": spec.trust_remote_code,
        "dtype": engine.dtype,
        "max_model_len": spec.max_model_len,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_num_seqs": spec.batch_sequences,
        "tensor_parallel_size": max(1, spec.gpus),
        "enable_expert_parallel": engine.expert_parallel,
        "enforce_eager": engine.enforce_eager,
        "enable_prefix_caching": False,  # the same prompt must cost the same prefill with and without a draft
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "disable_log_stats": False,  # the counters are part of the stats
    }
    if engine.kv_cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(engine.kv_cache_gib * 2**30)
    if spec.gpus:
        arguments["gpu_memory_utilization"] = engine.gpu_memory_utilization
    if spec.draft is not None:
        arguments["per_request_spec_decode_metrics"] = "summary"
        arguments["speculative_config"] = {
            "model": str(spec.draft),
            "method": "dspark",
            "num_speculative_tokens": spec.num_speculative_tokens,
        }
    return arguments


@contextmanager
def serving(spec: ServingSpec) -> Iterator[Any]:
    """A Server as a Ray actor handle, not waited for; its process ends with the block.

    The engine lives in the actor's own process (with tensor parallelism its workers watch it), so
    nothing outlives the kill. A server that did not start answers every call with RayActorError.
    """
    actor = (
        ray.remote(Server)
        .options(num_cpus=spec.cpus, num_gpus=spec.gpus, max_restarts=0, runtime_env={"env_vars": environment(spec)})
        .remote(spec)
    )
    try:
        yield actor
    finally:
        ray.kill(actor)


def room_for(spec: ServingSpec, servers: int) -> bool:
    """Whether the cluster has free CPUs and GPUs for that many servers of this size at once."""
    free = ray.available_resources()
    return free.get("CPU", 0.0) >= servers * spec.cpus and free.get("GPU", 0.0) >= servers * spec.gpus


def environment(spec: ServingSpec) -> dict[str, str]:
    """Environment of the server's process, complete before Python starts in it."""
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    if spec.draft is not None and not spec.gpus:
        variables |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    return variables


def _admit_triton_interpreter() -> None:
    """Let vLLM's CPU build use Triton: it asks only whether a backend of the name "cpu" is listed
    (vllm/triton_utils/importing.py), and the interpreter compiles nothing."""
    from triton import backends

    driver = SimpleNamespace(is_active=lambda: False)
    backends.backends.setdefault("cpu", backends.Backend(compiler=None, driver=driver))


def _cpu_name() -> str:
    """The processor's name as Linux tells it, else its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _runner_up(position: dict[int, Any]) -> tuple[int, float]:
    """The second best token of one position and its distance to the best, in nats."""
    (_, best), (token, second) = sorted(position.items(), key=lambda item: -float(item[1].logprob))[:2]
    return token, float(best.logprob - second.logprob)
