"""Identities, resume decisions, and the words in which they are explained."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeline import dag
from pipeline.config import ConfigError, PipelineConfig, Request, conf_path, load
from pipeline.dag import NAMES, STAGES, finished, plan, typed
from pipeline.run import select
from stages.artifacts import Artifact, ArtifactError, Record, Workspace, fingerprint, resource
from stages.target import Target


def config(tmp_path: Path, *overrides: str) -> PipelineConfig:
    return load(conf_path("tiny"), [f"out={tmp_path}", *overrides])


def identities(config: PipelineConfig) -> dict[str, str]:
    return {name: node.workspace.identity for name, node in plan(config).items()}


def changed(tmp_path: Path, *overrides: str) -> set[str]:
    """Stages that another config would make anew."""
    before, after = identities(config(tmp_path)), identities(config(tmp_path, *overrides))
    return {name for name in NAMES if before[name] != after[name]}


def complete(settings: PipelineConfig, *names: str) -> None:
    for name in names:
        node = plan(settings)[name]
        node.workspace.path.mkdir(parents=True)
        (node.workspace.path / "data").write_text("x")
        (node.workspace.path / ".data.123").write_text("")  # the remains of a killed writer
        kind = type(node.stage.kind, (Artifact,), {})
        node.workspace.commit(kind, counts={}, metrics={}, facts={"built": True, "model": "model"})


def test_table_is_in_data_order() -> None:
    seen: set[str] = set()
    for stage in STAGES:
        assert seen.issuperset(stage.inputs)
        seen.add(stage.name)


def test_identity_follows_the_road(tmp_path: Path) -> None:
    after_train = {"train", "calibrate", "evaluate", "publish"}
    assert changed(tmp_path, "train.lr=1e-4") == after_train
    assert changed(tmp_path, "datagen.max_new_tokens=64") == after_train | {"datagen"}
    assert changed(tmp_path, "target.tiny.seed=7") == set(NAMES)
    assert changed(tmp_path, "publish.license=mit") == {"publish"}
    assert changed(tmp_path, "publish.repo_id=me/draft") == {"publish"}  # or a rerun that adds it would not upload


def test_a_stage_of_another_version_is_made_anew_with_all_that_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path)
    complete(settings, *NAMES)
    before = identities(settings)
    newer = tuple(replace(stage, version=stage.version + (stage.name == "train")) for stage in STAGES)
    monkeypatch.setattr(dag, "STAGES", newer)
    after = identities(settings)
    assert {name for name in NAMES if before[name] != after[name]} == {"train", "calibrate", "evaluate", "publish"}
    assert plan(settings)["train"].reason.startswith("format version ")
    assert plan(settings)["calibrate"].reason == "train was made anew"


@pytest.mark.parametrize(
    "override",
    [
        "engine.num_actors=1",
        "engine.kv_cache_gib=1",
        "train.num_workers=1",
        "train.checkpoint_every_steps=7",
        "train.sharding=fsdp",
        "train.activation_checkpointing=true",
        "hidden_states.segment_gib=1",
        "ray.num_cpus=2",
        "tracking.uri=http://127.0.0.1:1",
    ],
)
def test_machines_paths_and_addresses_are_not_identity(override: str, tmp_path: Path) -> None:
    assert changed(tmp_path, override) == set()


def test_a_warm_start_counts_by_content_not_by_path(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.safetensors").write_bytes(b"weights")
    assert changed(tmp_path, f"train.init_from={tmp_path}/a") == {"train", "calibrate", "evaluate", "publish"}
    one = identities(config(tmp_path, f"train.init_from={tmp_path}/a"))
    assert identities(config(tmp_path, f"train.init_from={tmp_path}/b")) == one
    (tmp_path / "b" / "model.safetensors").write_bytes(b"others")
    assert identities(config(tmp_path, f"train.init_from={tmp_path}/b"))["train"] != one["train"]


def test_prompts_count_by_content_not_by_path(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "p.jsonl").write_text('{"turns": ["hello"]}\n')
    one = identities(config(tmp_path, f"datagen.prompts=[{tmp_path}/a/p.jsonl]"))
    assert identities(config(tmp_path, f"datagen.prompts=[{tmp_path}/b/p.jsonl]")) == one
    (tmp_path / "b" / "p.jsonl").write_text('{"turns": ["goodbye"]}\n')
    assert identities(config(tmp_path, f"datagen.prompts=[{tmp_path}/b/p.jsonl]"))["datagen"] != one["datagen"]


def test_plan_says_why(tmp_path: Path) -> None:
    first = config(tmp_path)
    assert plan(first)["train"].reason == "never made"
    complete(first, *NAMES)
    assert all(node.complete for node in plan(first).values())
    other = plan(config(tmp_path, "train.lr=0.5"))
    assert other["datagen"].complete
    assert other["train"].reason == "train.lr 0.002 → 0.5"
    assert other["calibrate"].reason == "train was made anew"
    other["train"].workspace.path.mkdir()
    assert "interrupted" in plan(config(tmp_path, "train.lr=0.5"))["train"].reason


def test_half_written_artifact_is_not_complete(tmp_path: Path) -> None:
    settings = config(tmp_path)
    complete(settings, "target")
    record = plan(settings)["target"].workspace.final / "record.json"
    record.write_text(record.read_text()[:20])
    node = plan(settings)["target"]
    assert not node.complete
    assert "damaged" in node.reason


@pytest.mark.parametrize("damage", ["removed", "cut", "another identity", "no facts"])
def test_damaged_artifact_is_made_again(damage: str, tmp_path: Path) -> None:
    settings = config(tmp_path)
    complete(settings, "target")
    final = plan(settings)["target"].workspace.final
    record = json.loads((final / "record.json").read_text())
    if damage == "removed":
        (final / "data").unlink()
    elif damage == "cut":
        (final / "data").write_text("")
    else:
        key, value = ("identity", "feed") if damage == "another identity" else ("facts", None)
        (final / "record.json").write_text(json.dumps(record | {key: value}))
    node = plan(settings)["target"]
    assert not node.complete
    assert node.reason.startswith("damaged: ")


def test_changed_content_is_refused_where_it_is_read(tmp_path: Path) -> None:
    """`plan` looks at sizes alone; a stage that takes the artifact reads all of it."""
    settings = config(tmp_path)
    complete(settings, "target")
    node = plan(settings)["target"]
    (node.workspace.final / "data").write_text("y")
    assert plan(settings)["target"].complete
    with pytest.raises(ArtifactError, match=r"data: changed since it was made"):
        typed({"target": Artifact.open(node.workspace.final)})


def test_artifact_that_another_run_made_meanwhile_is_taken(tmp_path: Path) -> None:
    settings = config(tmp_path)
    late = plan(settings)["target"]
    assert finished(late, settings) is None
    complete(settings, "target")
    assert finished(late, settings) == Artifact.open(late.workspace.final)


def test_selected_stages_need_their_inputs(tmp_path: Path) -> None:
    settings = config(tmp_path)
    with pytest.raises(ConfigError, match=r"train needs target.*never made"):
        select(Request(None, None, ("train",), ()), plan(settings))
    with pytest.raises(ConfigError, match=r"found 'trian'"):
        select(Request(None, None, ("trian",), ()), plan(settings))
    complete(settings, "target", "datagen")
    assert select(Request(None, None, ("train",), ()), plan(settings)) == ("train",)


def test_workspace_is_visible_only_when_whole(tmp_path: Path) -> None:
    space = Workspace(tmp_path / "thing", "abc")
    with space.locked() as out:
        (out.path / "data").write_text("x")
        (out.path / "work").mkdir()
        assert not space.final.exists()
        with pytest.raises(BlockingIOError, match=r"another run"), Workspace(tmp_path / "thing", "abc").locked():
            pass
        made = out.commit(Artifact, counts={"n": 1}, metrics={}, facts={}, drop=["work"])
    assert Artifact.load(space.final) == made
    assert sorted(path.name for path in space.final.iterdir()) == ["data", "record.json"]
    assert Record.read(space.final).counts == {"n": 1}
    with pytest.raises(ArtifactError, match=r"record\.json: expected JSON"):
        Artifact.load(tmp_path)


def test_resource_fields_are_left_out_of_identity() -> None:
    @dataclass(frozen=True)
    class Section:
        lr: float
        num_actors: int = resource(1)

    assert fingerprint(Section(0.1, num_actors=1)) == fingerprint(Section(0.1, num_actors=8)) == {"lr": 0.1}
    assert fingerprint(Section(0.2)) != fingerprint(Section(0.1))


def test_moved_target_folder_is_described_anew(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 4, "hidden_size": 8, "vocab_size": 1024, "max_position_embeddings": 512}
    folder = tmp_path / "here"
    folder.mkdir()
    save_file({"w": torch.zeros(1)}, folder / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text(json.dumps(shape))
    there = tmp_path / "there"
    before, after = (config(tmp_path / "out", "target.tiny=null", f"target.path={path}") for path in (folder, there))
    space = plan(before)["target"].workspace
    space.path.mkdir(parents=True)
    space.commit(Target, counts={}, metrics={}, facts={"built": False, "model": str(folder)})
    assert plan(before)["target"].complete
    folder.rename(there)
    moved = plan(after)["target"]
    assert moved.workspace.identity == space.identity
    assert moved.reason == f"the same target now lies at {there}"
