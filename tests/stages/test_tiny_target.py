from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from stages.target import TargetConfig, known_shape, read_folder
from stages.tiny_target import build as builder
from stages.tiny_target.config import TinyTargetConfig
from stages.tiny_target.domains import (
    DOMAINS,
    PROMPT_SEED,
    PROMPTS_PER_DOMAIN,
    prompt_lines,
    samples,
)

PROMPT_FILE = Path(__file__).parents[2] / "conf" / "prompts" / "tiny.jsonl"
SHORT = TinyTargetConfig(steps=3, batch_rows=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny") / "target"
    builder.build(SHORT, out)
    return out


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def render(tokenizer: Any, messages: list[dict[str, str]], **kwargs: Any) -> str:
    text = tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
    assert isinstance(text, str)
    return text


def test_samples_are_a_pure_function_of_the_seed() -> None:
    assert samples(5, 20) == samples(5, 20)
    assert samples(5, 20) != samples(6, 20)


def test_nine_domains_with_distinct_prompts() -> None:
    drawn = samples(5, 100)
    expected = "arithmetic code translation qa summarization tool_call writing rag chat"
    assert set(DOMAINS) == set(expected.split())
    assert Counter(sample.domain for sample in drawn) == dict.fromkeys(DOMAINS, 100)
    assert len({sample.prompt for sample in drawn}) == len(drawn)


def test_an_answer_is_a_function_of_its_prompt() -> None:
    answers: dict[str, str] = {}
    for seed in range(5):
        for sample in samples(seed, 300):
            assert answers.setdefault(sample.prompt, sample.answer) == sample.answer


def test_an_exhausted_domain_is_named() -> None:
    with pytest.raises(ValueError, match="ask for fewer"):
        samples(5, 7_000)


def test_tool_calls_are_json() -> None:
    for sample in samples(5, 50):
        if sample.domain == "tool_call":
            assert set(json.loads(sample.answer)) == {"name", "arguments"}


def test_prompt_file_is_what_the_generator_writes() -> None:
    lines = PROMPT_FILE.read_text(encoding="utf-8").splitlines(keepends=True)
    assert lines == list(prompt_lines())
    assert len({json.loads(line)["id"] for line in lines}) == len(DOMAINS) * PROMPTS_PER_DOMAIN


def test_answers_have_20_to_70_tokens(tokenizer: Any) -> None:
    for sample in samples(5, 100):
        assert 20 <= len(tokenizer(sample.answer + "<|im_end|>")["input_ids"]) <= 70, sample


def test_assistant_mask_covers_exactly_the_answers(tokenizer: Any) -> None:
    for first, second in zip(samples(5, 3), samples(6, 3), strict=True):
        messages = [{"role": "system", "content": "Be brief."}]
        for sample in (first, second):
            messages.append({"role": "user", "content": sample.prompt})
            messages.append({"role": "assistant", "content": sample.answer})
        encoded = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
        pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        marked = tokenizer.decode([token for token, mask in pairs if mask])
        assert marked == f"{first.answer}<|im_end|>{second.answer}<|im_end|>"
        assert tokenizer.decode(encoded["input_ids"]) == render(tokenizer, messages)


def test_a_longer_chat_only_appends(tokenizer: Any) -> None:
    messages = [
        {"role": role, "content": f"text of the {role}"}
        for role in ("system", "user", "assistant", "user", "assistant")
    ]
    for count in (1, 2, 3, 4):
        assert render(tokenizer, messages).startswith(render(tokenizer, messages[:count]))
    for count in (2, 4):
        prompt = render(tokenizer, messages[:count], add_generation_prompt=True)
        assert prompt.endswith("<|im_start|>assistant\n")
        assert render(tokenizer, messages[: count + 1]).startswith(prompt)


def test_mask_token_has_a_row_and_never_occurs_in_text(folder: Path, tokenizer: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    rows = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].shape[0]
    assert config["vocab_size"] == rows == -(-len(tokenizer) // 64) * 64
    assert tokenizer.convert_tokens_to_ids("<|mask|>") == tokenizer.mask_token_id < rows
    assert tokenizer.mask_token_id != tokenizer.pad_token_id
    for sample in samples(5, 20):
        ids = tokenizer(sample.prompt + sample.answer)["input_ids"]
        assert not {tokenizer.mask_token_id, tokenizer.pad_token_id} & set(ids)


def test_generation_stops_at_the_end_of_turn(folder: Path, tokenizer: Any) -> None:
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token == "<|im_end|>"


def test_same_config_gives_the_same_bits(folder: Path, tmp_path: Path) -> None:
    threads, random_state = torch.get_num_threads(), torch.get_rng_state()
    seen: list[tuple[int, int]] = []
    metrics = builder.build(SHORT, tmp_path, lambda step, steps, _: seen.append((step, steps)))
    assert (tmp_path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), random_state)
    assert seen == [(3, 3)]
    assert set(metrics) >= {"train_loss_nat", "build_s", "greedy_exact_match_share"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TinyTargetConfig(seed=PROMPT_SEED), r"target\.tiny\.seed=20: is the prompt file's own"),
        (TinyTargetConfig(num_kv_heads=3), r"target\.tiny\.num_heads=4: .*target\.tiny\.num_kv_heads=3"),
        (TinyTargetConfig(head_dim=33), r"target\.tiny\.head_dim=33: expected an even number"),
    ],
)
def test_a_target_that_cannot_be_built_is_refused(config: TinyTargetConfig, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        known_shape(TargetConfig(tiny=config))
    with pytest.raises(ValueError, match=message):
        builder.build(config, tmp_path)


@pytest.mark.parametrize("vocab_size", [1000, 1280])
def test_the_built_target_has_the_shape_that_was_known(
    vocab_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "_train", lambda *_: 0.0)
    monkeypatch.setattr(builder, "_exact_match", lambda *_: {})
    config = replace(SHORT, vocab_size=vocab_size, seed=3)
    builder.build(config, tmp_path)
    assert read_folder(tmp_path) == known_shape(TargetConfig(tiny=config))
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == vocab_size
