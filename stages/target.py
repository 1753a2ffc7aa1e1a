"""What the pipeline knows of a target model: where it is, its shape, its output head."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from stages.artifacts import Artifact, Workspace, file_digest, resource
from stages.tiny_target.config import TinyTargetConfig, check_tiny

if TYPE_CHECKING:
    import torch  # reading a config must not cost torch's import

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
WHOLE_BYTES = 64 << 20  # files up to this size, other than weights, are hashed whole
BUILT = "model"  # folder of the tiny target inside its artifact


@dataclass(frozen=True)
class TargetShape:
    """The numbers of a target that a draft must agree with."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int


@dataclass(frozen=True)
class TargetConfig:
    """A local folder, a Hub id, or the tiny target that is built on the spot."""

    path: str = resource("")  # folder or Hub id; empty only together with `tiny`
    # Commit, tag or branch; needed for a Hub id. Part of the identity as it is written: a branch that
    # moves does not remake anything, so a commit is the safe choice.
    revision: str | None = None
    trust_remote_code: bool = False
    tiny: TinyTargetConfig | None = None
    # Needed for a Hub id, so that a draft can be checked before anything is downloaded.
    shape: TargetShape | None = None


@dataclass(frozen=True)
class Target(Artifact):
    """A target that is ready to be served."""

    @property
    def model(self) -> str:
        """Folder (absolute) or Hub id."""
        return str(self.path / BUILT) if self.record.facts["built"] else str(self.record.facts["model"])

    @property
    def revision(self) -> str | None:
        value = self.record.facts["revision"]
        return None if value is None else str(value)

    @property
    def trust_remote_code(self) -> bool:
        return bool(self.record.facts["trust_remote_code"])

    @cached_property
    def folder(self) -> Path:
        """The local folder; a Hub id is resolved through the Hub's cache (and downloaded if absent).

        Raises ValueError when a local target is no longer where its record says.
        """
        if self.record.facts["built"] or Path(self.model).is_absolute():
            if not Path(self.model).is_dir():
                raise ValueError(
                    f"{self.path}: expected the target in {self.model}, found no such folder; put it back, or name "
                    "its new place in target.path and run again"
                )
            return Path(self.model)
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(self.model, revision=self.revision))

    @property
    def shape(self) -> TargetShape:
        return TargetShape(**self.record.facts["shape"])


@dataclass(frozen=True)
class TargetHead:
    """The frozen ends of the target: what turns tokens into states and states into logits.

    Legend: V vocabulary, D hidden size. Weights keep the checkpoint's dtype.
    """

    embed_VD: torch.Tensor
    norm_D: torch.Tensor
    lm_head_VD: torch.Tensor
    norm_eps: float

    def normed(self, states_TD: torch.Tensor) -> torch.Tensor:
        """fp32 states [T, D] after the final norm, of those before it."""
        states_TD = states_TD.float()
        scale_T1 = (states_TD.pow(2).mean(-1, keepdim=True) + self.norm_eps).rsqrt()
        return states_TD * scale_T1 * self.norm_D.float()

    def logits(self, states_TD: torch.Tensor) -> torch.Tensor:
        """fp32 logits [T, V] of pre-norm final-layer states [T, D]."""
        return self.normed(states_TD) @ self.lm_head_VD.float().T


def known_shape(config: TargetConfig) -> TargetShape:
    """The target's shape as far as the config and local files tell, without building or downloading.

    Raises ValueError naming the key when the target cannot be used or its shape is not known.
    """
    if (config.tiny is None) == (not config.path):
        raise ValueError(
            "target: expected either target.path (a folder or Hub id) or target.tiny, found "
            + ("both" if config.path else "neither")
        )
    if config.tiny is not None:
        tiny = config.tiny
        check_tiny(tiny)
        return TargetShape(tiny.num_layers, tiny.hidden_size, tiny.vocab_rows, tiny.max_position_embeddings)
    if local := local_folder(config.path):
        found = read_folder(local)
        if config.shape is not None and config.shape != found:
            raise ValueError(
                f"target.shape: expected {found}, the shape of {local}, found {config.shape}; "
                "correct it or leave it out"
            )
        return found
    if config.path.startswith((".", "/", "~")) or config.path.count("/") != 1:
        raise ValueError(
            f"target.path={config.path}: expected an existing folder or a Hub id (owner/name), found neither"
        )
    if config.revision is None:
        raise ValueError(
            f"target.revision: must be set for a Hub id (target.path={config.path}), found null; "
            "a branch moves: give a commit or a tag, or name the branch to follow it"
        )
    if config.shape is None:
        raise ValueError(
            f"target.shape: must be set for a Hub id (target.path={config.path}), so that the draft can be "
            "checked before a download; found null"
        )
    return config.shape


def local_folder(path: str) -> Path | None:
    """The folder that `path` names, or None when it is to be looked up on the Hub."""
    folder = Path(path).expanduser()
    return folder.resolve() if folder.is_dir() else None


def content(config: TargetConfig) -> dict[str, Any]:
    """What a target's identity depends on besides its config: the files of a local folder, or the Hub id.

    Every file directly in the folder counts, since code, merges and templates change what a target says;
    hidden ones and subfolders do not. Small files are hashed whole, weights by size and both ends: reading
    terabytes to start a run is no option, and no two trainings agree in the ends of a file.
    """
    if config.tiny is not None:
        return {}
    folder = local_folder(config.path)
    if folder is None:
        return {"hub": config.path}
    files = sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
    return {p.name: _ends_digest(p) if _is_large(p) else file_digest(p) for p in files}


def is_current(artifact: Artifact, config: TargetConfig) -> bool:
    """Whether the record of a target names the place that `config` does.

    Identity is the content of a folder, so a target that was moved keeps it, and its record names a
    folder that is gone: the record has to be made again, which is cheap.
    """
    return artifact.record.facts.get("model") == _place(config)


def _place(config: TargetConfig) -> str:
    """What the record says of the target's place: BUILT, an absolute folder or a Hub id."""
    return BUILT if config.tiny is not None else str(local_folder(config.path) or config.path)


def _is_large(path: Path) -> bool:
    return path.suffix in (".safetensors", ".bin") or path.stat().st_size > WHOLE_BYTES


def _ends_digest(path: Path, end_bytes: int = 1 << 20) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        ends = file.read(end_bytes)
        file.seek(max(0, size - end_bytes), os.SEEK_SET)
        ends += file.read(end_bytes)
    return f"{size}-{hashlib.sha256(ends).hexdigest()[:32]}"


def prepare(config: TargetConfig, *, out: Workspace) -> Target:
    """Make the target ready to be served: build the tiny one, or describe the one that is there.

    Raises ValueError when a folder is incomplete.
    """
    facts: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    if config.tiny is not None:
        from stages.tiny_target.build import build

        def tell(done: int, total: int, values: dict[str, float]) -> None:
            out.events.metrics(values, done)
            out.events.progress("target", done, total, "step", "  ".join(f"{k} {v:.3f}" for k, v in values.items()))

        out.events.rewind(-1)
        metrics = build(config.tiny, out.path / BUILT, tell)
        shape = read_folder(out.path / BUILT)
    else:
        metrics, shape = {}, known_shape(config)
    facts |= {"built": config.tiny is not None, "model": _place(config)}
    return out.commit(Target, counts={}, metrics=metrics, facts={**facts, "shape": vars(shape)})


def shape_of(config: dict[str, Any]) -> TargetShape:
    """The shape told by a `config.json`, looking into `text_config` for multimodal models."""
    text = config.get("text_config", config)
    names = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
    for name in names:
        if type(text[name]) is not int or text[name] < 1:
            raise ValueError(f"{name}={text[name]!r}: expected a number of at least 1")
    num_layers, hidden_size, vocab_size, max_positions = (text[name] for name in names)
    return TargetShape(
        num_layers=num_layers, hidden_size=hidden_size, vocab_size=vocab_size, max_positions=max_positions
    )


def read_folder(folder: Path) -> TargetShape:
    """Check that a local target folder is whole and return its shape.

    Raises ValueError naming the folder and the missing file.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"target.path={folder}: expected a Hugging Face model folder, found no config.json")
    for names, what in ((TOKENIZER_FILES, "tokenizer"), (WEIGHT_FILES, "safetensors weights")):
        if not any((folder / name).is_file() for name in names):
            raise ValueError(f"target.path={folder}: expected {what} ({' or '.join(names)}), found none")
    _check_weights(folder)
    try:
        return shape_of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder / 'config.json'}: expected a model config with layers, hidden size, vocabulary and positions, "
            f"found {error!r}"
        ) from error


def _check_weights(folder: Path) -> None:
    """Raise ValueError for the first weights file that is missing or cut; only headers are read."""
    index = folder / "model.safetensors.index.json"
    try:
        told = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values() if index.exists() else ()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: expected an index of weights, found {error!r}") from error
    for name in sorted(set(told)) or ["model.safetensors"]:
        try:
            with safe_open(folder / name, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{folder / name}: expected whole safetensors weights, found {error}") from error


def load_head(folder: Path) -> TargetHead:
    """Read only embedding, final norm and LM head from a target's safetensors files.

    A tied head is the embedding. Raises ValueError when a tensor cannot be found.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    index = folder / "model.safetensors.index.json"
    files = (
        dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        if index.exists()
        else dict.fromkeys(_names(folder / "model.safetensors"), "model.safetensors")
    )

    def tensor(suffix: str) -> torch.Tensor | None:
        found = [name for name in files if name == suffix or name.endswith("." + suffix)]
        if not found:
            return None
        with safe_open(folder / files[found[0]], framework="pt") as file:
            return file.get_tensor(found[0])

    embed, norm, head = tensor("embed_tokens.weight"), tensor("model.norm.weight"), tensor("lm_head.weight")
    if embed is None or norm is None or (head is None and not text.get("tie_word_embeddings")):
        raise ValueError(
            f"{folder}: expected embed_tokens, model.norm and lm_head (or tied embeddings), found {sorted(files)[:5]} …"
        )
    return TargetHead(embed, norm, embed if head is None else head, float(text.get("rms_norm_eps", 1e-6)))


def _names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())
