"""A pool of engines that start side by side, answer every request once, and end with the pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from stages.engine.actor import ActorSpec, VllmActor
from stages.engine.config import EngineConfig
from stages.engine.dispatch import ActorLostError, BackgroundLoop, Dispatcher, last_line
from stages.engine.log import tail
from stages.engine.requests import EngineError, GenerationRequest, GenerationResult

_ATTEMPTS = 3  # a request that was running in three dying engines is taken to be the reason
_QUEUED_SHARE = 2  # requests given to an engine for each that it can run, so that it never waits for more


class EnginePool:
    """`config.num_actors` engines made with `args`. Use as a context manager; logs go to `work`."""

    def __init__(self, config: EngineConfig, args: dict[str, Any], work: Path) -> None:
        self._config = config
        self._args = args
        self._work = work.absolute()
        self._group: PlacementGroup | None = None
        self.actors: tuple[ActorHandle, ...] = ()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all engines and give their resources back; safe to call twice."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors = ()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def generate(self, requests: Iterable[GenerationRequest]) -> Iterator[GenerationResult]:
        """Answer every request exactly once, in the order of completion.

        Requests are drawn from `requests` as engines get free. Raises EngineError when no engine
        can be had any more, or when one request was running in several engines that died.
        """
        with BackgroundLoop("engine-pool") as loop:
            yield from loop.iterate(self._answers(requests))

    async def _answers(self, requests: Iterable[GenerationRequest]) -> AsyncGenerator[GenerationResult, None]:
        dispatcher = Dispatcher(self.actors, self._config.start_timeout_s)
        limit = len(self.actors) * self._config.max_num_seqs * _QUEUED_SHARE
        source = iter(requests)
        running: set[asyncio.Task[GenerationResult]] = set()
        try:
            while True:
                while len(running) < limit and (request := next(source, None)) is not None:
                    running.add(asyncio.create_task(_answer(dispatcher, request)))
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        finally:
            for task in running:
                task.cancel()

    def _start(self) -> None:
        config = self._config
        bundle = {"CPU": config.cpus_per_actor} | ({"GPU": config.gpus_per_actor} if config.gpus_per_actor else {})
        self._group = placement_group([bundle] * config.num_actors, strategy="PACK")
        if not self._group.wait(config.start_timeout_s):
            raise EngineError(
                f"engine.num_actors={config.num_actors} of {bundle} each could not be placed within "
                f"engine.start_timeout_s={config.start_timeout_s}; the cluster has {ray.available_resources()} free"
            )
        self.actors = tuple(self._make(index, self._group) for index in range(config.num_actors))
        waiting = {actor.ready.remote(): self._log(index) for index, actor in enumerate(self.actors)}
        while waiting:  # whichever fails first is heard first
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=config.start_timeout_s)
            if not done:
                log = next(iter(waiting.values()))
                raise EngineError(
                    f"an engine did not start within engine.start_timeout_s={config.start_timeout_s}; "
                    f"{log} ends with:\n{tail(log)}"
                )
            try:
                ray.get(done[0])
            except RayActorError as error:
                raise EngineError(last_line(error)) from error
            del waiting[done[0]]

    def _make(self, index: int, group: PlacementGroup) -> ActorHandle:
        config = self._config
        spec = ActorSpec(
            args=self._args,
            log=self._log(index),
            index=index,
            num_actors=config.num_actors,
            on_cpu=config.gpus_per_actor == 0,
            start_timeout_s=config.start_timeout_s,
        )
        options = {
            "num_cpus": config.cpus_per_actor,
            "num_gpus": config.gpus_per_actor,
            "max_restarts": -1,  # a handle stays valid; an engine that cannot start again ends the actor for good
            "max_concurrency": 4 * config.max_num_seqs * _QUEUED_SHARE,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        }
        return ray.remote(VllmActor).options(**options).remote(spec)

    def _log(self, index: int) -> Path:
        return self._work / f"engine-{index}.log"


async def _answer(dispatcher: Dispatcher, request: GenerationRequest) -> GenerationResult:
    lost: ActorLostError | None = None
    for _ in range(_ATTEMPTS):
        index = await dispatcher.pick(avoid=None if lost is None else lost.index)
        try:
            result = await dispatcher.call(index, "generate", request)
        except ActorLostError as error:
            lost = error
        else:
            assert isinstance(result, GenerationResult)
            return result
    raise EngineError(f"request {request.id} was lost with {_ATTEMPTS} engines; the last said: {lost}") from lost
