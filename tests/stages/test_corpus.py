"""The corpus on disk: what is written comes back, and the same sequences give the same bytes."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from stages.artifacts import ArtifactError, Workspace
from stages.corpus import Corpus, TokenSequence, read_shard, tokens_checksum, write_shard


def sequence(id_: str, token_ids: list[int], mask: list[bool]) -> TokenSequence:
    messages = json.dumps([{"role": "user", "content": "Grüße, 世界 🌍"}], ensure_ascii=False)
    return TokenSequence(id_, "math", np.array(token_ids, np.int32), np.array(mask, bool), messages)


SEQUENCES = [
    sequence("a", [1, 2, 2**31 - 1], [False, True, True]),
    sequence("b", [7], [True]),
    sequence("c", list(range(500)), [i % 3 == 0 for i in range(500)]),
]


def test_shard_round_trip(tmp_path: Path) -> None:
    write_shard(tmp_path / "train-00000.parquet", SEQUENCES)
    found = read_shard(tmp_path / "train-00000.parquet")
    assert [(s.id, s.domain, s.messages) for s in found] == [(s.id, s.domain, s.messages) for s in SEQUENCES]
    for one, expected in zip(found, SEQUENCES, strict=True):
        assert one.input_ids.dtype == np.int32
        assert one.loss_mask.dtype == np.bool_
        np.testing.assert_array_equal(one.input_ids, expected.input_ids)
        np.testing.assert_array_equal(one.loss_mask, expected.loss_mask)
        assert one.checksum == expected.checksum


def test_shard_without_sequences(tmp_path: Path) -> None:
    write_shard(tmp_path / "train-00000.parquet", [])
    assert read_shard(tmp_path / "train-00000.parquet") == []


def test_same_sequences_same_bytes_and_nothing_left_beside(tmp_path: Path) -> None:
    write_shard(tmp_path / "one.parquet", SEQUENCES)
    write_shard(tmp_path / "two.parquet", SEQUENCES)
    assert (tmp_path / "one.parquet").read_bytes() == (tmp_path / "two.parquet").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.parquet", "two.parquet"]


def test_checksum_is_crc32_of_little_endian_int32() -> None:
    assert tokens_checksum([1, 2]) == zlib.crc32(bytes([1, 0, 0, 0, 2, 0, 0, 0]))
    assert tokens_checksum(np.array([1, 2], np.int64)) == tokens_checksum([1, 2])
    assert tokens_checksum([1, 2]) != tokens_checksum([2, 1])


def test_truncated_keeps_ids_and_mask_of_one_length() -> None:
    short = SEQUENCES[2].truncated(10)
    assert len(short) == len(short.input_ids) == len(short.loss_mask) == 10
    assert short.checksum == tokens_checksum(list(range(10)))


def test_variants_of_a_prompt_have_one_opening() -> None:
    def said(*messages: tuple[str, str]) -> TokenSequence:
        told = json.dumps([{"role": role, "content": text} for role, text in messages])
        return TokenSequence("x", "test", np.zeros(1, np.int32), np.ones(1, bool), told)

    told = [
        said(("user", "What is\n  ＸＮＯＲ?"), ("assistant", "A gate.")),
        said(("system", "Be brief."), ("user", "what IS xnor? ")),
        said(("user", "What is XNOR?"), ("assistant", "A gate."), ("user", "More.")),
    ]
    assert {sequence.opening for sequence in told} == {"what is xnor?"}
    assert said(("user", "What is NOR?")).opening == "what is nor?"


@pytest.mark.parametrize(
    ("mask", "expected"), [([0, 0, 1, 1], "5 6"), ([0, 0, 1, 0], "5 6"), ([1, 0, 1, 1], "5 6 7 8")]
)
def test_opening_without_messages_is_the_ids_before_the_answer(mask: list[int], expected: str) -> None:
    ids = np.array([5, 6, 7, 8], np.int32)
    assert TokenSequence("x", "test", ids, np.array(mask, bool)).opening == expected


def test_corpus_reads_a_split_in_order_over_its_files(tmp_path: Path) -> None:
    out = Workspace(final=tmp_path / "corpus", identity="x")
    out.path.mkdir()
    write_shard(out.path / "train-00001.parquet", SEQUENCES[2:])
    write_shard(out.path / "train-00000.parquet", SEQUENCES[:2])
    write_shard(out.path / "evaluation-00000.parquet", SEQUENCES[:1])
    out.commit(Corpus, counts={}, metrics={}, facts={})
    corpus = Corpus.load(tmp_path / "corpus")
    assert [s.id for s in corpus.sequences("train")] == ["a", "b", "c"]
    assert [s.id for s in corpus.sequences("evaluation")] == ["a"]
    assert corpus.sequences("validation") == []


def test_split_that_is_not_what_the_record_counts_is_refused(tmp_path: Path) -> None:
    out = Workspace(final=tmp_path / "corpus", identity="x")
    out.path.mkdir()
    write_shard(out.path / "train-00000.parquet", SEQUENCES)
    out.commit(Corpus, counts={"sequences_train": 3, "sequences_validation": 1}, metrics={}, facts={})
    corpus = Corpus.load(tmp_path / "corpus")
    assert len(corpus.sequences("train")) == 3
    with pytest.raises(ArtifactError, match=r"corpus: validation: expected 1 sequences, found 0 in 0 files; delete"):
        corpus.sequences("validation")


def test_corpus_without_a_record_is_refused(tmp_path: Path) -> None:
    write_shard(tmp_path / "train-00000.parquet", SEQUENCES)
    with pytest.raises(ArtifactError, match=r"record\.json: expected JSON"):
        Corpus.load(tmp_path)
