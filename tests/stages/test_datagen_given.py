"""Datagen with given answers: no engine, exact masks, conserved counts, and the same bytes after an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import Workspace
from stages.corpus import SPLITS, Corpus, read_shard
from stages.datagen import stage
from stages.datagen.config import DatagenConfig
from stages.datagen.shards import Shard
from stages.datagen.sources import content
from stages.datagen.template import ChatTemplate
from stages.engine.config import EngineConfig
from stages.hidden_states.config import HiddenStatesConfig
from stages.target import Target
from tests.stages.datagen_helpers import (
    CHATML,
    everything,
    file_bytes,
    make_target,
    run_datagen,
    supervised_spans,
    write_prompts,
)

Run = Callable[..., Corpus]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def run(tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> Run:
    def no_engines(*_: Any, **__: Any) -> None:
        raise AssertionError("an engine was started")

    def run_(rows: list[Any], name: str = "corpus", target: Target = target, **values: Any) -> Corpus:
        return run_datagen(tmp_path, target, rows, name, regenerate=False, **values)

    monkeypatch.setattr(stage, "extractor_pool", no_engines)
    return run_


def chat(*texts: str, **row: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)], **row}


def tokens(ids: list[int], mask: list[int], **row: Any) -> dict[str, Any]:
    return {"input_ids": ids, "loss_mask": mask, **row}


def chats(count: int) -> list[dict[str, Any]]:
    return [chat(f"question {i}", f"answer {i}", "more", "no more", domain=f"d{i % 2}") for i in range(count)]


def test_given_answers_are_kept_and_the_record_says_so(run: Run, target: Target) -> None:
    corpus = run([chat("one?", "1 indeed", "two?", "2", "left out", id="x")])
    template = ChatTemplate.load(target, "template")
    (sequence,) = everything(corpus).values()
    assert supervised_spans(sequence, template) == ["1 indeed<|im_end|>", "2<|im_end|>"]
    whole = template.render(json.loads(sequence.messages), ask=False)
    assert template.decode(sequence.input_ids.tolist()) == whole.removesuffix("\n")
    facts = corpus.record.facts
    assert facts["answers"] == "given"
    assert [facts[key] for key in ("temperature", "top_p", "vllm_version", "batch_invariant")] == [None] * 4
    assert "generated_tok_per_s" not in corpus.record.metrics


def test_token_rows_need_no_template_and_are_kept_as_they_are(run: Run, tmp_path: Path) -> None:
    bare = make_target(tmp_path / "bare", chat_template=None)
    corpus = run([tokens([5, 6, 7, 8], [0, 1, 0, 1], id="x"), tokens([5, 6, 9], [0, 1, 1], id="y")], target=bare)
    x, y = everything(corpus).values()
    assert (x.input_ids.tolist(), x.loss_mask.tolist()) == ([5, 6, 7, 8], [False, True, False, True])
    assert (y.messages, y.opening) == ("", "5")
    assert corpus.record.facts["chat_template_sha256"] is None


def test_corpus_is_a_source(run: Run, tmp_path: Path) -> None:
    """Its rows are token ids with messages, so that variants of a prompt stay in one split."""
    first = run([chat(f"question {i}", "answer", *more) for i in range(20) for more in ([], ["x", "y"])], "first")
    rows = [
        dict(zip(("input_ids", "loss_mask"), (s.input_ids.tolist(), s.loss_mask.tolist()), strict=True))
        for s in everything(first).values()
    ]
    for row, sequence in zip(rows, everything(first).values(), strict=True):
        row |= {"id": sequence.id, "domain": sequence.domain, "messages": sequence.messages}
    second = run(rows, "second")
    assert everything(second).keys() == everything(first).keys()
    openings = [{s.opening for s in second.sequences(split)} for split in SPLITS]
    assert sum(map(len, openings)) == len(set().union(*openings)) == 20
    assert second.record.counts["kept_evaluation"] > 0


def test_every_row_is_accounted_for(run: Run) -> None:
    long = [7] * 100
    rows = [
        *chats(4),
        chat("Question  0", "ANSWER 0", "more", "no more", id="copy"),
        chat("empty", " ", id="empty"),
        chat("cut", "xyz " * 60, id="cut"),
        chat("u" * 120, "too late", id="truncated"),
        chat("few", "a", id="few"),
        chat("end", "a<|im_end|>b", id="end"),
        tokens(long, [0] * 60 + [1] * 40, id="half"),
        tokens(long, [0] * 80 + [1] * 20, id="late"),
        tokens(long, [0] * 78 + [1] * 22, id="few-left"),
        tokens(long, [0] * 100, id="nothing"),
    ]
    corpus = run(rows, max_sequence_tokens=80, min_supervised_tokens=3)
    sequences = everything(corpus)
    assert sequences.keys() == {*(f"chat-{i}" for i in range(1, 5)), "cut", "half"}
    assert (len(sequences["cut"]), len(sequences["half"]), int(sequences["half"].loss_mask.sum())) == (80, 80, 20)
    counts = corpus.record.counts
    assert (counts["prompts_in"], counts["kept"]) == (14, 6)
    assert {key: value for key, value in counts.items() if key.startswith(("dropped_", "failed_"))} == {
        "dropped_duplicate": 1,
        "dropped_empty_answer": 1,
        "dropped_truncated_away": 2,
        "dropped_too_few_supervised": 3,
        "dropped_template_hides_answer": 1,
    }


@pytest.mark.parametrize("mask", [1, 0])
def test_share_of_one_or_zero_stops_the_run(run: Run, mask: int) -> None:
    expected = "supervised share between 0 and 1, found 1" if mask else "none left of 3 .*too_few_supervised': 3"
    with pytest.raises(ValueError, match=expected):
        run([tokens([5, 6, i], [mask] * 3) for i in range(3)])


def test_failed_templates_stop_the_stage(run: Run, tmp_path: Path) -> None:
    broken = make_target(tmp_path / "broken", CHATML + "{{ raise_exception('no') if messages | length > 1 }}")
    with pytest.raises(RuntimeError, match=r"max_failed_share=0\.01 allows; the last was chat-1: failed_template: no"):
        run(chats(3), target=broken)


def test_interrupted_work_goes_on_to_the_same_bytes(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [*chats(20), *(tokens([5, 6, i], [0, 1, 1]) for i in range(10)), chat("few", "", id="few")]
    whole = run(rows, "whole", shard_conversations=8)
    save, saved = Shard.save, []

    def die_after_two(self: Shard, *args: Any) -> None:
        if len(saved) == 2:
            raise KeyboardInterrupt
        saved.append(self.index)
        save(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Shard, "save", die_after_two)
        with pytest.raises(KeyboardInterrupt):
            run(rows, "resumed", shard_conversations=8)
    first = tmp_path / "resumed.partial/work/shard-00000.parquet"
    before = (first.stat().st_mtime_ns, len(read_shard(first)))
    kept = []
    monkeypatch.setattr(Shard, "save", lambda self, *args: (kept.append(self.index), save(self, *args))[1])
    resumed = run(rows, "resumed", shard_conversations=5)
    assert (saved, kept, before[1]) == ([0, 1], [2, 3], 8)
    assert file_bytes(resumed.path) == file_bytes(whole.path)
    assert resumed.record.facts == whole.record.facts
    assert resumed.record.counts == whole.record.counts


def test_sources_that_changed_since_the_plan_are_refused(run: Run, target: Target, tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "p.jsonl", chats(3))
    config = DatagenConfig(prompts=(path,), regenerate=False, min_supervised_tokens=2)
    out = Workspace(tmp_path / "corpus", "x", config={"datagen": {"content": content(config)}})

    def make() -> Corpus:
        with out.locked():
            return stage.run(
                config, target, engine=EngineConfig(), hidden_states=HiddenStatesConfig(), layer_ids=(1, 2), out=out
            )

    write_prompts(tmp_path / "p.jsonl", chats(4))
    with pytest.raises(ValueError, match=r"expected the sources .* when the run was planned, found others .*p\.jsonl"):
        make()
    write_prompts(tmp_path / "p.jsonl", chats(3))
    assert make().record.counts["prompts_in"] == 3
