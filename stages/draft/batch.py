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
    aux_TLD: torch.Tensor  # states of the aux layers, in the checkpoint's order, any float dtype
    final_TD: torch.Tensor  # the final layer's states before the target's final norm

    def __len__(self) -> int:
        return len(self.input_ids_T)

    @classmethod
    def from_hidden(cls, *batches: CapturedStates) -> PackedBatch:
        """Pack batches as they were read; the states of a single one are not copied.

        Raises ValueError when lengths disagree.
        """
        sequences = tuple(sequence for batch in batches for sequence in batch.sequences)
        states = [batch.states_TLD for batch in batches]
        return cls.pack(sequences, states[0] if len(states) == 1 else torch.cat(states))

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
            aux_TLD=states_TLD[:, :-1],
            final_TD=states_TLD[:, -1],
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
                self.aux_TLD[start:end],
                self.final_TD[start:end],
            )
            for id_, start, end in zip(self.ids, starts, ends, strict=True)
        ]

    def to(self, device: torch.device) -> PackedBatch:
        """The same batch on `device`."""
        return PackedBatch(
            self.ids,
            self.input_ids_T.to(device),
            self.loss_mask_T.to(device),
            self.positions_T.to(device),
            self.documents_T.to(device),
            self.aux_TLD.to(device),
            self.final_TD.to(device),
        )


def _joined(arrays: list[np.ndarray], dtype: type[np.generic]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype))
