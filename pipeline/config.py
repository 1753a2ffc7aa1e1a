"""One config: dataclass defaults < conf/NAME.yaml < command line, then plain frozen dataclasses.

OmegaConf is not seen outside this module. Sections live beside their owners; here they are only
put together.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from stages.calibrate.config import CalibrateConfig
from stages.datagen.config import DatagenConfig
from stages.draft.config import DraftConfig
from stages.engine.config import EngineConfig
from stages.evaluate.config import EvaluateConfig
from stages.hidden_states.config import HiddenStatesConfig
from stages.publish.config import PublishConfig
from stages.secrets import without_secrets
from stages.target import TargetConfig
from stages.tracking import TrackingConfig
from stages.train.config import TrainConfig

# OmegaConf, YAML, a file that is no text or a number too long, a list where a mapping belongs, a closed file.
_UNREADABLE = (OmegaConfBaseException, YAMLError, ValueError, OverflowError, TypeError, OSError)
ROOT = Path(__file__).resolve().parent.parent
DEFAULT_CONF = "tiny"


class ConfigError(ValueError):
    """A configuration that must not start. The message is one line for the user."""


@dataclass(frozen=True)
class RayConfig:
    """Where the tasks run."""

    address: str = ""  # empty: RAY_ADDRESS if set (as under `ray job submit`), else a cluster of this process
    num_cpus: float | None = None  # of a cluster of this process; None: all cores


@dataclass(frozen=True)
class PipelineConfig:
    """Everything that a run is made of."""

    name: str
    out: str = "out"  # shared storage when more than one node takes part
    target: TargetConfig = field(default_factory=TargetConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    hidden_states: HiddenStatesConfig = field(default_factory=HiddenStatesConfig)
    datagen: DatagenConfig = field(default_factory=DatagenConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    publish: PublishConfig = field(default_factory=PublishConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    ray: RayConfig = field(default_factory=RayConfig)


@dataclass(frozen=True)
class Request:
    """What the command line asked for."""

    conf: str | None
    run: str | None
    stages: tuple[str, ...] | None
    overrides: tuple[str, ...]


def parse(args: Sequence[str]) -> Request:
    """Split `conf=`, `run=` and `stages=` from `section.key=value` overrides."""
    known: dict[str, str] = {}
    overrides = []
    for arg in args:
        key, equals, value = arg.partition("=")
        if not equals:
            raise ConfigError(f"argument {arg!r}: expected key=value (see --help)")
        if key in ("conf", "run", "stages"):
            if key in known or not value:
                found = f"{known[key]!r} and {value!r}" if key in known else "nothing"
                raise ConfigError(f"{key}=: expected one value, found {found} (see --help)")
            known[key] = value
        else:
            overrides.append(arg)
    if "conf" in known and "run" in known:
        raise ConfigError("conf= and run= were both given: a run already has its config; drop one of the two")
    stages = tuple(name for name in known["stages"].split(",") if name) if "stages" in known else None
    return Request(known.get("conf"), known.get("run"), stages, tuple(overrides))


def conf_path(name: str) -> Path:
    """The YAML file of `conf=NAME`; a path to a file is taken as it is."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else ROOT / "conf" / f"{name}.yaml"
    if os.path.isfile(path):  # false, not an error, for a name too long and a folder that is closed
        return path
    if path.suffix in (".yaml", ".yml") and path == Path(name):
        raise ConfigError(f"conf={name}: expected a file, found none")
    names = sorted(p.stem for p in (ROOT / "conf").glob("*.yaml"))
    close = difflib.get_close_matches(name, names)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ConfigError(f"conf={name}: {hint}found {', '.join(names)} in conf/; or give the path of a .yaml file")


def load(source: Path, overrides: Sequence[str] = ()) -> PipelineConfig:
    """Merge and type-check. Raises ConfigError naming the key, with the closest known one."""
    schema = OmegaConf.structured(PipelineConfig)
    try:
        merged = OmegaConf.merge(schema, OmegaConf.load(source))
    except _UNREADABLE as error:
        raise ConfigError(f"{source}: {_first_line(error)}") from error
    for override in overrides:
        try:
            merged = OmegaConf.merge(merged, OmegaConf.from_dotlist([override]))
        except _UNREADABLE as error:
            raise ConfigError(f"{override}: {_first_line(error)}") from error
    try:
        config = OmegaConf.to_object(merged)
        values = flat(config)
    except _UNREADABLE as error:
        raise ConfigError(f"{source}: {_first_line(error)}") from error
    for key, value in values.items():
        if (told := str(value)) != without_secrets(told):
            raise ConfigError(
                f"{key}: expected no secret, since the config is stored, tracked and published, found the value of "
                f"{without_secrets(told).strip('<>')}; whoever needs it reads the environment itself"
            )
    assert isinstance(config, PipelineConfig)
    return config


def to_yaml(config: PipelineConfig) -> str:
    """The whole config as YAML that `load` reads back to an equal object."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def plain(config: Any) -> dict[str, Any]:
    """A config section as nested plain values."""
    return dict(OmegaConf.to_container(OmegaConf.structured(config), resolve=True))


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """A config section as dotted keys."""
    items: dict[str, Any] = {}

    def visit(value: Any, key: str) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                visit(inner, f"{key}.{name}" if key else str(name))
        else:
            items[key] = value

    visit(plain(config), prefix)
    return items


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in without_secrets(str(error)).splitlines() if line.strip()]
    keys = [line for line in lines if line.startswith("full_key:")]
    named = f" ({keys[0].removeprefix('full_key:').strip()})" if keys else ""
    hint = "; a list is written [a,b]" if "TupleConfig" in lines[0] else ""
    return lines[0] + named + hint
