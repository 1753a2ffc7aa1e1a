"""Batches of hidden states in exactly the order asked for, fetched ahead within a budget of bytes."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import torch

from stages.corpus import TokenSequence
from stages.engine.dispatch import BackgroundLoop
from stages.engine.requests import EngineError
from stages.hidden_states.config import HiddenStatesConfig
from stages.hidden_states.samples import Endpoint, SampleError, Samples
from stages.hidden_states.wire import HiddenBatch, HiddenStatesError, check_set_aside

_MIN_BATCHES_AHEAD = 2  # one that is being filled while the other waits to be taken


def misfit(sequence: TokenSequence, size_bytes: int, window_bytes: int, segment_bytes: int) -> str | None:
    """Why a sequence whose object has `size_bytes` can never be fetched, if so.

    `window_bytes`: what the reader may have in flight; `segment_bytes`: what one extractor lends.
    """
    limit_bytes = min(window_bytes, segment_bytes)
    if len(sequence) > 0 and size_bytes <= limit_bytes:
        return None
    return (
        f"sequence {sequence.id} of {len(sequence)} tokens is an object of {size_bytes} bytes, a rank may have 1 to "
        f"{limit_bytes} in flight; raise hidden_states.segment_gib or hidden_states.window_share, or shorten it"
    )


class ByteBudget:
    """`limit` bytes, given out in the order of asking. For use within one event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free = limit
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Hold `size` bytes (at most `limit`) for the length of the context."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        self._serve()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._free += size
            self._serve()

    def _serve(self) -> None:
        while self._waiting:
            size, turn = self._waiting[0]
            if not turn.cancelled():
                if size > self._free:
                    return
                self._free -= size
                turn.set_result(None)
            self._waiting.popleft()


class StreamingReader:
    """Implements `HiddenStatesReader` against a pool of extractors.

    One reader a rank: `num_ranks` share the store. What was asked for and not yet read never exceeds
    the rank's share of `hidden_states.window_share` of the store, so no put finds it full.
    """

    def __init__(self, endpoint: Endpoint, config: HiddenStatesConfig, *, num_ranks: int) -> None:
        self._endpoint = endpoint
        self._config = config
        self._samples = Samples(endpoint, config)
        self._window = ByteBudget(config.window_bytes(endpoint.store_bytes, num_ranks))
        running = math.ceil(endpoint.max_running / num_ranks)
        self._running = asyncio.Semaphore(running)
        self._most_ahead = 2 * running  # batches: as many ready or waiting as the engines run at once
        self._loop = BackgroundLoop("hidden-states-reader")

    def read(self, batches: Iterable[Sequence[TokenSequence]]) -> Iterator[HiddenBatch]:
        """One HiddenBatch per element of `batches`, which is drawn from another thread.

        Every sequence is asked for `hidden_states.attempts` times at most, then set aside by name.
        Raises HiddenStatesError, with the last cause, when more than `hidden_states.max_set_aside_share`
        of the sequences were (one is allowed unless the share is 0), when a sequence is larger than
        the budget, or when no engine is left; StoreGoneError when the store's master is.
        """
        try:
            yield from self._loop.iterate(self._batches(batches))
        except EngineError as error:
            raise HiddenStatesError(f"hidden states cannot be had: {error}") from error

    def close(self) -> None:
        """Stop fetching, end the thread, release the connection; safe to call twice."""
        if self._loop.close():
            self._samples.close()

    async def _batches(self, batches: Iterable[Sequence[TokenSequence]]) -> AsyncGenerator[HiddenBatch, None]:
        source = iter(batches)
        ahead: deque[tuple[asyncio.Task[HiddenBatch], int]] = deque()
        asked, set_aside = 0, list[tuple[str, str]]()
        try:
            while True:
                started = time.monotonic()
                while len(ahead) < _MIN_BATCHES_AHEAD or self._may_ask(ahead):
                    if (sequences := next(source, None)) is None:
                        break
                    size = sum(self._checked_bytes(sequence) for sequence in sequences)
                    ahead.append((asyncio.create_task(self._batch(tuple(sequences))), size))
                if not ahead:
                    return
                batch = await ahead[0][0]
                ahead.popleft()
                asked += len(batch.sequences) + len(batch.set_aside)
                set_aside += batch.set_aside
                check_set_aside(set_aside, asked, self._config.max_set_aside_share)
                yield replace(batch, wait_s=time.monotonic() - started)
        finally:
            for task, _ in ahead:
                task.cancel()
            await asyncio.gather(*(task for task, _ in ahead), return_exceptions=True)

    def _may_ask(self, ahead: Sequence[tuple[asyncio.Task[HiddenBatch], int]]) -> bool:
        """Whether the engines want more to do. With small sequences the window alone would let a long queue
        grow, behind which another read of the same reader (a validation) would wait."""
        return len(ahead) < self._most_ahead and sum(size for _, size in ahead) < self._window.limit

    def _checked_bytes(self, sequence: TokenSequence) -> int:
        """The size of the sequence's object. Raises HiddenStatesError when it could never be fetched."""
        size = self._endpoint.layout.object_bytes(len(sequence))
        if problem := misfit(sequence, size, self._window.limit, self._endpoint.segment_bytes):
            raise HiddenStatesError(problem)
        return size

    async def _batch(self, sequences: tuple[TokenSequence, ...]) -> HiddenBatch:
        """Fetch all sequences of a batch into one allocation."""
        lengths = [len(sequence) for sequence in sequences]
        memory, states_TLD, scratch = self._endpoint.layout.allocate(lengths)
        rows = states_TLD.split(lengths)
        self._samples.store.register(memory)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._sequence(*each)) for each in zip(sequences, rows, scratch, strict=True)
                ]
        except* (EngineError, HiddenStatesError) as errors:
            raise errors.exceptions[0] from None
        finally:
            self._samples.store.unregister(memory)
        reasons = [task.result() for task in tasks]
        set_aside = tuple((s.id, why) for s, why in zip(sequences, reasons, strict=True) if why is not None)
        if set_aside:
            kept = [row for row, why in zip(rows, reasons, strict=True) if why is None]
            sequences = tuple(s for s, why in zip(sequences, reasons, strict=True) if why is None)
            states_TLD = torch.cat(kept) if kept else states_TLD[:0]
        return HiddenBatch(sequences, states_TLD, 0.0, set_aside)

    async def _sequence(self, sequence: TokenSequence, states_TLD: torch.Tensor, scratch: torch.Tensor) -> str | None:
        """Fill `states_TLD`; returns why not after the last try."""
        failed: SampleError | None = None
        async with self._running, self._window.hold(self._endpoint.layout.object_bytes(len(sequence))):
            for attempt in range(self._config.attempts):
                actor = await self._samples.dispatcher.pick(avoid=None if failed is None else failed.actor)
                try:
                    await self._samples.take(sequence.input_ids, states_TLD, scratch, attempt=attempt, actor=actor)
                except SampleError as error:
                    failed = error
                else:
                    return None
        return f"{self._config.attempts} tries, the last: {failed}"
