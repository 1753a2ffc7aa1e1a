"""The producer's side of the store: checked states and their trailer become one object.

Runs in vLLM's workers (`connector.py`), and needs nothing of vLLM.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

import numpy as np
import torch
from hs_connectors.mooncake_store import MooncakeHiddenStatesStore, MooncakeStoreConfig

from stages.corpus import tokens_checksum
from stages.hidden_states.layout import TRAILER_BYTES, as_bytes, trailer
from stages.hidden_states.rows import CachedStates, check_distinct, check_peaks, peak_bits
from stages.hidden_states.store import ERROR_SUFFIX, in_own_memory

_LONGEST_ERROR = 2048  # characters


class SealedStore(MooncakeHiddenStatesStore):
    """Writes states and their trailer as one object, and deletes what nobody came for."""

    def __init__(self, config: MooncakeStoreConfig, keep_s: float) -> None:
        super().__init__(config)
        self._keep_s = keep_s
        self._written: deque[tuple[float, str]] = deque()  # (when, key), oldest first
        self._lock = threading.Lock()

    def put_states(self, key: str, token_ids: np.ndarray, states: CachedStates) -> None:
        """Check, copy to the host, seal, put. `token_ids`: int [T].

        Raises HiddenStatesError for rows that cannot be right, RuntimeError with Mooncake's code.
        """
        self._sweep()
        rows_TLD = states.rows(slice(None))
        check_peaks(peak_bits(rows_TLD))
        check_distinct(token_ids, states)
        staging = self._staging_buffer("put", rows_TLD.nbytes + TRAILER_BYTES)
        payload = staging[: rows_TLD.nbytes]
        payload.view(rows_TLD.dtype).view(rows_TLD.shape).copy_(rows_TLD)
        seal = trailer(as_bytes(payload), tokens_checksum(token_ids), len(token_ids))
        sealed_bytes = rows_TLD.nbytes + len(seal)
        as_bytes(staging)[rows_TLD.nbytes : sealed_bytes] = np.frombuffer(seal, dtype=np.uint8)
        self._put(key, staging, sealed_bytes)

    def put_error(self, transfer_manifest: dict[str, Any], error: str) -> None:
        """Publish a producer's error where the reader looks for it."""
        marker = np.frombuffer(error[:_LONGEST_ERROR].encode(), dtype=np.uint8)
        staging = self._staging_buffer("put", len(marker))
        as_bytes(staging)[: len(marker)] = marker
        self._put(transfer_manifest["handle"] + ERROR_SUFFIX, staging, len(marker))

    def _put(self, key: str, staging: torch.Tensor, size: int) -> None:
        """Store the first `size` bytes of `staging`."""
        store = self._require_store()
        code = store.put_from(key, staging.data_ptr(), size, in_own_memory(store))
        if code != 0:
            raise RuntimeError(f"Mooncake put of {size} bytes: expected success, found code {code} (-200: full)")
        with self._lock:
            self._written.append((time.monotonic(), key.removesuffix(ERROR_SUFFIX)))

    def _sweep(self) -> None:
        """Delete objects older than any reader waits; a reader that died leaves them behind."""
        limit = time.monotonic() - self._keep_s
        while True:
            with self._lock:
                if not self._written or self._written[0][0] > limit:
                    return
                _, key = self._written.popleft()
            self.delete_sample(key)
