"""What a producer refuses to send: rows of states that cannot be those of their tokens.

Runs on the producer's device before an object is sealed, so that its trailer vouches for good rows and
a consumer has only a checksum to compare.
Legend: N blocks of the engine's cache, B slots of a block, T tokens of a sequence, R some of them,
L captured layers, D hidden size, C some of its columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stages.hidden_states.wire import HiddenStatesError

# The bits of a bfloat16 without its sign, read as an integer, order as the magnitudes do.
_MAGNITUDE = 0x7FFF
_INFINITY = 0x7F80  # NaNs are above it
_ELEMENTS_AT_ONCE = {"cpu": 1 << 18, "other": 1 << 26}  # what a core's cache holds; what fills a GPU
_PRINTED_COLUMNS = 4  # of every layer; four bfloat16 are one int64


@dataclass(frozen=True)
class CachedStates:
    """The captured states of one sequence, where the engine's cache holds them."""

    cache_NLBD: torch.Tensor
    slots_T: torch.Tensor  # int64 on the cache's device: block * B + place in the block, of every token

    def rows(self, tokens: slice | torch.Tensor) -> torch.Tensor:
        """bfloat16 [R, L, D], a copy: what a consumer would get of these tokens."""
        slots_R, size = self.slots_T[tokens], self.cache_NLBD.shape[2]
        return self.cache_NLBD[slots_R // size, :, slots_R % size].to(torch.bfloat16)

    def columns(self, columns_C: torch.Tensor) -> torch.Tensor:
        """bfloat16 [T, L, C] of all tokens, without touching the other columns."""
        slots_T11, size = self.slots_T[:, None, None], self.cache_NLBD.shape[2]
        layers_1L1 = torch.arange(self.cache_NLBD.shape[1], device=slots_T11.device)[None, :, None]
        return self.cache_NLBD[slots_T11 // size, layers_1L1, slots_T11 % size, columns_C].to(torch.bfloat16)


def peak_bits(states_RLD: torch.Tensor) -> torch.Tensor:
    """int16 [R, L]: the bits, without the sign, of every row's largest magnitude (NaN counts as largest).

    States are contiguous bfloat16. Two integer passes over pieces that stay in the cache: on a CPU core
    fifty times the rate of `torch.aminmax`, which converts every element.
    """
    bits_RLD = states_RLD.view(torch.int16)
    peaks_RL = torch.empty(states_RLD.shape[:2], dtype=torch.int16, device=states_RLD.device)
    pieces = row_pieces(states_RLD)
    buffer = torch.empty_like(bits_RLD[pieces[0]]) if pieces else bits_RLD
    for rows in pieces:
        piece = bits_RLD[rows]
        torch.bitwise_and(piece, _MAGNITUDE, out=buffer[: len(piece)])
        torch.amax(buffer[: len(piece)], -1, out=peaks_RL[rows])
    return peaks_RL


def row_pieces(states_RLD: torch.Tensor) -> list[slice]:
    """All rows in pieces of a size that suits the device."""
    elements = _ELEMENTS_AT_ONCE.get(states_RLD.device.type, _ELEMENTS_AT_ONCE["other"])
    step = max(1, elements // max(1, states_RLD[:1].numel()))
    return [slice(start, start + step) for start in range(0, len(states_RLD), step)]


def check_peaks(peaks_RL: torch.Tensor, first_token: int = 0) -> None:
    """Raise HiddenStatesError unless every row is finite and none is all zeros (a slot that nobody wrote).

    `peaks_RL`: of `peak_bits`; row 0 belongs to token `first_token`.
    """
    for bad_RL, what in ((peaks_RL >= _INFINITY, "not finite"), (peaks_RL == 0, "all zero")):
        if bool(bad_RL.any()):
            row, layer = bad_RL.nonzero()[0].tolist()
            found = f"{int(bad_RL.any(1).sum())} of {len(bad_RL)} tokens"
            raise HiddenStatesError(
                f"states are {what} in {found}, first at token {first_token + row}, layer index {layer}"
            )


def check_distinct(token_ids: np.ndarray, states: CachedStates) -> None:
    """Raise HiddenStatesError when two tokens have equal rows in all layers: one's slots hold the other's states.

    `token_ids`: int [T]. Equal rows are right only where all tokens from the first up to both are the
    same token: attention over equal values gives that value. Whatever else came before, a position sees
    it through other rotary phases. A few columns of every layer tell which rows to compare whole.
    """
    leading = np.flatnonzero(token_ids != token_ids[:1])
    same_from_start = int(leading[0]) if len(leading) else len(token_ids)
    prints_T = _prints(states)
    order_T = torch.argsort(prints_T, stable=True)
    alike = prints_T[order_T[:-1]] == prints_T[order_T[1:]]
    earlier, later = order_T[:-1][alike], order_T[1:][alike]
    suspect = later >= same_from_start
    for one, other in zip(earlier[suspect].tolist(), later[suspect].tolist(), strict=True):
        pair = states.rows(torch.tensor([one, other], device=states.slots_T.device))
        if torch.equal(pair[0], pair[1]):
            raise HiddenStatesError(f"states of tokens {one} and {other} are equal in all layers")


def _prints(states: CachedStates) -> torch.Tensor:
    """int64 [T]: equal where rows are, and hardly anywhere else."""
    columns_C = torch.linspace(0, states.cache_NLBD.shape[3] - 1, _PRINTED_COLUMNS, device=states.slots_T.device)
    words_TL = states.columns(columns_C.long()).contiguous().view(torch.int64)[..., 0]
    odd_L = 2 * torch.arange(words_TL.shape[1], device=words_TL.device) + 0x9E3779B97F4A7C1
    return (words_TL * odd_L).sum(1)  # wraps, as a hash may
