"""Both ends of `transfer.py`: processes that put objects into the store, and that read them in all the ways."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch

from stages.corpus import TokenSequence, tokens_checksum
from stages.engine.requests import Extraction
from stages.hidden_states import samples
from stages.hidden_states.config import Encoding, HiddenStatesConfig
from stages.hidden_states.fp8 import encode
from stages.hidden_states.layout import TRAILER_BYTES, as_bytes, seal
from stages.hidden_states.pool import open_reader
from stages.hidden_states.reader import StreamingReader
from stages.hidden_states.rows import peak_bits
from stages.hidden_states.samples import Endpoint
from stages.hidden_states.store import (
    METADATA,
    HiddenStatesStore,
    in_own_memory,
    local_hostname,
    stripe_name,
)
from stages.hidden_states.wire import Manifest

LAYERS, WIDTH, DTYPE = 6, 4096, torch.bfloat16
TOKEN_BYTES = LAYERS * WIDTH * DTYPE.itemsize
PRODUCERS, BATCH, IN_FLIGHT = 2, 2, 4  # samples of a batch, samples that a reader may have in flight
SHARED = ("memcpy", "raw", "raw_2", "ours", "ours_unchecked", "ours_fp8", "hs_connectors")
CONTESTANTS = (*SHARED, "hs_connectors_checked")
LIFE = "trusted"  # of engines that have passed the contract check
STEP_TOKENS = 2048


class Producer:
    """Lends memory, puts objects before a round, and answers requests for them within it."""

    def __init__(self, master: str, segment_bytes: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.store = MooncakeDistributedStore()
        assert self.store.setup(local_hostname(master), METADATA, segment_bytes, 16 << 20, "tcp", "", master) == 0
        self.made: dict[tuple[int, str], tuple[torch.Tensor, int]] = {}  # memory and bytes of its payload

    async def ready(self) -> int:
        return os.getpid()

    async def watch(self, life: str) -> None:
        await asyncio.Event().wait()

    async def put(self, keys: Sequence[str], tokens: int, encoding: Encoding | Literal["hs_connectors"]) -> None:
        """Store the same sample under all `keys`, as our connector or hs_connectors' does."""
        if (tokens, encoding) not in self.made:
            self.made[tokens, encoding] = memory, _ = _object(tokens, encoding)
            assert self.store.register_buffer(memory.data_ptr(), memory.nbytes) == 0
        memory, payload_bytes = self.made[tokens, encoding]
        size, ids = memory.nbytes, np.arange(tokens, dtype=np.int32)
        for key in keys:
            if encoding != "hs_connectors":
                end = seal(as_bytes(memory[:payload_bytes]), _manifest(key, ids, encoding), slice(0, tokens))
                as_bytes(memory)[payload_bytes:] = np.frombuffer(end, dtype=np.uint8)
            name = key if encoding == "hs_connectors" else stripe_name(key, 0)
            assert self.store.put_from(name, memory.data_ptr(), size, in_own_memory(self.store)) == 0

    async def extract(self, token_ids: np.ndarray, capture: dict[str, Any], logprobs: str) -> Extraction:
        """The connector's answer for an object that is there already."""
        return Extraction(asdict(_manifest(capture["key"], token_ids, capture["encoding"])), LIFE, ())


def _manifest(key: str, token_ids: np.ndarray, encoding: Encoding) -> Manifest:
    shape = (len(token_ids), LAYERS, WIDTH)
    return Manifest(
        key, shape, encoding, 1, tuple(range(LAYERS)), True, "bench", tokens_checksum(token_ids), 0, STEP_TOKENS
    )


def _object(tokens: int, encoding: Encoding | Literal["hs_connectors"]) -> tuple[torch.Tensor, int]:
    """Memory of a stored sample (uint8), and how much of it is payload; the rest is a trailer, or token ids."""
    states_TLD = torch.randn(tokens, LAYERS, WIDTH, generator=torch.Generator().manual_seed(0)).to(DTYPE)
    parts = encode(states_TLD, peak_bits(states_TLD)) if encoding == "fp8" else (states_TLD,)
    payload = np.concatenate([as_bytes(part) for part in parts])
    end = torch.arange(tokens) if encoding == "hs_connectors" else torch.zeros(TRAILER_BYTES, dtype=torch.uint8)
    return torch.from_numpy(np.concatenate([payload, as_bytes(end)])), len(payload)


class Consumer:
    """Reads rounds in every contestant's way. `run` gives seconds on the machine's clock and of CPU."""

    def __init__(self, endpoint: Endpoint, most_tokens: int) -> None:
        from hs_connectors.mooncake_store import MooncakeHiddenStatesStore, MooncakeStoreConfig

        torch.set_num_threads(1)
        share = IN_FLIGHT * (most_tokens * TOKEN_BYTES + TRAILER_BYTES) / endpoint.store_bytes
        config = HiddenStatesConfig(window_share=share)
        fp8 = replace(endpoint, layout=replace(endpoint.layout, encoding="fp8"))
        self.readers = {
            name: open_reader(fp8 if name == "ours_fp8" else endpoint, config, num_ranks=1)
            for name in CONTESTANTS
            if name.startswith("ours")
        }
        self.store = HiddenStatesStore(endpoint.store)
        self.memory = torch.zeros(BATCH, most_tokens * TOKEN_BYTES + TRAILER_BYTES, dtype=torch.uint8)
        self.store.register(self.memory)
        master = endpoint.store.master
        theirs = MooncakeStoreConfig(local_hostname(master), METADATA, master, 0, 16 << 20, "tcp", "")
        self.hs = MooncakeHiddenStatesStore(theirs).setup()

    def keys(self, contestant: str, count: int) -> list[str]:
        """Under which keys the contestant will look for its objects: our reader chooses its own."""
        if contestant.startswith("ours"):
            mine = self.readers[contestant]._samples
            first = mine._asked + 1
            return [f"{mine._session}-{first + i}-0" for i in range(count)]
        return [f"{contestant}-{os.getpid()}-{i}" for i in range(count)]

    def run(self, contestant: str, keys: list[str], tokens: int) -> tuple[float, float, float]:
        way: Callable[[list[str], int], None] = {
            "memcpy": self._memcpy,
            "raw": lambda keys, tokens: self._raw(keys, tokens, threads=1),
            "raw_2": lambda keys, tokens: self._raw(keys, tokens, threads=2),
            "hs_connectors": lambda keys, tokens: self._hs(keys, tokens, check=False),
            "hs_connectors_checked": lambda keys, tokens: self._hs(keys, tokens, check=True),
        }.get(contestant, lambda keys, tokens: self._ours(self.readers[contestant], keys, tokens))
        unchecked = contestant == "ours_unchecked"
        with patch.object(samples, "check_seal", lambda *_: None) if unchecked else nullcontext():
            start, cpu_s = time.monotonic(), time.process_time()
            way(keys, tokens)
            end, cpu_s = time.monotonic(), time.process_time() - cpu_s
        if contestant.startswith("raw"):
            self.store.remove([stripe_name(key, 0) for key in keys])
        return start, end, cpu_s

    def _memcpy(self, keys: list[str], tokens: int) -> None:
        size = tokens * TOKEN_BYTES
        for _ in keys:
            self.memory[0, :size].copy_(self.memory[1, :size])

    def _raw(self, keys: list[str], tokens: int, threads: int) -> None:
        size = tokens * TOKEN_BYTES + TRAILER_BYTES

        def get(index: int) -> None:
            found = self.store._store.get_into(stripe_name(keys[index], 0), self.memory[index % BATCH].data_ptr(), size)
            assert found == size, found

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(get, range(len(keys))))

    def _ours(self, reader: StreamingReader, keys: list[str], tokens: int) -> None:
        ids, mask = np.arange(tokens, dtype=np.int32), np.ones(tokens, dtype=bool)
        sequences = [TokenSequence(key, "bench", ids, mask) for key in keys]
        taken = 0
        for batch in reader.read(_batched(sequences)):
            taken += len(batch.states_TLD)
        assert taken == len(keys) * tokens

    def _hs(self, keys: list[str], tokens: int, check: bool) -> None:
        from hs_connectors.mooncake_store import VERSION, packed_layout
        from speculators.data_generation.offline import check_hidden_states
        from speculators.train.data import CollateFn

        collate = CollateFn(BATCH * tokens, WIDTH, LAYERS - 1, DTYPE)
        layout = {"hidden_states": ((tokens, LAYERS, WIDTH), DTYPE), "token_ids": ((tokens,), torch.int64)}
        tensors, size = packed_layout(layout)
        for part in _batched(keys):
            items = []
            for key in part:
                manifest = {
                    "version": VERSION, "handle": key, "tensors": tensors, "metadata": {"total_aligned_bytes": size}
                }  # fmt: skip
                sample = self.hs.get_sample(manifest)
                if check:
                    check_hidden_states(sample, list(range(tokens)))
                self.hs.delete_sample(key)
                # as speculators' ArrowDataset and BaseDataset
                items.append(
                    {
                        "hidden_states": sample["hidden_states"][:, :-1].flatten(1),
                        "input_ids": sample["token_ids"],
                        "verifier_last_hidden_states": sample["hidden_states"][:, -1],
                        "loss_mask": torch.ones(tokens, dtype=torch.bool),
                        "lengths": torch.tensor([tokens]),
                        "position_ids": torch.arange(tokens),
                    }
                )
            collate(items)


def _batched(items: list[Any]) -> list[list[Any]]:
    return [items[i : i + BATCH] for i in range(0, len(items), BATCH)]
