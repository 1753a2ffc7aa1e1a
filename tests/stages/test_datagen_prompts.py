"""Prompt files and splits: what is read, what is refused and with which words, who is held out."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.datagen import prompts as prompts_module
from stages.datagen.config import DatagenConfig
from stages.datagen.prompts import Prompt, check, load_prompts, source_digests, unique
from stages.datagen.splits import assign_splits
from tests.stages.datagen_helpers import write_prompts


def config_of(*paths: str, **values: Any) -> DatagenConfig:
    return DatagenConfig(prompts=paths, **values)


def test_three_row_forms(tmp_path: Path) -> None:
    path = write_prompts(
        tmp_path / "mix.jsonl",
        [
            {"turns": ["one", "two"], "domain": "chat", "id": "x"},
            {"prompt": "three"},
            {
                "id": 7,
                "messages": [
                    {"role": "system", "content": "be brief"},
                    {"role": "user", "content": "four"},
                    {"role": "assistant", "content": "not on-policy"},
                    {"role": "user", "content": "five"},
                    {"role": "assistant", "content": "not on-policy either"},
                ],
            },
        ],
    )
    assert load_prompts(config_of(path)) == [
        Prompt("x", "chat", ("one", "two"), None, f"{path}:1"),
        Prompt("mix-2", "mix", ("three",), None, f"{path}:2"),
        Prompt("7", "mix", ("four", "five"), "be brief", f"{path}:3"),
    ]


def test_folder_and_parquet_and_limit(tmp_path: Path) -> None:
    write_prompts(tmp_path / "a.jsonl", [{"prompt": f"a{i}"} for i in range(5)])
    rows = [{"messages": [{"role": "user", "content": f"b{i}"}], "id": None, "label": 1.0} for i in range(5)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    (tmp_path / "README.md").write_text("not prompts")
    found = load_prompts(config_of(str(tmp_path), limit=2))
    assert [(p.id, p.domain, p.turns) for p in found] == [
        ("a-1", "a", ("a0",)),
        ("a-2", "a", ("a1",)),
        ("b-1", "b", ("b0",)),
        ("b-2", "b", ("b1",)),
    ]


def test_relative_path_falls_back_to_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "repository").mkdir()
    write_prompts(tmp_path / "repository" / "p.jsonl", [{"prompt": "there"}])
    monkeypatch.setattr(prompts_module, "REPOSITORY", tmp_path / "repository")
    monkeypatch.chdir(tmp_path)
    assert [p.turns for p in load_prompts(config_of("p.jsonl"))] == [("there",)]
    write_prompts(tmp_path / "p.jsonl", [{"prompt": "here"}])
    assert [p.turns for p in load_prompts(config_of("p.jsonl"))] == [("here",)]
    assert list(source_digests(config_of("p.jsonl"))) == ["p.jsonl"]


def test_source_digest_follows_the_content(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "p.jsonl", [{"prompt": "one"}])
    before = source_digests(config_of(path))
    write_prompts(tmp_path / "p.jsonl", [{"prompt": "two"}])
    assert source_digests(config_of(path)) != before


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{not json", "p.jsonl:2: expected one JSON object a line, found {not json"),
        ("[1, 2]", "p.jsonl:2: expected a JSON object, found [1, 2]"),
        ('{"text": "x"}', 'p.jsonl:2: expected "turns": [text, ...], "messages"'),
        ('{"turns": "x"}', "p.jsonl:2: expected \"turns\" to be a list of at least one text, found 'x'"),
        ('{"turns": []}', 'p.jsonl:2: expected "turns" to be a list of at least one text, found []'),
        ('{"turns": ["a", 3]}', 'p.jsonl:2: expected "turns" to be a text that is not empty, found 3'),
        ('{"prompt": "  "}', "p.jsonl:2: expected \"prompt\" to be a text that is not empty, found '  '"),
        ('{"prompt": "\\ud800"}', 'p.jsonl:2: expected "prompt" to be valid Unicode, found surrogates not allowed'),
        ('{"prompt": "a", "id": 1.5}', 'p.jsonl:2: expected "id" to be a text or a whole number, found 1.5'),
        ('{"prompt": "a", "domain": 1}', 'p.jsonl:2: expected "domain" to be a text that is not empty, found 1'),
        ('{"messages": "a"}', 'p.jsonl:2: expected "messages" to be a list of {"role", "content"}'),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "at least one from the user, found none"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "found 'tool' in message 0"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}',
            "expected roles user and assistant after at most one leading system, found 'system' in message 1",
        ),
        (
            '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
            'p.jsonl:2: expected "content" of message 0 to be a text that is not empty, found [{',
        ),
        (
            '{"prompt": "another", "id": "first"}',
            "p.jsonl:2: expected ids unique over all files, found 'first' also at",
        ),
    ],
)
def test_bad_row_is_refused_with_file_and_line(tmp_path: Path, line: str, expected: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine", "id": "first"}\n' + line + "\n")
    with pytest.raises(ValueError, match=re.escape(expected)) as caught:
        check(config_of(str(path)))
    assert "\n" not in str(caught.value)


def test_bad_files_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "not.parquet").write_text("text")
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "ä"}\n'.encode("latin-1"))
    (tmp_path / "p.txt").write_text("text")
    (tmp_path / "folder").mkdir()
    for name, expected in {
        "empty.jsonl": "empty.jsonl: expected at least one row with .*found an empty file",
        "not.parquet": "not.parquet: expected a Parquet file",
        "latin.jsonl": "latin.jsonl:1: expected one JSON object a line",
        "p.txt": "expected a file ending in .jsonl or .parquet, found p.txt",
        "folder": "expected .jsonl or .parquet files in this folder, found none",
        "absent.jsonl": "absent.jsonl: expected a file or folder here or under the repository, found nothing",
    }.items():
        with pytest.raises(ValueError, match=expected) as caught:
            check(config_of(str(tmp_path / name)))
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"datagen\.prompts: expected at least one"):
        check(config_of())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"limit": 0}, "datagen.limit=0: expected at least 1"),
        ({"temperature": -1.0}, "datagen.temperature=-1.0"),
        ({"top_p": 0.0}, "datagen.top_p=0.0: expected in (0, 1]"),
        ({"max_new_tokens": 0}, "datagen.max_new_tokens=0"),
        ({"min_supervised_tokens": 0}, "datagen.min_supervised_tokens=0"),
        ({"max_sequence_tokens": 16}, "datagen.max_sequence_tokens=16: expected more than min_supervised_tokens=16"),
        ({"shard_conversations": 0}, "datagen.shard_conversations=0"),
        ({"max_failed_share": 1.5}, "datagen.max_failed_share=1.5"),
        ({"evaluation_share": -0.1}, "datagen.evaluation_share=-0.1: expected in [0, 1)"),
        ({"evaluation_share": 0.5, "validation_share": 0.5}, "= 1.1: expected less than 1"),
    ],
)
def test_bad_value_is_refused_with_its_key(tmp_path: Path, values: dict[str, Any], expected: str) -> None:
    path = write_prompts(tmp_path / "p.jsonl", [{"prompt": "one"}])
    check(config_of(path))
    with pytest.raises(ValueError, match=re.escape(expected)):
        check(config_of(path, **values))


def test_duplicates_are_found_by_all_user_turns() -> None:
    prompts = [
        Prompt("a", "d", ("What is  2+2?",)),
        Prompt("b", "e", ("what is 2+2?\n",)),
        Prompt("c", "d", ("What is 2+2?", "And 3+3?")),
        Prompt("d", "d", ("What is 2+2?And 3+3?",)),
        Prompt("a", "d", ("What is 2+2?",)),
    ]
    kept, duplicates = unique(prompts)
    assert [p.id for p in kept] == ["a", "c", "d"]
    assert [(p.id, first.id) for p, first in duplicates] == [("b", "a"), ("a", "a")]


def prompts_of(domain: str, count: int) -> list[Prompt]:
    return [Prompt(f"{domain}-{i}", domain, (f"{domain} question {i}",)) for i in range(count)]


SHARES = DatagenConfig(validation_share=0.05, calibration_share=0.1, evaluation_share=0.05)


def test_splits_are_stratified() -> None:
    prompts = prompts_of("big", 200) + prompts_of("small", 10) + prompts_of("tiny", 3)
    splits = assign_splits(prompts, SHARES)
    assert splits.keys() == {p.id for p in prompts}
    counts = {
        domain: Counter(splits[p.id] for p in prompts if p.domain == domain) for domain in ("big", "small", "tiny")
    }
    assert counts["big"] == {"train": 160, "validation": 10, "calibration": 20, "evaluation": 10}
    assert counts["small"] == {"train": 7, "validation": 1, "calibration": 1, "evaluation": 1}
    assert counts["tiny"] == {"train": 3}


def test_small_domains_give_at_least_one_to_each_split() -> None:
    little = DatagenConfig(validation_share=0.01, calibration_share=0.02, evaluation_share=0.01)
    assert Counter(assign_splits(prompts_of("d", 10), little).values())["train"] == 7
    assert set(assign_splits(prompts_of("d", 9), little).values()) == {"train"}


def test_splits_depend_on_seed_and_prompt_only() -> None:
    prompts = prompts_of("one", 100) + prompts_of("two", 100)
    splits = assign_splits(prompts, SHARES)
    assert assign_splits(list(reversed(prompts)), SHARES) == splits
    assert assign_splits(prompts[:100], SHARES) == {id_: s for id_, s in splits.items() if id_.startswith("one")}
    renamed = [dataclasses.replace(p, id=f"r-{p.id}") for p in prompts]
    assert assign_splits(renamed, SHARES) == {f"r-{id_}": split for id_, split in splits.items()}
    assert assign_splits(prompts, dataclasses.replace(SHARES, seed=1)) != splits


def test_share_zero_holds_nothing_out() -> None:
    none = DatagenConfig(validation_share=0.0, calibration_share=0.0, evaluation_share=0.0)
    assert set(assign_splits(prompts_of("d", 50), none).values()) == {"train"}


def test_large_shares_leave_a_training_prompt() -> None:
    greedy = DatagenConfig(validation_share=0.3, calibration_share=0.3, evaluation_share=0.35)
    assert set(assign_splits(prompts_of("d", 10), greedy).values()) == {
        "train",
        "validation",
        "calibration",
        "evaluation",
    }


def test_conversations_with_one_opening_stay_together() -> None:
    short = prompts_of("d", 100)
    longer = [Prompt(f"long-{p.id}", "other", (p.turns[0].upper(), "Are you sure?")) for p in short]
    splits = assign_splits(short + longer, SHARES)
    assert all(splits[p.id] == splits[f"long-{p.id}"] for p in short)


def test_check_reads_only_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "a"}) + "\nnot json\n")
    check(config_of(str(path), limit=1))
    with pytest.raises(ValueError, match=r"p\.jsonl:2"):
        check(config_of(str(path), limit=2))
