"""A draft on disk, in the speculators format that vLLM (method=dspark) and speculators load.

`config.json` names the target as `speculators_config.verifier.name_or_path`: the Hub id, or the
absolute folder the draft was trained against (a release gets a name instead, see `name_target`). vLLM
ignores it when the draft is given next to its target; our loader ignores it always and takes the
target's folder as an argument, so files may move.
`model.safetensors` holds what was trained: embedding, LM head and final norm are the target's own. With a
reduced vocabulary vLLM and speculators also want its rows of the LM head and its tables, `t2d` and `d2t`;
the digest of its ids is in the file's metadata.
Weights are bf16; the confidence head stays fp32, as vLLM computes it, so that a folded map is exact, and
the rows of the LM head keep every bit of the target's.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig

from stages.artifacts import remove, write_json
from stages.draft.model import FROZEN, construct, fill_frozen, trainable
from stages.draft.vocab import set_vocab, vocab_digest
from stages.target import load_head

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
CALIBRATION_KEY = "dspark_calibration"
HEAD_PREFIX = "confidence_head."
HEAD_WEIGHT, HEAD_BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"
LM_HEAD, TARGET_TO_DRAFT, DRAFT_TO_TARGET = "lm_head.weight", "t2d", "d2t"  # of a reduced vocabulary
VOCAB_DIGEST = "draft_vocab_sha256"


def export_draft(model: DSparkDraftModel, folder: Path) -> None:
    """Write `model` to `folder`, replacing it, and check what was written.

    Raises ValueError when a weight is not finite or a tensor is missing.
    """
    config = json.loads(model.config.to_json_string(use_diff=False))
    config.pop("auto_map", None)  # would ask every reader for remote code
    config["dtype"] = "bfloat16"
    kept = {name: parameter.detach() for name, parameter in trainable(model).items()}
    if model.use_draft_vocab:
        kept |= {LM_HEAD: model.lm_head.weight.detach(), TARGET_TO_DRAFT: model.t2d, DRAFT_TO_TARGET: model.d2t}
    tensors = {name: _stored(name, tensor) for name, tensor in kept.items()}
    _write(folder, config, tensors)
    check_checkpoint(folder)


def check_checkpoint(folder: Path) -> None:
    """Every tensor that the config asks for is there, with its shape, and finite; nothing else is.

    Raises ValueError naming the file, what was expected and what was found. The confidence head is
    among the expected: vLLM would drop a missing one without a word.
    """
    with torch.device("meta"):
        model = construct(_read_config(folder))
    expected = {name: list(p.shape) for name, p in model.named_parameters() if name not in FROZEN}
    if model.use_draft_vocab:
        shapes = (model.lm_head.weight.shape, model.t2d.shape, model.d2t.shape)
        expected |= {name: list(s) for name, s in zip((LM_HEAD, TARGET_TO_DRAFT, DRAFT_TO_TARGET), shapes, strict=True)}
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        found = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        if found != expected:
            odd = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
            told = "; ".join(f"{name}: expected {expected.get(name)}, found {found.get(name)}" for name in odd[:3])
            raise ValueError(f"{folder / WEIGHTS}: {len(odd)} tensors differ from {CONFIG} ({told}); export it again")
        if model.use_draft_vocab:
            digest = (file.metadata() or {}).get(VOCAB_DIGEST)
            _check_vocab(file.get_tensor(TARGET_TO_DRAFT), file.get_tensor(DRAFT_TO_TARGET), digest, folder)
        for name in found:
            if not file.get_tensor(name).isfinite().all():
                raise ValueError(f"{folder / WEIGHTS}: {name} holds values that are not finite; it cannot be served")


def load_draft(folder: Path, target_folder: Path) -> DSparkDraftModel:
    """The draft in `folder` as fp32 module in eval mode, its frozen parts from `target_folder`.

    Raises ValueError when the checkpoint is incomplete or does not fit the target.
    """
    check_checkpoint(folder)
    config = _read_config(folder)
    with torch.random.fork_rng(devices=[]):  # construction draws random weights; the caller's generator stays
        model = construct(config)
    tensors = load_file(folder / WEIGHTS)
    if model.use_draft_vocab:
        del tensors[TARGET_TO_DRAFT]
        set_vocab(model, _ids(tensors.pop(DRAFT_TO_TARGET)))
    fill_frozen(model, load_head(target_folder))
    if model.use_draft_vocab and not torch.equal(tensors.pop(LM_HEAD).float(), model.lm_head.weight):
        raise ValueError(
            f"{folder / WEIGHTS}: its rows of the LM head are not those of {target_folder}; name the target that "
            "the draft was trained against"
        )
    parameters = trainable(model)
    for name, tensor in tensors.items():
        parameters[name].data.copy_(tensor)
    return model.eval()


def head_digest(folder: Path) -> str:
    """SHA-256 (hex) of the confidence head's tensors: names, dtypes and bytes.

    Raises ValueError when the checkpoint has no confidence head.
    """
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        names = sorted(name for name in file.keys() if name.startswith(HEAD_PREFIX))  # noqa: SIM118
        return _digest({name: file.get_tensor(name) for name in names}, folder)


def scale_confidence(folder: Path, out: Path, scale: float, shift: float) -> None:
    """Copy a checkpoint to `out` with its confidence logit z mapped to scale*z + shift.

    The map is folded into the head's weight and bias, so every server profits. `config.json` of the
    copy gets `dspark_calibration` with the map and the digest of the new head. Raises ValueError when
    the checkpoint has no head, or is calibrated already (a second map would calibrate twice).
    """
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if CALIBRATION_KEY in config:
        raise ValueError(
            f"{folder / CONFIG}: the confidence head is calibrated already ({config[CALIBRATION_KEY]}); "
            "start from the trained draft"
        )
    tensors = load_file(folder / WEIGHTS)
    if HEAD_WEIGHT not in tensors:
        raise ValueError(
            f"{folder / WEIGHTS}: expected a confidence head ({HEAD_WEIGHT}), found none; "
            "train with draft.confidence_head=true"
        )
    tensors[HEAD_WEIGHT] = (tensors[HEAD_WEIGHT].double() * scale).float()
    tensors[HEAD_BIAS] = (tensors[HEAD_BIAS].double() * scale + shift).float()
    head = {name: tensor for name, tensor in tensors.items() if name.startswith(HEAD_PREFIX)}
    config[CALIBRATION_KEY] = {"scale": scale, "shift": shift, "head_digest": _digest(head, folder)}
    _write(out, config, tensors)
    check_checkpoint(out)


def name_target(folder: Path, name: str) -> None:
    """Let `config.json` call the target `name`. Weights, and so every digest of them, stay as they are."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    config["speculators_config"]["verifier"]["name_or_path"] = name
    write_json(folder / CONFIG, config)


def _stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.cpu().contiguous()
    if name.startswith(HEAD_PREFIX):
        return tensor.float()
    if not tensor.is_floating_point():
        return tensor
    rounded = tensor.bfloat16()
    return tensor if name == LM_HEAD and not torch.equal(rounded.float(), tensor) else rounded


def _check_vocab(t2d_V: torch.Tensor, d2t_W: torch.Tensor, told: str | None, folder: Path) -> None:
    """Raise ValueError unless both tables name the same tokens in the same order, those of the digest that is told."""
    ids_W = _ids(d2t_W)
    if not torch.equal(t2d_V.nonzero()[:, 0], ids_W):
        raise ValueError(f"{folder / WEIGHTS}: t2d and d2t name different tokens; export the draft again")
    if told is not None and told != (found := vocab_digest(ids_W.numpy())):
        raise ValueError(
            f"{folder / WEIGHTS}: expected a vocabulary of digest {told}, found {found}; export the draft again"
        )


def _ids(d2t_W: torch.Tensor) -> torch.Tensor:
    return d2t_W.cpu() + torch.arange(len(d2t_W))


def _digest(head: dict[str, torch.Tensor], folder: Path) -> str:
    if not head:
        raise ValueError(f"{folder / WEIGHTS}: expected a confidence head ({HEAD_PREFIX}*), found none")
    sha = hashlib.sha256()
    for name, tensor in sorted(head.items()):
        sha.update(f"{name}:{tensor.dtype}:{list(tensor.shape)}".encode())
        sha.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def _read_config(folder: Path) -> DSparkSpeculatorConfig:
    """The config without the target's name, which speculators would look up, if need be on the Hub."""
    try:
        values: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        values["speculators_config"]["verifier"]["name_or_path"] = None
        values.pop(CALIBRATION_KEY, None)
        return DSparkSpeculatorConfig(**values)
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG}: expected a speculators DSpark config, found {error!r}") from error


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    beside = folder.with_name(f".{folder.name}.partial")
    remove(beside)
    beside.mkdir(parents=True)
    write_json(beside / CONFIG, config)
    metadata = {"format": "pt"}
    if DRAFT_TO_TARGET in tensors:
        metadata[VOCAB_DIGEST] = vocab_digest(_ids(tensors[DRAFT_TO_TARGET]).numpy())
    save_file(tensors, beside / WEIGHTS, metadata=metadata)
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)
