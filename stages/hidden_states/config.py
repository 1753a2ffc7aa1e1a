"""How hidden states travel from vLLM to training."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from stages.artifacts import resource
from stages.engine.config import EngineConfig

LEAST_SEGMENT_BYTES = 16 << 20  # Mooncake refuses to lend less
Encoding = Literal["bfloat16", "fp8"]  # how states are stored; a consumer always gets bfloat16


@dataclass(frozen=True)
class HiddenStatesConfig:
    """The Mooncake store between extractors and trainers, and the bounds on what is in flight."""

    encoding: Encoding = "bfloat16"  # fp8: half the bytes, 3 % of error in L2
    # disk: extracted once into `out`/states, then read from there by every epoch and run, without an engine
    transport: Literal["mooncake", "disk"] = resource("mooncake")
    protocol: Literal["tcp", "rdma"] = resource("tcp")
    device: str = resource("")  # RDMA devices, comma separated; empty: Mooncake chooses
    # host:port (IPv4 or a name) of a running master, which may be started again in 15 s (see store.py);
    # empty: the stage runs its own
    master_address: str = resource("")
    segment_gib: float = resource(0.5)  # memory each extractor lends to the store, shared by its ranks
    writer_threads: int = resource(2)
    window_share: float = resource(0.5)  # of the store's capacity that may be asked for and not yet read
    attempts: int = resource(3)  # tries for one sequence before it is set aside by name
    sample_timeout_s: float = resource(120.0)
    # of what a reader was asked for so far, or training of all; above it (and above one sequence) the stage stops
    max_set_aside_share: float = resource(0.01)

    @property
    def segment_bytes(self) -> int:
        """`segment_gib` in bytes; no sample can be larger."""
        return int(self.segment_gib * 2**30)

    def window_bytes(self, store_bytes: int, num_ranks: int) -> int:
        """What one of `num_ranks` readers of a store may have asked for and not yet read."""
        return int(self.window_share * store_bytes / num_ranks)


def check_hidden_states(config: HiddenStatesConfig, engine: EngineConfig) -> None:
    """Raise ValueError for settings that cannot work with extractors like `engine`, naming the key."""
    least = engine.tensor_parallel * LEAST_SEGMENT_BYTES
    if config.segment_bytes < least:
        raise ValueError(
            f"hidden_states.segment_gib={config.segment_gib}: expected at least {least / 2**30}, 16 MiB for each rank "
            f"of engine.tensor_parallel={engine.tensor_parallel}"
        )
    address = config.master_address
    found = re.fullmatch(r"[\w.-]+:(\d{1,5})", address, re.ASCII)
    if address and not (found and 0 < int(found[1]) < 1 << 16):
        raise ValueError(
            f"hidden_states.master_address={address}: expected host:port of a Mooncake master (IPv4 or a name), or "
            "nothing, for one of the stage's own"
        )
