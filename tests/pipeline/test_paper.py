"""What `python -m pipeline.plan` says before anything starts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.config import conf_path, load
from pipeline.dag import plan as nodes_of
from pipeline.plan import corpus_size, main, told
from stages.corpus import Corpus, TokenSequence, write_shard
from stages.target import known_shape


def rows(text: str) -> dict[str, list[str]]:
    """Cells by the first one."""
    lines = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]
    return {line[0]: line[1:] for line in lines if line}


def test_the_k3_target_takes_what_its_shape_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conf=kimi_k3", f"out={tmp_path}"]) == 0
    told = rows(capsys.readouterr().out)
    assert told["states of a token"] == ["84.0 KiB", "6 layers x 7168, bfloat16"]
    assert told["longest sequence"] == ["672.0 MiB", "8,192 tokens"]
    assert told["states on disk"][1].startswith("if hidden_states.transport were disk; ")
    assert told["output folder"][1].startswith("checkpoints and drafts of 2,396,090,241 weights; ")


def test_a_corpus_that_is_there_is_counted(tmp_path: Path) -> None:
    config = load(conf_path("tiny"), [f"out={tmp_path}", "train.max_sequence_tokens=100"])
    shape = known_shape(config.target)
    node = nodes_of(config)["datagen"]
    chosen, tokens, exact = corpus_size(config, shape, node)
    assert not exact
    assert tokens == chosen * config.datagen.max_sequence_tokens > 0

    node.workspace.path.mkdir(parents=True)
    for split, length in (("train", 300), ("validation", 50), ("calibration", 120), ("evaluation", 7)):
        ids = np.zeros(length, dtype=np.int32)
        write_shard(node.workspace.path / f"{split}-00000.parquet", [TokenSequence("a", "", ids, ids > 0)])
    node.workspace.commit(Corpus, counts={}, metrics={}, facts={})
    assert corpus_size(config, shape, nodes_of(config)["datagen"]) == (3, 100 + 50 + 100, True)


def test_a_machine_that_could_not_upload_can_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main([f"out={tmp_path}", "publish.repo_id=me/draft"]) == 0
    assert main([f"out={tmp_path}", "publish.repo_id=draft"]) == 2
    assert capsys.readouterr().err.startswith("error: publish.repo_id='draft'")


def test_what_a_run_would_refuse_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for argument in ("train.lr=-1", "stages=training"):
        assert main(["conf=tiny", argument]) == 2
        assert capsys.readouterr().err.startswith(f"error: {argument}")


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1023, "1,023 B"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB")])
def test_bytes_as_people_read_them(size: int, text: str) -> None:
    assert told(size) == text
