"""What a finished training says of itself: `result.json`, from which the stage makes the record."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from stages.artifacts import file_digest, write_json
from stages.draft.checkpoint import WEIGHTS
from stages.hidden_states.wire import kind_of
from stages.train.checkpoint import TrainState
from stages.train.data import Order
from stages.train.job import EXPORT, RESULT, TrainError, TrainJob
from stages.train.warm_start import WarmStart


def check_visits(state: TrainState, order: Order) -> None:
    """Raise TrainError unless every planned visit of the steps that are done became something."""
    planned, accounted = order.visits(state.step), visits(state)
    if planned != accounted:
        raise TrainError(f"{planned} visits of sequences were planned, {accounted} are accounted for: {state}")


def visits(state: TrainState) -> int:
    """Visits of sequences so far, whatever became of them."""
    return state.visits_trained + state.visits_nonfinite + len(state.set_aside)


def write_result(
    job: TrainJob,
    state: TrainState,
    order: Order,
    num_parameters: int,
    start: WarmStart | None,
    totals: Mapping[str, float],
) -> None:
    """Counts, metrics and facts; the validation's metrics are those of the exported weights."""
    planned = order.visits(order.total_steps)
    counts = {
        "visits_planned": planned,
        "visits_trained": state.visits_trained,
        "visits_skipped_nonfinite": state.visits_nonfinite,
        "visits_stopped_early": planned - order.visits(state.step),
        **_by_reason(state.set_aside),
        "steps": state.step,
        "steps_nonfinite": len(state.nonfinite),
        **(start.counts() if start else {}),
    }
    facts = {
        "num_trainable_parameters": num_parameters,
        "weights_sha256": file_digest(job.out.path / EXPORT / WEIGHTS),
        "exported_step": state.step if state.best_step is None else state.best_step,
        "set_aside": state.set_aside,
        "nonfinite_steps": state.nonfinite,
        **({"warm_start": asdict(start)} if start else {}),
    }
    write_json(job.out.path / RESULT, {"counts": counts, "metrics": {**state.best_values, **totals}, "facts": facts})


def _by_reason(set_aside: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Counts of set-aside visits: all, and by the kind of their reasons."""
    counts = {"visits_set_aside": len(set_aside)}
    for _, reason in set_aside:
        key = "visits_set_aside_" + re.sub(r"\W+", "_", kind_of(reason).lower())
        counts[key] = counts.get(key, 0) + 1
    return counts
