"""The datagen stage with a fake pool: exact tokens and masks, conserved counts, byte-equal resume."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import Workspace, file_digest
from stages.corpus import SPLITS, Corpus
from stages.datagen.generate import request_seed
from stages.datagen.template import ChatTemplate
from stages.engine.requests import GenerationRequest, GenerationResult
from stages.target import Target
from tests.stages.datagen_helpers import (
    CHATML,
    END_OF_TURN,
    FakePool,
    everything,
    file_bytes,
    make_target,
    plain_answer,
    run_datagen,
    supervised_spans,
)

Run = Callable[..., Corpus]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def template(target: Target) -> ChatTemplate:
    return ChatTemplate.load(target, "template")


@pytest.fixture
def pool(template: ChatTemplate, monkeypatch: pytest.MonkeyPatch) -> FakePool:
    return FakePool(template.tokenizer).install(monkeypatch)


@pytest.fixture
def run(tmp_path: Path, target: Target) -> Run:
    def run_(rows: list[Any], name: str = "corpus", target: Target = target, **values: Any) -> Corpus:
        return run_datagen(tmp_path, target, rows, name, **values)

    return run_


def questions(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"what is the number of {i}", "domain": f"d{i % 2}"} for i in range(count)]


def test_single_turn_mask_is_the_answer_and_its_end(run: Run, pool: FakePool, template: ChatTemplate) -> None:
    sequence = everything(run([{"prompt": "hello"}]))["chat-1"]
    (prompt_ids,) = [request.prompt_token_ids for request in pool.requests]
    answer_ids = plain_answer(pool.requests[0], template.tokenizer).token_ids
    assert tuple(sequence.input_ids) == prompt_ids + answer_ids
    assert sequence.loss_mask.tolist() == [False] * len(prompt_ids) + [True] * len(answer_ids)
    assert template.decode(prompt_ids) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    messages = json.loads(sequence.messages)
    assert [m["role"] for m in messages] == ["user", "assistant"]
    assert supervised_spans(sequence, template) == [messages[1]["content"] + END_OF_TURN]


def test_multi_turn_with_system_is_the_rendered_conversation(run: Run, pool: FakePool, template: ChatTemplate) -> None:
    said = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "somebody else's answer"},
        {"role": "user", "content": "Zwei? 🌍"},
    ]
    sequence = everything(run([{"messages": said}, {"turns": ["a", "b", "c"]}]))["chat-1"]
    messages = json.loads(sequence.messages)
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert "somebody" not in sequence.messages
    assert supervised_spans(sequence, template) == [
        m["content"] + END_OF_TURN for m in messages if m["role"] == "assistant"
    ]
    rendered = template.tokenizer.apply_chat_template(messages, tokenize=False)
    assert template.decode(sequence.input_ids.tolist()) == rendered.removesuffix("\n")
    assert len(pool.requests) == 5


def test_generated_ids_are_kept_where_encoding_again_would_differ(
    run: Run, pool: FakePool, template: ChatTemplate
) -> None:
    letters = [template.encode(letter)[0] for letter in "answer"]
    assert template.encode("answer") != letters

    def by_letter(request: GenerationRequest, tokenizer: Any) -> GenerationResult:
        return GenerationResult(request.id, (*letters, tokenizer.eos_token_id), "stop")

    pool.answer = by_letter
    sequence = everything(run([{"turns": ["a", "b"]}]))["chat-1"]
    assert sequence.input_ids[sequence.loss_mask].tolist() == [*letters, template.tokenizer.eos_token_id] * 2


def test_answer_cut_by_length_ends_the_conversation(run: Run, pool: FakePool, template: ChatTemplate) -> None:
    def endless(request: GenerationRequest, tokenizer: Any) -> GenerationResult:
        return GenerationResult(request.id, tuple(template.encode("answer" * 30)[: request.max_tokens]), "length")

    pool.answer = endless
    corpus = run([{"turns": ["a", "b"]}], max_new_tokens=7)
    sequence = everything(corpus)["chat-1"]
    assert sequence.loss_mask.sum() == 7
    assert sequence.loss_mask[-1]
    assert END_OF_TURN not in supervised_spans(sequence, template)[0]
    assert len(pool.requests) == 1
    assert corpus.record.counts["turns_left_out"] == 1


def test_requests_carry_sampling_and_seeds_of_their_own(run: Run, pool: FakePool) -> None:
    rows = [{"id": "x", "turns": ["a", "b"]}, {"id": "y", "prompt": "c"}]
    run(rows, temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, seed=5)
    sampling = {(r.temperature, r.top_p, r.top_k, r.min_p, r.max_tokens) for r in pool.requests}
    assert sampling == {(0.7, 0.9, 20, 0.1, 64)}
    seeds = [r.seed for r in pool.requests]
    assert sorted(seeds) == sorted([request_seed(5, "x", 0), request_seed(5, "x", 1), request_seed(5, "y", 0)])
    assert len(set(seeds)) == 3
    assert request_seed(6, "x", 0) not in seeds
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_shard_size_changes_nothing(run: Run, pool: FakePool) -> None:
    one = run(questions(30), "one", shard_conversations=100)
    many = run(questions(30), "many", shard_conversations=7)
    assert one.record.facts == many.record.facts
    assert one.record.counts == many.record.counts
    assert file_bytes(one.path) == file_bytes(many.path)


def test_every_prompt_is_accounted_for(run: Run, pool: FakePool, template: ChatTemplate) -> None:
    def answer(request: GenerationRequest, tokenizer: Any) -> GenerationResult:
        prompt, end = template.decode(request.prompt_token_ids), tokenizer.eos_token_id
        if "empty" in prompt:
            return GenerationResult(request.id, (*template.encode(" \n"), end), "stop")
        if "few" in prompt:
            return GenerationResult(request.id, (*template.encode("a"), end), "stop")
        if "broken" in prompt:
            return GenerationResult(request.id, (), "error", "prompt refused")
        if "lengthy" in prompt:
            return GenerationResult(request.id, (*template.encode("x" * 60), end), "stop")
        return plain_answer(request, tokenizer)

    pool.answer = answer
    rows = [
        *questions(20),
        {"id": "copy", "prompt": "What is  the number of 3"},
        {"id": "empty", "prompt": "empty"},
        {"id": "empty-later", "turns": ["fine", "empty"]},
        {"id": "few", "prompt": "few"},
        {"id": "broken", "prompt": "broken"},
        {"id": "long-prompt", "prompt": "x" * 300},
        {"id": "no-room", "prompt": "x" * 116},  # 126 tokens and 900 new ones are more than 1024
        {"id": "long-answer", "prompt": "lengthy" + "x" * 60},
    ]
    corpus = run(rows, min_supervised_tokens=3, max_sequence_tokens=130, max_new_tokens=900, max_failed_share=0.1)
    counts = corpus.record.counts
    assert counts["prompts_in"] == 28
    assert counts["kept"] == 20 == sum(counts[f"kept_{split}"] for split in SPLITS) == len(everything(corpus))
    assert {key: value for key, value in counts.items() if key.startswith(("dropped_", "failed_"))} == {
        "dropped_duplicate": 1,
        "dropped_empty_answer": 2,
        "dropped_too_few_supervised": 1,
        "dropped_too_long": 3,
        "failed_error": 1,
    }
    lost = [json.loads(line) for line in (corpus.path / "set_aside.jsonl").read_text().splitlines()]
    assert {row["id"]: row["reason"] for row in lost} == {
        "copy": "dropped_duplicate",
        "empty": "dropped_empty_answer",
        "empty-later": "dropped_empty_answer",
        "few": "dropped_too_few_supervised",
        "broken": "failed_error",
        "long-prompt": "dropped_too_long",
        "no-room": "dropped_too_long",
        "long-answer": "dropped_too_long",
    }
    assert len(template.encode(template.render([{"role": "user", "content": "x" * 116}]))) == 126
    asked = {request.id for request in pool.requests}
    assert not asked & {"copy", "long-prompt", "no-room"}


def test_results_that_do_not_match_requests_are_refused(run: Run, pool: FakePool) -> None:
    pool.answer = lambda request, tokenizer: dataclasses.replace(plain_answer(request, tokenizer), id="chat-1")
    with pytest.raises(RuntimeError, match="expected one result a request, found an extra one for 'chat-1'"):
        run(questions(3))
    pool.generate = lambda requests: iter(())  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="expected 3 results, found 3 missing"):
        run(questions(3))


def test_failures_above_the_share_stop_the_stage_with_the_last_cause(run: Run, pool: FakePool) -> None:
    pool.answer = lambda request, tokenizer: GenerationResult(request.id, (), "error", "out of memory")
    expected = (
        "3 of 20 conversations failed, more than max_failed_share=0.1 allows; the last was chat-18: failed_error: out"
    )
    with pytest.raises(RuntimeError, match=expected):
        run(questions(20), max_failed_share=0.1)
    assert not pool.open


def test_target_without_chat_template_is_refused(run: Run, pool: FakePool, tmp_path: Path) -> None:
    bare = make_target(tmp_path / "bare", chat_template=None)
    with pytest.raises(ValueError, match=re.escape(f"{bare.folder}: expected a tokenizer with a chat template")):
        run(questions(3), target=bare)
    assert pool.starts == 0


def test_no_room_for_a_prompt_is_refused(run: Run, pool: FakePool) -> None:
    with pytest.raises(
        ValueError, match=r"datagen\.max_new_tokens=1024: expected less than engine\.max_model_len=1024"
    ):
        run(questions(3), max_new_tokens=1024)


def test_template_error_is_a_named_failure(run: Run, pool: FakePool, tmp_path: Path) -> None:
    strict = make_target(
        tmp_path / "strict",
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML,
    )
    rows = [{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}, {"prompt": "fine"}]
    assert run(rows, target=strict, max_failed_share=0.5).record.counts["failed_template"] == 1
    with pytest.raises(RuntimeError, match="failed_template: no system"):
        run(rows, "second", target=strict)


def test_nothing_left_to_train_on_is_an_error(run: Run, pool: FakePool) -> None:
    with pytest.raises(
        ValueError, match=r"expected conversations to train on, found none left of 3 .*too_few_supervised': 3"
    ):
        run(questions(3), min_supervised_tokens=500)


def test_record_tells_where_the_corpus_came_from(
    run: Run, pool: FakePool, template: ChatTemplate, target: Target
) -> None:
    corpus = run(questions(40))
    facts = corpus.record.facts
    (source,) = facts["prompts"].items()
    assert source[1] == file_digest(Path(source[0]))
    assert (facts["answers"], facts["temperature"]) == ("regenerated", 0.0)
    assert facts["target"] == {"model": target.model, "revision": "r1", "identity": "target-id"}
    assert facts["chat_template_sha256"] == hashlib.sha256(CHATML.encode()).hexdigest()
    assert facts["layer_ids"] == [1, 3]
    assert facts["batch_invariant"] is True
    assert facts["files"] == {p.name: file_digest(p) for p in sorted(corpus.path.glob("*.parquet"))}
    listing = "".join(f"{file_digest(p)}  {p.name}\n" for p in sorted(corpus.path.glob("*.parquet")))
    assert facts["corpus_sha256"] == hashlib.sha256(listing.encode()).hexdigest()
    assert facts["domains"]["d0"] == {"train": 16, "validation": 1, "calibration": 2, "evaluation": 1}
    sequences = everything(corpus).values()
    supervised, tokens = sum(int(s.loss_mask.sum()) for s in sequences), sum(map(len, sequences))
    assert facts["supervised_share"] == corpus.record.metrics["supervised_share"] == supervised / tokens
    assert corpus.record.metrics["mean_sequence_tokens"] == tokens / 40
    assert corpus.record.metrics["generated_tokens"] == supervised
    assert {p.name for p in corpus.path.iterdir()} - facts["files"].keys() == {
        "contract.json",
        "metrics.jsonl",
        "record.json",
        "set_aside.jsonl",
    }


def test_resume_is_byte_identical_and_generates_only_what_is_missing(
    run: Run, pool: FakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.datagen.watch.TICK_S", 0.0)
    rows = [*questions(20), {"turns": ["a", "b"], "id": "multi"}, {"prompt": "x" * 4000, "id": "long"}]
    whole = run(rows, "whole", shard_conversations=5)
    pool.requests, pool.starts, pool.crash_after = [], 0, 13
    with pytest.raises(RuntimeError, match="the engine died"):
        run(rows, "resumed", shard_conversations=5)
    assert not pool.open
    assert not (tmp_path / "resumed").exists()
    assert len(list((tmp_path / "resumed.partial" / "work").glob("shard-*.json"))) == 2

    pool.requests, pool.crash_after = [], None
    resumed = run(rows, "resumed", shard_conversations=3)  # another size does not throw the shards away
    assert pool.starts == 2
    assert len(pool.requests) == 10 + 2  # single turns, and two of one conversation; the long prompt is never sent
    assert not {f"chat-{i}" for i in range(1, 11)} & {request.id for request in pool.requests}
    assert file_bytes(resumed.path) == file_bytes(whole.path)
    assert resumed.record.facts == whole.record.facts
    assert resumed.record.counts == whole.record.counts
    steps = [json.loads(line)["step"] for line in (resumed.path / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))
    assert steps[-1] == 22
    assert not (resumed.path / "work").exists()


def interrupted_before_commit(run: Run, monkeypatch: pytest.MonkeyPatch, rows: list[Any], **values: Any) -> None:
    """All shards and split files are there, the record is not."""
    with monkeypatch.context() as patch:

        def die(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(Workspace, "commit", die)
        with pytest.raises(KeyboardInterrupt):
            run(rows, **values)


def test_finished_work_starts_no_pool(run: Run, pool: FakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted_before_commit(run, monkeypatch, questions(12), shard_conversations=5)
    assert (pool.starts, len(pool.requests)) == (1, 12)
    corpus = run(questions(12), shard_conversations=5)
    assert (pool.starts, len(pool.requests)) == (1, 12)
    assert corpus.record.counts["kept"] == 12
    assert corpus.record.metrics["generated_tokens"] > 0


def test_torn_or_foreign_shards_are_generated_again(
    run: Run, pool: FakePool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = run(questions(15), "whole")
    interrupted_before_commit(run, monkeypatch, questions(15), shard_conversations=5)
    work = tmp_path / "corpus.partial" / "work"
    (work / "shard-00000.parquet").write_bytes(b"PAR1 torn")
    (work / "shard-00001.parquet").unlink()
    (tmp_path / "corpus.partial" / "train-00007.parquet").write_bytes(b"stale")
    pool.requests = []
    assert file_bytes(run(questions(15)).path) == file_bytes(whole.path)
    assert {request.id for request in pool.requests} == {f"chat-{i}" for i in range(1, 11)}

    interrupted_before_commit(run, monkeypatch, questions(15), name="edited", shard_conversations=5)
    pool.requests = []
    edited = [*questions(14), {"prompt": "another question", "domain": "d0"}]
    run(edited, "edited")
    assert {request.id for request in pool.requests} == {f"chat-{i}" for i in range(11, 16)}


def test_many_conversations_make_several_files(run: Run, pool: FakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.datagen.account.SEQUENCES_PER_FILE", 4)
    corpus = run(questions(12), shard_conversations=5)
    assert len(corpus.files("train")) == 3
    order = [int(s.id.removeprefix("chat-")) for s in corpus.sequences("train")]
    assert order == sorted(order)
