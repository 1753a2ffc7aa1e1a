"""The release folder: which files it may hold, and what must be true of them before anybody sees it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stages.artifacts import file_digest, write_whole
from stages.draft.artifact import TEMPERATURES, Calibration, Report
from stages.draft.checkpoint import CONFIG, WEIGHTS, check_checkpoint
from stages.publish.hub import SUMS

CHECKPOINT_FILES = (CONFIG, WEIGHTS)
CALIBRATION_FILES = (TEMPERATURES, "calibration.json", "reliability.png")
REPORT_FILES = ("report.json", "report.md", "acceptance.png", "positions.png")
WRITTEN_FILES = ("README.md", "speculative_config.json", "provenance.json")
ALLOWED = frozenset((*CHECKPOINT_FILES, *CALIBRATION_FILES, *REPORT_FILES, *WRITTEN_FILES, SUMS))
TEXT_SUFFIXES = (".json", ".md", "")


def copy_inputs(calibration: Calibration, report: Report, folder: Path) -> None:
    """Copy checkpoint, calibration files and report into `folder`.

    Raises ValueError when the checkpoint holds a file that would not be released (a shard, remote code).
    """
    odd = sorted(path.name for path in calibration.checkpoint.iterdir() if path.name not in CHECKPOINT_FILES)
    if odd:
        raise ValueError(f"{calibration.checkpoint}: expected {', '.join(CHECKPOINT_FILES)} only, found also {odd}")
    sources = [calibration.checkpoint / name for name in CHECKPOINT_FILES]
    if calibration.record.facts["calibrated"]:
        sources += [calibration.path / name for name in CALIBRATION_FILES if (calibration.path / name).exists()]
    sources += [report.path / name for name in REPORT_FILES]
    for source in sources:
        shutil.copyfile(source, folder / source.name)


def replace_folders(folder: Path, places: Iterable[str], name: str) -> None:
    """Write `name` for every absolute folder of `places` in the text files of a release.

    A release is read elsewhere: where the target lay on this machine says nothing there.
    """
    absolute = sorted((place for place in set(places) if Path(place).is_absolute()), key=len, reverse=True)
    for path in (path for path in sorted(folder.iterdir()) if path.suffix in TEXT_SUFFIXES):
        before = after = path.read_text(encoding="utf-8")
        written = _in_json if path.suffix == ".json" else str
        for place in absolute:
            # Whole paths only: /data is not to be found in https://x/data, in /data2 or in /data.old.
            pattern = rf"(?<![\w./-]){re.escape(written(place))}(?![\w-]|\.\w)"
            after = re.sub(pattern, written(name).replace("\\", r"\\"), after)
        if after != before:
            write_whole(path, after)


def shorten_paths(value: Any) -> Any:
    """A JSON value in which every absolute path, as value or key, is only its last part: the rest is the maker's."""
    if isinstance(value, dict):
        return {shorten_paths(key): shorten_paths(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [shorten_paths(inner) for inner in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def check_release(folder: Path, evaluated_sha256: Mapping[str, str], secrets: Mapping[str, str]) -> None:
    """Raise ValueError unless the folder may be published.

    The weights are bit for bit those that were evaluated; every tensor fits `config.json`; only allowed
    files are there; no text file holds one of the `secrets` (value by variable).
    """
    found = {path.name: file_digest(path) for path in sorted(folder.glob("*.safetensors"))}
    if found != dict(evaluated_sha256):
        raise ValueError(
            f"{folder}: expected the evaluated weights {dict(evaluated_sha256)}, found {found}; evaluate again"
        )
    check_checkpoint(folder)
    names = {path.name for path in folder.iterdir()}
    if not names <= ALLOWED or not {*CHECKPOINT_FILES, *REPORT_FILES, *WRITTEN_FILES} <= names:
        raise ValueError(f"{folder}: expected files among {sorted(ALLOWED)}, found {sorted(names)}")
    for path in sorted(folder.iterdir()):
        text = path.read_text(encoding="utf-8") if path.suffix in TEXT_SUFFIXES else ""
        held = [variable for variable, value in secrets.items() if value in text or _in_json(value) in text]
        if held:
            raise ValueError(
                f"{path}: holds the value of a secret from the environment ({', '.join(held)}); "
                "it must not be published"
            )


def _in_json(text: str) -> str:
    """`text` as it stands inside a JSON string."""
    return json.dumps(text)[1:-1]


def write_sums(folder: Path) -> list[str]:
    """Write SHA256SUMS over all other files (`sha256sum -c` checks it); returns all names, sorted."""
    names = sorted(path.name for path in folder.iterdir() if path.name != SUMS)
    write_whole(folder / SUMS, "".join(f"{file_digest(folder / name)}  {name}\n" for name in names))
    return sorted([*names, SUMS])
