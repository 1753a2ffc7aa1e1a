"""The contract: a real model in the engine's place, honest and with everything that was ever captured wrong."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_targets import build_tiny_qwen3
from transformers import AutoModelForCausalLM

from stages.engine.requests import Extraction
from stages.hidden_states.contract import Agreement, Contract, ContractError
from stages.target import TargetHead

Answers = list[tuple[torch.Tensor, np.ndarray, Extraction]]


@dataclass(frozen=True)
class Captured:
    """Of one prompt: what an engine computes at different places, and says of it."""

    ids: np.ndarray
    final: torch.Tensor  # before the final norm
    normed: torch.Tensor
    before_mlp: torch.Tensor  # before the last residual step
    before_layer: torch.Tensor  # one layer early
    logits: torch.Tensor
    said: Extraction


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 whose last residual step changes 4 % of its first choices, and whose final norm has weights."""
    folder = tmp_path_factory.mktemp("target")
    build_tiny_qwen3(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(0))
        model.model.layers[-1].mlp.down_proj.weight.mul_(0.04)
    model.save_pretrained(folder)
    return folder


def contract_of(folder: Path, dtype: torch.dtype) -> Contract:
    return Contract(folder, str(dtype).removeprefix("torch."), vocab_size=256, longest=511, step_tokens=256)


def captured(folder: Path, dtype: torch.dtype) -> list[Captured]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    seen: dict[str, torch.Tensor] = {}
    last = model.model.layers[-1]
    model.model.norm.register_forward_hook(lambda _, given, out: seen.update(final=given[0], normed=out))
    last.register_forward_pre_hook(lambda _, given: seen.update(before_layer=given[0]))
    last.post_attention_layernorm.register_forward_pre_hook(lambda _, given: seen.update(before_mlp=given[0]))
    found = []
    for ids, which in contract_of(folder, dtype).prompts():
        with torch.no_grad():
            logits = model(torch.from_numpy(ids)[None].long()).logits[0]
        next_token = int(logits[-1].argmax())
        following = torch.tensor([*ids[1:].tolist(), next_token])
        logprobs = torch.log_softmax(logits.float(), -1).gather(-1, following[:, None])[:, 0].tolist()
        said = Extraction({}, "", tuple(logprobs if which == "all" else logprobs[-1:]), next_token)
        states: dict[str, Any] = {name: tensor[0].bfloat16() for name, tensor in seen.items()}
        found.append(Captured(ids=ids, logits=logits, said=said, **states))
    return found


@pytest.fixture(scope="module")
def engine(folder: Path) -> list[Captured]:
    return captured(folder, torch.bfloat16)


def answers(engine: list[Captured], states: Callable[[Captured], torch.Tensor]) -> Answers:
    return [(states(one), one.ids, one.said) for one in engine]


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [(torch.bfloat16, 0.9, 1.1), (torch.float16, 0.9, 1.1), (torch.float32, 0.9, 1.1)]
)
def test_an_honest_engine_errs_as_its_rounding_predicts(
    folder: Path, dtype: torch.dtype, least: float, most: float
) -> None:
    agreement = contract_of(folder, dtype).judge(answers(captured(folder, dtype), lambda one: one.final))
    assert least < agreement.ratio < most
    assert agreement.positions > 700


def agreement_in_top_1(engine: list[Captured], states: Callable[[Captured], torch.Tensor], folder: Path) -> float:
    from stages.target import load_head

    head = load_head(folder)
    same = [head.logits(states(one)).argmax(-1) == one.logits.argmax(-1) for one in engine]
    return float(torch.cat(same).float().mean())


def rolled(one: Captured) -> torch.Tensor:
    return one.final.roll(1, 0)


def noisy(one: Captured) -> torch.Tensor:
    noise = torch.randn(one.final.shape, generator=torch.Generator().manual_seed(0))
    return (one.final.float() + 0.02 * one.final.float().pow(2).mean(-1, keepdim=True).sqrt() * noise).bfloat16()


def one_row(one: Captured) -> torch.Tensor:
    return torch.cat([one.final[:20], one.final[30:31], one.final[21:]])


WRONG: dict[str, Callable[[Captured], torch.Tensor]] = {
    "one layer early": lambda one: one.before_layer,
    "after the final norm": lambda one: one.normed,
    "rows shifted by one": rolled,
    "before the last residual step": lambda one: one.before_mlp,
    "a small additive error": noisy,
    "one wrong row": one_row,
    "zeros": lambda one: torch.zeros_like(one.final),
    "NaN": lambda one: one.final * float("nan"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_states_break_the_contract(engine: list[Captured], folder: Path, name: str) -> None:
    with pytest.raises(ContractError, match="do not reproduce the engine's log-probabilities"):
        contract_of(folder, torch.bfloat16).judge(answers(engine, WRONG[name]))


@pytest.mark.parametrize("name", ["before the last residual step", "a small additive error"])
def test_what_breaks_it_would_pass_for_good_by_top_1(engine: list[Captured], folder: Path, name: str) -> None:
    assert 0.95 < agreement_in_top_1(engine, WRONG[name], folder) < 0.99


def test_swapped_requests_break_the_contract(engine: list[Captured], folder: Path) -> None:
    first, *_, shared, _, _ = found = answers(engine, lambda one: one.final)
    assert len(first[1]) == len(shared[1])
    found[0], found[4] = (shared[0], *first[1:]), (first[0], *shared[1:])
    with pytest.raises(ContractError, match="states of another layer, other tokens"):
        contract_of(folder, torch.bfloat16).judge(found)


def test_a_consumer_without_the_final_norm_breaks_the_contract(
    engine: list[Captured], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TargetHead, "normed", lambda _, states_TD: states_TD.float())
    with pytest.raises(ContractError):
        contract_of(folder, torch.bfloat16).judge(answers(engine, lambda one: one.final))


def test_the_last_position_alone_tells(engine: list[Captured], folder: Path) -> None:
    """Where an engine could not afford the logits of all positions of a long prompt."""
    contract = replace(contract_of(folder, torch.bfloat16), vocab_size=1 << 21)
    assert [which for _, which in contract.prompts()] == ["all"] * 5 + ["last"] * 2
    long = replace(engine[-1], said=replace(engine[-1].said, logprobs=engine[-1].said.logprobs[-1:]))
    assert contract.judge(answers([long], lambda one: one.final)).positions == 1
    with pytest.raises(ContractError):
        contract.judge(answers([long], rolled))


def test_prompts_cover_the_traps() -> None:
    prompts = [ids for ids, _ in Contract(Path(), "bfloat16", 1000, longest=512, step_tokens=128).prompts()]
    assert any(np.array_equal(a, b) for i, a in enumerate(prompts) for b in prompts[:i])  # a repeated request
    assert np.array_equal(prompts[4][:20], prompts[1][:20])  # a shared prefix
    assert {129, 176} <= set(map(len, prompts))  # two prefill steps
    assert all(ids.min() >= 0 and ids.max() < 1000 for ids in prompts)
    whole_step = [ids for ids, _ in Contract(Path(), "bfloat16", 1000, longest=512, step_tokens=512).prompts()]
    assert max(map(len, whole_step)) == 512
    assert sum(map(len, whole_step)) > 512  # together more than a step
    assert max(len(ids) for ids, _ in Contract(Path(), "bfloat16", 50, longest=20, step_tokens=20).prompts()) == 20


def test_nan_never_agrees() -> None:
    assert not Agreement(0.0, float("nan"), 0.0, 100).holds
    assert not Agreement(0.0, 0.0, float("nan"), 100).holds
