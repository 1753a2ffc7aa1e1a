"""The producer's side of the store: checked states and their trailer become an object.

Runs in vLLM's workers (`connector.py`), and needs nothing of vLLM.
"""

from __future__ import annotations

import threading
import time
from collections import deque

import numpy as np
import torch
from hs_connectors.mooncake_store import MooncakeHiddenStatesStore, MooncakeStoreConfig

from stages.hidden_states.fp8 import encode
from stages.hidden_states.layout import TRAILER_BYTES, Layout, as_bytes, seal
from stages.hidden_states.rows import CachedStates, check_distinct, check_peaks, peak_bits
from stages.hidden_states.store import error_name, in_own_memory, stripe_name
from stages.hidden_states.wire import HiddenStatesError, Manifest

_LONGEST_ERROR = 2048  # characters
# A put that fails is tried again for as long: the store is full until somebody reads, or its master was started again
# and this process has yet to tell it of its memory, which Mooncake does in a few seconds. Without a marker a reader
# would wait for its time-out, so that one may take longer.
_PATIENCE_S = 2.0
_MARKER_PATIENCE_S = 20.0
_AGAIN_S = 0.05
_FULL = -200  # Mooncake's code


class SealedStore(MooncakeHiddenStatesStore):
    """Writes states and their trailers, and deletes what nobody came for."""

    def __init__(self, config: MooncakeStoreConfig, keep_s: float) -> None:
        super().__init__(config)
        self._keep_s = keep_s
        self._written: deque[tuple[float, str]] = deque()  # (when, name), oldest first
        self._lock = threading.Lock()

    def put_stripe(self, manifest: Manifest, stripe: int, token_ids: np.ndarray, states: CachedStates) -> None:
        """Check, encode, copy to the host, seal, put: the tokens of one stripe of a sample, if it has so many.

        `token_ids`: int [T], and `states`: of the whole sample. Raises HiddenStatesError for rows that cannot
        be right, or with Mooncake's code.
        """
        # Of this thread alone. With a team of its own the process has more OpenMP threads than cores, and libgomp then
        # lets the engine's threads sleep, not spin, at the end of every operator: 10 % of a prefill on two cores.
        torch._C.set_num_threads(1)  # vLLM puts a warning in the place of torch.set_num_threads
        self._sweep()
        spans = Layout.of(manifest).spans(len(token_ids))
        if stripe >= len(spans):
            return
        span = spans[stripe]
        rows_RLD = states.rows(span)
        peaks_RL = peak_bits(rows_RLD)
        check_peaks(peaks_RL, span.start)
        check_distinct(token_ids, states)
        parts = encode(rows_RLD, peaks_RL) if manifest.encoding == "fp8" else (rows_RLD,)
        staging = self._staging_buffer("put", sum(part.nbytes for part in parts) + TRAILER_BYTES)
        size = 0
        for part in parts:
            staging[size : size + part.nbytes].copy_(part.view(torch.uint8).view(-1))
            size += part.nbytes
        trailer = seal(as_bytes(staging[:size]), manifest, span)
        as_bytes(staging)[size : size + TRAILER_BYTES] = np.frombuffer(trailer, dtype=np.uint8)
        self._put(stripe_name(manifest.key, stripe), staging, size + TRAILER_BYTES, _PATIENCE_S)

    def put_failure(self, key: str, error: Exception) -> None:
        """Tell the consumer of a sample why it cannot be stored."""
        ours = isinstance(error, HiddenStatesError) and str(error)  # another's text may need its type to be understood
        why = ours or f"{type(error).__name__}: {error}"
        marker = np.frombuffer(why[:_LONGEST_ERROR].encode(), dtype=np.uint8)
        staging = self._staging_buffer("put", len(marker))
        as_bytes(staging)[: len(marker)] = marker
        self._put(error_name(key), staging, len(marker), _MARKER_PATIENCE_S)

    def _put(self, name: str, staging: torch.Tensor, size: int, patience_s: float) -> None:
        """Store the first `size` bytes of `staging`."""
        store, deadline = self._require_store(), time.monotonic() + patience_s
        while (code := store.put_from(name, staging.data_ptr(), size, in_own_memory(store))) != 0:
            if time.monotonic() > deadline:
                full = "; the store is full: raise hidden_states.segment_gib or lower hidden_states.window_share"
                raise HiddenStatesError(
                    f"Mooncake put of {name} ({size} bytes): expected success, found code {code}"
                    f"{full if code == _FULL else ''}"
                )
            time.sleep(_AGAIN_S)
        with self._lock:
            self._written.append((time.monotonic(), name))

    def _sweep(self) -> None:
        """Delete objects older than any reader waits; a reader that died leaves them behind."""
        limit = time.monotonic() - self._keep_s
        while True:
            with self._lock:
                if not self._written or self._written[0][0] > limit:
                    return
                _, name = self._written.popleft()
            self._require_store().remove(name, True)  # mostly gone already
