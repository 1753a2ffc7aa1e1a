"""One try at the states of one sequence: ask an engine, wait for the object, read it, check it, delete it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from ray.actor import ActorHandle

from stages.corpus import tokens_checksum
from stages.engine.dispatch import ActorLostError, BackgroundLoop, Dispatcher, last_line
from stages.engine.requests import EngineError, Extraction
from stages.hidden_states.arrivals import Arrivals
from stages.hidden_states.buffers import BatchBuffers
from stages.hidden_states.config import HiddenStatesConfig
from stages.hidden_states.contract import SHORT_PROMPTS, Contract, Logprobs
from stages.hidden_states.layout import Layout, check_seal
from stages.hidden_states.proof import Proof
from stages.hidden_states.store import HiddenStatesStore, StoreAddress, StoreGoneError, error_name, stripe_name
from stages.hidden_states.wire import HiddenStatesError, Manifest

R = TypeVar("R")
_CHECK_SLAB_BYTES = 16 << 20
# Reading and checking release the GIL. A get over TCP keeps a core busy at both ends: on two cores a second one
# at a time made both slower (`raw_2` of `make bench-transfer`).
_READ_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
_MOST_LATE = 10_000


@dataclass(frozen=True)
class Endpoint:
    """How a training process reaches the extractors. Picklable by Ray."""

    actors: tuple[ActorHandle, ...]
    store: StoreAddress
    target: str  # identity
    layer_ids: tuple[int, ...]
    layout: Layout
    store_bytes: int  # lent by all extractors
    segment_bytes: int  # lent by one; no sample is larger
    max_running: int  # sequences that all extractors run at once
    start_timeout_s: float
    contract: Contract  # what an engine must prove before its samples are used
    proof: Proof | None = None  # what they proved; whoever comes back must prove the same
    lives: frozenset[str] = frozenset()  # of engines that have


class SampleError(HiddenStatesError):
    """This try failed; asking again, elsewhere if `actor` is known, may succeed. Its kind comes first (`kind_of`)."""

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
        self._gets = ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="hidden-states-get")
        self._checks = ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="hidden-states-check")
        self._arrivals = Arrivals(self.store)
        self._late: deque[str] = deque(maxlen=_MOST_LATE)  # names that may appear after their try was given up
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
        logprobs: Logprobs | None = None,
        layout: Layout | None = None,
        arrived: Callable[[], None] = lambda: None,
    ) -> Extraction:
        """Have `actor` extract the states of `token_ids` (int [T]) and read them into registered memory.

        `states_TLD`: bfloat16, filled; `scratch`: uint8 [layout.scratch_bytes(T)], for what else is read.
        `arrived` is called when the sample is in the store, from which it is gone afterwards. Raises SampleError
        when it cannot be had or must not be trained on, StoreGoneError when none can be had any more. Only the
        contract check asks for log-probabilities, and so of an engine that has yet to pass it.
        """
        self._asked += 1
        key = f"{self._session}-{self._asked}-{attempt}"  # fresh: a late object of an earlier try harms nobody
        layout = layout or self.endpoint.layout
        expected = self._expected(key, token_ids, attempt, layout)
        names, done = [error_name(key), *_names(expected)], False
        capture, breaks = {"key": key, "attempt": attempt, "encoding": layout.encoding}, self.store.breaks
        try:
            async with asyncio.timeout(self._timeout_s):
                extraction = await self.dispatcher.call(actor, "extract", token_ids, capture, logprobs or "")
                assert isinstance(extraction, Extraction)
                if logprobs is None and extraction.life not in self.trusted:
                    raise self.dispatcher.lost(actor, f"engine {actor} was started again and has not been checked")
                # The bytes come after the answer, or never, if the engine dies in between.
                fetching = self._fetch(extraction.reference, expected, (states_TLD, scratch), arrived, breaks)
                await self.dispatcher.unless_lost(actor, extraction.life, fetching)
                done = True
        except TimeoutError as error:
            why = f"no states in time: none within hidden_states.sample_timeout_s={self._timeout_s}"
            if logprobs is None:  # the next would wait as long: first it must show that it can
                self.dispatcher.lost(actor, why)
            raise SampleError(why, actor) from error
        except StoreGoneError:
            raise
        except ActorLostError as error:
            raise SampleError(f"engine lost: {last_line(error)}", actor) from error
        except ValueError as error:
            raise SampleError(f"refused by the engine: {last_line(error)}", actor) from error
        except HiddenStatesError as error:
            raise SampleError(" ".join(str(error).split()), actor) from error
        finally:
            # The store may be gone as well; what is left behind there is deleted by its writer in time.
            with contextlib.suppress(HiddenStatesError):
                self.store.remove(names)
            if not done:
                self._late.extend(names)
        return extraction

    async def check(self, actor: int) -> Proof:
        """Have `actor` prove that its states are right, and trust this life of its engine from then on.

        Raises ContractError when they are not, or not those of the endpoint's proof, SampleError when they cannot
        be had.
        """
        contract, layout = self.endpoint.contract, self.endpoint.layout
        exact = dataclasses.replace(layout, encoding="bfloat16")
        lives = set()
        buffers = BatchBuffers(_CHECK_SLAB_BYTES, self.store.register, self.store.unregister)

        async def get(token_ids: np.ndarray, which: Logprobs, layout: Layout) -> tuple[torch.Tensor, Extraction]:
            states_TLD, [scratch] = layout.allocate([len(token_ids)], buffers.lease)
            said = await self.take(token_ids, states_TLD, scratch, actor=actor, logprobs=which, layout=layout)
            lives.add(said.life)
            return states_TLD, said

        async def one(token_ids: np.ndarray, which: Logprobs) -> tuple[torch.Tensor, np.ndarray, Extraction]:
            states_TLD, said = await get(token_ids, which, exact)
            if layout != exact:
                contract.judge_encoding(states_TLD, (await get(token_ids, which, layout))[0])
            return states_TLD, token_ids, said

        try:
            async with asyncio.TaskGroup() as group:  # on a failure the others end before the store is closed
                tasks = [group.create_task(one(token_ids, which)) for token_ids, which in contract.prompts()]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        finally:
            buffers.close()
        if len(lives) > 1:
            raise SampleError(f"engine {actor} was started again during its check", actor)
        answers = [task.result() for task in tasks]

        def judge() -> Proof:
            agreement = contract.judge([(states_TLD[:, -1], ids, said) for states_TLD, ids, said in answers])
            states = [states_TLD for states_TLD, *_ in answers[:SHORT_PROMPTS]]
            return Proof.of(agreement, self.endpoint.layer_ids, states)

        proof = await self._in_thread(self._checks, judge)
        if self.endpoint.proof is not None:
            proof.check_same(self.endpoint.proof, "the pool's first engine gave")
        self.trusted |= lives
        return proof

    async def _readmit(self, actor: int) -> None:
        try:
            await self.check(actor)
        except SampleError as error:
            raise ActorLostError(actor, f"engine {actor} came back, but: {error}") from error
        except HiddenStatesError as error:
            raise EngineError(f"engine {actor} came back, but: {error}") from error

    async def _fetch(
        self,
        reference: dict[str, object],
        expected: Manifest,
        into: tuple[torch.Tensor, torch.Tensor],
        arrived: Callable[[], None],
        breaks: int,
    ) -> None:
        await self._arrivals.wait(
            expected.key, _names(expected), breaks
        )  # before anything is refused: it is to be deleted
        arrived()
        expected.check(reference)
        places = Layout.of(expected).places(*into)
        await self._in_thread(self._gets, self._get, expected, places)
        await self._in_thread(self._checks, _check, expected, places, into[0])

    def _expected(self, key: str, token_ids: np.ndarray, attempt: int, layout: Layout) -> Manifest:
        return Manifest(
            key=key,
            shape=(len(token_ids), layout.num_layers, layout.hidden_size),
            encoding=layout.encoding,
            stripes=layout.stripes,
            layer_ids=self.endpoint.layer_ids,
            pre_norm=True,
            target=self.endpoint.target,
            tokens_crc32=tokens_checksum(token_ids),
            attempt=attempt,
            step_tokens=self.endpoint.contract.step_tokens,
        )

    def _get(self, manifest: Manifest, places: list[tuple[slice, torch.Tensor, torch.Tensor]]) -> None:
        """All stripes in one call, each into its place."""
        self.store.get_into({name: place[1:] for name, place in zip(_names(manifest), places, strict=True)})

    async def _in_thread(self, pool: ThreadPoolExecutor, job: Callable[..., R], *args: Any) -> R:
        """Run `job` in a thread, and wait for it even when cancelled: it writes into memory that others own."""
        running = asyncio.get_running_loop().run_in_executor(pool, job, *args)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise

    def close(self) -> None:
        """Release the connection, when nothing runs any more. Mostly nothing is left behind in the store."""
        self._gets.shutdown()
        self._checks.shutdown()
        with contextlib.suppress(HiddenStatesError):
            if self._late:
                self.store.remove(self._late)
        self.store.close()


def _check(
    manifest: Manifest, places: list[tuple[slice, torch.Tensor, torch.Tensor]], states_TLD: torch.Tensor
) -> None:
    """Compare the seals of all stripes, and decode what is encoded."""
    layout = Layout.of(manifest)
    for span, payload, trailer in places:
        check_seal(trailer.numpy().tobytes(), payload.numpy(), manifest, span)
        layout.unpack(payload, states_TLD[span])


def _names(manifest: Manifest) -> list[str]:
    """The store's names of a sample's stripes."""
    spans = Layout.of(manifest).spans(manifest.shape[0])
    return [stripe_name(manifest.key, stripe) for stripe in range(len(spans))]


def check_contract(endpoint: Endpoint, config: HiddenStatesConfig) -> tuple[Endpoint, Proof]:
    """Have all engines at once prove their states: an endpoint that trusts them, and what they proved.

    Raises ContractError with what was measured, HiddenStatesError when states cannot be had.
    """
    samples = Samples(endpoint, config)

    async def check_all() -> list[Proof]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(samples.check(actor)) for actor in range(len(endpoint.actors))]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        return [task.result() for task in tasks]

    try:
        with BackgroundLoop("contract-check") as loop:
            first, *others = loop.run(check_all())
    except SampleError as error:
        raise HiddenStatesError(f"contract check: no states from the extractors: {error}") from error
    finally:
        samples.close()
    for actor, other in enumerate(others, start=1):
        other.check_same(first, f"engine 0 gave and engine {actor} did not")
    worst = max((p.agreement for p in (first, *others)), key=lambda agreement: agreement.ratio / agreement.tolerance)
    proof = dataclasses.replace(first, agreement=worst)
    return dataclasses.replace(endpoint, proof=proof, lives=frozenset(samples.trusted)), proof
