"""The check that captured states are the ones the target's own distribution comes from.

From one request come the captured final state and the engine's prompt log-probabilities;
`log_softmax(lm_head(final_norm(h)))` must reproduce them. Top-1 agreement is far weaker: a state taken
one step early was seen to agree in 96 % of positions.
Legend: T tokens, V vocabulary, D hidden size, L captured layers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stages.engine.config import EngineConfig
from stages.engine.dispatch import BackgroundLoop
from stages.engine.requests import EngineError
from stages.hidden_states.config import HiddenStatesConfig
from stages.hidden_states.layout import TRAILER_BYTES
from stages.hidden_states.samples import Endpoint, SampleError, Samples
from stages.hidden_states.wire import HiddenStatesError
from stages.target import Target, TargetHead, load_head

_ROWS_AT_ONCE = 256  # bounds the fp32 logits held
_SEED = 20260101
_SHORT_TOKENS = 48
_LOWEST_ID = 256  # below: special tokens in many vocabularies, and bytes


class ContractError(HiddenStatesError):
    """Captured states do not reproduce the engine's log-probabilities."""


@dataclass(frozen=True)
class Agreement:
    """Differences (nat) between reconstructed and reported log-probabilities, over sequences and actors.

    `mean` is that of the worst sequence, `largest` that of the worst position; the tolerances belong to them.
    """

    mean: float
    largest: float
    mean_tolerance: float
    largest_tolerance: float

    @property
    def holds(self) -> bool:
        # NaN must not hold.
        return self.mean <= self.mean_tolerance and self.largest <= self.largest_tolerance


def compare(states_TD: torch.Tensor, token_ids: np.ndarray, logprobs: Sequence[float], head: TargetHead) -> Agreement:
    """Compare one sequence's final pre-norm states with what the engine said of its tokens 1..T-1.

    Tolerances. With unit roundoff u of the states' dtype, the engine rounds a logit z by at most u|z|,
    u|z|/2 on average; the norm's output and the captured state (D products of relative error u each,
    adding up like a random walk) move it by about as much again. A log-probability is the difference of
    two such numbers, so with Z the largest |logit| of a position, averaged over positions,
    mean <= u Z (measured on a random Qwen3 in bf16: a quarter of it) and any position <= 6 u Z.
    fp32 adds the order of summation: 8 u32 (sqrt(D) Z + log V), which is all there is for fp32 engines.
    """
    expected_T = torch.tensor(logprobs, dtype=torch.float32)
    next_T = torch.from_numpy(np.asarray(token_ids[1:], dtype=np.int64))
    difference, scale = [], []
    for start in range(0, len(next_T), _ROWS_AT_ONCE):
        rows = slice(start, min(start + _ROWS_AT_ONCE, len(next_T)))
        logits_TV = head.logits(states_TD[rows])
        found_T = torch.log_softmax(logits_TV, -1).gather(-1, next_T[rows, None])[:, 0]
        difference.append((found_T - expected_T[rows]).abs())
        scale.append(logits_TV.abs().amax(-1))
    difference_T, scale_T = torch.cat(difference), torch.cat(scale)
    u, u32 = torch.finfo(states_TD.dtype).eps / 2, torch.finfo(torch.float32).eps / 2
    vocab_size, hidden_size = head.lm_head_VD.shape
    summation = 8 * u32 * (hidden_size**0.5 * float(scale_T.max()) + float(np.log(vocab_size)))
    return Agreement(
        mean=float(difference_T.mean()),
        largest=float(difference_T.max()),
        mean_tolerance=u * float(scale_T.mean()) + summation,
        largest_tolerance=6 * u * float(scale_T.max()) + summation,
    )


def contract_sequences(vocab_size: int, max_model_len: int, max_num_batched_tokens: int) -> list[np.ndarray]:
    """Token ids (int32) that put an extractor's bookkeeping to the test, the same every time.

    Three different ones, the first again, one that shares half of the second, and, where the model
    allows it, one longer than a prefill step.
    """
    random = np.random.default_rng(_SEED)
    low = _LOWEST_ID if vocab_size > 2 * _LOWEST_ID else vocab_size // 4

    def draw(length: int) -> np.ndarray:
        return random.integers(low, vocab_size - low // 4, min(length, max_model_len), dtype=np.int32)

    first, second, third = draw(_SHORT_TOKENS), draw(_SHORT_TOKENS + 1), draw(2 * _SHORT_TOKENS)
    sequences = [first, second, third, first.copy()]
    sequences.append(np.concatenate([second[: len(second) // 2], draw(_SHORT_TOKENS // 2)])[:max_model_len])
    if max_num_batched_tokens + _SHORT_TOKENS <= max_model_len:
        sequences.append(draw(max_num_batched_tokens + _SHORT_TOKENS))
    return sequences


def check_contract(target: Target, endpoint: Endpoint, engine: EngineConfig, config: HiddenStatesConfig) -> Agreement:
    """Extract a few sequences at once from every actor and compare; the worst agreement.

    Raises ContractError with what was measured, HiddenStatesError when states cannot be had.
    """
    sequences = contract_sequences(target.shape.vocab_size, engine.max_model_len, engine.max_num_batched_tokens)
    head = load_head(target.folder)
    with BackgroundLoop("contract-check") as loop:
        samples = Samples(endpoint, config)
        try:
            found = loop.run(_extract(samples, sequences))
        except (EngineError, SampleError) as error:
            raise HiddenStatesError(f"contract check: no states from the extractors: {error}") from error
        finally:
            samples.close()
    agreements = [compare(states_TD, ids, said, head) for states_TD, ids, said in found]
    for agreement, (_, ids, _) in zip(agreements, found, strict=True):
        if not agreement.holds:
            raise ContractError(_explain(agreement, len(ids)))
    return max(agreements, key=lambda agreement: agreement.mean / agreement.mean_tolerance)


async def _extract(
    samples: Samples, sequences: list[np.ndarray]
) -> list[tuple[torch.Tensor, np.ndarray, tuple[float, ...]]]:
    """Final states [T, D], tokens and log-probabilities of all sequences from all actors."""
    endpoint = samples.endpoint

    async def one(token_ids: np.ndarray, actor: int) -> tuple[torch.Tensor, np.ndarray, tuple[float, ...]]:
        shape = (len(token_ids), len(endpoint.layer_ids), endpoint.hidden_size)
        states_TLD = torch.empty(shape, dtype=endpoint.torch_dtype)
        trailer = torch.empty(TRAILER_BYTES, dtype=torch.uint8)
        samples.store.register(states_TLD)
        samples.store.register(trailer)
        try:
            answer = await samples.take(token_ids, states_TLD, trailer, actor=actor, logprobs=True)
        finally:
            samples.store.unregister(trailer)
            samples.store.unregister(states_TLD)
        return states_TLD[:, -1], token_ids, answer.logprobs

    actors = range(len(endpoint.actors))
    try:
        async with asyncio.TaskGroup() as group:  # on a failure the others end before the store is closed
            tasks = [group.create_task(one(token_ids, actor)) for actor in actors for token_ids in sequences]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    return [task.result() for task in tasks]


def _explain(found: Agreement, num_tokens: int) -> str:
    if not found.mean <= 50 * found.mean_tolerance:
        cause = "states of another layer, other tokens or after the final norm; or the head is not RMS norm and matrix"
    elif found.mean <= found.mean_tolerance:
        cause = "single rows are wrong: look at chunk and block boundaries"
    else:
        cause = "a state captured before the target's last step, or an engine less exact than its dtype"
    return (
        f"captured states do not reproduce the engine's log-probabilities over {num_tokens} tokens: "
        f"mean difference {found.mean:.4g} nat (tolerance {found.mean_tolerance:.4g}), "
        f"largest {found.largest:.4g} (tolerance {found.largest_tolerance:.4g}); likely {cause}"
    )
