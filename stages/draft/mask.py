"""Which keys a block's slots may attend to.

Legend: T packed tokens, A anchors, S slots of a block, Q = A*S queries, K = T+Q keys (context, then blocks).
"""

from __future__ import annotations

import torch


def block_mask(
    documents_T: torch.Tensor,
    positions_T: torch.Tensor,
    anchors_A: torch.Tensor,
    slots: int,
    *,
    sliding_window: int | None,
    causal: bool,
) -> torch.Tensor:
    """Boolean mask [Q, K], true where attention is allowed.

    Slot k of anchor p sees the context of its own document strictly before p, and the slots of its own
    block (all of them, or 0..k when `causal`). With a sliding window w it sees only keys at positions
    greater than p+k-w: vLLM counts the window from the query, itself included (speculators counts it
    from the anchor, excluded; the two differ at the far edge only).
    """
    device = anchors_A.device
    slots_Q = torch.arange(slots, device=device).repeat(len(anchors_A))
    anchors_Q = anchors_A.repeat_interleave(slots)
    blocks_Q = torch.arange(len(anchors_A), device=device).repeat_interleave(slots)

    packed_T = torch.arange(len(documents_T), device=device)
    context_QT = (documents_T[anchors_Q][:, None] == documents_T) & (packed_T < anchors_Q[:, None])
    block_QQ = blocks_Q[:, None] == blocks_Q
    if causal:
        block_QQ &= slots_Q <= slots_Q[:, None]
    if sliding_window is not None:
        query_positions_Q = positions_T[anchors_Q] + slots_Q
        context_QT &= positions_T > query_positions_Q[:, None] - sliding_window
        block_QQ &= slots_Q > slots_Q[:, None] - sliding_window
    return torch.cat([context_QT, block_QQ], dim=1)
