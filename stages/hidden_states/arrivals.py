"""Waiting for objects that appear in the store after the engine has answered."""

from __future__ import annotations

import asyncio

from stages.hidden_states.store import ERROR_SUFFIX, HiddenStatesStore
from stages.hidden_states.wire import HiddenStatesError

_POLL_S = 0.005  # between looks at the store; a prefill takes longer, and one look asks for all keys at once


class Arrivals:
    """Waits for many objects with one look at the store."""

    def __init__(self, store: HiddenStatesStore) -> None:
        self._store = store
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._looking: asyncio.Task[None] | None = None

    async def wait(self, key: str) -> None:
        """Return when the object is there. Raises HiddenStatesError with the producer's error instead."""
        future = self._waiting[key] = asyncio.get_running_loop().create_future()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            await future
        finally:
            del self._waiting[key]

    async def _look(self) -> None:
        while self._waiting:
            waiting = [(key, future) for key, future in self._waiting.items() if not future.done()]
            keys = [key for key, _ in waiting]
            try:
                there = self._store.exist(keys + [key + ERROR_SUFFIX for key in keys])
            except HiddenStatesError as error:
                for _, future in waiting:
                    future.set_exception(type(error)(str(error)))
                return
            for (key, future), stored, failed in zip(waiting, there, there[len(keys) :], strict=False):
                if failed:
                    future.set_exception(self._producer_error(key))
                elif stored:
                    future.set_result(None)
            await asyncio.sleep(_POLL_S)

    def _producer_error(self, key: str) -> HiddenStatesError:
        try:
            return HiddenStatesError(f"the engine could not store them: {self._store.get_error(key)}")
        except HiddenStatesError as error:
            return type(error)(f"the engine could not store them, and why cannot be read: {error}")
