"""The part that runs inside vLLM: stores the captured states of the requests that ask for it.

vLLM loads this module by its path (`kv_connector_module_path`) in the engine's core process (scheduler
side) and in every worker. A request asks with `kv_transfer_params={"capture": True, "key": …,
"attempt": …, "encoding": …}` and gets the fields of a `Manifest` back; requests that don't ask leave no
trace. The ranks of a tensor-parallel engine all hold the states, and each stores a share of the tokens.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import asdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from hs_connectors.mooncake_hidden_states_connector import (
    MooncakeConnectorMetadata,
    MooncakeHiddenStatesConnector,
    PendingSave,
)
from hs_connectors.mooncake_store import MooncakeStoreConfig
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.request import RequestStatus

from stages.corpus import tokens_checksum
from stages.hidden_states.rows import CachedStates
from stages.hidden_states.store import METADATA, local_hostname
from stages.hidden_states.wire import Manifest
from stages.hidden_states.writer import SealedStore

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)
_COMPLETED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


def _nothing(*_: object) -> None:
    pass


# On the CPU a step has finished when it returns, so streams and events order nothing.
_CPU_DEVICE = SimpleNamespace(
    Stream=lambda: SimpleNamespace(wait_event=_nothing),
    Event=lambda: SimpleNamespace(record=_nothing),
    stream=lambda _: contextlib.nullcontext(),
)


class HiddenStatesConnector(MooncakeHiddenStatesConnector):
    """hs_connectors' Mooncake connector, per request, with manifests and sealed objects; also on the CPU.

    `kv_connector_extra_config`: `mooncake` (of MooncakeStoreConfig, without the host name), `keep_s`,
    `target`. A manifest names the layers that the engine was told to capture.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        super().__init__(vllm_config, role, kv_cache_config)
        mooncake = extra["mooncake"]
        host = local_hostname(mooncake["master_server_address"])
        config = MooncakeStoreConfig(**mooncake, metadata_server=METADATA, local_hostname=host)
        self._store = SealedStore(config, extra["keep_s"])
        self._target: str = extra["target"]
        hf_config = vllm_config.speculative_config.draft_model_config.hf_config
        self._layer_ids: list[int] = hf_config.eagle_aux_hidden_state_layer_ids
        self._captured: set[str] = set()  # worker side: requests whose blocks the scheduler holds for us

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._rank: int = get_tensor_model_parallel_rank()
        self._is_tp_rank_zero = True  # to the base class: one that writes
        self._ensure_store()  # now, so that a wrong master address fails the start and not a sample

    def _device(self) -> Any:
        return _CPU_DEVICE if self._vllm_config.device_config.device_type == "cpu" else super()._device()

    def _write_sample(self, pending: PendingSave, ready_event: Any) -> None:
        """Runs in a writer's thread. What goes wrong is told to the consumer under the sample's key."""
        assert self._kv_cache is not None
        assert self._copy_stream is not None
        self._copy_stream.wait_event(ready_event)
        try:
            with self._device().stream(self._copy_stream):
                states = CachedStates(self._kv_cache, self._slots(pending))
                manifest = pending.transfer_manifest["manifest"]
                self._store.put_stripe(manifest, self._rank, pending.token_ids.numpy(), states)
        except Exception as error:
            try:
                self._store.put_failure(pending.mooncake_key, error)
            except RuntimeError:
                logger.exception("no error marker for %s", pending.mooncake_key)
            raise

    def _slots(self, pending: PendingSave) -> torch.Tensor:
        """int64 [T]: where the engine's cache holds each token's states."""
        blocks_N = torch.tensor(pending.block_ids, dtype=torch.int64)
        slots_NB = blocks_N[:, None] * self._block_size + torch.arange(self._block_size)
        assert self._kv_cache is not None
        return slots_NB.flatten()[: len(pending.token_ids)].to(self._kv_cache.device, non_blocking=True)

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
        manifest = Manifest(
            key=params["key"],
            shape=(len(token_ids), self._num_hidden_states, self._hidden_size),
            encoding=params["encoding"],
            stripes=self._vllm_config.parallel_config.tensor_parallel_size,
            layer_ids=tuple(self._layer_ids),
            pre_norm=True,  # vLLM's extra layer id `num_layers`; the contract check holds it to that
            target=self._target,
            tokens_crc32=tokens_checksum(token_ids.numpy()),
            attempt=params["attempt"],
            step_tokens=self._vllm_config.scheduler_config.max_num_batched_tokens,
        )
        self._pending_saves[request.request_id] = PendingSave(
            req_id=request.request_id,
            mooncake_key=params["key"],
            token_ids=token_ids,
            block_ids=list(block_ids),
            transfer_manifest={"manifest": manifest},
        )
        return True, asdict(manifest)
