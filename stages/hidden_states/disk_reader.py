"""Batches of hidden states that are kept on disk: no engine, no store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from stages.corpus import TokenSequence
from stages.hidden_states.buffers import BatchBuffers
from stages.hidden_states.config import HiddenStatesConfig
from stages.hidden_states.disk import READ_THREADS, KeptStates, key_of
from stages.hidden_states.flow import FlowMeter
from stages.hidden_states.layout import Layout
from stages.hidden_states.proof import Proof
from stages.hidden_states.reader import BatchReader
from stages.hidden_states.wire import HiddenStatesError

_AHEAD_BYTES = 128 << 20  # read and not taken yet
_MOST_AHEAD = 64  # sequences


class DiskReader(BatchReader):
    """Reads from a folder; what is not there, or damaged, is set aside by name.

    `set_aside`: why states are not there, by key, as far as that is known.
    """

    def __init__(self, kept: KeptStates, config: HiddenStatesConfig, set_aside: Mapping[str, str]) -> None:
        about = kept.about
        self._kept = kept
        self._set_aside = set_aside
        self._entries = kept.entries()
        self._threads = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="hidden-states-disk")
        layout = Layout(len(about.layer_ids), about.hidden_size, "bfloat16", stripes=1)
        proof = Proof.read(kept.path)
        meter = FlowMeter(_AHEAD_BYTES, about.layer_ids, proof.rms if proof else {})
        super().__init__(layout, BatchBuffers(_AHEAD_BYTES), meter, _MOST_AHEAD, config.max_set_aside_share)

    def _size(self, sequence: TokenSequence) -> int:
        return self._layout.payload_bytes(len(sequence))

    async def _fetch(self, sequence: TokenSequence, states_TLD: torch.Tensor, scratch: torch.Tensor) -> str | None:
        key = key_of(sequence.input_ids)
        if (entry := self._entries.get(key)) is None:
            return self._set_aside.get(key, f"not kept: no states of it in {self._kept.path}")
        with self._meter.fetching(self._size(sequence), "transfer"):
            try:
                await asyncio.get_running_loop().run_in_executor(
                    self._threads, self._kept.read, entry, sequence.input_ids, states_TLD
                )
            except HiddenStatesError as error:
                return str(error)
        return None

    def _release(self) -> None:
        self._threads.shutdown()
