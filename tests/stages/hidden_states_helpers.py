"""Pretended extractors that write real objects into a real store."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from hs_connectors.mooncake_store import MooncakeStoreConfig
from safetensors.torch import save_file
from store_helpers import SEGMENT_BYTES, address_of

from stages.corpus import TokenSequence, tokens_checksum
from stages.engine.actor import end_with_event_loop
from stages.engine.requests import EngineError, Extraction
from stages.hidden_states.config import HiddenStatesConfig
from stages.hidden_states.contract import Contract
from stages.hidden_states.layout import Layout
from stages.hidden_states.rows import CachedStates
from stages.hidden_states.samples import Endpoint, check_contract
from stages.hidden_states.store import METADATA, local_hostname
from stages.hidden_states.wire import Manifest
from stages.hidden_states.writer import SealedStore
from stages.target import load_head

LAYER_IDS = (1, 3)
HIDDEN_SIZE = 8
VOCAB_SIZE = 1000
STEP_TOKENS = 128
STRIPES = 2  # written one after the other here, by ranks of a real engine


def states_of(token_ids: np.ndarray, layer_ids: tuple[int, ...] = LAYER_IDS) -> torch.Tensor:
    """What a pretended extractor gives for these tokens: bfloat16 [T, L, D], each layer larger than the one before."""
    tokens, positions = torch.from_numpy(token_ids.astype(np.int64)), torch.arange(len(token_ids))
    rows_T = tokens * 1_000_003 + positions * 7_919
    layers_L1 = torch.tensor(layer_ids)[:, None]
    columns_LD = (layers_L1 * HIDDEN_SIZE + torch.arange(HIDDEN_SIZE)) * 1_299_709
    mixed_TLD = rows_T[:, None, None] + columns_LD
    for shift, factor in ((15, 2_654_435_761), (13, 2_246_822_519), (16, 3_266_489_917)):
        mixed_TLD = (mixed_TLD ^ mixed_TLD >> shift) * factor % 2**32
    return ((mixed_TLD / 2**31 - 1) * 1.1**layers_L1).to(torch.bfloat16)


def sequence(first: int, length: int = 5) -> TokenSequence:
    """Tokens first, first+1, … of which only `first` matters to a pretended extractor."""
    ids = np.arange(first, first + length, dtype=np.int32)
    return TokenSequence(f"s{first}", "test", ids, np.ones(length, dtype=bool))


class HarmfulStore(SealedStore):
    """What our connector writes with, and a way to damage what it has sealed."""

    harm = ""

    def _put(self, key: str, staging: torch.Tensor, size: int, patience_s: float) -> None:
        if self.harm == "flip":
            staging[9] ^= 1
        super()._put(key, staging, size - (self.harm == "short"), patience_s)


class PretendExtractor:
    """Plays `faults[first token][attempt]`; everything else is extracted well, after a pretended prefill.

    It says that it captures `layer_ids`, and does so until it is told to `capture` others.
    """

    def __init__(
        self,
        master: str,
        home: Path,
        index: int,
        faults: dict[int, list[str]],
        slow: tuple[int, ...] = (),
        layer_ids: tuple[int, ...] = LAYER_IDS,
    ) -> None:
        end_with_event_loop()
        self.layer_ids = self.captured = layer_ids
        self.life = str(os.getpid())
        self.head = load_head(home)
        with (home / f"lives-{index}").open("a+") as lives:
            lives.write("*")
            self.came_back = lives.tell() > 1
        self.wrong = self.came_back and (home / "wrong-when-back").exists()
        config = MooncakeStoreConfig(local_hostname(master), METADATA, master, SEGMENT_BYTES, local_buffer_size=0)
        self.store = HarmfulStore(config, keep_s=60.0)
        self.store.setup()
        self.faults = faults
        self.slow = slow
        self.asked: list[int] = []
        self.late: list[asyncio.Task[None]] = []
        self.writer = ThreadPoolExecutor(1)
        self.broken = ""

    @ray.method(max_task_retries=-1)
    async def ready(self) -> int:
        return os.getpid()

    async def watch(self, life: str) -> None:
        while life == self.life:
            await asyncio.sleep(0.05)
        raise EngineError("died and was started again")

    async def capture(self, layer_ids: tuple[int, ...]) -> None:
        """As if it had been started again, and captured these layers from now on."""
        self.captured, self.life = layer_ids, self.life + "+"

    async def break_down(self, how: str) -> None:
        """From now on it does not answer ("stall") or store what it has answered ("mute"); "" as before."""
        self.broken = how

    async def log(self) -> list[int]:
        """First tokens of all requests so far."""
        return self.asked

    async def extract(self, token_ids: np.ndarray, capture: dict[str, Any], logprobs: str) -> Extraction:
        first = int(token_ids[0])
        self.asked.append(first)
        planned = self.faults.get(first, [])
        fault = planned[capture["attempt"]] if capture["attempt"] < len(planned) else ""
        if fault == "die":
            os._exit(1)
        if fault == "exit":
            sys.exit(0)
        if fault == "refuse":
            raise ValueError("prompt too long")
        if "stall" in (fault, self.broken):
            await asyncio.Event().wait()
        if first in self.slow:
            await asyncio.sleep(0.3)
        manifest = Manifest(
            key=capture["key"],
            shape=(len(token_ids), len(self.layer_ids), HIDDEN_SIZE),
            encoding=capture["encoding"],
            stripes=STRIPES,
            layer_ids=self.layer_ids,
            pre_norm=True,
            target="tiny",
            tokens_crc32=tokens_checksum(token_ids),
            attempt=capture["attempt"],
            step_tokens=STEP_TOKENS,
        )
        self.late.append(asyncio.create_task(self._store(manifest, token_ids, fault)))
        if fault.startswith("manifest "):
            field = fault.removeprefix("manifest ")
            wrong = {"layer_ids": (1, 2), "pre_norm": False, "target": "other", "tokens_crc32": 1}
            manifest = replace(manifest, **{field: wrong[field]})
        reference = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(manifest).items()}
        if fault == "no pre_norm":
            del reference["pre_norm"]
        return Extraction(reference, self.life, *(self._logprobs(token_ids) if logprobs else ()))

    def _logprobs(self, token_ids: np.ndarray) -> tuple[tuple[float, ...], int]:
        """Of all positions and a next token: what an engine with these states and this head would say."""
        next_token = int(token_ids[0])
        following = torch.tensor([*token_ids[1:].tolist(), next_token])
        logits = self.head.logits(states_of(token_ids, self.layer_ids)[:, -1])
        return tuple(torch.log_softmax(logits, -1).gather(-1, following[:, None])[:, 0].tolist()), next_token

    async def _store(self, manifest: Manifest, token_ids: np.ndarray, fault: str) -> None:
        await asyncio.sleep(0.01)
        if fault == "lose" or self.broken == "mute":
            return
        if fault == "die late":
            os._exit(1)
        states = states_of(token_ids, self.captured)
        if self.wrong:
            states = states.roll(1, 0)
        if fault == "zero":
            states[2, 1] = 0
        if fault == "nan":
            states[1, 0, 3] = float("nan")
        if fault == "double":
            states[4] = states[1]
        if fault == "swap":
            manifest = replace(manifest, tokens_crc32=1)
        if fault == "other layers":
            manifest = replace(manifest, layer_ids=(1, 2))
        await asyncio.get_running_loop().run_in_executor(self.writer, self._put, manifest, token_ids, states, fault)

    def _put(self, manifest: Manifest, token_ids: np.ndarray, states: torch.Tensor, fault: str) -> None:
        self.store.harm = fault
        try:
            if fault == "device":
                raise RuntimeError("device lost\nlook at 7")
            for stripe in range(STRIPES - (fault == "lose a stripe")):
                self.store.put_stripe(manifest, stripe, token_ids, in_one_block(states))
        except RuntimeError as error:
            self.store.put_failure(manifest.key, error)


def write_head(home: Path) -> None:
    """The ends of a target for states of HIDDEN_SIZE, as a Hugging Face folder."""
    random = torch.Generator().manual_seed(0)
    tensors = {
        "model.embed_tokens.weight": torch.zeros(1, HIDDEN_SIZE),
        "model.norm.weight": torch.rand(HIDDEN_SIZE, generator=random) + 0.5,
        "lm_head.weight": torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=random),
    }
    save_file(tensors, home / "model.safetensors")
    (home / "config.json").write_text("{}")


@contextlib.contextmanager
def extractors(
    master: str,
    home: Path,
    count: int,
    faults: dict[int, list[str]] | None = None,
    slow: tuple[int, ...] = (),
    layer_ids: tuple[int, ...] = LAYER_IDS,
) -> Iterator[Endpoint]:
    """Actors that stand for `count` engines, and have passed the contract check."""
    write_head(home)
    make = ray.remote(PretendExtractor).options(num_cpus=0, max_restarts=-1, max_concurrency=64)
    actors = tuple(make.remote(master, home, index, faults or {}, slow, layer_ids) for index in range(count))
    ray.get([actor.ready.remote() for actor in actors])
    endpoint = Endpoint(
        actors=actors,
        store=address_of(master),
        target="tiny",
        layer_ids=layer_ids,
        layout=Layout(len(layer_ids), HIDDEN_SIZE, "bfloat16", STRIPES),
        store_bytes=count * SEGMENT_BYTES,
        segment_bytes=SEGMENT_BYTES,
        max_running=8 * count,
        start_timeout_s=60.0,
        contract=Contract(home, "bfloat16", VOCAB_SIZE, longest=256, step_tokens=STEP_TOKENS),
    )
    try:
        yield check_contract(endpoint, HiddenStatesConfig())[0]
    finally:
        for actor in actors:
            ray.kill(actor)


def in_one_block(states_TLD: torch.Tensor) -> CachedStates:
    """The cache of an engine that runs one sequence."""
    return CachedStates(states_TLD.transpose(0, 1)[None], torch.arange(len(states_TLD)))
