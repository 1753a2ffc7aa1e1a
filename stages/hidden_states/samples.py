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
from stages.engine.dispatch import ActorLostError, BackgroundLoop, Dispatcher
from stages.engine.requests import EngineError, Extraction
from stages.hidden_states.arrivals import Arrivals
from stages.hidden_states.config import HiddenStatesConfig
from stages.hidden_states.contract import Agreement, Contract, Logprobs
from stages.hidden_states.layout import TRAILER_BYTES, as_bytes, check_trailer, object_bytes
from stages.hidden_states.store import HiddenStatesStore, StoreAddress, StoreGoneError
from stages.hidden_states.wire import HiddenStatesError, Manifest

R = TypeVar("R")
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
    contract: Contract  # what an engine must prove before its samples are used
    lives: frozenset[str] = frozenset()  # of engines that have proved it

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def object_bytes(self, num_tokens: int) -> int:
        """Bytes of the stored object of a sequence of this length."""
        return object_bytes(num_tokens, len(self.layer_ids), self.hidden_size, self.torch_dtype)


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
        self.dispatcher = Dispatcher(endpoint.actors, endpoint.start_timeout_s, self._readmit)
        self.trusted = set(endpoint.lives)
        self._timeout_s = config.sample_timeout_s
        self._threads = ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="hidden-states")
        self._arrivals = Arrivals(self.store)
        self._session = uuid.uuid4().hex
        self._asked = 0

    async def take(
        self,
        token_ids: np.ndarray,
        into: tuple[torch.Tensor, torch.Tensor],
        *,
        attempt: int = 0,
        actor: int,
        logprobs: Logprobs | None = None,
    ) -> Extraction:
        """Have `actor` extract the states of `token_ids` (int [T]) and read them `into` registered memory.

        `into`: states [T, L, D] and trailer uint8 [TRAILER_BYTES]. The object is gone from the store
        afterwards. Raises SampleError when it cannot be had or must not be trained on, StoreGoneError
        when none can be had any more. Only the contract check asks for log-probabilities, and so of an
        engine that has yet to pass it.
        """
        self._asked += 1
        key = f"{self._session}-{self._asked}-{attempt}"  # fresh: a late object of an earlier try harms nobody
        expected = self._expected(key, token_ids, attempt)
        capture = {"key": key, "attempt": attempt}
        try:
            async with asyncio.timeout(self._timeout_s):
                extraction = await self.dispatcher.call(actor, "extract", token_ids, capture, logprobs or "")
                assert isinstance(extraction, Extraction)
                if logprobs is None and extraction.life not in self.trusted:
                    raise self.dispatcher.lost(actor, f"engine {actor} was started again and has not been checked")
                # The bytes come after the answer, or never, if the engine dies in between.
                fetching = self._fetch(extraction.reference, expected, into)
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

    async def check(self, actor: int) -> Agreement:
        """Have `actor` prove that its states are right, and trust this life of its engine from then on.

        Raises ContractError when they are not, SampleError when they cannot be had.
        """
        contract, endpoint = self.endpoint.contract, self.endpoint
        lives = set()

        async def one(token_ids: np.ndarray, which: Logprobs) -> tuple[torch.Tensor, np.ndarray, Extraction]:
            shape = (len(token_ids), len(endpoint.layer_ids), endpoint.hidden_size)
            states_TLD, trailer = torch.empty(shape, dtype=endpoint.torch_dtype), torch.empty(TRAILER_BYTES).byte()
            self.store.register(states_TLD)
            self.store.register(trailer)
            try:
                said = await self.take(token_ids, (states_TLD, trailer), actor=actor, logprobs=which)
            finally:
                self.store.unregister(trailer)
                self.store.unregister(states_TLD)
            lives.add(said.life)
            return states_TLD[:, -1], token_ids, said

        try:
            async with asyncio.TaskGroup() as group:  # on a failure the others end before the store is closed
                tasks = [group.create_task(one(token_ids, which)) for token_ids, which in contract.prompts()]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        if len(lives) > 1:
            raise SampleError(f"engine {actor} was started again during its check", actor)
        agreement = await self._in_thread(functools.partial(contract.judge, [task.result() for task in tasks]))
        self.trusted |= lives
        return agreement

    async def _readmit(self, actor: int) -> None:
        try:
            await self.check(actor)
        except SampleError as error:
            raise ActorLostError(actor, f"engine {actor} came back, but: {error}") from error
        except HiddenStatesError as error:
            raise EngineError(f"engine {actor} came back, but: {error}") from error

    async def _fetch(
        self, reference: dict[str, object], expected: Manifest, into: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        await self._arrivals.wait(expected.key)  # before anything is refused, so that there is something to delete
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


def check_manifest(reference: dict[str, object], expected: Manifest) -> None:
    """Raise HiddenStatesError naming every field of a connector's answer that is not as expected."""
    wanted = dataclasses.asdict(expected)
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in reference.items()}
    wrong = [name for name, value in wanted.items() if found.get(name) != value]
    if wrong:
        said = "; ".join(f"{name}: expected {wanted[name]!r}, found {found.get(name)!r}" for name in wrong)
        raise HiddenStatesError(f"manifest differs in {said}")


def check_contract(endpoint: Endpoint, config: HiddenStatesConfig) -> tuple[Endpoint, Agreement]:
    """Have all engines at once prove their states: an endpoint that trusts them, and the worst agreement.

    Raises ContractError with what was measured, HiddenStatesError when states cannot be had.
    """
    samples = Samples(endpoint, config)

    async def check_all() -> list[Agreement]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(samples.check(actor)) for actor in range(len(endpoint.actors))]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        return [task.result() for task in tasks]

    try:
        with BackgroundLoop("contract-check") as loop:
            agreements = loop.run(check_all())
    except SampleError as error:
        raise HiddenStatesError(f"contract check: no states from the extractors: {error}") from error
    finally:
        samples.close()
    worst = max(agreements, key=lambda agreement: agreement.ratio / agreement.tolerance)
    return dataclasses.replace(endpoint, lives=frozenset(samples.trusted)), worst
