"""Calibrate: make a draft's confidence mean what it says, on text that training never saw."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stages.artifacts import Workspace, remove, write_json
from stages.calibrate.config import CalibrateConfig
from stages.calibrate.plots import plot_reliability
from stages.calibrate.records import Records, check_records, collect, load, require_greedy, save
from stages.calibrate.scaling import (
    AffineFit,
    PositionMeasure,
    TemperatureFit,
    fit_affine,
    fit_temperatures,
    if_better,
    measure,
)
from stages.corpus import Corpus, TokenSequence
from stages.draft.artifact import TEMPERATURES, Calibration, Draft
from stages.draft.checkpoint import CALIBRATION_KEY, CONFIG, head_digest, load_draft, scale_confidence
from stages.draft.config import DraftConfig, captured_layers
from stages.draft.layers import check_trained
from stages.draft.model import num_predictions
from stages.engine.config import EngineConfig
from stages.hidden_states.config import HiddenStatesConfig
from stages.hidden_states.pool import check_sizes, states_of
from stages.hidden_states.wire import HiddenStatesReader
from stages.target import Target

RECORDS = "records.parquet"
WORK = "engines"


def run(
    config: CalibrateConfig,
    target: Target,
    corpus: Corpus,
    draft_artifact: Draft,
    *,
    draft: DraftConfig,
    engine: EngineConfig,
    hidden_states: HiddenStatesConfig,
    max_sequence_tokens: int,
    out: Workspace,
) -> Calibration:
    """Fit an affine map, fold it into a copy of the checkpoint, then fit temperatures for what is left.

    Needs a corpus that the target wrote at temperature 0 (see `records.py`). Reads the first
    `max_sequence_tokens` of a sequence, as training did. Raises ValueError for another corpus, a draft that is
    calibrated already, a sequence too large to fetch, or records too few or truncated. A draft without
    a confidence head is passed on unchanged, which the record says.
    """
    if not draft.confidence_head:
        return _without_head(draft_artifact, out)
    require_greedy(corpus)
    _require_uncalibrated(draft_artifact.checkpoint)
    if not (out.path / RECORDS).exists():
        layers = captured_layers(draft, target.shape)
        check_trained(layers, draft_artifact, draft_artifact.checkpoint)
        sequences = [sequence.truncated(max_sequence_tokens) for sequence in corpus.sequences("calibration")]
        check_sizes(sequences, target, layers, engine, hidden_states, num_ranks=1)
        out.events.progress("starting vLLM", 0, 0, "sequences")
        work, references = out.path / WORK, [draft_artifact.path]
        with (
            states_of(
                sequences, target, layers, engine, hidden_states, work=work, out=out, references=references
            ) as open_reader,
            closing(open_reader(1)) as reader,
        ):
            record(config, target, corpus, sequences, draft_artifact, reader, out)
    return fit(config, corpus, draft_artifact, out)


def record(
    config: CalibrateConfig,
    target: Target,
    corpus: Corpus,
    sequences: Sequence[TokenSequence],
    draft_artifact: Draft,
    reader: HiddenStatesReader,
    out: Workspace,
) -> None:
    """Draft on `sequences` of the calibration split and write the records, whole, into the workspace."""
    # Ray gives a stage one. A fixed number: sums are split by thread, and their low bits with them.
    torch.set_num_threads(config.threads)
    model = load_draft(draft_artifact.checkpoint, target.folder)
    provenance = {
        "calibrated": False,
        "num_positions": num_predictions(model),
        "draft": draft_artifact.identity,
        "head_digest": head_digest(draft_artifact.checkpoint),
        "corpus": corpus.identity,
        "target": target.identity,
        "temperature": 0.0,
    }

    def tell(done: int) -> None:
        flow = reader.flow()
        out.events.metrics(flow.metrics(), step=done)
        out.events.progress("drafting", done, len(sequences), "sequences", flow.note)

    records, counts = collect(reader, model, sequences, config, provenance, tell)
    save(replace(records, provenance=provenance | {"counts": counts}), out.path / RECORDS)


def fit(config: CalibrateConfig, corpus: Corpus, draft_artifact: Draft, out: Workspace) -> Calibration:
    """From the records in the workspace to the calibrated checkpoint and its files.

    Records that cannot be fitted are removed before the ValueError, so that the next try makes new ones:
    sequences may have been set aside for a reason that has passed.
    """
    records = load(out.path / RECORDS)
    openings = {sequence.id: sequence.opening for sequence in corpus.sequences("calibration")}
    is_fit_N = np.array([in_fit_part(openings[id_], config) for id_ in records.prompt_N], dtype=bool)
    fit_part, test_part = records.take(is_fit_N), records.take(~is_fit_N)
    try:
        check_records(fit_part, int(records.provenance["num_positions"]), config.min_records)
    except ValueError:
        remove(out.path / RECORDS)
        raise

    affine = fit_affine(fit_part.logits_NB, fit_part.accepted_N)
    affine = if_better(affine, test_part.logits_NB, test_part.accepted_N)
    scale_confidence(draft_artifact.checkpoint, out.path / "checkpoint", affine.scale, affine.shift)
    temperatures = fit_temperatures(
        affine.apply(fit_part.logits_NB),
        fit_part.accepted_N,
        np.geomspace(config.temperature_min, config.temperature_max, config.temperature_steps),
        bins=config.bins,
        min_records=config.min_records,
    )
    folded_NB = affine.apply(test_part.logits_NB)
    variants = {
        "raw": test_part.logits_NB.astype(np.float64),
        "folded": folded_NB,
        "folded and scaled": folded_NB / np.array([fitted.temperature for fitted in temperatures]),
    }
    measures = {name: measure(logits_NB, test_part.accepted_N, config.bins) for name, logits_NB in variants.items()}

    head = head_digest(out.path / "checkpoint")
    served = _engine_file(temperatures, measures, corpus, len(fit_part), head)
    write_json(out.path / TEMPERATURES, served)
    write_json(out.path / "calibration.json", _numbers(affine, temperatures, measures, fit_part, test_part, head))
    if len(test_part):
        plot_reliability(variants, test_part.accepted_N, config.bins, out.path / "reliability.png")
    return out.commit(
        Calibration,
        counts=records.provenance["counts"] | {"blocks_fit": len(fit_part), "blocks_test": len(test_part)},
        metrics=_metrics(affine, temperatures, measures),
        facts={
            "calibrated": True,
            "scale": affine.scale,
            "shift": affine.shift,
            "flags": [affine.flag, *(fitted.flag for fitted in temperatures)],
            "head_digest": head,
            "draft": draft_artifact.identity,
            "corpus": corpus.identity,
        },
        drop=[WORK],
    )


def in_fit_part(opening: str, config: CalibrateConfig) -> bool:
    """Whether the blocks of prompts with this opening fit or measure: a pure function of it and the seed."""
    hashed = hashlib.sha256(f"{config.seed}:{opening}".encode()).digest()
    return int.from_bytes(hashed[:8], "big") / 2**64 < config.fit_share


def _without_head(draft_artifact: Draft, out: Workspace) -> Calibration:
    remove(out.path / "checkpoint")
    shutil.copytree(draft_artifact.checkpoint, out.path / "checkpoint")
    facts = {"calibrated": False, "why": "draft.confidence_head=false", "draft": draft_artifact.identity}
    return out.commit(Calibration, counts={}, metrics={}, facts=facts)


def _require_uncalibrated(checkpoint: Path) -> None:
    found = json.loads((checkpoint / CONFIG).read_text(encoding="utf-8")).get(CALIBRATION_KEY)
    if found is not None:
        raise ValueError(
            f"{checkpoint / CONFIG}: expected an uncalibrated draft, found {found}; start from the trained draft"
        )


def _engine_file(
    temperatures: Sequence[TemperatureFit],
    measures: Mapping[str, Sequence[PositionMeasure]],
    corpus: Corpus,
    num_samples: int,
    head: str,
) -> dict[str, Any]:
    """What SGLang 0.5.23 reads, with TensorRT-LLM's spelling beside it (not verified against a release of that).

    SGLang refuses null in optional keys, so what could not be measured is left out.
    """
    values = [fitted.temperature for fitted in temperatures]
    errors = {
        "ece_before": [position.ece_survival for position in measures["folded"]],
        "ece_after": [position.ece_survival for position in measures["folded and scaled"]],
    }
    return {
        "temperatures": values,
        "sts_temperatures": values,
        "dataset": f"calibration split of corpus {corpus.identity}",
        "num_samples": num_samples,
        "head_digest": head,
    } | {key: value for key, value in errors.items() if None not in value}


def _numbers(
    affine: AffineFit,
    temperatures: Sequence[TemperatureFit],
    measures: Mapping[str, Sequence[PositionMeasure]],
    fit_part: Records,
    test_part: Records,
    head: str,
) -> dict[str, Any]:
    return {
        "affine": asdict(affine),
        "temperatures": [asdict(fitted) for fitted in temperatures],
        "measured_on_test_part": {name: [asdict(m) for m in positions] for name, positions in measures.items()},
        "blocks": {"fit": len(fit_part), "test": len(test_part)},
        "prompts": {"fit": len(set(fit_part.prompt_N)), "test": len(set(test_part.prompt_N))},
        "head_digest": head,
        "provenance": dict(fit_part.provenance),
    }


def _metrics(
    affine: AffineFit, temperatures: Sequence[TemperatureFit], measures: Mapping[str, Sequence[PositionMeasure]]
) -> dict[str, float]:
    """Means over positions; a measure that no position has is left out."""
    values = {"affine_scale": affine.scale, "affine_shift": affine.shift}
    values |= {f"temperature/{k + 1}": fitted.temperature for k, fitted in enumerate(temperatures)}
    for name, positions in measures.items():
        for measure_name in ("ece_survival", "ece_conditional", "brier", "auroc"):
            known = [value for p in positions if (value := getattr(p, measure_name)) is not None]
            if known:
                values[f"{measure_name}/{name.replace(' ', '_')}"] = float(np.mean(known))
    return values
