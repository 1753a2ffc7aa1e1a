"""Batches of hidden states in exactly the order asked for, fetched ahead within a budget of bytes."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from functools import partial

import torch

from stages.corpus import TokenSequence
from stages.engine.dispatch import BackgroundLoop
from stages.engine.requests import EngineError
from stages.hidden_states.buffers import BatchBuffers
from stages.hidden_states.config import HiddenStatesConfig
from stages.hidden_states.flow import Flow, FlowMeter
from stages.hidden_states.layout import Layout
from stages.hidden_states.proof import layer_rms
from stages.hidden_states.samples import Endpoint, SampleError, Samples
from stages.hidden_states.wire import HiddenBatch, HiddenStatesError, check_set_aside

_MEASURED_ROWS = 64  # of a batch
_SLAB_BYTES = 256 << 20  # memory that is registered, and pinned, at once; larger for a larger batch
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


class BatchReader(ABC):
    """Implements `HiddenStatesReader`, all but where the states of one sequence come from.

    Fetches ahead until batches of the meter's `window_bytes`, or of `most_ahead` sequences, are under way or ready, and
    two at least; one more is ready for the next turn, and the trainer holds those that it works on.
    """

    def __init__(
        self, layout: Layout, buffers: BatchBuffers, meter: FlowMeter, most_ahead: int, max_set_aside_share: float
    ) -> None:
        self._layout = layout
        self._buffers = buffers
        self._meter = meter
        self._most_ahead = most_ahead
        self._max_set_aside_share = max_set_aside_share
        self._loop = BackgroundLoop("hidden-states-reader")

    def read(self, batches: Iterable[Sequence[TokenSequence]]) -> Iterator[HiddenBatch]:
        """One HiddenBatch per element of `batches`, which is drawn from another thread.

        Sequences that cannot be had are set aside by name. Raises HiddenStatesError, with the last cause,
        when more than `hidden_states.max_set_aside_share` of them are (one is allowed unless the share is
        0), and what `_size` and `_fetch` raise.
        """
        waiting: deque[int] = deque()  # sizes of the batches that the loop has ready for the next turns of this one
        try:
            with closing(self._loop.iterate(self._batches(batches, waiting))) as coming:
                while True:
                    with self._meter.trainer_waits():
                        batch = next(coming, None)
                    if batch is None:
                        return
                    self._meter.ready(waiting.popleft(), batches=-1)
                    self._meter.taken(*_measured(batch.states_TLD))
                    yield batch
        finally:
            for size in waiting:
                self._meter.ready(size, batches=-1)

    def flow(self) -> Flow:
        """What has flowed since the reader was opened."""
        return self._meter.flow()

    def close(self) -> None:
        """Stop fetching, end the thread, release what the reader holds; safe to call twice."""
        if self._loop.close():
            self._release()

    @abstractmethod
    def _size(self, sequence: TokenSequence) -> int:
        """Bytes that travel for it. Raises HiddenStatesError when they could never be fetched."""

    @abstractmethod
    async def _fetch(self, sequence: TokenSequence, states_TLD: torch.Tensor, scratch: torch.Tensor) -> str | None:
        """Fill `states_TLD`; why not, when that cannot be. `scratch`: uint8 [layout.scratch_bytes(T)]."""

    @abstractmethod
    def _release(self) -> None: ...

    async def _batches(
        self, batches: Iterable[Sequence[TokenSequence]], waiting: deque[int]
    ) -> AsyncGenerator[HiddenBatch, None]:
        source = iter(batches)
        ahead: deque[tuple[asyncio.Task[HiddenBatch], int]] = deque()
        ahead_bytes, ahead_sequences, asked, set_aside = 0, 0, 0, list[tuple[str, str]]()
        try:
            while True:
                while len(ahead) < _MIN_BATCHES_AHEAD or (
                    ahead_bytes < self._meter.window_bytes and ahead_sequences < self._most_ahead
                ):
                    if (sequences := next(source, None)) is None:
                        break
                    size = sum(self._size(sequence) for sequence in sequences)
                    ahead.append((asyncio.create_task(self._batch(tuple(sequences), size)), size))
                    ahead_bytes += size
                    ahead_sequences += len(sequences)
                if not ahead:
                    return
                task, size = ahead[0]
                batch = await task
                ahead.popleft()
                waiting.append(size)
                taken = len(batch.sequences) + len(batch.set_aside)
                ahead_bytes -= size
                ahead_sequences -= taken
                asked += taken
                set_aside += batch.set_aside
                check_set_aside(set_aside, asked, self._max_set_aside_share)
                yield batch
        finally:
            for task, _ in ahead:
                task.cancel()
            left = await asyncio.gather(*(task for task, _ in ahead), return_exceptions=True)
            for (_, size), outcome in zip(ahead, left, strict=True):
                if isinstance(outcome, HiddenBatch):
                    self._meter.ready(size, batches=-1)

    async def _batch(self, sequences: tuple[TokenSequence, ...], size: int) -> HiddenBatch:
        """Fetch all sequences of a batch into one lease."""
        lengths = [len(sequence) for sequence in sequences]
        states_TLD, scratch = self._layout.allocate(lengths, self._buffers.lease)
        rows = states_TLD.split(lengths)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._fetch(*of)) for of in zip(sequences, rows, scratch, strict=True)]
        except* (EngineError, HiddenStatesError) as errors:
            raise errors.exceptions[0] from None
        reasons = [task.result() for task in tasks]
        set_aside = tuple((s.id, why) for s, why in zip(sequences, reasons, strict=True) if why is not None)
        if set_aside:
            kept = [row for row, why in zip(rows, reasons, strict=True) if why is None]
            sequences = tuple(s for s, why in zip(sequences, reasons, strict=True) if why is None)
            states_TLD = torch.cat(kept) if kept else states_TLD[:0]
        self._meter.ready(size)
        return HiddenBatch(sequences, states_TLD, set_aside)


def _measured(states_TLD: torch.Tensor) -> tuple[int, list[float]]:
    """Tokens, and the layers' median RMS over a few of them."""
    tokens = len(states_TLD)
    if not tokens:
        return 0, []
    return tokens, layer_rms(states_TLD[torch.linspace(0, tokens - 1, min(tokens, _MEASURED_ROWS)).long()])


class StreamingReader(BatchReader):
    """Reads from a pool of extractors while they compute.

    One reader a rank: `num_ranks` share the store. What was asked for and not yet read never exceeds
    the rank's share of `hidden_states.window_share` of the store, so no put finds it full. An engine that was
    started again proves itself with samples (`Contract.prompts`) that come on top, out of the rest of the store.
    """

    def __init__(self, endpoint: Endpoint, config: HiddenStatesConfig, *, num_ranks: int) -> None:
        window_bytes = config.window_bytes(endpoint.store_bytes, num_ranks)
        running = math.ceil(endpoint.max_running / num_ranks)
        self._endpoint = endpoint
        self._attempts = config.attempts
        self._samples = Samples(endpoint, config)
        self._window = ByteBudget(window_bytes)
        self._running = asyncio.Semaphore(running)
        buffers = BatchBuffers(
            min(window_bytes, _SLAB_BYTES), self._samples.store.register, self._samples.store.unregister
        )
        # With small sequences the window alone would let a queue grow, behind which another read (a validation) waits.
        meter = FlowMeter(window_bytes, endpoint.layer_ids, endpoint.proof.rms if endpoint.proof else {})
        super().__init__(endpoint.layout, buffers, meter, 2 * running, config.max_set_aside_share)

    def read(self, batches: Iterable[Sequence[TokenSequence]]) -> Iterator[HiddenBatch]:
        """As `BatchReader.read`; every sequence is asked for `hidden_states.attempts` times at most.

        Raises HiddenStatesError also when a sequence is larger than the budget or when no engine is left,
        StoreGoneError when the store's master is.
        """
        try:
            yield from super().read(batches)
        except EngineError as error:
            raise HiddenStatesError(f"hidden states cannot be had: {error}") from error

    def _size(self, sequence: TokenSequence) -> int:
        size = self._layout.object_bytes(len(sequence))
        if problem := misfit(sequence, size, self._window.limit, self._endpoint.segment_bytes):
            raise HiddenStatesError(problem)
        return size

    async def _fetch(self, sequence: TokenSequence, states_TLD: torch.Tensor, scratch: torch.Tensor) -> str | None:
        failed: SampleError | None = None
        size = self._layout.object_bytes(len(sequence))
        async with self._running, self._window.hold(size):
            for attempt in range(self._attempts):
                actor = await self._samples.dispatcher.pick(avoid=None if failed is None else failed.actor)
                with self._meter.fetching(size, "extractors") as go:
                    try:
                        await self._samples.take(
                            sequence.input_ids,
                            states_TLD,
                            scratch,
                            attempt=attempt,
                            actor=actor,
                            arrived=partial(go, "transfer"),
                        )
                    except SampleError as error:
                        failed = error
                    else:
                        return None
        return f"{self._attempts} tries, the last: {failed}"

    def _release(self) -> None:
        try:
            self._buffers.close()
        finally:
            self._samples.close()
