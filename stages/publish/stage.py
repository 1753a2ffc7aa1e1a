"""Publish: assemble the release folder, refuse what must not go out, upload when a repository is named."""

from __future__ import annotations

import json
from typing import Any

from stages.artifacts import Artifact, Workspace, remove, write_json, write_whole
from stages.corpus import Corpus
from stages.draft.artifact import RELEASE, Calibration, Draft, Release, Report
from stages.draft.checkpoint import name_target
from stages.draft.config import DraftConfig
from stages.publish.card import model_card, public_name
from stages.publish.config import PublishConfig
from stages.publish.hub import check, check_access, upload
from stages.publish.release import check_release, copy_inputs, replace_folders, shorten_paths, write_sums
from stages.secrets import secret_values
from stages.target import Target

STEPS = 3


def run(
    config: PublishConfig,
    target: Target,
    corpus: Corpus,
    draft_artifact: Draft,
    calibration: Calibration,
    report: Report,
    *,
    draft: DraftConfig,
    provenance: dict[str, Any],
    out: Workspace,
) -> Release:
    """Make `release/` from what was evaluated, check it, and upload it if `publish.repo_id` is set.

    `provenance`: JSON values that the release should name (the whole configuration, the MLflow run). Raises
    ValueError when the folder must not go out (see `check_release`) or the Hub could not take it.
    """
    check(config)
    check_access(config)
    folder = out.path / RELEASE
    remove(folder)
    folder.mkdir(parents=True)
    out.events.progress("assembling", 0, STEPS, "steps")
    copy_inputs(calibration, report, folder)
    name_target(folder, public_name(target))
    serving = {
        "model": config.repo_id or ".",
        "method": "dspark",
        "num_speculative_tokens": draft.num_speculative_tokens,
        "draft_sample_method": config.draft_sample_method,
        "rejection_sample_method": config.rejection_sample_method,
    }
    write_json(folder / "speculative_config.json", serving)
    artifacts = {a.record.kind: a for a in (target, corpus, draft_artifact, calibration, report)}
    write_json(folder / "provenance.json", {**provenance, "artifacts": {k: _origin(a) for k, a in artifacts.items()}})
    numbers = json.loads((report.path / "report.json").read_text(encoding="utf-8"))
    report_text = (report.path / "report.md").read_text(encoding="utf-8")
    write_whole(folder / "README.md", model_card(config, target, corpus, calibration, numbers, report_text, serving))
    # A target may have moved between stages, so each tells where it found it.
    places = {target.model, corpus.record.facts["target"]["model"], draft_artifact.record.facts["verifier"]}
    replace_folders(folder, places | {numbers["target"]["model"]}, public_name(target))
    origin = folder / "provenance.json"
    write_json(origin, shorten_paths(json.loads(origin.read_text(encoding="utf-8"))))

    out.events.progress("checking", 1, STEPS, "steps")
    check_release(folder, report.record.facts["draft"]["weights_sha256"], secret_values())
    names = write_sums(folder)
    facts: dict[str, Any] = {"files": names, "repo_id": config.repo_id, "commit": None}
    if config.repo_id is not None:
        out.events.progress("uploading", 2, STEPS, "steps", config.repo_id)
        facts["commit"] = upload(folder, names, config)
    size = sum((folder / name).stat().st_size for name in names)
    return out.commit(Release, counts={"files": len(names)}, metrics={"release_bytes": size}, facts=facts)


def _origin(artifact: Artifact) -> dict[str, Any]:
    record = artifact.record
    return {
        "identity": record.identity,
        "inputs": record.inputs,
        "code_version": record.code_version,
        "created": record.created,
        "facts": record.facts,
    }
