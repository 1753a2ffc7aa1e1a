"""How fast stored states reach a batch: ours, hs_connectors 0.9, Mooncake's own get, memcpy: `make bench-transfer`.

Prints one JSON object, with ratios of throughputs (medians over repeats of the ratio within a repeat), and plots
the sweeps over the size of a sample and the number of consumers. Producers (store clients that lend memory and put
objects) and consumers are processes of their own; objects are in the store before the clock runs. All contestants
read the same tensors in the same run and take turns:

- `ours`: `StreamingReader`, as training uses it: ask an actor, look for the object, get it into the batch's memory,
  compare its checksum, delete. `ours_unchecked`: without the checksum, to see what it costs. `ours_fp8`: the same
  states in e4m3 with scales, decoded; its throughput counts the bfloat16 that the batch gets.
- `hs_connectors`: `get_sample`, delete, and what its consumer in speculators makes of it: layers split, batch
  collated. `hs_connectors_checked`: with that consumer's check. Its loader then copies every batch from a worker
  process to the trainer; that copy is left out.
- `raw`: Mooncake's `get_into` registered memory and nothing else, one after the other; `raw_2`: two at a time.
- `memcpy`: the same bytes from memory to memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import ray
import torch

from stages.corpus import TokenSequence, tokens_checksum
from stages.engine.requests import Extraction
from stages.hidden_states import samples
from stages.hidden_states.config import Encoding, HiddenStatesConfig
from stages.hidden_states.contract import Contract
from stages.hidden_states.fp8 import encode
from stages.hidden_states.layout import TRAILER_BYTES, Layout, as_bytes, seal
from stages.hidden_states.master import mooncake_master
from stages.hidden_states.pool import open_reader
from stages.hidden_states.reader import StreamingReader
from stages.hidden_states.rows import peak_bits
from stages.hidden_states.samples import Endpoint
from stages.hidden_states.store import (
    METADATA,
    HiddenStatesStore,
    StoreAddress,
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
GOALS = {"ours/hs_connectors": 2.0, "ours/raw": 0.9}


@dataclass(frozen=True)
class Case:
    """What is transferred in one round."""

    tokens: int  # of a sample
    samples: int  # for each consumer
    consumers: int = 1

    @property
    def total_bytes(self) -> int:
        return self.tokens * TOKEN_BYTES * self.samples * self.consumers


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
    return Manifest(key, shape, encoding, 1, tuple(range(LAYERS)), True, "bench", tokens_checksum(token_ids), 0)


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


@dataclass
class Bench:
    """Running producers and consumers."""

    producers: list[Any]
    consumers: list[Any]

    def round(self, contestant: str, case: Case) -> tuple[float, float]:
        """Bytes a second over all consumers, and their CPU seconds for a GiB."""
        consumers = self.consumers[: case.consumers]
        keys = ray.get([consumer.keys.remote(contestant, case.samples) for consumer in consumers])
        if contestant != "memcpy":
            everything = [key for part in keys for key in part]
            kinds: dict[str, Any] = {"hs_connectors": "hs_connectors", "hs_connectors_checked": "hs_connectors"}
            kind = kinds.get(contestant, "fp8" if contestant == "ours_fp8" else "bfloat16")
            puts = [
                producer.put.remote(everything[i :: len(self.producers)], case.tokens, kind)
                for i, producer in enumerate(self.producers)
            ]
            ray.get(puts)
        rounds = [c.run.remote(contestant, k, case.tokens) for c, k in zip(consumers, keys, strict=True)]
        starts, ends, cpu_s = zip(*ray.get(rounds), strict=True)
        return case.total_bytes / (max(ends) - min(starts)), sum(cpu_s) / case.total_bytes * 2**30

    def measure(self, case: Case, contestants: Sequence[str], repeats: int) -> dict[str, dict[str, Any]]:
        """Every contestant once a repeat, in an order that rotates; the first repeat only warms up."""
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
        for repeat in range(repeats + 1):
            turn = repeat % len(contestants)
            for name in (*contestants[turn:], *contestants[:turn]):
                result = self.round(name, case)
                if repeat:
                    found[name].append(result)
        return {
            name: {
                "gb_per_s": median(rate for rate, _ in rounds) / 1e9,
                "cpu_s_per_gib": median(cpu_s for _, cpu_s in rounds),
                "all_gb_per_s": [rate / 1e9 for rate, _ in rounds],
            }
            for name, rounds in found.items()
        }


def ratio(found: dict[str, dict[str, Any]], name: str) -> float:
    """Median over repeats of `a/b`."""
    a, b = (found[contestant]["all_gb_per_s"] for contestant in name.split("/"))
    return median(x / y for x, y in zip(a, b, strict=True))


def bench(repeats: int, most_consumers: int) -> dict[str, Any]:
    """The main case, then the sweeps with fewer repeats."""
    sizes, many = (64, 256, 1024, 2048, 4096), [n for n in (1, 2, 4, 8) if n <= most_consumers]
    main = Case(tokens=2048, samples=6)
    by_size = [Case(tokens, samples=6) for tokens in sizes]
    by_consumers = [Case(tokens=2048, samples=4, consumers=n) for n in many]
    largest_bytes = max(case.total_bytes for case in (*by_size, *by_consumers)) + max(sizes) * TOKEN_BYTES
    segment_bytes = largest_bytes // PRODUCERS + (64 << 20)
    load_before = os.getloadavg()[0]
    with TemporaryDirectory() as folder, mooncake_master("127.0.0.1", Path(folder) / "master.log") as master:
        make = ray.remote(Producer).options(num_cpus=0, max_concurrency=64)
        producers = [make.remote(master, segment_bytes) for _ in range(PRODUCERS)]
        ray.get([producer.ready.remote() for producer in producers])
        endpoint = Endpoint(
            actors=tuple(producers), store=StoreAddress(master, "tcp", ""), target="bench",
            layer_ids=tuple(range(LAYERS)), layout=Layout(LAYERS, WIDTH, "bfloat16", stripes=1),
            contract=Contract(Path(folder), "bfloat16", 2, 2, 2), lives=frozenset({LIFE}),
            store_bytes=PRODUCERS * segment_bytes, segment_bytes=segment_bytes, max_running=64, start_timeout_s=600.0,
        )  # fmt: skip
        consumers = [ray.remote(Consumer).options(num_cpus=0).remote(endpoint, max(sizes)) for _ in range(many[-1])]
        running = Bench(producers, consumers)
        found = running.measure(main, CONTESTANTS, repeats)
        swept = SHARED[1:]
        sizes_found = [asdict(case) | {"found": running.measure(case, swept, 3)} for case in by_size]
        consumers_found = [asdict(case) | {"found": running.measure(case, swept, 3)} for case in by_consumers]
    names = [
        f"ours{kind}/{other}" for kind in ("", "_unchecked", "_fp8") for other in ("hs_connectors", "raw", "raw_2")
    ]
    return {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "load": [load_before, os.getloadavg()[0]],
        "versions": {"hs_connectors": version("hs-connectors"), "torch": torch.__version__},
        "sample_bytes": main.tokens * TOKEN_BYTES,
        "repeats": repeats,
        "ratios": {name: round(ratio(found, name), 3) for name in (*names, "ours/memcpy", "raw/memcpy")},
        "goals": GOALS,
        "main": asdict(main) | {"found": found},
        "by_size": sizes_found,
        "by_consumers": consumers_found,
    }


def plot(told: dict[str, Any], path: Path) -> None:
    """Throughput over the size of a sample, and over the number of consumers."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axis, part, scale, label in (
        (left, "by_size", lambda row: row["tokens"] * TOKEN_BYTES / 2**20, "MiB a sample, one consumer"),
        (right, "by_consumers", lambda row: row["consumers"], "consumers, 96 MiB a sample"),
    ):
        for name in told[part][0]["found"]:
            rates = [row["found"][name]["gb_per_s"] for row in told[part]]
            axis.plot([scale(row) for row in told[part]], rates, marker="o", label=name)
        axis.set_xscale("log", base=2)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    left.set_ylabel("GB/s into batches, all consumers")
    left.set_ylim(bottom=0)
    right.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="timed rounds of each contestant in the main case")
    parser.add_argument("--consumers", type=int, default=4, help="the most consumers of the sweep")
    parser.add_argument("--plot", type=Path, default=Path("out/bench/transfer.png"))
    args = parser.parse_args()
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        told = bench(args.repeats, args.consumers)
    finally:
        ray.shutdown()
    plot(told, args.plot)
    print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
