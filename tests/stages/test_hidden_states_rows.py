"""What a producer refuses: rows that are not finite, zero, or another token's."""

import numpy as np
import pytest
import torch

from stages.hidden_states.rows import CachedStates, check_distinct, check_peaks, peak_bits
from stages.hidden_states.wire import HiddenStatesError


def cached(states_TLD: torch.Tensor, block_size: int = 4) -> CachedStates:
    """The same states as an engine would hold them: in blocks that lie anywhere in its cache."""
    num_blocks = -(-len(states_TLD) // block_size)
    cache_NLBD = torch.full((2 * num_blocks, states_TLD.shape[1], block_size, states_TLD.shape[2]), float("nan"))
    blocks = torch.randperm(2 * num_blocks, generator=torch.Generator().manual_seed(0))[:num_blocks]
    slots_T = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[: len(states_TLD)]
    cache_NLBD = cache_NLBD.to(states_TLD.dtype)
    cache_NLBD[slots_T // block_size, :, slots_T % block_size] = states_TLD
    return CachedStates(cache_NLBD, slots_T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cached_states_are_found_where_they_lie(dtype: torch.dtype) -> None:
    states = torch.randn(11, 3, 8).to(dtype)
    found = cached(states)
    assert torch.equal(found.rows(slice(None)), states.bfloat16())
    assert torch.equal(found.rows(slice(3, 7)), states[3:7].bfloat16())
    assert torch.equal(found.columns(torch.tensor([0, 7])), states[:, :, [0, 7]].bfloat16())


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rows", [5, 700])  # in one piece and in several
def test_states_must_be_finite(bad: float, rows: int) -> None:
    states = torch.randn(rows, 2, 512).to(torch.bfloat16)
    states[0, 0, 0], states[0, 0, 1] = torch.finfo(torch.bfloat16).max, torch.finfo(torch.bfloat16).min
    check_peaks(peak_bits(states))
    states[rows - 2, 1, 2] = bad
    with pytest.raises(
        HiddenStatesError, match=f"not finite in 1 of {rows} tokens, first at token {rows - 2}, layer index 1"
    ):
        check_peaks(peak_bits(states))


def test_an_unwritten_slot_is_found() -> None:
    states = torch.randn(5, 2, 8).to(torch.bfloat16)
    states[2, 0] = 0
    states[2, 0, 3] = -0.0
    with pytest.raises(HiddenStatesError, match="all zero in 1 of 5 tokens, first at token 12, layer index 0"):
        check_peaks(peak_bits(states), first_token=10)
    states[2, 0, 7] = torch.finfo(torch.bfloat16).tiny
    check_peaks(peak_bits(states))


def test_another_tokens_row_is_found_wherever_it_lies() -> None:
    ids, states = np.arange(40), torch.randn(40, 2, 64).to(torch.bfloat16)
    check_distinct(ids, cached(states))
    states[7, 1] = states[3, 1]
    check_distinct(ids, cached(states))  # in one layer only
    states[7, 0] = states[3, 0]
    with pytest.raises(HiddenStatesError, match="tokens 3 and 7 are equal in all layers"):
        check_distinct(ids, cached(states))
    states[7, 0, 17] += 1  # a column that the quick look leaves out
    check_distinct(ids, cached(states))
    states[16:32] = states[0:16]  # a block read twice
    with pytest.raises(HiddenStatesError, match=r"tokens \d+ and \d+ are equal in all layers"):
        check_distinct(ids, cached(states))


def test_equal_rows_are_right_only_while_one_token_repeats_from_the_start() -> None:
    states = torch.randn(1, 2, 64).to(torch.bfloat16).expand(6, -1, -1)
    check_distinct(np.array([5] * 6), cached(states))
    check_distinct(np.array([5]), cached(states[:1]))
    for ids in ([4, 5, 5, 5, 5, 5], [5, 5, 5, 5, 5, 4], [5, 4, 5, 4, 5, 4]):
        with pytest.raises(HiddenStatesError, match="are equal in all layers"):
            check_distinct(np.array(ids), cached(states))
    tail = torch.cat([states[:4], torch.randn(2, 2, 64).to(torch.bfloat16)])
    check_distinct(np.array([5, 5, 5, 5, 6, 5]), cached(tail))
    with pytest.raises(HiddenStatesError, match="tokens 3 and 5 are equal"):
        check_distinct(np.array([5, 5, 5, 5, 6, 5]), cached(torch.cat([tail[:5], tail[:1]])))
