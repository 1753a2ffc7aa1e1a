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
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers.modeling_utils import AttentionInterface
from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward

from stages.draft.mask import Blocks

Attention = Literal["sdpa", "flex", "eager"]
NAMES: dict[Attention, str] = {"sdpa": "dspark_documents", "flex": "dspark_flex", "eager": "dspark_dense"}
Rotary = tuple[torch.Tensor, torch.Tensor]  # cos and sin [1, K, R] of the first R dimensions of a head


@dataclass(frozen=True)
class DocumentMasks:
    """The documents of a packed batch: how much context and how many queries each has, and what sees what."""

    context: list[int]
    queries: list[int]  # 0 for a document without anchors
    added_QK: list[torch.Tensor]  # to the scores of one document, 0 or -inf; keys are its context, then its blocks


def attention_mask(attention: str, blocks: Blocks, dtype: torch.dtype) -> Any:
    """The mask that the function registered as `attention` (a value of NAMES) takes, for scores of `dtype`."""
    if attention == NAMES["sdpa"]:
        parts = blocks.by_document()
        return DocumentMasks(
            [len(part.documents_T) for part in parts],
            [part.num_queries for part in parts],
            [_added(part, dtype) for part in parts],
        )
    if attention == NAMES["eager"]:
        return _added(blocks, dtype)[None, None]
    device = blocks.anchors_A.device
    build = _fast(create_block_mask, device)

    def allowed(_batch: object, _head: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return blocks.allowed(query, key)  # a method would be taken for a function of five arguments

    return build(allowed, None, None, blocks.num_queries, blocks.num_keys, device=device)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function)
    return compiled


def _fast(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """On a GPU compiled: as they are, both functions of flex attention make whole tensors [Q, K]."""
    return _compiled(function) if device.type == "cuda" else function


def _added(blocks: Blocks, dtype: torch.dtype) -> torch.Tensor:
    """What to add to scores; from a bool mask torch would make the same again in every layer."""
    allowed_QK = blocks.dense()
    return torch.zeros(allowed_QK.shape, dtype=dtype, device=allowed_QK.device).masked_fill_(~allowed_QK, -torch.inf)


def rotate_part(query_1HQE: torch.Tensor, key_1GKE: torch.Tensor, rotary: Rotary | None) -> Rotary:
    """Queries (the last Q positions) and keys with the first dimensions rotated; as they are without `rotary`."""
    if rotary is None:
        return query_1HQE, key_1GKE

    def rotated(x: torch.Tensor) -> torch.Tensor:
        cos, sin = (table[:, None, -x.shape[2] :] for table in rotary)
        turned, kept = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
        first, second = turned.chunk(2, dim=-1)
        return torch.cat([turned * cos + torch.cat([-second, first], dim=-1) * sin, kept], dim=-1)

    return rotated(query_1HQE), rotated(key_1GKE)


def attend_dense(
    module: torch.nn.Module,
    query_1HQE: torch.Tensor,
    key_1GKE: torch.Tensor,
    value_1GKE: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    part_rotary: Rotary | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attention output [1, Q, H, E] (and None, as transformers' interface has it)."""
    query_1HQE, key_1GKE = rotate_part(query_1HQE, key_1GKE, part_rotary)
    output = eager_attention_forward(module, query_1HQE, key_1GKE, value_1GKE, attention_mask, scaling)[0]
    return output, None


def attend_by_document(
    module: torch.nn.Module,
    query_1HQE: torch.Tensor,
    key_1GKE: torch.Tensor,
    value_1GKE: torch.Tensor,
    attention_mask: DocumentMasks,
    scaling: float,
    part_rotary: Rotary | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """As `attend_dense`, with one product for every document."""
    masks = attention_mask
    query_1HQE, key_1GKE = rotate_part(query_1HQE, key_1GKE, part_rotary)
    queries = query_1HQE.split(masks.queries, dim=2)
    # one split each: the gradient of many slices would be as many tensors of the whole size
    keys, values = (x.split([*masks.context, *masks.queries], dim=2) for x in (key_1GKE, value_1GKE))
    parts = []
    for i, added_QK in enumerate(masks.added_QK):
        if masks.queries[i]:
            blocks = i + len(masks.context)
            key, value = (torch.cat([x[i], x[blocks]], dim=2) for x in (keys, values))
            parts.append(
                F.scaled_dot_product_attention(queries[i], key, value, added_QK, scale=scaling, enable_gqa=True)
            )
    return torch.cat(parts, dim=2).transpose(1, 2), None


def attend_flex(
    module: torch.nn.Module,
    query_1HQE: torch.Tensor,
    key_1GKE: torch.Tensor,
    value_1GKE: torch.Tensor,
    attention_mask: BlockMask,
    scaling: float,
    part_rotary: Rotary | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """As `attend_dense`, in one kernel. On a CPU torch has no backward pass of it."""
    query_1HQE, key_1GKE = rotate_part(query_1HQE, key_1GKE, part_rotary)
    # autocast leaves it alone: norms gave fp32, the values' projection did not
    query_1HQE, key_1GKE = query_1HQE.to(value_1GKE), key_1GKE.to(value_1GKE)
    # inside a compiled layer it is compiled with it
    attend: Any = flex_attention if torch.compiler.is_compiling() else _fast(flex_attention, query_1HQE.device)
    output = attend(query_1HQE, key_1GKE, value_1GKE, block_mask=attention_mask, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2), None


AttentionInterface.register(NAMES["sdpa"], attend_by_document)
AttentionInterface.register(NAMES["flex"], attend_flex)
AttentionInterface.register(NAMES["eager"], attend_dense)
