"""Waiting for objects that appear in the store after the engine has answered."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from stages.hidden_states.store import HiddenStatesStore, error_name
from stages.hidden_states.wire import HiddenStatesError

# Between looks at the store, which ask for all names at once: soon after something came or was asked for, since small
# samples come in quick succession, and ever later while a prefill takes its time.
_SHORTEST_POLL_S = 0.0005
_LONGEST_POLL_S = 0.008

_Waiting = tuple[Sequence[str], asyncio.Future[None], int]  # names, who waits, the store's breaks before


class Arrivals:
    """Waits for many samples with one look at the store.

    A look is a call that blocks the event loop: 0.1 ms, which a thread would double. With a master that does not answer
    it is the store's `_BACK_WITHIN_S`, in which nothing could be had anyway.
    """

    def __init__(self, store: HiddenStatesStore) -> None:
        self._store = store
        self._waiting: dict[str, _Waiting] = {}
        self._looking: asyncio.Task[None] | None = None
        self._poll_s = _SHORTEST_POLL_S

    async def wait(self, key: str, names: Sequence[str], breaks: int) -> None:
        """Return when all objects of sample `key` are there. Raises HiddenStatesError with the producer's error.

        `breaks`: the store's when they were asked for; when there are more, they may be forgotten, and are not
        waited for.
        """
        future = asyncio.get_running_loop().create_future()
        self._waiting[key] = (names, future, breaks)
        self._poll_s = _SHORTEST_POLL_S
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
            self._looking.add_done_callback(self._looked)
        try:
            await future
        finally:
            del self._waiting[key]

    async def _look(self) -> None:
        while self._waiting:
            waiting = {key: held for key, held in self._waiting.items() if not held[1].done()}
            self._look_once(waiting)
            await asyncio.sleep(self._poll_s)

    def _looked(self, task: asyncio.Task[None]) -> None:
        """Tell all who wait why nobody looks any more: else they would wait for their time-outs."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        known, said = isinstance(error, HiddenStatesError), f"{type(error).__name__}: {error}"
        for _, future, _ in self._waiting.values():
            if not future.done():
                future.set_exception(type(error)(str(error)) if known else HiddenStatesError(said))

    def _look_once(self, waiting: Mapping[str, _Waiting]) -> None:
        asked = [name for key, (names, *_) in waiting.items() for name in (error_name(key), *names)]
        there = dict(zip(asked, self._store.exist(asked), strict=True))
        self._poll_s = min(2 * self._poll_s, _LONGEST_POLL_S)
        for key, (names, future, breaks) in waiting.items():
            if self._store.breaks != breaks:
                future.set_exception(HiddenStatesError("the store's master may have been started again meanwhile"))
            elif there[error_name(key)]:
                future.set_exception(self._producer_error(key))
            elif all(there[name] for name in names):
                future.set_result(None)
                self._poll_s = _SHORTEST_POLL_S

    def _producer_error(self, key: str) -> HiddenStatesError:
        try:
            return HiddenStatesError(f"the engine could not store them: {self._store.get_error(key)}")
        except HiddenStatesError as error:
            return type(error)(f"the engine could not store them, and why cannot be read: {error}")
