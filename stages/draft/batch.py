"""What a draft reads: token ids and target states of several sequences, packed along one axis.

Legend: T packed tokens, L aux layers, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from stages.corpus import TokenSequence


class CapturedStates(Protocol):
    """What a draft needs of a batch of hidden states (a `HiddenBatch`): how they travelled it does not know."""

    @property
    def sequences(self) -> tuple[TokenSequence, ...]: ...

    @property
    def states_TLD(self) -> torch.Tensor: ...  # the last layer is the final one, before the target's norm


@dataclass(frozen=True)
class PackedBatch:
    """Sequences laid end to end; attention never crosses from one document to another.

    Positions restart at 0 in every document, as the target (and the served draft) count them.
    """

    ids: tuple[str, ...]  # of the sequences, in the order of the documents
    input_ids_T: torch.Tensor  # int64
    loss_mask_T: torch.Tensor  # bool, true where the target wrote the token
    positions_T: torch.Tensor  # int64, inside the document
    documents_T: torch.Tensor  # int64, index into `ids`
    states_TLD: torch.Tensor  # of the aux layers, in the checkpoint's order, and the final one; any float dtype

    @property
    def aux_TLD(self) -> torch.Tensor:
        """States of the aux layers, a view."""
        return self.states_TLD[:, :-1]

    @property
    def final_TD(self) -> torch.Tensor:
        """The final layer's states before the target's final norm, a view."""
        return self.states_TLD[:, -1]

    def __len__(self) -> int:
        return len(self.input_ids_T)

    @classmethod
    def from_hidden(cls, batch: CapturedStates) -> PackedBatch:
        """The batch as it was read: its states are not copied. Raises ValueError when lengths disagree."""
        return cls.pack(batch.sequences, batch.states_TLD)

    @classmethod
    def pack(cls, sequences: tuple[TokenSequence, ...], states_TLD: torch.Tensor) -> PackedBatch:
        """As `from_hidden`, from the sequences and their states alone."""
        lengths = [len(sequence) for sequence in sequences]
        if sum(lengths) != states_TLD.shape[0]:
            raise ValueError(
                f"hidden states: expected {sum(lengths)} tokens of {len(sequences)} sequences, "
                f"found {states_TLD.shape[0]}"
            )
        lengths_tensor = torch.tensor(lengths, dtype=torch.long)
        return cls(
            ids=tuple(sequence.id for sequence in sequences),
            input_ids_T=_joined([s.input_ids for s in sequences], np.int64),
            loss_mask_T=_joined([s.loss_mask for s in sequences], np.bool_),
            positions_T=_joined([np.arange(n) for n in lengths], np.int64),
            documents_T=torch.repeat_interleave(torch.arange(len(lengths)), lengths_tensor),
            states_TLD=states_TLD,
        )

    def documents(self) -> list[PackedBatch]:
        """One batch per sequence (views): attention cost grows with the square of a batch's tokens."""
        ends = np.cumsum(np.bincount(self.documents_T.cpu().numpy(), minlength=len(self.ids))).tolist()
        starts = [0, *ends][:-1]
        return [
            PackedBatch(
                (id_,),
                self.input_ids_T[start:end],
                self.loss_mask_T[start:end],
                self.positions_T[start:end],
                torch.zeros_like(self.documents_T[start:end]),
                self.states_TLD[start:end],
            )
            for id_, start, end in zip(self.ids, starts, ends, strict=True)
        ]

    def to(self, device: torch.device) -> PackedBatch:
        """The same batch on `device`. Out of pinned memory the copies overlap what the device does."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=True)

        return PackedBatch(
            self.ids,
            moved(self.input_ids_T),
            moved(self.loss_mask_T),
            moved(self.positions_T),
            moved(self.documents_T),
            moved(self.states_TLD),
        )


def _joined(arrays: list[np.ndarray], dtype: type[np.generic]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype))
