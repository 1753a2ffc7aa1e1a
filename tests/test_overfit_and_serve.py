"""Overfit and serve: a draft that knows four answers by heart, served from its exported files alone.

Any disagreement between training and serving (anchor layout, positions, mask token, layer ids, the
Markov head's previous token) drops the acceptance length to about 1.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from pipeline.config import ROOT, PipelineConfig, load
from stages.artifacts import Workspace
from stages.corpus import SPLITS, Corpus, write_shard
from stages.datagen.stage import run as datagen
from stages.draft.artifact import Calibration
from stages.evaluate.stage import run as evaluate
from stages.target import prepare
from stages.train.stage import run as train

pytestmark = pytest.mark.e2e
SEQUENCES = 4


@pytest.fixture
def config(tmp_path: Path) -> PipelineConfig:
    lines = (ROOT / "conf/prompts/tiny.jsonl").read_text().splitlines()
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines[::60]) + "\n")
    return load(
        ROOT / "conf/tiny.yaml",
        [
            "target.tiny.steps=150",
            f"datagen.prompts=[{tmp_path / 'prompts.jsonl'}]",
            "datagen.max_new_tokens=64",
            "engine.num_actors=1",
            "engine.cpus_per_actor=1",
            "train.num_workers=1",
            "train.cpus_per_worker=1",
            "train.epochs=180",
            "train.batch_sequences=4",
            "train.anchors_per_sequence=48",
            "train.validate_every_steps=1000",
            "train.checkpoint_every_steps=1000",
            "evaluate.min_acceptance_length=7.0",
            "evaluate.max_new_tokens=64",
        ],
    )


def known_by_heart(corpus: Corpus, out: Workspace) -> Corpus:
    """A corpus whose splits are all the same few sequences, the longest of `corpus`."""
    everything = [s for split in SPLITS for s in corpus.sequences(split)]
    chosen = sorted(everything, key=lambda s: (-int(s.loss_mask.sum()), s.id))[:SEQUENCES]
    out.path.mkdir(parents=True)
    for split in SPLITS:
        write_shard(out.path / f"{split}-00000.parquet", [replace(s, id=f"{split}-{s.id}") for s in chosen])
    return out.commit(Corpus, counts={}, metrics={}, facts=corpus.record.facts)


def test_memorised_draft_is_served_at_full_length(config: PipelineConfig, tmp_path: Path) -> None:
    spaces = {name: Workspace(tmp_path / name, f"overfit-{name}") for name in ("target", "all", "train", "eval")}
    for space in spaces.values():
        space.path.mkdir()
    ray.init(address="local", num_cpus=2, log_to_driver=False)
    try:
        target = prepare(config.target, out=spaces["target"])
        layer_ids = (*config.draft.aux_layer_ids, target.shape.num_layers)
        shared = {"engine": config.engine, "hidden_states": config.hidden_states}
        full = datagen(config.datagen, target, layer_ids=layer_ids, out=spaces["all"], **shared)
        corpus = known_by_heart(full, Workspace(tmp_path / "corpus", "overfit-corpus"))
        draft = train(config.train, target, corpus, draft=config.draft, out=spaces["train"], **shared)
        as_trained = Calibration(draft.path, draft.record)  # served without any calibration
        report = evaluate(
            config.evaluate, target, corpus, as_trained, draft=config.draft, engine=config.engine, out=spaces["eval"]
        )
    finally:
        ray.shutdown()
    acceptance = json.loads((report.path / "report.json").read_text())["acceptance"]
    assert acceptance["pooled"]["acceptance_length"] >= 7.0
