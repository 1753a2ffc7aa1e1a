"""Which actor is asked next, what happens to a call whose actor dies, and a loop to do it in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any, Self, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from stages.engine.requests import EngineError

T = TypeVar("T")
_RETURNS = 3  # times that an actor may fail to come back in a row before it is given up


class ActorLostError(EngineError):
    """The actor died under a call. Asking again may succeed, there or elsewhere."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


class Dispatcher:
    """Knows which actors live and how much each has to do. For use within one event loop.

    `admit`: awaited for an actor that came back before it is picked again. Its ActorLostError means another
    try, its EngineError that the actor is given up.
    """

    def __init__(
        self,
        actors: Sequence[ActorHandle],
        restart_timeout_s: float,
        admit: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        self._actors = tuple(actors)
        self._restart_timeout_s = restart_timeout_s
        self._admit = admit
        self._running = [0] * len(actors)
        self._recovering: dict[int, asyncio.Task[None]] = {}
        self._dead: dict[int, str] = {}
        self._watches: dict[str, asyncio.Task[str]] = {}  # by life

    async def pick(self, avoid: int | None = None) -> int:
        """The living actor with the least to do, other than `avoid` if possible; waits for a restart if none lives.

        Raises EngineError when no actor can come back.
        """
        while True:
            up = [i for i in range(len(self._actors)) if i not in self._recovering and i not in self._dead]
            if choice := [i for i in up if i != avoid] or up:
                return min(choice, key=self._running.__getitem__)
            if not self._recovering:
                last = list(self._dead.values())[-1]
                raise EngineError(f"all {len(self._actors)} engines are dead; the last said: {last}")
            await asyncio.wait(list(self._recovering.values()), return_when=asyncio.FIRST_COMPLETED)

    async def call(self, index: int, method: str, *args: Any) -> Any:
        """What `method` of actor `index` returns or raises; ActorLostError when the actor dies meanwhile."""
        self._running[index] += 1
        try:
            return await self._ask(index, method, *args)
        except (RayActorError, EngineError) as error:
            raise self.lost(index, last_line(error)) from error
        finally:
            self._running[index] -= 1

    async def unless_lost(self, index: int, life: str, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result; cancelled with ActorLostError when engine `life` of actor `index` dies before."""
        if life not in self._watches:
            self._watches[life] = asyncio.create_task(self._watch(index, life))
        watch = self._watches[life]
        task = asyncio.create_task(coroutine)
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ActorLostError(index, watch.result())
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _ask(self, index: int, method: str, *args: Any) -> Any:
        ref = getattr(self._actors[index], method).remote(*args)
        try:
            return await ref
        except asyncio.CancelledError:
            ray.cancel(ref)
            raise

    async def _watch(self, index: int, life: str) -> str:
        """Return why that engine died, once it has."""
        try:
            await self._ask(index, "watch", life)
        except (RayActorError, EngineError) as error:
            return str(self.lost(index, last_line(error)))
        raise AssertionError("VllmActor.watch returned")

    def lost(self, index: int, why: str) -> ActorLostError:
        """Pick the actor no more until it has come back; gives the error for the call that found out."""
        if index not in self._recovering and index not in self._dead:
            self._recovering[index] = task = asyncio.create_task(self._recover(index))
            task.add_done_callback(lambda task: self._recovered(index, task))
        return ActorLostError(index, why)

    async def _recover(self, index: int) -> None:
        """Wait until Ray has started the actor again and it is admitted. Raises why it is given up."""
        try:
            async with asyncio.timeout(self._restart_timeout_s):
                for tries_left in reversed(range(_RETURNS)):
                    await self._actors[index].ready.remote()
                    try:
                        if self._admit is not None:
                            await self._admit(index)
                    except ActorLostError:
                        if not tries_left:
                            raise
                    else:
                        return
        except TimeoutError as error:
            why = f"engine {index} not back within engine.start_timeout_s={self._restart_timeout_s}"
            raise EngineError(why) from error

    def _recovered(self, index: int, task: asyncio.Task[None]) -> None:
        del self._recovering[index]
        if not task.cancelled() and (error := task.exception()) is not None:  # whatever it is: it was not admitted
            self._dead[index] = last_line(error)


class BackgroundLoop:
    """An event loop in a thread, for synchronous callers of asynchronous code."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. When the caller is interrupted the coroutine is cancelled."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def iterate(self, source: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Items of an asynchronous generator, each made while the one before is used; closes it in the end."""
        end = object()
        turn = asyncio.Lock()  # a step that was interrupted is still being cancelled when the generator is to close

        async def step() -> Any:
            async with turn:
                return await anext(source, end)

        async def close() -> None:
            async with turn:
                await source.aclose()

        coming = asyncio.run_coroutine_threadsafe(step(), self._loop)
        try:
            while (item := coming.result()) is not end:
                coming = asyncio.run_coroutine_threadsafe(step(), self._loop)
                yield item
        finally:
            coming.cancel()
            if not self._loop.is_closed():
                self.run(close())

    def close(self) -> bool:
        """Cancel what still runs and end the thread. False when that was done before."""
        if self._loop.is_closed():
            return False
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        return True


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


def last_line(error: BaseException) -> str:
    """The message of an error that Ray wrapped in a traceback, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
