"""Which keys a block's slots may attend to.

Legend: T packed tokens, A anchors, S slots of a block, Q = A*S queries, K = T+Q keys (context, then blocks).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Blocks:
    """Blocks over a packed context.

    Slot k of anchor p sees the context of its own document strictly before p, and the slots of its own
    block (all of them, or 0..k when `causal`). With a sliding window w it sees only keys at positions
    greater than p+k-w: vLLM counts the window from the query, itself included (speculators counts it
    from the anchor, excluded; the two differ at the far edge only).
    """

    documents_T: torch.Tensor  # int64, ascending
    positions_T: torch.Tensor  # int64, inside the document
    anchors_A: torch.Tensor  # int64, packed indices, ascending
    slots: int
    sliding_window: int | None
    causal: bool

    @property
    def num_queries(self) -> int:
        return len(self.anchors_A) * self.slots

    @property
    def num_keys(self) -> int:
        return len(self.documents_T) + self.num_queries

    def allowed(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Whether a query may attend to a key, for indices that broadcast."""
        num_context = len(self.documents_T)
        slot, anchor = query % self.slots, self.anchors_A[query // self.slots]
        context, other = key.clamp(max=num_context - 1), key - num_context
        in_context = (self.documents_T[context] == self.documents_T[anchor]) & (context < anchor)
        in_block = other // self.slots == query // self.slots
        if self.causal:
            in_block = in_block & (other % self.slots <= slot)
        if self.sliding_window is not None:
            oldest = slot - self.sliding_window  # relative to the anchor, itself excluded
            in_context = in_context & (self.positions_T[context] > self.positions_T[anchor] + oldest)
            in_block = in_block & (other % self.slots > oldest)
        return torch.where(key < num_context, in_context, in_block)

    def dense(self) -> torch.Tensor:
        """The whole mask, bool [Q, K]."""
        device = self.anchors_A.device
        queries_Q, keys_K = (torch.arange(n, device=device) for n in (self.num_queries, self.num_keys))
        return self.allowed(queries_Q[:, None], keys_K)

    def by_document(self) -> list[Blocks]:
        """The same blocks with nothing but their own document; one entry per document."""
        lengths = self.documents_T.bincount()
        counts = self.documents_T[self.anchors_A].bincount(minlength=len(lengths))
        tokens, anchors = torch.stack([lengths, counts]).tolist()  # on a GPU one wait for both
        documents, positions = self.documents_T.split(tokens), self.positions_T.split(tokens)
        starts = [0, *torch.tensor(tokens).cumsum(0).tolist()]
        return [
            replace(self, documents_T=documents[i], positions_T=positions[i], anchors_A=part_A - starts[i])
            for i, part_A in enumerate(self.anchors_A.split(anchors))
        ]
