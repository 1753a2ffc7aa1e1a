"""A draft that starts from another one: a DSpark, DFlash or other speculators checkpoint.

What fits by name and shape is taken, the rest starts fresh, and both are told. Embedding, LM head and
final norm stay the target's, whatever the checkpoint holds. Rows that stand for tokens of a draft
vocabulary go by token, not by place: two vocabularies of one size have the same shapes.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from stages.artifacts import file_digest
from stages.target import local_folder
from stages.train.config import TrainConfig

if TYPE_CHECKING:
    import torch
    from torch import nn  # checking a config must not cost torch's import

logger = logging.getLogger(__name__)

TARGETS = ("embed_tokens.", "lm_head.", "verifier_", "t2d", "d2t")  # the target's own, and vocabulary maps
VOCAB_ROWS = "markov_head.markov_w2.weight"  # one for every token of the draft's vocabulary
# Values under which a weight of the same shape means something else.
MEANING = ("aux_hidden_state_layer_ids", "block_size", "sample_from_anchor", "mask_token_id", "draft_vocab_size")


def check_init(config: TrainConfig) -> None:
    """Raise ValueError, naming the key, when `init_from` cannot be a draft."""
    name = config.init_from
    if name is None:
        return
    if folder := local_folder(name):
        _weights(folder)
        _check_head(folder, name)
    elif name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ValueError(f"train.init_from={name}: expected an existing folder or a Hub id (owner/name), found neither")
    elif config.init_revision is None:
        raise ValueError(
            f"train.init_revision: must be set for a Hub id (train.init_from={name}), found null; a branch moves: give "
            "a commit or a tag, or name the branch to follow it"
        )


def content(config: TrainConfig) -> dict[str, str]:
    """What an identity must know of the start: digests of a folder's weights, or the Hub id."""
    assert config.init_from is not None
    folder = local_folder(config.init_from)
    if folder is None:
        return {"hub": config.init_from}
    return {path.name: file_digest(path) for path in _weights(folder)}


@dataclass(frozen=True)
class WarmStart:
    """What became of every tensor: of the checkpoint's (taken, or not and why) and of the draft's (fresh)."""

    source: str  # Hub id, or the folder's name
    taken: tuple[str, ...]
    fresh: tuple[str, ...]
    left: dict[str, str]
    partly: dict[str, str]  # of the taken ones: how many rows
    differs: dict[str, list[Any]]  # config key: [the checkpoint's, the draft's]
    parameters_taken: int

    def counts(self) -> dict[str, int]:
        return {
            "init_tensors_taken": len(self.taken),
            "init_tensors_left": len(self.left),
            "init_tensors_partly_taken": len(self.partly),
            "init_tensors_fresh": len(self.fresh),
            "init_parameters_taken": self.parameters_taken,
        }


def warm_start(model: nn.Module, parameters: dict[str, nn.Parameter], config: TrainConfig) -> WarmStart | None:
    """Copy into `parameters`, the trained ones of `model`, what fits; None without `train.init_from`.

    Raises ValueError when nothing fits, a value is not finite, or the Markov head is of another kind.
    """
    if config.init_from is None:
        return None
    folder = local_folder(config.init_from) or _download(config)
    _check_head(folder, config.init_from)
    taken, left = [], dict[str, str]()
    rows = _common_rows(folder, model, len(parameters[VOCAB_ROWS]))
    for path in _weights(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                found = _fitting(name, file, parameters, rows)
                if isinstance(found, str):
                    left[name] = found
                    continue
                if not found.isfinite().all():
                    raise ValueError(f"{path}: {name} holds values that are not finite; start from another draft")
                parameters[name].data.copy_(found)
                taken.append(name)
    if not taken:
        told = "; ".join(f"{name}: {why}" for name, why in list(left.items())[:3])
        raise ValueError(
            f"train.init_from={config.init_from}: expected weights of a draft like this one, found none that fits "
            f"({told}); set draft.* as that draft has it, or leave train.init_from out"
        )
    partly = {}
    parameters_taken = sum(math.prod(parameters[name].shape) for name in taken)
    if rows is not None and VOCAB_ROWS in taken:
        size, width = parameters[VOCAB_ROWS].shape
        partly[VOCAB_ROWS] = f"{len(rows[0])} of {size} rows, those of tokens that both vocabularies have"
        parameters_taken -= (size - len(rows[0])) * width
    start = WarmStart(
        source=folder.name if local_folder(config.init_from) else config.init_from,
        taken=tuple(sorted(taken)),
        fresh=tuple(name for name in parameters if name not in taken),
        left=left,
        partly=partly,
        differs=_differences(folder, getattr(model, "config", None)),
        parameters_taken=parameters_taken,
    )
    _tell(start)
    return start


Rows = tuple["torch.Tensor", "torch.Tensor"]  # of the draft, and of the checkpoint: the same tokens


def _fitting(name: str, file: Any, parameters: dict[str, nn.Parameter], rows: Rows | None) -> torch.Tensor | str:
    """What the draft's weight `name` becomes, or why it stays."""
    if name.startswith(TARGETS):
        return "the target's own is used"
    if name not in parameters:
        return "the draft has no such weight"
    own, found = parameters[name].data, file.get_tensor(name)
    if name == VOCAB_ROWS and rows is not None and own.shape[1:] == found.shape[1:]:
        mixed = own.clone()
        mixed[rows[0]] = found[rows[1]].to(own)
        return mixed
    if own.shape != found.shape:
        return f"shape {tuple(found.shape)}, the draft's is {tuple(own.shape)}"
    return found


def _common_rows(folder: Path, model: nn.Module, size: int) -> Rows | None:
    """Which rows stand for the same tokens, when the vocabulary of `folder` is not the draft's own of `size` tokens."""
    import torch

    def ids_of(offsets: torch.Tensor | None, size: int) -> torch.Tensor:
        places = torch.arange(size)
        return places if offsets is None else offsets.cpu() + places

    offsets, found = None, 0
    for path in _weights(folder):
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if "d2t" in names:
                offsets = file.get_tensor("d2t")
            if VOCAB_ROWS in names:
                found = file.get_slice(VOCAB_ROWS).get_shape()[0]
    if not found:
        return None
    theirs, ours = ids_of(offsets, found), ids_of(getattr(model, "d2t", None), size)
    if torch.equal(ours, theirs):
        return None
    column = {token: row for row, token in enumerate(theirs.tolist())}
    pairs = [(row, column[token]) for row, token in enumerate(ours.tolist()) if token in column]
    own, other = torch.tensor(pairs, dtype=torch.long).view(-1, 2).unbind(1)
    return own, other


def _tell(start: WarmStart) -> None:
    logger.info("%s: %d tensors taken: %s", start.source, len(start.taken), ", ".join(start.taken))
    for name, how_much in start.partly.items():
        logger.warning("%s: of %s taken: %s", start.source, name, how_much)
    for name, why in start.left.items():
        logger.info("%s: %s not taken: %s", start.source, name, why)
    if start.fresh:
        logger.warning("%s: %d tensors start fresh: %s", start.source, len(start.fresh), ", ".join(start.fresh))
    for key, (theirs, ours) in start.differs.items():
        logger.warning("%s: was trained with %s %s, this draft has %s", start.source, key, theirs, ours)


def _config(folder: Path) -> dict[str, Any]:
    """What the checkpoint says of itself, nothing when it cannot be read."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _check_head(folder: Path, name: str) -> None:
    """Raise ValueError for a Markov head whose matrices fit here, but were trained behind a gate or a recurrence."""
    if (kind := _config(folder).get("markov_head_type", "vanilla")) != "vanilla":
        raise ValueError(
            f"train.init_from={name}: expected markov_head_type=vanilla in its config.json, found {kind}; vLLM serves "
            "no other, start from another draft"
        )


def _differences(folder: Path, config: Any) -> dict[str, list[Any]]:
    theirs = _config(folder)
    pairs = {key: [theirs[key], getattr(config, key, None)] for key in MEANING if key in theirs}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _weights(folder: Path) -> list[Path]:
    if not (found := sorted(folder.glob("*.safetensors"))):
        raise ValueError(f"train.init_from={folder}: expected a draft's safetensors files, found none")
    return found


def _download(config: TrainConfig) -> Path:
    from huggingface_hub import snapshot_download

    files = ["*.safetensors", "config.json"]
    return Path(snapshot_download(config.init_from, revision=config.init_revision, allow_patterns=files))
