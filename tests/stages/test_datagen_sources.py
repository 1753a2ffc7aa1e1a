"""Where rows come from: files, folders and data sets, their contents as identity, and refusals by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.datagen import sources
from stages.datagen.config import DatagenConfig, HubDataset
from stages.datagen.prompts import check, load
from stages.datagen.sources import content, rows, told
from tests.stages.datagen_helpers import VOCAB_SIZE, write_prompts

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def config_of(*paths: str, **values: Any) -> DatagenConfig:
    return DatagenConfig(prompts=paths, **values)


def of_hub(path: str | Path, **values: Any) -> DatagenConfig:
    return DatagenConfig(hub={"chat": HubDataset(str(path), **values)})


def prompts_of(config: DatagenConfig) -> list[str]:
    return [row.value["prompt"] for row in rows(config)]


def test_folder_and_parquet_and_limit(tmp_path: Path) -> None:
    write_prompts(tmp_path / "a.jsonl", [{"prompt": f"a{i}"} for i in range(5)])
    answers: list[dict[str, Any]] = [
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "y", "name": "n"},
    ]
    tools = [{"name": "f", "parameters": {"a": 1}}, {"name": "g"}]
    talk = [[{"role": "user", "content": f"b{i}"}, *answers] for i in range(5)]
    table = [{"messages": messages, "tools": tools, "id": None, "label": 1.0} for messages in talk]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "b.parquet")
    (tmp_path / "README.md").write_text("not prompts")
    found = list(load(config_of(str(tmp_path), limit=2), VOCAB_SIZE))
    assert [(one.id, one.domain) for one in found] == [("a-1", "a"), ("a-2", "a"), ("b-1", "b"), ("b-2", "b")]
    assert found[3].messages == tuple(talk[1])
    assert found[3].tools == tuple(tools)  # Arrow gives every struct all keys, with nulls that no template must see


def test_relative_path_falls_back_to_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "repository").mkdir()
    write_prompts(tmp_path / "repository" / "p.jsonl", [{"prompt": "there"}])
    monkeypatch.setattr(sources, "REPOSITORY", tmp_path / "repository")
    monkeypatch.chdir(tmp_path)
    assert prompts_of(config_of("p.jsonl")) == ["there"]
    write_prompts(tmp_path / "p.jsonl", [{"prompt": "here"}])
    assert prompts_of(config_of("p.jsonl")) == ["here"]
    assert list(told(config_of("p.jsonl"))) == ["p.jsonl"]


def test_bad_files_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "not.parquet").write_text("text")
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "ä"}\n'.encode("latin-1"))
    (tmp_path / "p.txt").write_text("text")
    (tmp_path / "folder").mkdir()
    for name, expected in {
        "empty.jsonl": "empty.jsonl: expected at least one row, found it empty",
        "not.parquet": "not.parquet: expected a Parquet file",
        "latin.jsonl": "latin.jsonl:1: expected one JSON object a line",
        "p.txt": "expected a file ending in .jsonl or .parquet, found p.txt",
        "folder": "expected .jsonl or .parquet files in this folder, found none",
        "absent.jsonl": "absent.jsonl: expected a file or folder here or under the repository, found nothing",
    }.items():
        with pytest.raises(ValueError, match=expected) as caught:
            check(config_of(str(tmp_path / name)), VOCAB_SIZE)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"datagen\.prompts: expected at least one"):
        check(config_of(), VOCAB_SIZE)


def test_identity_is_content_and_stem(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "p.jsonl", [{"prompt": "one"}])
    before = content(config_of(path))
    (tmp_path / "elsewhere").mkdir()
    assert content(config_of(write_prompts(tmp_path / "elsewhere/p.jsonl", [{"prompt": "one"}]))) == before
    write_prompts(tmp_path / "p.jsonl", [{"prompt": "two"}])
    assert content(config_of(path)) != before


def write_dataset(folder: Path, train: list[Any], test: list[Any]) -> Path:
    """A data set as the Hub has them: a card that names configurations and splits, and Parquet files."""
    (folder / "data").mkdir(parents=True)
    for split, rows_ in (("train", train), ("test", test)):
        pq.write_table(pa.Table.from_pylist(rows_), folder / "data" / f"{split}.parquet")
    card = "---\nconfigs:\n- config_name: talk\n  data_files:\n"
    card += "".join(f"  - split: {split}\n    path: data/{split}.parquet\n" for split in ("train", "test"))
    (folder / "README.md").write_text(card + "---\n")
    return folder


def test_local_data_set_by_configuration_and_split(tmp_path: Path) -> None:
    talk: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": "answer"}]}
        for i in range(3)
    ]
    talk[1]["messages"][1]["tool_calls"] = [{"function": {"name": "add", "arguments": '{"a": 1}'}}]
    folder = write_dataset(tmp_path / "set", talk, talk[1:2])
    config = of_hub(folder, name="talk")
    found = list(load(config, VOCAB_SIZE))
    assert [(one.id, one.domain, one.source) for one in found[:2]] == [
        ("chat-1", "chat", "datagen.hub.chat:1"),
        ("chat-2", "chat", "datagen.hub.chat:2"),
    ]
    assert [len(one.messages[1]) for one in found] == [2, 3, 2]
    assert found[1].messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert len(list(load(dataclasses.replace(config, limit=2), VOCAB_SIZE))) == 2
    (held_out,) = load(of_hub(folder, split="test"), VOCAB_SIZE)
    assert held_out.messages == found[1].messages

    assert told(config)["datagen.hub.chat"].keys() == {"path", "name", "split", "sha256"}
    assert content(config) != content(of_hub(folder, name="talk", split="test"))
    before = content(config)
    (folder / ".cache").write_text("not content")
    assert content(config) == before
    (folder / "README.md").write_text("another card")
    assert content(config) != before


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"split": "tain"}, r"datagen\.hub\.chat: expected rows of split 'tain' of .*Available splits"),
        ({"name": "tlak"}, r"of split 'train' of .*, configuration 'tlak', found none after row 0 .*Available"),
    ],
)
def test_wrong_part_of_a_data_set_is_refused(tmp_path: Path, values: dict[str, str], expected: str) -> None:
    folder = write_dataset(tmp_path / "set", [{"prompt": "a"}], [{"prompt": "b"}])
    with pytest.raises(ValueError, match=expected) as caught:
        check(of_hub(folder, **values), VOCAB_SIZE)
    assert "\n" not in str(caught.value)


def test_data_set_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    with pytest.raises(ValueError, match=r"datagen\.hub\.chat: expected rows .*found none after row 0"):
        check(of_hub(tmp_path / "set"), VOCAB_SIZE)
    folder = write_dataset(tmp_path / "torn", [{"prompt": "a"}], [{"prompt": "b"}])
    (folder / "data" / "train.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(ValueError, match=r"datagen\.hub\.chat: expected rows .*found none after row 0") as caught:
        check(of_hub(folder), VOCAB_SIZE)
    assert "\n" not in str(caught.value)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no way to the Hub."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / ".cache" / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / ".cache" / "hub"


def cached(hub_cache: Path, prompt: str, commit: str) -> None:
    """What a download of owner/talk at `main` leaves in the cache: links to what it got."""
    repository = hub_cache / "datasets--owner--talk"
    got = write_dataset(repository / "blobs" / commit, [{"prompt": prompt}], [{"prompt": "t"}])
    for path in [p for p in got.rglob("*") if p.is_file()]:
        link = repository / "snapshots" / commit / path.relative_to(got)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)


def test_branch_is_resolved_to_its_commit(hub_cache: Path) -> None:
    cached(hub_cache, "old", COMMIT)
    branch, commit = of_hub("owner/talk", revision="main"), of_hub("owner/talk", revision=COMMIT)
    assert prompts_of(branch) == prompts_of(commit) == ["old"]
    assert content(branch) == content(commit)
    said = told(branch)["datagen.hub.chat"]
    assert (said["revision"], said["commit"], said["revision_moves"]) == ("main", COMMIT, True)
    assert told(commit)["datagen.hub.chat"]["revision_moves"] is False
    cached(hub_cache, "new", COMMIT[::-1])
    assert prompts_of(branch) == ["new"]
    assert content(branch) != content(commit)
    assert prompts_of(commit) == ["old"]


@pytest.mark.parametrize(
    ("path", "revision", "expected"),
    [
        ("owner/talk", None, r"datagen\.hub\.chat\.revision: must be set for a Hub id .*found null"),
        ("owner/talk", "main", r"datagen\.hub\.chat: expected owner/talk at revision main on the Hub or in its cache"),
        ("owner/talk", COMMIT, rf"datagen\.hub\.chat: expected owner/talk at revision {COMMIT} on the Hub"),
        ("./talk", "main", r"datagen\.hub\.chat\.path=\./talk: expected an existing folder or a Hub id"),
        ("talk", "main", r"datagen\.hub\.chat\.path=talk: expected an existing folder or a Hub id"),
    ],
)
def test_data_set_that_cannot_be_reached_is_refused(
    hub_cache: Path, path: str, revision: str | None, expected: str
) -> None:
    with pytest.raises(ValueError, match=expected) as caught:
        check(of_hub(path, revision=revision), VOCAB_SIZE)
    assert "\n" not in str(caught.value)


def test_objects_that_differ_from_row_to_row_survive_as_json_text(tmp_path: Path) -> None:
    calls = [
        [{"role": "user", "content": "u"}, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {k: 1}}]}]
        for k in "ab"
    ]
    pq.write_table(pa.Table.from_pylist([{"messages": json.dumps(c)} for c in calls]), tmp_path / "p.parquet")
    found = list(load(config_of(str(tmp_path / "p.parquet"), regenerate=False), VOCAB_SIZE))
    assert [one.messages[1]["tool_calls"][0]["arguments"] for one in found] == [{"a": 1}, {"b": 1}]
