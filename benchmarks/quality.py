"""Two drafts from the same corpus and steps, with the paper's loss and speculators': `make bench-quality`.

Each goes the whole road (train, calibrate, evaluate with unmodified vLLM) on the config and overrides given, e.g.

    python -m benchmarks.quality conf=smollm2 target.path=DIR train.max_steps=600 --seeds 0,1,2

and shares target and corpus with the others by identity, in one output folder. A run that is killed goes on
where it was. Prints one JSON object: acceptance lengths that vLLM served and that validation measured,
and their ratio. `speculators` here is its loss: CE of the target's likeliest token, half of L1, means over labels,
and a target distribution renormalised over a reduced draft vocabulary (see `LossWeights`); model, anchors,
optimiser and data are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from pipeline.config import conf_path, load, parse
from pipeline.dag import plan
from stages.artifacts import Artifact

STAGES = "target,datagen,train,calibrate,evaluate"
SPECULATORS = {"ce_label": "target", "target_support": "draft", "denominator": "labels"}


def variants(l1_weight: float) -> dict[str, list[str]]:
    """Overrides of each side. The paper's are the defaults, so what the config says of them is put back."""
    paper = {"ce_label": "data", "target_support": "full", "denominator": "weights", "l1_weight": l1_weight}
    theirs = {**SPECULATORS, "l1_weight": l1_weight / 2}  # their tv is half of L1
    return {
        name: [f"train.{key}={value}" for key, value in values.items()]
        for name, values in (("ours", paper), ("speculators", theirs))
    }


def made(args: Sequence[str]) -> dict[str, Artifact]:
    """Run the road with `args`. Raises SystemExit with its code when it fails."""
    command = [sys.executable, "-m", "pipeline.run", f"stages={STAGES}", *args]
    if code := subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        raise SystemExit(code)
    request = parse(list(args))
    nodes = plan(load(conf_path(request.conf or "tiny"), request.overrides))
    return {name: Artifact.open(nodes[name].workspace.final) for name in STAGES.split(",")}


def told(artifacts: dict[str, Artifact]) -> dict[str, Any]:
    """What one draft came to."""
    report = json.loads((artifacts["evaluate"].path / "report.json").read_text(encoding="utf-8"))["acceptance"]
    validation = artifacts["train"].record.metrics
    return {
        "served_macro": report["macro"]["acceptance_length"],
        "served_macro_interval": report["macro"]["interval"],
        "served_pooled": report["pooled"]["acceptance_length"],
        "served_pooled_interval": report["pooled"]["interval"],
        "rounds": report["pooled"]["rounds"],
        "validation": validation.get("val_acceptance_length"),
        "validation_greedy": validation.get("val_greedy_acceptance_length"),
        "confidence_abs_error": validation.get("val_confidence_abs_error"),
        "steps": artifacts["train"].record.counts["steps"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0", help="train.seed of every pair, with commas between")
    options, args = parser.parse_known_args()
    config = load(conf_path(parse(args).conf or "tiny"), parse(args).overrides)
    found: dict[str, list[dict[str, Any]]] = {}
    inputs = set()
    for seed in options.seeds.split(","):
        for name, overrides in variants(config.train.l1_weight).items():
            artifacts = made([*args, *overrides, f"train.seed={seed}", "evaluate.min_acceptance_length=null"])
            inputs.add((artifacts["target"].identity, artifacts["datagen"].identity))
            found.setdefault(name, []).append({"seed": int(seed), **told(artifacts)})
    assert len(inputs) == 1, inputs  # one target, one corpus
    means = {name: mean(row["served_macro"] for row in rows) for name, rows in found.items()}
    out = Path(config.out).resolve()
    result = {
        "config": config.name,
        "out": os.path.relpath(out),
        "served_macro_mean": means,
        "served_macro_ratio": round(means["ours"] / means["speculators"], 4),
        **found,
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
