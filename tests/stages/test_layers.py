"""One list of layers: what engines capture, the records name, training used and the exported draft asks for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import Workspace, write_json
from stages.calibrate import stage as calibrate
from stages.calibrate.config import CalibrateConfig
from stages.corpus import Corpus
from stages.draft.artifact import Calibration, Draft
from stages.draft.config import DraftConfig
from stages.engine.config import EngineConfig
from stages.evaluate import stage as evaluate
from stages.evaluate.config import EvaluateConfig
from stages.events import Events
from stages.hidden_states.config import HiddenStatesConfig
from stages.target import Target
from stages.train import stage as train
from stages.train.job import EXPORT, RESULT
from tests.stages.draft_helpers import CONFIG, DRAFT, LAYERS, make_job, random_sequences
from tests.stages.served_helpers import artifact

ENGINE = EngineConfig(max_model_len=64)
OTHER = replace(DRAFT, aux_layer_ids=(1, 2))
Run = Callable[[DraftConfig], Any]


class AskedError(Exception):
    """Raised in place of starting engines."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What stages ask for when they ask for states, which they do not get."""
    seen: list[dict[str, Any]] = []

    def states_of(sequences: Any, target: Target, layer_ids: Any, *_: Any, **how: Any) -> None:
        seen.append({"layer_ids": layer_ids, **how})
        raise AskedError

    for stage in (train, calibrate):
        monkeypatch.setattr(stage, "states_of", states_of)
    return seen


@pytest.fixture
def made(tmp_path: Path) -> tuple[Target, Corpus, Draft]:
    """A target, a corpus and a draft that all name LAYERS."""
    job = make_job(tmp_path, CONFIG, random_sequences(5, 20))
    facts = {"temperature": 0.0, "layer_ids": list(LAYERS)}
    corpus = replace(job.corpus, record=replace(job.corpus.record, facts=facts))
    draft = artifact(Draft, tmp_path / "trained", {"layer_ids": list(LAYERS)})
    export(draft.checkpoint, DRAFT)
    return job.target, corpus, draft


def export(checkpoint: Path, draft: DraftConfig) -> None:
    """The part of an exported checkpoint that names layers."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    write_json(checkpoint / "config.json", {"aux_hidden_state_layer_ids": list(draft.aux_layer_ids)})


@pytest.fixture
def run_train(made: tuple[Target, Corpus, Draft], tmp_path: Path) -> Run:
    def run(draft: DraftConfig) -> Any:
        target, corpus, _ = made
        with Workspace(tmp_path / "artifacts" / "train", "t").locked() as out:
            store = HiddenStatesConfig()
            return train.run(CONFIG, target, corpus, draft=draft, engine=ENGINE, hidden_states=store, out=out)

    return run


@pytest.fixture
def run_calibrate(made: tuple[Target, Corpus, Draft], tmp_path: Path) -> Run:
    def run(draft: DraftConfig) -> Any:
        config, store = CalibrateConfig(), HiddenStatesConfig()
        with Workspace(tmp_path / "artifacts" / "calibrate", "c").locked() as out:
            shared: dict[str, Any] = {"draft": draft, "engine": ENGINE, "hidden_states": store}
            return calibrate.run(config, *made, **shared, max_sequence_tokens=512, out=out)

    return run


def test_train_holds_engines_to_the_corpus(
    run_train: Run, made: tuple[Target, Corpus, Draft], asked: list[dict[str, Any]]
) -> None:
    for draft in (DRAFT, OTHER):  # a corpus has no states in it
        with pytest.raises(AskedError):
            run_train(draft)
    assert [one["layer_ids"] for one in asked] == [LAYERS, (1, 2, 4)]
    assert [one["references"] for one in asked] == [[made[1].path.absolute()]] * 2


def test_a_corpus_of_a_deeper_target_is_refused(
    run_train: Run, made: tuple[Target, Corpus, Draft], asked: list[dict[str, Any]]
) -> None:
    made[1].record.facts["layer_ids"] = [1, 3, 5]
    with pytest.raises(ValueError, match=r"layers: expected \[4\] .*found \[5\] in .*corpus/record\.json: the last of"):
        run_train(DRAFT)
    assert not asked


def test_a_draft_is_exported_for_the_layers_it_was_trained_on(run_train: Run, tmp_path: Path) -> None:
    work = tmp_path / "artifacts" / "train.partial"
    export(work / EXPORT, OTHER)
    (work / RESULT).write_text(json.dumps({"counts": {}, "metrics": {}, "facts": {}}))
    Events(work).metrics({"loss": 1.0}, step=1)
    with pytest.raises(
        ValueError, match=r"layers: expected \[1, 3, 4\] .*found \[1, 2, 4\] in .*checkpoint/config\.json"
    ):
        run_train(DRAFT)
    export(work / EXPORT, DRAFT)
    assert run_train(DRAFT).record.facts["layer_ids"] == [1, 3, 4]


def test_calibrate_takes_the_layers_of_the_draft_or_none(
    run_calibrate: Run, made: tuple[Target, Corpus, Draft], asked: list[dict[str, Any]]
) -> None:
    draft = made[2]
    with pytest.raises(ValueError, match=r"expected \[1, 2, 4\] .*found \[1, 3, 4\] in .*record\.json: layer_ids"):
        run_calibrate(OTHER)
    export(draft.checkpoint, OTHER)
    with pytest.raises(
        ValueError, match=r"expected \[1, 3, 4\] .*found \[1, 2, 4\] in .*config\.json: aux_hidden_state"
    ):
        run_calibrate(DRAFT)
    assert not asked
    export(draft.checkpoint, DRAFT)
    with pytest.raises(AskedError):
        run_calibrate(DRAFT)
    assert asked[0]["layer_ids"] == LAYERS
    assert asked[0]["references"] == [draft.path]


def test_evaluate_serves_a_draft_of_the_layers_in_the_config(
    made: tuple[Target, Corpus, Draft], tmp_path: Path
) -> None:
    target, corpus, _ = made
    calibration = artifact(Calibration, tmp_path / "calibrated", {})
    export(calibration.checkpoint, DRAFT)
    with (
        Workspace(tmp_path / "artifacts" / "evaluate", "e").locked() as out,
        pytest.raises(ValueError, match=r"expected \[1, 2, 4\] .*found \[1, 3, 4\] in .*calibrated/checkpoint/config"),
    ):
        evaluate.run(EvaluateConfig(), target, corpus, calibration, draft=OTHER, engine=ENGINE, out=out)
