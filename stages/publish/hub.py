"""The Hub: what can be refused before a run starts, and the upload. The only user of its write API."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.utils import HFValidationError, validate_repo_id

from stages.publish.config import PublishConfig

TOKEN = "HF_TOKEN"
SUMS = "SHA256SUMS"
SHARDS = ("model*.safetensors", "model*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json")
"""Weights of another checkpoint, which a server would load beside or instead of ours."""


def check(config: PublishConfig) -> None:
    """Raise ValueError, naming the key, for what would make `publish` fail at the very end, on any machine."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", config.license):
        raise ValueError(f"publish.license={config.license!r}: expected a Hub license id such as apache-2.0 or mit")
    if config.repo_id is None:
        return
    try:
        validate_repo_id(config.repo_id)
    except HFValidationError as error:
        raise ValueError(
            f"publish.repo_id={config.repo_id!r}: expected owner/name, found an invalid id: {error}"
        ) from error
    if config.repo_id.count("/") != 1:
        raise ValueError(f"publish.repo_id={config.repo_id!r}: expected owner/name")


def check_access(config: PublishConfig) -> None:
    """Raise ValueError, naming the variable, when this machine could not upload what is to be uploaded."""
    if config.repo_id is None:
        return
    if constants.is_offline_mode():
        raise ValueError(f"publish.repo_id={config.repo_id}: HF_HUB_OFFLINE forbids the upload; unset one of the two")
    if not os.environ.get(TOKEN):
        raise ValueError(
            f"publish.repo_id={config.repo_id}: expected a write token in {TOKEN}, found none; "
            "export one, or unset publish.repo_id"
        )


def upload(folder: Path, names: Sequence[str], config: PublishConfig, endpoint: str | None = None) -> str:
    """Put exactly `names` of `folder` into the repository in one commit and return the commit's hash.

    Users see the earlier release until that commit, and all of the new one after it (`upload_folder`
    may split into several commits, so it is not used). The same commit deletes what an earlier release
    left (see `_stale`); everything else in the repository is its owner's and stays. Raises RuntimeError
    when the Hub then lacks a file; the Hub's own errors pass through.
    """
    assert config.repo_id is not None
    api = HfApi(endpoint=endpoint, token=os.environ[TOKEN])
    api.create_repo(config.repo_id, private=config.private, exist_ok=True)
    commit = api.create_commit(
        config.repo_id,
        operations=[
            *(CommitOperationDelete(path_in_repo=name) for name in _stale(api, config.repo_id, names)),
            *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name) for name in names),
        ],
        commit_message="Release draft",
    )
    missing = set(names) - set(api.list_repo_files(config.repo_id, revision=commit.oid))
    if missing:
        raise RuntimeError(f"{config.repo_id}: commit {commit.oid} lacks {sorted(missing)}; publish again")
    return str(commit.oid)


def _stale(api: HfApi, repo_id: str, names: Sequence[str]) -> list[str]:
    """Remote files that must not survive a release of `names`: other weights, and files of the release before it.

    That release is told by its SHA256SUMS. Files in folders were never part of one.
    """
    remote = api.list_repo_files(repo_id)
    earlier: set[str] = set()
    if SUMS in remote:
        with tempfile.TemporaryDirectory() as folder:
            sums = Path(api.hf_hub_download(repo_id, SUMS, local_dir=folder)).read_text(encoding="utf-8")
        earlier = {name.strip() for line in sums.splitlines() for name in line.split(maxsplit=1)[1:]}
    return [
        name
        for name in remote
        if name not in names
        and "/" not in name
        and (name in earlier or any(fnmatch(name, pattern) for pattern in SHARDS))
    ]
