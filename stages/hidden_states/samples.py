"""One try at the states of one sequence: ask an engine, wait for the object, read it, check it, delete it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from ray.actor import ActorHandle

from stages.corpus import tokens_checksum
from stages.engine.dispatch import ActorLostError, Dispatcher
from stages.engine.requests import Extraction
from stages.hidden_states.config import HiddenStatesConfig
from stages.hidden_states.layout import TRAILER_BYTES, as_bytes, check_trailer, object_bytes
from stages.hidden_states.store import ERROR_SUFFIX, HiddenStatesStore, StoreAddress, StoreGoneError
from stages.hidden_states.wire import HiddenStatesError, Manifest

R = TypeVar("R")
_POLL_S = 0.005  # between looks at the store; a prefill takes longer, and one look asks for all keys at once
_READ_THREADS = 2  # reading and checking release the GIL


@dataclass(frozen=True)
class Endpoint:
    """How a training process reaches the extractors. Picklable by Ray."""

    actors: tuple[ActorHandle, ...]
    store: StoreAddress
    target: str  # identity
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    store_bytes: int  # lent by all extractors
    segment_bytes: int  # lent by one; no object is larger
    max_running: int  # sequences that all extractors run at once
    start_timeout_s: float

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def object_bytes(self, num_tokens: int) -> int:
        """Bytes of the stored object of a sequence of this length."""
        return object_bytes(num_tokens, len(self.layer_ids), self.hidden_size, self.torch_dtype)

    def scratch_bytes(self, num_tokens: int) -> int:
        """Bytes of memory that reading such a sequence needs besides that for its states."""
        return TRAILER_BYTES


class SampleError(HiddenStatesError):
    """This try failed. Asking again, elsewhere if `actor` is known, may succeed."""

    def __init__(self, message: str, actor: int | None = None) -> None:
        super().__init__(message)
        self.actor = actor


class Samples:
    """A connection to the extractors and their store. All methods run in one event loop."""

    def __init__(self, endpoint: Endpoint, config: HiddenStatesConfig) -> None:
        self.endpoint = endpoint
        self.store = HiddenStatesStore(endpoint.store)
        self.dispatcher = Dispatcher(endpoint.actors, endpoint.start_timeout_s)
        self._timeout_s = config.sample_timeout_s
        self._threads = ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="hidden-states")
        self._arrivals = _Arrivals(self.store)
        self._session = uuid.uuid4().hex
        self._asked = 0

    async def take(
        self,
        token_ids: np.ndarray,
        states_TLD: torch.Tensor,
        scratch: torch.Tensor,
        *,
        attempt: int = 0,
        actor: int,
        logprobs: bool = False,
        arrived: Callable[[], None] = lambda: None,
    ) -> Extraction:
        """Have `actor` extract the states of `token_ids` (int [T]) and read them into `states_TLD`.

        That and `scratch`, uint8 [endpoint.scratch_bytes(T)], are in registered memory. `arrived` is called when
        the object is in the store, from which it is gone afterwards. Raises SampleError when it cannot be had or
        must not be trained on, StoreGoneError when none can be had any more.
        """
        self._asked += 1
        key = f"{self._session}-{self._asked}-{attempt}"  # fresh: a late object of an earlier try harms nobody
        expected = self._expected(key, token_ids, attempt)
        capture = {"key": key, "attempt": attempt}
        try:
            async with asyncio.timeout(self._timeout_s):
                extraction = await self.dispatcher.call(actor, "extract", token_ids, capture, logprobs)
                assert isinstance(extraction, Extraction)
                # The bytes come after the answer, or never, if the engine dies in between.
                fetching = self._fetch(extraction.reference, expected, (states_TLD, scratch), arrived)
                await self.dispatcher.unless_lost(actor, extraction.life, fetching)
        except TimeoutError as error:
            raise SampleError(f"no states within hidden_states.sample_timeout_s={self._timeout_s}", actor) from error
        except StoreGoneError:
            raise
        except (ActorLostError, ValueError, HiddenStatesError) as error:
            raise SampleError(str(error).strip().splitlines()[-1], actor) from error
        finally:
            # The store may be gone as well; what is left behind there is deleted by its writer in time.
            with contextlib.suppress(HiddenStatesError):
                self.store.remove(key)
        return extraction

    async def _fetch(
        self,
        reference: dict[str, object],
        expected: Manifest,
        into: tuple[torch.Tensor, torch.Tensor],
        arrived: Callable[[], None],
    ) -> None:
        await self._arrivals.wait(expected.key)  # before anything is refused, so that there is something to delete
        arrived()
        check_manifest(reference, expected)
        await self._in_thread(functools.partial(self._read, expected, into))

    def _expected(self, key: str, token_ids: np.ndarray, attempt: int) -> Manifest:
        endpoint = self.endpoint
        return Manifest(
            key=key,
            num_tokens=len(token_ids),
            layer_ids=endpoint.layer_ids,
            hidden_size=endpoint.hidden_size,
            dtype=endpoint.dtype,
            pre_norm=True,
            target=endpoint.target,
            tokens_crc32=tokens_checksum(token_ids),
            total_bytes=endpoint.object_bytes(len(token_ids)),
            attempt=attempt,
        )

    def _read(self, manifest: Manifest, into: tuple[torch.Tensor, torch.Tensor]) -> None:
        states_TLD, trailer = into
        self.store.get_into(manifest.key, (states_TLD, trailer))
        check_trailer(trailer.numpy().tobytes(), as_bytes(states_TLD), manifest.tokens_crc32, manifest.num_tokens)
        check_states(states_TLD)

    async def _in_thread(self, job: Callable[[], R]) -> R:
        """Run `job` in a thread, and wait for it even when cancelled: it writes into memory that others own."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, job)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise

    def close(self) -> None:
        """Release the connection, when nothing runs any more."""
        self._threads.shutdown()
        self.store.close()


class _Arrivals:
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


def check_manifest(reference: dict[str, object], expected: Manifest) -> None:
    """Raise HiddenStatesError naming every field of a connector's answer that is not as expected."""
    wanted = dataclasses.asdict(expected)
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in reference.items()}
    wrong = [name for name, value in wanted.items() if found.get(name) != value]
    if wrong:
        said = "; ".join(f"{name}: expected {wanted[name]!r}, found {found.get(name)!r}" for name in wrong)
        raise HiddenStatesError(f"manifest differs in {said}")


def check_states(states_TLD: torch.Tensor) -> None:
    """Raise HiddenStatesError unless every state is finite and none is all zeros (an unwritten slot)."""
    if states_TLD.numel() == 0:
        return
    low_TL, high_TL = torch.aminmax(states_TLD, dim=-1)  # NaN wins in both
    wild_TL = ~(torch.isfinite(low_TL) & torch.isfinite(high_TL))
    if bool(wild_TL.any()):
        raise HiddenStatesError(f"states are not finite in {_where(wild_TL)}")
    zero_TL = (low_TL == 0) & (high_TL == 0)
    if bool(zero_TL.any()):
        raise HiddenStatesError(f"states are all zero in {_where(zero_TL)}")


def _where(bad_TL: torch.Tensor) -> str:
    token, layer = bad_TL.nonzero()[0].tolist()
    return f"{int(bad_TL.any(1).sum())} of {len(bad_TL)} tokens, first at token {token}, layer index {layer}"
