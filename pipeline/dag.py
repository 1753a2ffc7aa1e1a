"""The road, in data order: what each stage takes, what changes its result, and how it is called.

    target ─► datagen ─► train ─► calibrate ─► evaluate ─► publish

Read this first. An artifact's identity follows from this table and the config alone, so what a run
would do is known before any process starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

from pipeline.config import PipelineConfig, flat
from stages.artifacts import Artifact, ArtifactError, Layout, Record, Workspace, digest, fingerprint
from stages.datagen.sources import content as datagen_content
from stages.draft.config import captured_layers
from stages.target import content, is_current
from stages.train.warm_start import content as init_content

if TYPE_CHECKING:
    from stages.corpus import Corpus
    from stages.draft.artifact import Calibration, Draft, Report
    from stages.target import Target


class Inputs(TypedDict, total=False):
    """Artifacts by the stage that made them; a stage is given those that its row of the table names.

    `run` is the folder of the run that asks: no part of an identity.
    """

    target: Target
    datagen: Corpus
    train: Draft
    calibrate: Calibration
    evaluate: Report
    run: Path


@dataclass(frozen=True)
class Stage:
    """One node of the graph."""

    name: str
    kind: str  # of the artifact
    inputs: tuple[str, ...]  # stages whose artifacts it takes
    config: tuple[str, ...]  # sections of PipelineConfig that change its result
    version: int  # of what it writes; raise it when the same inputs give another output
    run: Callable[[PipelineConfig, Inputs, Workspace], Artifact]


# Stage modules are imported where they run: a driver that skips everything needs neither torch nor vLLM.


def _target(c: PipelineConfig, i: Inputs, out: Workspace) -> Artifact:
    from stages.target import prepare

    return prepare(c.target, out=out)


def _datagen(c: PipelineConfig, i: Inputs, out: Workspace) -> Artifact:
    from stages.datagen.stage import run

    layer_ids = captured_layers(c.draft, i["target"].shape)
    return run(c.datagen, i["target"], engine=c.engine, hidden_states=c.hidden_states, layer_ids=layer_ids, out=out)


def _train(c: PipelineConfig, i: Inputs, out: Workspace) -> Artifact:
    from stages.train.stage import run

    return run(
        c.train, i["target"], i["datagen"], draft=c.draft, engine=c.engine, hidden_states=c.hidden_states, out=out
    )


def _calibrate(c: PipelineConfig, i: Inputs, out: Workspace) -> Artifact:
    from stages.calibrate.stage import run

    shared: dict[str, Any] = {"draft": c.draft, "engine": c.engine, "hidden_states": c.hidden_states}
    longest = c.train.max_sequence_tokens  # part of the draft's identity already
    return run(c.calibrate, i["target"], i["datagen"], i["train"], **shared, max_sequence_tokens=longest, out=out)


def _evaluate(c: PipelineConfig, i: Inputs, out: Workspace) -> Artifact:
    from stages.evaluate.stage import run

    return run(c.evaluate, i["target"], i["datagen"], i["calibrate"], draft=c.draft, engine=c.engine, out=out)


def _publish(c: PipelineConfig, i: Inputs, out: Workspace) -> Artifact:
    from stages.publish.stage import run
    from stages.tracking_state import await_parent_run, store_uri

    made = (i["target"], i["datagen"], i["train"], i["calibrate"], i["evaluate"])
    told = {name: fingerprint(getattr(c, name)) for stage in STAGES for name in stage.config}  # no paths, no addresses
    provenance = {
        "config": told,
        "code_versions": {a.record.kind: a.record.code_version for a in made},
        "mlflow_run": await_parent_run(store_uri(c.tracking.uri, out.layout.root), i["run"]),
    }
    return run(c.publish, *made, draft=c.draft, provenance=provenance, out=out)


STAGES: tuple[Stage, ...] = (
    Stage("target", "Target", (), ("target",), 1, _target),
    Stage("datagen", "Corpus", ("target",), ("datagen", "engine"), 4, _datagen),
    Stage("train", "Draft", ("target", "datagen"), ("train", "draft", "engine", "hidden_states"), 2, _train),
    Stage(
        "calibrate",
        "Calibration",
        ("target", "datagen", "train"),
        ("calibrate", "draft", "engine", "hidden_states"),
        3,
        _calibrate,
    ),
    Stage("evaluate", "Report", ("target", "datagen", "calibrate"), ("evaluate", "draft", "engine"), 2, _evaluate),
    Stage(
        "publish", "Release", ("target", "datagen", "train", "calibrate", "evaluate"), ("publish", "draft"), 3, _publish
    ),
)
NAMES: tuple[str, ...] = tuple(stage.name for stage in STAGES)


def typed(artifacts: Mapping[str, Artifact]) -> Inputs:
    """The same artifacts as objects of their own classes. Raises ArtifactError when a file of one was changed."""
    from stages.corpus import Corpus
    from stages.draft.artifact import Calibration, Draft, Release, Report
    from stages.target import Target

    kinds: dict[str, type[Artifact]] = {k.__name__: k for k in (Target, Corpus, Draft, Calibration, Report, Release)}
    loaded = {name: kinds[a.record.kind].load(a.path) for name, a in artifacts.items()}
    for artifact in loaded.values():
        artifact.check_files(contents=True)
    return cast(Inputs, loaded)


def stage_params(config: PipelineConfig, stage: Stage) -> dict[str, Any]:
    """The config values that change a stage's result, as dotted keys."""
    return {key: value for section in stage.config for key, value in flat(getattr(config, section), section).items()}


@dataclass(frozen=True)
class Node:
    """A stage of one run: where its artifact belongs, and why it has or has not to be made."""

    stage: Stage
    workspace: Workspace
    complete: bool
    reason: str

    @property
    def name(self) -> str:
        return self.stage.name


def plan(config: PipelineConfig) -> dict[str, Node]:
    """Every stage's identity and whether its artifact is there already. Reads disk, starts nothing."""
    layout = Layout(Path(config.out).resolve())
    nodes: dict[str, Node] = {}
    for stage in STAGES:
        inputs = {name: nodes[name].workspace.identity for name in stage.inputs}
        told = {section: _told(config, section) for section in stage.config}
        identity = digest([stage.name, stage.version, told, inputs])
        final = layout.artifact(stage.name, identity)
        workspace = Workspace(final, identity, stage.version, told, inputs)
        complete, reason = _state(stage, workspace, layout, config)
        nodes[stage.name] = Node(stage, workspace, complete, reason)
    return nodes


def finished(node: Node, config: PipelineConfig) -> Artifact | None:
    """The node's artifact if it is complete by now: another run may have made it since `plan`."""
    complete, _ = _state(node.stage, node.workspace, Layout(Path(config.out).resolve()), config)
    return Artifact.open(node.workspace.final) if complete else None


def _told(config: PipelineConfig, section: str) -> Any:
    """A section's part in an identity: its values, and the contents of the files that it names."""
    values = fingerprint(getattr(config, section))
    if section == "target":
        values["content"] = content(config.target)
    if section == "datagen":
        values["content"] = datagen_content(config.datagen)
    if section == "train" and config.train.init_from is not None:
        values["init"] = init_content(config.train)
    return values


def _state(stage: Stage, workspace: Workspace, layout: Layout, config: PipelineConfig) -> tuple[bool, str]:
    """Whether the artifact is there, whole, and why it has to be made if not."""
    if workspace.final.exists():
        try:
            found = Artifact.open(workspace.final)
            found.check_files(contents=False)
        except ArtifactError as error:
            return False, f"damaged: {error}"
        if (found.record.kind, found.identity) != (stage.kind, workspace.identity):
            return False, f"damaged: {workspace.final} holds the {found.record.kind} {found.identity}"
        if stage.name == "target" and not is_current(found, config.target):
            return False, f"the same target now lies at {config.target.path}"
        return True, f"complete since {found.record.created}"
    if workspace.path.exists():
        return False, "was interrupted; continues"
    for other in layout.others(stage.name, workspace.identity):
        try:
            return False, _difference(Record.read(other), workspace)
        except ArtifactError:
            continue
    return False, "never made"


def _difference(old: Record, new: Workspace) -> str:
    """Why an earlier artifact of the same stage does not serve, in the config's own words."""
    changes = [f"{key} {before!r} → {after!r}" for key, before, after in _changed(old.config, new.config)]
    changes += [f"{name} was made anew" for name, identity in new.inputs.items() if old.inputs.get(name) != identity]
    if old.format_version != new.format_version:
        changes.append(f"format version {old.format_version} → {new.format_version}")
    return "; ".join(changes[:4]) + (f" and {len(changes) - 4} more" if len(changes) > 4 else "")


def _changed(before: Any, after: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        names = list(dict.fromkeys([*before, *after]))
        nested = (_changed(before.get(n), after.get(n), f"{key}.{n}" if key else n) for n in names)
        return [change for changes in nested for change in changes]
    return [] if before == after else [(key, before, after)]
