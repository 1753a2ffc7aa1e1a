"""Which keys a block's slots may attend to.

Legend: T packed tokens, A anchors, S slots of a block, Q = A*S queries, K = T+Q keys (context, then blocks).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# (batch, head, query, key) -> allowed, for index tensors that broadcast, as flex attention wants it
Visible = Callable[[object, object, torch.Tensor, torch.Tensor], torch.Tensor]


def visible(
    documents_T: torch.Tensor,
    positions_T: torch.Tensor,
    anchors_A: torch.Tensor,
    slots: int,
    *,
    sliding_window: int | None,
    causal: bool,
) -> Visible:
    """Whether query q may attend to key k.

    Slot k of anchor p sees the context of its own document strictly before p, and the slots of its own
    block (all of them, or 0..k when `causal`). With a sliding window w it sees only keys at positions
    greater than p+k-w: vLLM counts the window from the query, itself included (speculators counts it
    from the anchor, excluded; the two differ at the far edge only).
    """
    num_context = len(documents_T)

    def allowed(_batch: object, _head: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        slot, anchor = query % slots, anchors_A[query // slots]
        context, other = key.clamp(max=num_context - 1), key - num_context
        in_context = (documents_T[context] == documents_T[anchor]) & (context < anchor)
        in_block = other // slots == query // slots
        if causal:
            in_block = in_block & (other % slots <= slot)
        if sliding_window is not None:
            in_context = in_context & (positions_T[context] > positions_T[anchor] + slot - sliding_window)
            in_block = in_block & (other % slots > slot - sliding_window)
        return torch.where(key < num_context, in_context, in_block)

    return allowed


def dense(allowed: Visible, num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
    """The whole mask, bool [Q, K]."""
    queries_Q1, keys_K = torch.arange(num_queries, device=device)[:, None], torch.arange(num_keys, device=device)
    return allowed(None, None, queries_Q1, keys_K)
