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
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import ray
import torch

from benchmarks.transfer_ends import (
    CONTESTANTS,
    LAYERS,
    LIFE,
    PRODUCERS,
    SHARED,
    STEP_TOKENS,
    TOKEN_BYTES,
    WIDTH,
    Consumer,
    Producer,
)
from stages.hidden_states.contract import Contract
from stages.hidden_states.layout import Layout
from stages.hidden_states.master import mooncake_master
from stages.hidden_states.samples import Endpoint
from stages.hidden_states.store import (
    StoreAddress,
)

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
            contract=Contract(Path(folder), "bfloat16", 2, 2, STEP_TOKENS), lives=frozenset({LIFE}),
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
    parser.add_argument("--repeats", type=int, default=25, help="timed rounds of each contestant in the main case")
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
