"""The part that runs inside vLLM: stores the captured states of the requests that ask for it.

vLLM loads this module by its path (`kv_connector_module_path`) in the engine's core process (scheduler
side) and in every worker. A request asks with `kv_transfer_params={"capture": True, "key": …,
"attempt": …}` and gets the fields of a `Manifest` back; requests that don't ask leave no trace.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from hs_connectors.mooncake_hidden_states_connector import (
    MooncakeConnectorMetadata,
    MooncakeHiddenStatesConnector,
    PendingSave,
)
from hs_connectors.mooncake_store import MooncakeHiddenStatesStore, MooncakeStoreConfig
from vllm.v1.request import RequestStatus

from stages.corpus import tokens_checksum
from stages.engine.cpu import die_with_parent
from stages.hidden_states.layout import TRAILER_BYTES, as_bytes, object_bytes, trailer
from stages.hidden_states.store import ERROR_SUFFIX, METADATA, in_own_memory, local_hostname

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_LONGEST_ERROR = 2048  # characters
_COMPLETED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


def _nothing(*_: object) -> None:
    pass


# On the CPU a step has finished when it returns, so streams and events order nothing.
_CPU_DEVICE = SimpleNamespace(
    Stream=lambda: SimpleNamespace(wait_event=_nothing),
    Event=lambda: SimpleNamespace(record=_nothing),
    stream=lambda _: contextlib.nullcontext(),
)


class SealedStore(MooncakeHiddenStatesStore):
    """Writes states and their trailer as one object, and deletes what nobody came for."""

    def __init__(self, config: MooncakeStoreConfig, keep_s: float) -> None:
        super().__init__(config)
        self._keep_s = keep_s
        self._written: deque[tuple[float, str]] = deque()  # (when, key), oldest first
        self._lock = threading.Lock()

    def put_sample(self, transfer_manifest: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Copy to the host, seal, put. Raises RuntimeError with Mooncake's code."""
        self._sweep()
        states, token_ids = tensors["hidden_states"], tensors["token_ids"]
        total_bytes = transfer_manifest["total_bytes"]
        staging = self._staging_buffer("put", total_bytes)
        sealed_bytes = total_bytes - TRAILER_BYTES
        staging[:sealed_bytes].view(states.dtype).view(states.shape).copy_(states)
        ids = token_ids.numpy()
        seal = trailer(as_bytes(staging[:sealed_bytes]), tokens_checksum(ids), len(ids))
        as_bytes(staging)[sealed_bytes:total_bytes] = np.frombuffer(seal, dtype=np.uint8)
        self._put(transfer_manifest["handle"], staging, total_bytes)

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


class HiddenStatesConnector(MooncakeHiddenStatesConnector):
    """hs_connectors' Mooncake connector, per request, with manifests and sealed objects; also on the CPU.

    `kv_connector_extra_config`: `mooncake` (of MooncakeStoreConfig, without the host name), `keep_s`,
    `target`, `layer_ids`, `actor_pid`.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        die_with_parent(extra["actor_pid"])
        super().__init__(vllm_config, role, kv_cache_config)
        mooncake = extra["mooncake"]
        host = local_hostname(mooncake["master_server_address"])
        config = MooncakeStoreConfig(**mooncake, metadata_server=METADATA, local_hostname=host)
        self._store = SealedStore(config, extra["keep_s"])
        self._target: str = extra["target"]
        self._layer_ids: list[int] = extra["layer_ids"]
        self._captured: set[str] = set()  # worker side: requests whose blocks the scheduler holds for us

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        if self._is_tp_rank_zero:
            self._ensure_store()  # now, so that a wrong master address fails the start and not a sample

    def _device(self) -> Any:
        return _CPU_DEVICE if self._vllm_config.device_config.device_type == "cpu" else super()._device()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Report only captured requests: the scheduler has forgotten the others by now."""
        if self.has_connector_metadata():
            metadata = self._get_connector_metadata()
            assert isinstance(metadata, MooncakeConnectorMetadata)
            self._captured.update(pending.req_id for pending in metadata.pending_saves)
        sent, received = super().get_finished(finished_req_ids & self._captured)
        self._captured -= sent or set()
        return sent, received

    # Scheduler side

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Take the states of a completed request that asked; its blocks stay until they are stored."""
        self._request_keys.pop(request.request_id, None)
        params = request.kv_transfer_params or {}
        if not params.get("capture") or request.status not in _COMPLETED:
            return False, None
        token_ids = torch.tensor(request.prompt_token_ids, dtype=torch.int32)
        num_tokens, num_layers = len(token_ids), self._num_hidden_states
        manifest = {
            "key": params["key"],
            "num_tokens": num_tokens,
            "layer_ids": self._layer_ids,
            "hidden_size": self._hidden_size,
            "dtype": str(self._hidden_state_dtype).removeprefix("torch."),
            "pre_norm": True,  # vLLM's extra layer id `num_layers`; the contract check holds it to that
            "target": self._target,
            "tokens_crc32": tokens_checksum(token_ids.numpy()),
            "total_bytes": object_bytes(num_tokens, num_layers, self._hidden_size, self._hidden_state_dtype),
            "attempt": params["attempt"],
        }
        self._pending_saves[request.request_id] = PendingSave(
            req_id=request.request_id,
            mooncake_key=params["key"],
            token_ids=token_ids,
            block_ids=list(block_ids),
            transfer_manifest={"handle": params["key"], **manifest},
        )
        return True, manifest
