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
from road_helpers import config

from pipeline.dag import plan
from stages.artifacts import Workspace
from stages.corpus import SPLITS, Corpus, write_shard
from stages.draft.artifact import Calibration
from stages.evaluate.stage import run as evaluate
from stages.target import Target
from stages.train.stage import run as train

pytestmark = pytest.mark.e2e
SEQUENCES = 4


OVERRIDES = (
    "train.max_steps=null",
    "train.num_workers=1",
    "train.cpus_per_worker=1",
    "train.epochs=180",
    "train.batch_sequences=4",
    "train.anchors_per_sequence=48",
    "train.validate_every_steps=1000",
    "train.checkpoint_every_steps=1000",
    "evaluate.min_acceptance_length=7.0",
    "evaluate.max_new_tokens=48",
)


def known_by_heart(corpus: Corpus, out: Workspace) -> Corpus:
    """A corpus whose splits are all the same few sequences, the longest of `corpus`."""
    everything = [s for split in SPLITS for s in corpus.sequences(split)]
    chosen = sorted(everything, key=lambda s: (-int(s.loss_mask.sum()), s.id))[:SEQUENCES]
    out.path.mkdir(parents=True)
    for split in SPLITS:
        write_shard(out.path / f"{split}-00000.parquet", [replace(s, id=f"{split}-{s.id}") for s in chosen])
    return out.commit(Corpus, counts={}, metrics={}, facts=corpus.record.facts)


def test_memorised_draft_is_served_at_full_length(road: Path, small: list[str], tmp_path: Path) -> None:
    settings = config(small, road, *OVERRIDES)
    nodes = plan(settings)
    target = Target.load(nodes["target"].workspace.final)
    corpus = known_by_heart(Corpus.load(nodes["datagen"].workspace.final), Workspace(tmp_path / "corpus", "overfit"))
    spaces = {name: Workspace(tmp_path / name, f"overfit-{name}") for name in ("train", "evaluate")}
    for space in spaces.values():
        space.path.mkdir()
    shared = {"draft": settings.draft, "engine": settings.engine}
    ray.init(address="local", num_cpus=2, log_to_driver=False)
    try:
        states = settings.hidden_states
        draft = train(settings.train, target, corpus, hidden_states=states, out=spaces["train"], **shared)
        as_trained = Calibration(draft.path, draft.record)  # served without any calibration
        report = evaluate(settings.evaluate, target, corpus, as_trained, out=spaces["evaluate"], **shared)
    finally:
        ray.shutdown()
    acceptance = json.loads((report.path / "report.json").read_text())["acceptance"]
    assert acceptance["pooled"]["acceptance_length"] >= 7.0
