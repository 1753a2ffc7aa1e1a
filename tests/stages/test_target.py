"""The target: what its identity sees, where its record says it is, and what is refused before a download."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stages import target
from stages.artifacts import Workspace
from stages.target import Target, TargetConfig, TargetShape, content, is_current, known_shape, prepare
from stages.tiny_target.config import TinyTargetConfig
from tests.stages.served_helpers import artifact

SHAPE = TargetShape(num_layers=4, hidden_size=8, vocab_size=9, max_positions=99)
CONFIG = '{"num_hidden_layers": 4, "hidden_size": 8, "vocab_size": 9, "max_position_embeddings": 99}'
HUB = TargetConfig("owner/name", revision="main", shape=SHAPE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A target as far as its files' names go."""
    made = tmp_path / "target"
    (made / "original").mkdir(parents=True)
    (made / "config.json").write_text(CONFIG)
    save_file({"w": torch.zeros(1)}, made / "model.safetensors")
    for name in ("tokenizer.json", "merges.txt", "modeling_own.py", "own.tiktoken", ".hidden"):
        (made / name).write_text(name)
    (made / "original" / "consolidated.pth").write_text("weights")
    return made


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "merges.txt", "modeling_own.py", "own.tiktoken", "new.jinja"]
)
def test_every_file_of_a_folder_is_part_of_its_content(name: str, folder: Path) -> None:
    before = content(TargetConfig(str(folder)))
    with (folder / name).open("a") as file:
        file.write("x")
    after = content(TargetConfig(str(folder)))
    assert {n for n in before.keys() | after.keys() if before.get(n) != after.get(n)} == {name}


def test_hidden_files_and_subfolders_are_not_content(folder: Path) -> None:
    before = content(TargetConfig(str(folder)))
    (folder / ".hidden").write_text("changed")
    (folder / "original" / "consolidated.pth").write_text("changed")
    assert content(TargetConfig(str(folder))) == before


@pytest.mark.parametrize(("name", "large"), [("w.safetensors", 1), ("w.bin", 1), ("w.gguf", 1), ("w.json", 0)])
def test_large_files_are_told_by_size_and_ends(
    name: str, large: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 3 << 20
    if name == "w.gguf":
        monkeypatch.setattr(target, "WHOLE_BYTES", size - 1)

    def told(changed: int) -> str:
        value = bytearray(size)
        value[changed] = 1
        (folder / name).write_bytes(value)
        return str(content(TargetConfig(str(folder)))[name])

    assert (told(size // 2) == told(size // 2 + 1)) == bool(large)
    assert told(0) != told(size - 1)


def test_hub_id_without_a_revision_is_refused() -> None:
    assert known_shape(HUB) == SHAPE
    with pytest.raises(ValueError, match=r"target\.revision.*owner/name.*found null") as refused:
        known_shape(replace(HUB, revision=None))
    assert "\n" not in str(refused.value)


def test_moved_folder_keeps_its_content_but_not_its_record(folder: Path, tmp_path: Path) -> None:
    before = TargetConfig(str(folder))
    with Workspace(tmp_path / "artifact", "t").locked() as out:
        made = prepare(before, out=out)
    assert made.folder == folder
    assert is_current(made, before)

    after = TargetConfig(str(shutil.move(folder, tmp_path / "elsewhere")))
    assert content(after)["merges.txt"]
    assert not is_current(made, after)
    with pytest.raises(ValueError, match=f"expected the target in {folder}, found no such folder") as refused:
        _ = Target.load(made.path).folder  # must not ask the Hub for a folder's name
    assert "\n" not in str(refused.value)

    with Workspace(tmp_path / "artifact", "t").locked() as out:
        again = prepare(after, out=out)
    assert is_current(again, after)
    assert again.folder == tmp_path / "elsewhere"


def test_record_is_current_for_one_place_only(folder: Path, tmp_path: Path) -> None:
    tiny = TargetConfig(tiny=TinyTargetConfig())
    records = {
        "model": (tiny, artifact(Target, tmp_path / "a", {"built": True, "model": "model"})),
        "local": (TargetConfig(str(folder)), artifact(Target, tmp_path / "b", {"built": False, "model": str(folder)})),
        "hub": (HUB, artifact(Target, tmp_path / "c", {"built": False, "model": "owner/name"})),
    }
    for name, (config, _) in records.items():
        assert [other for other, (_, made) in records.items() if is_current(made, config)] == [name]
    with pytest.raises(ValueError, match="found no such folder"):
        _ = records["model"][1].folder
