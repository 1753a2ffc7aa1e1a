"""One list of target layers everywhere: what engines capture, training was given, and the exported draft asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.artifacts import RECORD, Artifact, read_json
from stages.corpus import Corpus


def check_exported(layer_ids: Sequence[int], checkpoint: Path) -> None:
    """Raise ValueError, naming both, unless a checkpoint asks for `layer_ids`: the aux layers, then the final one."""
    config = checkpoint / "config.json"
    aux = read_json(config).get("aux_hidden_state_layer_ids") or []
    _check(layer_ids, {f"{config}: aux_hidden_state_layer_ids with the final layer": [*aux, layer_ids[-1]]})


def check_trained(layer_ids: Sequence[int], draft: Artifact, checkpoint: Path) -> None:
    """`check_exported`, and the same for the record of the draft."""
    _check(layer_ids, {f"{draft.path / RECORD}: layer_ids": draft.record.facts["layer_ids"]})
    check_exported(layer_ids, checkpoint)


def check_corpus(layer_ids: Sequence[int], corpus: Corpus) -> None:
    """Raise ValueError when a corpus was written by a target of another depth.

    Its engines may have proved other aux layers: a corpus holds no states, and serves drafts of any layers.
    """
    told = corpus.record.facts.get("layer_ids") or layer_ids
    _check(layer_ids[-1:], {f"{corpus.path / RECORD}: the last of layer_ids": told[-1:]})


def _check(layer_ids: Sequence[int], told: Mapping[str, Any]) -> None:
    for where, found in told.items():
        if list(found) != list(layer_ids):
            raise ValueError(
                f"layers: expected {list(layer_ids)} (draft.aux_layer_ids and the target's number of layers), "
                f"found {list(found)} in {where}; give the config that it was made with, or make it again"
            )
