"""How blocks attend: the same answer in three ways, for different machines.

- `sdpa`: document by document, so that no query meets the keys of another document. For CPUs.
- `flex`: one kernel over the packed batch that skips what the mask leaves empty. For GPUs.
- `eager`: one dense mask over the packed batch. To compare with.

The layers are speculators', which ask transformers' registry for a function by its name in their config
and hand it the mask as it is.

Legend: H query heads, G key heads, T packed tokens, A anchors, Q queries (slots of all blocks),
K = T+Q keys (context, then blocks), E head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from speculators.models.attention import create_float_mask  # registers `simple_flex_attention`
from torch.nn.attention.flex_attention import create_block_mask
from transformers.modeling_utils import AttentionInterface

from stages.draft.mask import dense, visible

Attention = Literal["sdpa", "flex", "eager"]
NAMES: dict[Attention, str] = {"sdpa": "dspark_documents", "flex": "simple_flex_attention", "eager": "eager"}


@dataclass(frozen=True)
class DocumentMask:
    """One document of a packed batch: where its queries and its context lie, and what sees what."""

    queries: slice
    context: slice
    allowed_QK: torch.Tensor  # bool, keys are this document's context, then its blocks


def attention_mask(
    attention: str,
    documents_T: torch.Tensor,
    positions_T: torch.Tensor,
    anchors_A: torch.Tensor,
    slots: int,
    *,
    sliding_window: int | None,
    causal: bool,
) -> Any:
    """The mask that the function registered as `attention` (a value of NAMES) takes.

    Documents and anchors must come in ascending order.
    """
    options = {"sliding_window": sliding_window, "causal": causal}
    num_context, num_queries, device = len(documents_T), len(anchors_A) * slots, anchors_A.device
    if attention == NAMES["sdpa"]:
        return _document_masks(documents_T, positions_T, anchors_A, slots, options)
    allowed = visible(documents_T, positions_T, anchors_A, slots, **options)
    if attention == NAMES["eager"]:
        return create_float_mask(allowed, None, None, num_queries, num_context + num_queries, device, torch.float32)
    build: Callable[..., Any] = torch.compile(create_block_mask) if device.type == "cuda" else create_block_mask
    return build(allowed, None, None, num_queries, num_context + num_queries, device=device)


def _document_masks(
    documents_T: torch.Tensor, positions_T: torch.Tensor, anchors_A: torch.Tensor, slots: int, options: dict[str, Any]
) -> tuple[DocumentMask, ...]:
    of_anchor_A = documents_T[anchors_A]
    documents = of_anchor_A.unique_consecutive()
    # on a GPU one wait for all of them
    edges = torch.stack(
        [
            torch.searchsorted(documents_T, documents),
            torch.searchsorted(documents_T, documents, right=True),
            torch.searchsorted(of_anchor_A, documents),
            torch.searchsorted(of_anchor_A, documents, right=True),
        ],
        dim=1,
    ).tolist()
    masks = []
    for start, end, first, last in edges:
        anchors, size = anchors_A[first:last] - start, (last - first) * slots
        allowed = visible(documents_T[start:end], positions_T[start:end], anchors, slots, **options)
        allowed_QK = dense(allowed, size, end - start + size, anchors_A.device)
        masks.append(DocumentMask(slice(first * slots, last * slots), slice(start, end), allowed_QK))
    return tuple(masks)


def attend_by_document(
    module: torch.nn.Module,
    query_1HQE: torch.Tensor,
    key_1GKE: torch.Tensor,
    value_1GKE: torch.Tensor,
    attention_mask: tuple[DocumentMask, ...],
    scaling: float,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attention output [1, Q, H, E] (and None, as transformers' interface has it)."""
    num_context = key_1GKE.shape[2] - query_1HQE.shape[2]
    parts = []
    for mask in attention_mask:
        blocks = slice(num_context + mask.queries.start, num_context + mask.queries.stop)
        key, value = (torch.cat([x[:, :, mask.context], x[:, :, blocks]], dim=2) for x in (key_1GKE, value_1GKE))
        query = query_1HQE[:, :, mask.queries]
        parts.append(F.scaled_dot_product_attention(query, key, value, mask.allowed_QK, scale=scaling, enable_gqa=True))
    return torch.cat(parts, dim=2).transpose(1, 2), None


AttentionInterface.register(NAMES["sdpa"], attend_by_document)
