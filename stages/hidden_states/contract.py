"""The check that captured states are the ones the target's own distribution comes from.

From one request come the captured final states and the engine's log-probabilities;
`log_softmax(lm_head(final_norm(h)))` must reproduce them. Top-1 agreement is far weaker: a state taken
one residual step early was seen to agree in 96 % of positions.
Legend: T tokens, P compared positions, V vocabulary, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from stages.engine.requests import Extraction
from stages.hidden_states.wire import HiddenStatesError
from stages.target import TargetHead, load_head

Logprobs = Literal["all", "last"]

_ROWS_AT_ONCE = 256  # bounds the fp32 logits held
_SEED = 20260101
SHORT_PROMPTS = 5  # the first of `Contract.prompts`: from engines of any size they are the same
_SHORT_TOKENS = 48
_LOWEST_ID = 256  # below: special tokens in many vocabularies, and bytes
_MOST_LOGITS = 1 << 28  # 1 GiB in fp32: what an engine must find room for when it is asked about every position
_MARGIN = 1.5  # of an honest engine's rounding over the model of it in `compare`; 1.0 was measured
_LARGEST = 8.0  # of a single position; an honest engine's largest of 1,200 was 3.1
# Of a layer in L2. fp8 costs 0.03; two prefills on a GPU may differ too, each by at most 0.017 from fp32 (`proof.py`):
# sqrt(0.03² + 2 x 0.017²) = 0.038.
_ENCODING_ERROR = 0.04


class ContractError(HiddenStatesError):
    """Captured states do not reproduce the engine's log-probabilities."""


@dataclass(frozen=True)
class Agreement:
    """Differences between reconstructed and reported log-probabilities over a number of positions."""

    mean_nat: float
    ratio: float  # root mean square, each difference in units of the rounding error expected of it
    largest: float  # in the same units
    positions: int

    @property
    def tolerance(self) -> float:
        """What `ratio` may be. The mean of P squares of unit normals scatters by sqrt(2 / P); four of that pass."""
        return _MARGIN * math.sqrt(1 + 4 * math.sqrt(2 / self.positions))

    @property
    def holds(self) -> bool:
        return self.ratio <= self.tolerance and self.largest <= _LARGEST  # False for NaN

    @staticmethod
    def pooled(parts: Sequence[Agreement]) -> Agreement:
        """Of all positions together."""
        weights = np.array([part.positions for part in parts])
        return Agreement(
            mean_nat=float(np.average([part.mean_nat for part in parts], weights=weights)),
            ratio=float(np.average([part.ratio**2 for part in parts], weights=weights)) ** 0.5,
            largest=max(part.largest for part in parts),
            positions=int(weights.sum()),
        )


def compare(
    states_PD: torch.Tensor, next_P: torch.Tensor, logprobs_P: torch.Tensor, head: TargetHead, dtype: torch.dtype
) -> Agreement:
    """Compare final pre-norm states with what an engine that computes in `dtype` said of the next tokens.

    The log-probability of token t is the sum of e_v z_v over the vocabulary to first order, where
    e = onehot(t) - p and z = W x are the logits. Rounding to nearest with unit roundoff u gives a relative
    error of variance u² / 6 (mantissas uniform over an octave). Each element of x was rounded three times
    (the captured state, the norm's output, its weight), each logit once, so that the variance is
    (u² / 6) (sum over D of 3 (W' e)² x² + sum over V of e² z²). States travel as bfloat16, which counts when the
    engine is finer; fp32 log-softmax adds 4 u32 (max |z| + log V). Measured on SmolLM2 in bf16, random
    tokens and text alike: 1.00 to 1.04 of it.
    """
    u, u32 = torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps / 2
    u_state = max(u, torch.finfo(states_PD.dtype).eps / 2)
    lm_head_VD = head.lm_head_VD.float()
    differences, units = [], []
    for start in range(0, len(next_P), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        x_PD = head.normed(states_PD[rows])
        z_PV, next_P1 = x_PD @ lm_head_VD.T, next_P[rows, None]
        logs_PV = torch.log_softmax(z_PV, -1)
        differences.append(logs_PV.gather(-1, next_P1)[:, 0] - logprobs_P[rows])
        e_PV = logs_PV.exp().neg().scatter_add(-1, next_P1, torch.ones_like(logs_PV[:, :1]))
        inputs_P = ((e_PV @ lm_head_VD) * x_PD).square().sum(-1)
        outputs_P = (e_PV * z_PV).square().sum(-1)
        floor_P = 4 * u32 * (z_PV.abs().amax(-1) + math.log(z_PV.shape[-1]))
        units.append((((u_state**2 + 2 * u**2) * inputs_P + u**2 * outputs_P) / 6 + floor_P**2).sqrt())
    difference_P = torch.cat(differences)
    relative_P = difference_P / torch.cat(units)
    return Agreement(
        mean_nat=float(difference_P.abs().mean()),
        ratio=float(relative_P.square().mean().sqrt()),
        largest=float(relative_P.abs().max()),
        positions=len(next_P),
    )


@dataclass(frozen=True)
class Contract:
    """What an engine is asked to prove that its captured states are right. Picklable."""

    folder: Path  # of the target, for its norm and head
    dtype: str  # the engine's
    vocab_size: int
    longest: int  # tokens of the longest sequence it takes
    step_tokens: int  # prefilled in one step, over all sequences

    def prompts(self) -> list[tuple[np.ndarray, Logprobs]]:
        """Token ids (int32) and the positions to ask about; the same every time, to be asked for all at once.

        `SHORT_PROMPTS` short ones: three different ones, the first again, one that shares half of the second.
        Then two that are longer than a prefill step, if the engine takes such, and otherwise as long as it
        takes: together they fill more than a step, so that some sequence is cut. Of the long ones only the
        last position is compared where all would cost the engine too much memory.
        """
        random = np.random.default_rng(_SEED)
        low = _LOWEST_ID if self.vocab_size > 2 * _LOWEST_ID else self.vocab_size // 4

        def draw(length: int) -> np.ndarray:
            return random.integers(low, self.vocab_size - low // 4, min(length, self.longest), dtype=np.int32)

        first, second, third = draw(_SHORT_TOKENS), draw(_SHORT_TOKENS + 1), draw(2 * _SHORT_TOKENS)
        shared = np.concatenate([second[: len(second) // 2], draw(_SHORT_TOKENS // 2)])[: self.longest]
        long = [draw(self.step_tokens + beyond) for beyond in (1, _SHORT_TOKENS)]
        affordable = self.step_tokens * self.vocab_size <= _MOST_LOGITS
        short: list[tuple[np.ndarray, Logprobs]] = [
            (ids, "all") for ids in (first, second, third, first.copy(), shared)
        ]
        return [*short, *((ids, "all" if affordable else "last") for ids in long)]

    def judge(self, answers: Sequence[tuple[torch.Tensor, np.ndarray, Extraction]]) -> Agreement:
        """Over all positions of one engine's answers: final states [T, D], tokens [T], what the engine said.

        Raises ContractError with what was measured when one answer does not hold, or all together.
        """
        head, dtype = load_head(self.folder), getattr(torch, self.dtype)
        head = replace(head, lm_head_VD=head.lm_head_VD.float())  # once for all answers
        agreements = []
        for states_TD, token_ids, said in answers:
            following = torch.from_numpy(np.append(token_ids[1:], said.next_token).astype(np.int64))
            logprobs_P = torch.tensor(said.logprobs, dtype=torch.float32)
            asked = slice(len(token_ids) - len(logprobs_P), None)
            agreements.append(compare(states_TD[asked], following[asked], logprobs_P, head, dtype))
        pooled = Agreement.pooled(agreements)
        for agreement in (*agreements, pooled):
            if not agreement.holds:
                raise ContractError(_explain(agreement))
        return pooled

    def judge_encoding(self, states_TLD: torch.Tensor, decoded_TLD: torch.Tensor) -> None:
        """Raise ContractError when states that travelled encoded are too far from those that did not."""
        error_L = (decoded_TLD.float() - states_TLD.float()).norm(dim=(0, 2)) / states_TLD.float().norm(dim=(0, 2))
        if not bool((error_L <= _ENCODING_ERROR).all()):
            raise ContractError(
                f"decoded states differ from the engine's by {error_L.tolist()} of each layer's L2 norm "
                f"(tolerance {_ENCODING_ERROR}); leave hidden_states.encoding at bfloat16"
            )


def _explain(found: Agreement) -> str:
    if not found.ratio <= 50 * found.tolerance:
        cause = "states of another layer, other tokens or after the final norm; or the head is not RMS norm and matrix"
    elif found.ratio <= found.tolerance:
        cause = "single rows are wrong: look at chunk and block boundaries"
    else:
        cause = "a state captured before the target's last step, or an engine less exact than its dtype"
    return (
        f"captured states do not reproduce the engine's log-probabilities over {found.positions} positions: mean "
        f"difference {found.mean_nat:.4g} nat, {found.ratio:.3g} times the expected rounding (tolerance "
        f"{found.tolerance:.3g}), largest {found.largest:.3g} times (tolerance {_LARGEST:g}); likely {cause}"
    )
