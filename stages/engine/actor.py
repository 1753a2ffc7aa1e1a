"""One vLLM engine in one Ray actor.

The engine's core is a process of its own, a child of the actor: it dies with the actor (`executor.py`),
and an actor whose core died exits, so that Ray starts both again. Knows nothing of hidden states but the
parameters that it hands to the engine's connector and the reference that comes back.
"""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import ray

from stages.engine.cpu import cpu_environment
from stages.engine.log import redirect_output, root_cause
from stages.engine.requests import EngineError, Extraction, GenerationRequest, GenerationResult

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

_WATCH_S = 0.5
_LEFT = 70  # exit status
_EXIT_DELAY_S = 0.5  # lets the answers that name the cause leave before the process ends


@dataclass(frozen=True)
class ActorSpec:
    """How actor `index` of `num_actors` makes its engine."""

    args: dict[str, Any]  # of AsyncEngineArgs
    log: Path
    index: int
    num_actors: int
    on_cpu: bool
    start_timeout_s: float


def end_with_event_loop() -> None:
    """End the process when the event loop that calls this ends, as it does when somebody calls `sys.exit` in it.

    Ray would keep the process, with a loop that answers nothing: whoever has asked would wait for a time-out.
    """
    loop_thread = threading.current_thread()

    def watch() -> None:
        loop_thread.join()
        os._exit(_LEFT)

    threading.Thread(target=watch, name="event-loop-watch", daemon=True).start()


class VllmActor:
    """Owns one `AsyncLLM`. Raises EngineError with the engine's own message when it cannot start."""

    def __init__(self, spec: ActorSpec) -> None:
        end_with_event_loop()
        self._spec = spec
        self._life = uuid.uuid4().hex
        self._log_start = redirect_output(spec.log)
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = str(int(spec.start_timeout_s))
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from stages.engine.executor import ACTOR_PID

        os.environ[ACTOR_PID] = str(os.getpid())
        if spec.on_cpu:  # after the imports: OpenMP, which they load, would bind this process' thread too
            os.environ |= cpu_environment(spec.index, spec.num_actors, spec.args["tensor_parallel_size"])
        try:
            self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**spec.args))
        except Exception as error:
            raise EngineError(f"engine {spec.index} did not start: {self._cause(str(error))}") from error

    @ray.method(max_task_retries=-1)
    async def ready(self) -> int:
        """Answer with the actor's pid once there is a living engine; asked across a restart, waits for it."""
        if self._engine.errored:
            self._exit_soon()
            await asyncio.Event().wait()
        return os.getpid()

    async def watch(self, life: str) -> None:
        """Never returns; raises EngineError once engine `life` is dead, also when nobody asks it anything."""
        if life != self._life:
            raise EngineError(f"engine {self._spec.index} died and was started again")
        while not self._engine.errored:
            await asyncio.sleep(_WATCH_S)
        self._dead()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Continue exactly these tokens. What vLLM refuses comes back as an "error" result."""
        from vllm import SamplingParams

        try:
            params = SamplingParams(
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
                min_p=request.min_p,
                max_tokens=request.max_tokens,
                seed=request.seed,
                detokenize=False,
            )
            output = await self._run(list(request.prompt_token_ids), params)
        except ValueError as error:
            return GenerationResult(request.id, (), "error", str(error))
        answer = output.outputs[0]
        return GenerationResult(request.id, tuple(answer.token_ids), answer.finish_reason or "error")

    async def extract(self, token_ids: np.ndarray, capture: dict[str, Any], logprobs: str = "") -> Extraction:
        """Prefill `token_ids` (int [T]); the connector, told `capture`, stores their states.

        `logprobs`: of no position, of the "last" or of "all". Answers before the states are stored.
        Raises ValueError when vLLM refuses the request.
        """
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            detokenize=False,
            logprobs=0 if logprobs else None,
            prompt_logprobs=0 if logprobs == "all" else None,
            extra_args={"kv_transfer_params": {"capture": True, **capture}},
        )
        output = await self._run(token_ids.tolist(), params)
        [answer] = output.outputs
        rows = [*(output.prompt_logprobs or [])[1:], *(answer.logprobs or [])]
        said = tuple(next(iter(row.values())).logprob for row in rows)
        return Extraction(dict(output.kv_transfer_params or {}), self._life, said, answer.token_ids[0])

    async def _run(self, token_ids: list[int], params: SamplingParams) -> RequestOutput:
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        params.output_kind = RequestOutputKind.FINAL_ONLY
        final = None
        try:
            async for output in self._engine.generate(tokens_input(token_ids), params, uuid.uuid4().hex):
                final = output
        except EngineDeadError as error:
            self._dead(error)
        except VLLMValidationError as error:
            raise ValueError(str(error)) from error
        assert final is not None
        return final

    def _dead(self, error: Exception | None = None) -> NoReturn:
        self._exit_soon()
        cause = self._cause("its process ended without a word")
        raise EngineError(f"engine {self._spec.index} died: {cause}") from error

    def _cause(self, otherwise: str) -> str:
        return root_cause(self._spec.log, self._log_start, otherwise)

    def _exit_soon(self) -> None:
        asyncio.get_running_loop().call_later(_EXIT_DELAY_S, os._exit, 1)
