"""The whole road at its smallest size, as a user runs it: everything real, then rerun, changed, killed and resumed.

One file, so that one worker process makes the road once for all tests that use it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from mlflow import MlflowClient
from road_helpers import PROMPTS_PER_DOMAIN, command, config, run

from pipeline.config import ROOT
from pipeline.dag import NAMES, plan
from stages.artifacts import Artifact, Layout, Workspace, file_digest
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
    f"evaluate.prompts_per_domain={SEQUENCES}",
)


def test_release_is_whole(road: Path, small: list[str]) -> None:
    nodes = plan(config(small, road))
    assert all(node.complete for node in nodes.values())
    release = nodes["publish"].workspace.final / "release"
    for name in ("config.json", "model.safetensors", "speculative_config.json", "README.md", "provenance.json"):
        assert (release / name).stat().st_size > 0, name
    served = nodes["calibrate"].workspace.final / "checkpoint"
    assert file_digest(release / "model.safetensors") == file_digest(served / "model.safetensors")
    told = json.loads((release / "provenance.json").read_text())
    assert {"target", "engine", "datagen", "hidden_states", "train", "draft", "publish"} <= told["config"].keys()
    assert told["config"]["train"]["max_steps"] == 12
    records = {kind: a.record for name in NAMES[:-1] for a in [Artifact.open(nodes[name].workspace.final)]
               for kind in [a.record.kind]}  # fmt: skip
    assert told["code_versions"] == {kind: record.code_version for kind, record in records.items()}
    assert {kind: a["identity"] for kind, a in told["artifacts"].items()} == {k: r.identity for k, r in records.items()}
    data = told["artifacts"]["Corpus"]["facts"]
    shards = [shard for split in SPLITS for shard in Corpus.load(nodes["datagen"].workspace.final).files(split)]
    assert data["files"] == {shard.name: file_digest(shard) for shard in shards}
    assert data["prompts"]["prompts.jsonl"] == file_digest(Path(small[1].partition("=")[2].strip("[]")))
    assert told["mlflow_run"] == finished_run(road)["mlflow_run"] != ""


def finished_run(road: Path) -> dict[str, Any]:
    """`run.json` of the run that made everything; later ones had nothing to make."""
    [made] = [run for path in Layout(road).runs() if (run := json.loads((path / "run.json").read_text()))["made"]]
    return made


def module(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", name, *args], capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_status_tells_the_run_and_its_stages(road: Path, small: list[str]) -> None:
    status = module("pipeline.status", *small, f"out={road}")
    assert status.returncode == 0, status.stderr
    rows = {line.split()[0]: line.split() for line in status.stdout.splitlines() if line}
    assert rows[finished_run(road)["run"]][1] == "finished"
    for name, node in plan(config(small, road)).items():
        assert rows[name][1:3] == [node.workspace.identity, "complete"]


def test_help_names_what_a_run_takes() -> None:
    told = module("pipeline.run", "--help")
    assert told.returncode == 0
    assert all(argument in told.stdout for argument in ("conf=", "stages=", "run=", *NAMES))


def test_finished_run_given_again_has_nothing_to_make(road: Path) -> None:
    before = finished_run(road)
    again = module("pipeline.run", f"run={before['run']}", f"out={road}")
    assert again.returncode == 0, again.stderr
    assert "nothing to make" in again.stderr
    after = finished_run(road)
    assert [after[key] for key in ("mlflow_run", "made", "status")] == [
        before["mlflow_run"], list(NAMES), "finished"
    ]  # fmt: skip


def test_mlflow_holds_the_run(road: Path) -> None:
    client = MlflowClient(f"sqlite:///{road / 'mlflow.db'}")
    parent = client.get_run(finished_run(road)["mlflow_run"])
    children = client.search_runs(
        [parent.info.experiment_id], filter_string=f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    )
    by_name = {run.info.run_name: run for run in children}
    assert set(by_name) == set(NAMES)
    assert {run.info.status for run in [parent, *children]} == {"FINISHED"}
    assert parent.data.params["train.max_steps"] == by_name["train"].data.params["train.max_steps"] == "12"
    [used] = parent.inputs.dataset_inputs
    assert used.dataset.digest == finished_run(road)["stages"]["datagen"]
    plots = [file.path for file in client.list_artifacts(by_name["evaluate"].info.run_id)]
    assert "acceptance.png" in plots
    [version] = client.search_model_versions("name = 'tiny-draft'")
    assert version.run_id == by_name["publish"].info.run_id


def test_counts_are_conserved_along_the_road(road: Path, small: list[str]) -> None:
    records = {
        name: json.loads((node.workspace.final / "record.json").read_text())
        for name, node in plan(config(small, road)).items()
    }
    corpus, draft = records["datagen"]["counts"], records["train"]["counts"]
    lost = sum(n for key, n in corpus.items() if key.startswith(("dropped_", "failed_")))
    assert corpus["prompts_in"] == 9 * PROMPTS_PER_DOMAIN == corpus["kept"] + lost
    splits = ("train", "validation", "calibration", "evaluation")
    assert corpus["kept"] == sum(corpus[f"kept_{split}"] for split in splits)
    assert draft["sequences_in"] == corpus["kept_train"] == corpus["sequences_train"]
    assert draft["validation_sequences_in"] == corpus["sequences_validation"]
    assert records["calibrate"]["counts"]["prompts_in"] == corpus["sequences_calibration"]
    assert records["evaluate"]["counts"]["prompts_in"] == corpus["sequences_evaluation"]


def test_rerun_keeps_everything_and_is_quick(road: Path, small: list[str]) -> None:
    began = time.monotonic()
    again = run(small, road)
    assert again.returncode == 0
    assert time.monotonic() - began < 20
    assert "nothing to make" in again.stderr


def test_changed_value_redoes_what_follows_and_says_why(road: Path, small: list[str]) -> None:
    nodes = plan(config(small, road, "train.lr=1e-3"))
    assert [name for name in NAMES if not nodes[name].complete] == ["train", "calibrate", "evaluate", "publish"]
    assert nodes["train"].reason == "train.lr 0.002 → 0.001"


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_driver_killed_in_every_stage_leaves_the_same_weights(road: Path, small: list[str], tmp_path: Path) -> None:
    nodes, more = plan(config(small, tmp_path)), ["train.checkpoint_every_steps=1"]  # every step tells of itself
    signs = {  # that a stage is at its work
        "target": "metrics.jsonl", "datagen": "work/engine-0.log", "train": "checkpoints/step-*/state.json",
        "calibrate": "engines/engine-0.log", "evaluate": "served/draft.log",
    }  # fmt: skip
    grace_s = 10 + config(small, tmp_path).train.grace_s  # to save, and to end every process
    stops = [(name, signal.SIGKILL) for name in signs]
    stops.insert(stops.index(("train", signal.SIGKILL)), ("train", signal.SIGTERM))
    for name, signum in stops:
        final = nodes[name].workspace.final
        partial = final.with_name(final.name + ".partial")
        before = set(partial.glob(signs[name]))
        with subprocess.Popen(command(small, tmp_path, *more), cwd=ROOT, stderr=subprocess.DEVNULL) as driver:
            deadline = time.monotonic() + 300
            while not set(partial.glob(signs[name])) - before:
                assert driver.poll() is None, name
                assert time.monotonic() < deadline, name
                time.sleep(0.05)
            started = psutil.Process(driver.pid).children(recursive=True)
            names = {process.pid: process.name() for process in started}
            stopped_at = time.monotonic()
            os.kill(driver.pid, signum)
            if signum == signal.SIGTERM:  # a driver that can clean up leaves nothing
                assert driver.wait(timeout=grace_s) == 128 + signum
                _, alive = psutil.wait_procs(started, timeout=max(0.0, stopped_at + grace_s - time.monotonic()))
                for part in ("raylet", "mooncake_master"):
                    assert any(part in told for told in names.values()), names
                assert not [names[process.pid] for process in alive]
        assert not final.exists()
        if (name, signum) == ("train", signal.SIGKILL):  # how states travel is no part of an identity
            more = ["hidden_states.transport=disk"]
    resumed = run(small, tmp_path, *more)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "was interrupted; continues" in resumed.stderr
    weights = [
        plan(config(small, out))["train"].workspace.final / "checkpoint/model.safetensors" for out in (road, tmp_path)
    ]
    assert file_digest(weights[0]) == file_digest(weights[1])


def known_by_heart(corpus: Corpus, out: Workspace) -> Corpus:
    """A corpus whose splits are all the same few sequences, the longest of `corpus`."""
    everything = [s for split in SPLITS for s in corpus.sequences(split)]
    chosen = sorted(everything, key=lambda s: (-int(s.loss_mask.sum()), s.id))[:SEQUENCES]
    out.path.mkdir(parents=True)
    for split in SPLITS:
        write_shard(out.path / f"{split}-00000.parquet", [replace(s, id=f"{split}-{s.id}") for s in chosen])
    return out.commit(Corpus, counts={}, metrics={}, facts=corpus.record.facts)


def test_memorised_draft_is_served_at_full_length(road: Path, small: list[str], tmp_path: Path) -> None:
    """Overfit and serve: a draft that knows four answers by heart, served from its exported files alone.

    Any disagreement between training and serving (anchor layout, positions, mask token, layer ids, the
    Markov head's previous token) drops the acceptance length to about 1.
    """
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
    assert report.record.counts["evaluated"] == SEQUENCES
    acceptance = json.loads((report.path / "report.json").read_text())["acceptance"]
    assert acceptance["pooled"]["acceptance_length"] >= 7.0
