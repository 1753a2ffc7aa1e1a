"""Rows and which of them are chosen: what is read, what is refused and with which words, who is held out."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.corpus import Split, TokenSequence
from stages.datagen import splits
from stages.datagen.config import DatagenConfig
from stages.datagen.conversation import Conversation, Turn, parse
from stages.datagen.prompts import check, chosen, load, select
from stages.datagen.sources import Row
from stages.datagen.splits import Candidate
from tests.stages.datagen_helpers import VOCAB_SIZE, write_prompts


def config_of(*paths: str, **values: Any) -> DatagenConfig:
    return DatagenConfig(prompts=paths, **values)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


SYSTEM = {"role": "system", "content": "be brief"}
CALL = assistant("", tool_calls=[{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}])


def test_row_forms(tmp_path: Path) -> None:
    path = write_prompts(
        tmp_path / "mix.jsonl",
        [
            {"turns": ["one", "two"], "domain": "chat", "id": "x"},
            {"prompt": "three", "prompt_id": "ignored"},
            {
                "id": 7,
                "messages": [SYSTEM, {**user("four"), "ip": "1.2.3.4"}, assistant("said")],
                "tools": [{"name": "add"}],
            },
            {"conversations": [{"from": "human", "value": "five"}, {"from": "gpt", "value": "said"}]},
            {"messages": json.dumps([user("six"), CALL, tool("2")]), "tools": None},
        ],
    )
    assert list(load(config_of(path), VOCAB_SIZE)) == [
        Conversation("x", "chat", (user("one"), user("two")), (), f"{path}:1"),
        Conversation("mix-2", "mix", (user("three"),), (), f"{path}:2"),
        Conversation("7", "mix", (SYSTEM, user("four"), assistant("said")), ({"name": "add"},), f"{path}:3"),
        Conversation("mix-4", "mix", (user("five"), assistant("said")), (), f"{path}:4"),
        Conversation("mix-5", "mix", (user("six"), CALL, tool("2")), (), f"{path}:5"),
    ]


def test_token_rows_are_kept_as_they_are(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [5, 6, 7], "loss_mask": [False, True, True]},
        {"input_ids": [5, 6], "loss_mask": [0, 1], "messages": json.dumps([user("Hi "), assistant("a")]), "id": "y"},
    ]
    one, two = load(config_of(write_prompts(tmp_path / "p.jsonl", rows), regenerate=False), VOCAB_SIZE)
    assert (one.input_ids.tolist(), one.loss_mask.tolist()) == ([5, 6, 7], [False, True, True])
    assert (one.input_ids.dtype, one.loss_mask.dtype) == (np.int32, np.bool_)
    assert (one.opening, two.opening) == ("5", "hi")
    assert TokenSequence("y", "d", two.input_ids, two.loss_mask, json.dumps(two.messages)).opening == two.opening
    assert TokenSequence("x", "d", one.input_ids, one.loss_mask).opening == one.opening


def test_arguments_that_are_json_text_become_objects() -> None:
    def call(arguments: Any) -> dict[str, Any]:
        return assistant("", tool_calls=[{"function": {"name": "add", "arguments": arguments}}])

    for given, expected in {'{"a": 1}': {"a": 1}, "not json": "not json"}.items():
        row = Row("p:1", "p", 1, {"messages": [user("u"), call(given), tool("2")]})
        assert parse(row, regenerate=True, vocab_size=VOCAB_SIZE).messages[1] == call(expected)


@pytest.mark.parametrize(
    ("messages", "regenerated", "given"),
    [
        ([user("a"), user("b")], [Turn((user("a"),)), Turn((user("b"),))], []),
        (
            [SYSTEM, user("a"), assistant("x"), user("b")],
            [Turn((SYSTEM, user("a")), assistant("x")), Turn((user("b"),))],
            [Turn((SYSTEM, user("a")), assistant("x"))],
        ),
        (
            [user("a"), CALL, tool("1"), tool("2"), assistant("x")],
            [Turn((user("a"),), CALL), Turn((tool("1"), tool("2")), assistant("x"))],
            [Turn((user("a"),), CALL), Turn((tool("1"), tool("2")), assistant("x"))],
        ),
        (
            [user("a"), CALL, tool("1"), user("b"), assistant("x")],
            [Turn((user("a"),), CALL), Turn((tool("1"),)), Turn((user("b"),), assistant("x"))],
            [Turn((user("a"),), CALL), Turn((tool("1"), user("b")), assistant("x"))],
        ),
        (
            [assistant("hello"), user("a"), assistant("x"), CALL, tool("1")],
            [Turn((assistant("hello"), user("a")), CALL), Turn((tool("1"),))],
            [Turn((), assistant("hello")), Turn((user("a"),), assistant("x")), Turn((), CALL)],
        ),
    ],
)
def test_turns_are_what_is_said_before_each_answer(
    messages: list[dict[str, Any]], regenerated: list[Turn], given: list[Turn]
) -> None:
    one = Conversation("x", "d", tuple(messages))
    assert one.turns(regenerate=True) == regenerated
    assert one.turns(regenerate=False) == given


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{not json", "p.jsonl:2: expected one JSON object a line, found {not json"),
        ("[1, 2]", "p.jsonl:2: expected a JSON object, found [1, 2]"),
        ('{"text": "x"}', 'p.jsonl:2: expected "prompt": text, "turns": [text, ...]'),
        ('{"turns": "x"}', "p.jsonl:2: expected \"turns\" to be a list of at least one text, found 'x'"),
        ('{"turns": []}', 'p.jsonl:2: expected "turns" to be a list of at least one text, found []'),
        ('{"turns": ["a", 3]}', 'p.jsonl:2: expected "turns" to be a text that is not empty, found 3'),
        ('{"prompt": "  "}', "p.jsonl:2: expected \"prompt\" to be a text that is not empty, found '  '"),
        ('{"prompt": "\\ud800"}', 'p.jsonl:2: expected "prompt" to be valid Unicode, found surrogates not allowed'),
        ('{"prompt": "a", "id": 1.5}', 'p.jsonl:2: expected "id" to be a text or a whole number, found 1.5'),
        ('{"prompt": "a", "domain": 1}', 'p.jsonl:2: expected "domain" to be a text that is not empty, found 1'),
        ('{"messages": "a"}', "p.jsonl:2: expected \"messages\" to be a list or its JSON text, found 'a'"),
        ('{"messages": "3"}', 'p.jsonl:2: expected "messages" to be a list of {"role", "content"}, found 3'),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "at least one message from the user, found none"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "found 'tool' in message 0"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}',
            "tool after an assistant, and at most one leading system, found 'system' in message 1",
        ),
        (
            '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
            'p.jsonl:2: expected "content" of message 0 to be a text that is not empty, found [{',
        ),
        (
            '{"prompt": "another", "id": "first"}',
            "p.jsonl:2: expected ids unique over all sources, found 'first' also at",
        ),
        ('{"prompt": "another", "id": "first#2"}', "p.jsonl:2: expected no id that reads like a part of another one"),
        ('{"messages": [{"role": ["user"], "content": "a"}]}', "found ['user'] in message 0"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": 3}]}',
            'expected "content" of message 1 to be a text, found 3',
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\\ud800"}]}',
            'expected "messages" to be valid Unicode',
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": ["add"]}]}',
            'expected "tool_calls" of message 1 to be a list of {"function": {"name", "arguments"}}, found \'add\'',
        ),
        ('{"prompt": "a", "tools": "add"}', "p.jsonl:2: expected \"tools\" to be a list or its JSON text, found 'add'"),
        ('{"prompt": "a", "tools": ["add"]}', 'p.jsonl:2: expected "tools" to be a list of JSON schemas'),
        (
            '{"input_ids": [1], "loss_mask": [1]}',
            "p.jsonl:2: expected a conversation with answers to regenerate, found token ids; datagen.regenerate=false",
        ),
    ],
)
def test_bad_row_is_refused_with_file_and_line(tmp_path: Path, line: str, expected: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine", "id": "first"}\n' + line + "\n")
    with pytest.raises(ValueError, match=re.escape(expected)) as caught:
        check(config_of(str(path)), VOCAB_SIZE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "alone"}, "p.jsonl:2: expected answers for datagen.regenerate=false to keep, found a prompt alone"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, '"input_ids" and "loss_mask" of one length, found 2 and 1'),
        ({"input_ids": [1, 300], "loss_mask": [0, 1]}, '"input_ids" from 0 to 299 (the vocabulary), found 300'),
        ({"input_ids": [1, -1], "loss_mask": [0, 1]}, "found -1"),
        ({"input_ids": [1, 2.0], "loss_mask": [0, 1]}, '"input_ids" to be a list of whole numbers, found [1, 2.0]'),
        ({"input_ids": [], "loss_mask": []}, '"input_ids" to be a list of whole numbers, found []'),
        ({"input_ids": [1, 2]}, '"loss_mask" to be a list of true and false or 1 and 0, found None'),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "found [0, 2]"),
    ],
)
def test_row_without_answers_to_keep_is_refused(tmp_path: Path, row: dict[str, Any], expected: str) -> None:
    fine = {"messages": [user("a"), assistant("b")]}
    path = write_prompts(tmp_path / "p.jsonl", [fine, row])
    with pytest.raises(ValueError, match=re.escape(expected)) as caught:
        check(config_of(path, regenerate=False), VOCAB_SIZE)
    assert "\n" not in str(caught.value)
    check(config_of(path, regenerate=False, limit=1), VOCAB_SIZE)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"max_sequence_tokens": 16}, "datagen.max_sequence_tokens=16: expected more than min_supervised_tokens=16"),
        ({"evaluation_share": 0.5, "validation_share": 0.5}, "= 1.1: expected less than 1"),
        ({"domain_shares": {"p": 0.5}}, "datagen.domain_shares={'p': 0.5}: expected shares that add up to 1, not 0.5"),
        ({"domain_shares": {"p": 2.0, "q": -1.0}}, "expected shares of at least 0"),
        ({"domain_shares": {"q": 1.0}}, "expected a share (0 to leave it out) for every domain, found none for 'p'"),
        ({"domain_shares": {"p": 0.5, "q": 0.5}}, "expected conversations of 'q', found none"),
    ],
)
def test_bad_value_is_refused_with_its_key(tmp_path: Path, values: dict[str, Any], expected: str) -> None:
    path = write_prompts(tmp_path / "p.jsonl", [{"prompt": "one"}])
    check(config_of(path), VOCAB_SIZE)
    with pytest.raises(ValueError, match=re.escape(expected)):
        check(config_of(path, **values), VOCAB_SIZE)


def test_duplicates_ask_the_same(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "prompt": "What is  2+2?"},
        {"id": "b", "prompt": "what is 2+2?\n", "domain": "other"},
        {"id": "c", "turns": ["What is 2+2?", "And 3+3?"]},
        {"id": "d", "prompt": "What is 2+2?And 3+3?"},
        {"id": "a", "prompt": "What is 2+2?"},
        {"id": "e", "messages": [SYSTEM, user("What is 2+2?")]},
        {"id": "f", "messages": [user("What is 2+2?"), assistant("four")]},
        {"id": "g", "messages": [user("What is 2+2?"), assistant("five")], "tools": [{"name": "add"}]},
    ]
    config = config_of(write_prompts(tmp_path / "p.jsonl", rows))
    selection = select(config, VOCAB_SIZE)
    assert [one.id for one in chosen(config, selection, VOCAB_SIZE)] == ["a", "c", "d", "e", "g"]
    assert selection.splits.keys() == set("acdeg")
    assert [(one.id, one.reason) for one in selection.set_aside] == [
        (id_, "dropped_duplicate") for id_ in ("b", "a", "f")
    ]
    assert selection.set_aside[0].cause.endswith("p.jsonl:2 asks the same as " + f"{tmp_path}/p.jsonl:1")


def test_given_answers_tell_conversations_apart(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "a", "messages": [user("What is 2+2?"), assistant("four")]},
        {"id": "b", "messages": [user("What is 2+2?"), assistant("Four."), user("thanks")]},
        {"id": "c", "messages": [user("what is 2+2?"), assistant("FOUR")]},
        {"id": "d", "input_ids": [1, 2], "loss_mask": [0, 1]},
        {"id": "e", "input_ids": [1, 2], "loss_mask": [1, 1]},
        {"id": "f", "input_ids": [1, 2], "loss_mask": [0, 1]},
    ]
    config = config_of(write_prompts(tmp_path / "p.jsonl", rows), regenerate=False)
    assert select(config, VOCAB_SIZE).splits.keys() == set("abde")


def test_domain_shares_hold_exactly_and_the_rest_is_counted(tmp_path: Path) -> None:
    rows = [
        {"id": f"{d}{i}", "prompt": f"{d} {i}", "domain": d}
        for d, n in {"a": 30, "b": 50, "c": 5}.items()
        for i in range(n)
    ]
    path = write_prompts(tmp_path / "p.jsonl", rows)
    config = config_of(path, domain_shares={"a": 0.75, "b": 0.25, "c": 0.0})
    selection = select(config, VOCAB_SIZE)
    assert Counter(id_[0] for id_ in selection.splits) == {"a": 30, "b": 10}
    assert Counter((one.reason, one.cause) for one in selection.set_aside) == {
        ("dropped_domain_share", "b"): 40,
        ("dropped_domain_share", "c"): 5,
    }
    assert select(config, VOCAB_SIZE).splits == selection.splits
    other = select(dataclasses.replace(config, seed=1), VOCAB_SIZE).splits
    assert other.keys() != selection.splits.keys()
    shuffled = write_prompts(tmp_path / "q.jsonl", rows[::-1])
    again = select(dataclasses.replace(config, prompts=(shuffled,)), VOCAB_SIZE).splits
    assert again == selection.splits


def prompts_of(domain: str, count: int) -> list[Conversation]:
    return [Conversation(f"{domain}-{i}", domain, (user(f"{domain} question {i}"),)) for i in range(count)]


def assign_splits(prompts: Iterable[Conversation], config: DatagenConfig) -> dict[str, Split]:
    return splits.assign_splits([Candidate.of(one, config) for one in prompts], config)


SHARES = DatagenConfig(validation_share=0.05, calibration_share=0.1, evaluation_share=0.05)


def test_splits_are_stratified() -> None:
    prompts = prompts_of("big", 200) + prompts_of("small", 10) + prompts_of("tiny", 3)
    found = assign_splits(prompts, SHARES)
    assert found.keys() == {p.id for p in prompts}
    counts = {
        domain: Counter(found[p.id] for p in prompts if p.domain == domain) for domain in ("big", "small", "tiny")
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
    found = assign_splits(prompts, SHARES)
    assert assign_splits(list(reversed(prompts)), SHARES) == found
    assert assign_splits(prompts[:100], SHARES) == {id_: s for id_, s in found.items() if id_.startswith("one")}
    renamed = [dataclasses.replace(p, id=f"r-{p.id}") for p in prompts]
    assert assign_splits(renamed, SHARES) == {f"r-{id_}": split for id_, split in found.items()}
    assert assign_splits(prompts, dataclasses.replace(SHARES, seed=1)) != found


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
    longer = [
        Conversation(f"long-{p.id}", "other", (user(p.messages[0]["content"].upper()), user("Are you sure?")))
        for p in short
    ]
    found = assign_splits(short + longer, SHARES)
    assert all(found[p.id] == found[f"long-{p.id}"] for p in short)


def test_check_reads_only_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "a"}) + "\nnot json\n")
    check(config_of(str(path), limit=1), VOCAB_SIZE)
    with pytest.raises(ValueError, match=r"p\.jsonl:2"):
        check(config_of(str(path), limit=2), VOCAB_SIZE)
