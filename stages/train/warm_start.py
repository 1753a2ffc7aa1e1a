"""A draft that starts from another one: a DSpark, DFlash or other speculators checkpoint.

What fits by name and shape is taken, the rest starts fresh, and both are told. Embedding, LM head and
final norm stay the target's, whatever the checkpoint holds.
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
    from torch import nn  # checking a config must not cost torch's import

logger = logging.getLogger(__name__)

TARGETS = ("embed_tokens.", "lm_head.", "verifier_", "t2d", "d2t")  # the target's own, and vocabulary maps
# Values under which a weight of the same shape means something else.
MEANING = ("aux_hidden_state_layer_ids", "block_size", "sample_from_anchor", "mask_token_id", "draft_vocab_size")


def check_init(config: TrainConfig) -> None:
    """Raise ValueError, naming the key, when `init_from` cannot be a draft."""
    name = config.init_from
    if name is None:
        return
    if folder := local_folder(name):
        _weights(folder)
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
    differs: dict[str, list[Any]]  # config key: [the checkpoint's, the draft's]
    parameters_taken: int

    def counts(self) -> dict[str, int]:
        return {
            "init_tensors_taken": len(self.taken),
            "init_tensors_left": len(self.left),
            "init_tensors_fresh": len(self.fresh),
            "init_parameters_taken": self.parameters_taken,
        }


def warm_start(model: nn.Module, parameters: dict[str, nn.Parameter], config: TrainConfig) -> WarmStart | None:
    """Copy into `parameters`, the trained ones of `model`, what fits; None without `train.init_from`.

    Raises ValueError when nothing fits, or a value is not finite.
    """
    if config.init_from is None:
        return None
    folder = local_folder(config.init_from) or _download(config)
    taken, left = [], dict[str, str]()
    for path in _weights(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                shape = tuple(file.get_slice(name).get_shape())
                if name.startswith(TARGETS):
                    left[name] = "the target's own is used"
                elif name not in parameters:
                    left[name] = "the draft has no such weight"
                elif shape != (expected := tuple(parameters[name].shape)):
                    left[name] = f"shape {shape}, the draft's is {expected}"
                else:
                    tensor = file.get_tensor(name)
                    if not tensor.isfinite().all():
                        raise ValueError(f"{path}: {name} holds values that are not finite; start from another draft")
                    parameters[name].data.copy_(tensor)
                    taken.append(name)
    if not taken:
        told = "; ".join(f"{name}: {why}" for name, why in list(left.items())[:3])
        raise ValueError(
            f"train.init_from={config.init_from}: expected weights of a draft like this one, found none that fits "
            f"({told}); set draft.* as that draft has it, or leave train.init_from out"
        )
    start = WarmStart(
        source=folder.name if local_folder(config.init_from) else config.init_from,
        taken=tuple(sorted(taken)),
        fresh=tuple(name for name in parameters if name not in taken),
        left=left,
        differs=_differences(folder, getattr(model, "config", None)),
        parameters_taken=sum(math.prod(parameters[name].shape) for name in taken),
    )
    _tell(start)
    return start


def _tell(start: WarmStart) -> None:
    logger.info("%s: %d tensors taken: %s", start.source, len(start.taken), ", ".join(start.taken))
    for name, why in start.left.items():
        logger.info("%s: %s not taken: %s", start.source, name, why)
    if start.fresh:
        logger.warning("%s: %d tensors start fresh: %s", start.source, len(start.fresh), ", ".join(start.fresh))
    for key, (theirs, ours) in start.differs.items():
        logger.warning("%s: was trained with %s %s, this draft has %s", start.source, key, theirs, ours)


def _differences(folder: Path, config: Any) -> dict[str, list[Any]]:
    try:
        theirs = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
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
