"""Hidden states kept on disk: safetensors shards in a folder of their own kind, found by their tokens.

All states of a folder are of one target, one set of layers and one way to compute them. Every tensor
[T, L, D] of a shard is one sequence's, named by the checksum of its token ids; the shard's metadata hold its
manifest and vouch for the bytes. A shard is written beside, renamed, and never changed. Nothing here
knows Ray, vLLM or Mooncake.
Legend: T tokens of one sequence, L captured layers, D hidden size.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors.torch import save_file

from stages.artifacts import exclusive
from stages.corpus import TokenSequence, tokens_checksum
from stages.hidden_states.layout import as_bytes
from stages.hidden_states.wire import HiddenStatesError, HiddenStatesReader, Manifest

logger = logging.getLogger(__name__)

READ_THREADS = 4  # reading and checking release the GIL
SHARD_BYTES = 256 << 20  # held in memory until it is written, and lost when the process is killed before
_CHECKSUMS, _MANIFESTS = "xxh3_64", "manifests"  # by tensor, in a shard's metadata
_SUFFIX, _PARTIAL, _REFUSED = ".safetensors", ".partial", ".refused"
_KEY = re.compile("[0-9a-f]{32}")
_HEADER_BYTES = 1024  # of a tensor's name, shape, offsets, checksum and manifest in a shard's header, at most
_DTYPE = "BF16"  # the format's name for it
_GIB = 1 << 30


@dataclass(frozen=True)
class About:
    """What all states of a folder have in common."""

    target: str  # identity
    layer_ids: tuple[int, ...]
    hidden_size: int
    step_tokens: int  # as in a manifest
    settings: dict[str, Any]  # whatever else changes the numbers, as JSON values
    pre_norm: bool = True  # the final layer's states are before the target's final norm
    format: int = 2

    @property
    def metadata(self) -> dict[str, str]:
        """Of every shard; their digest names the folder."""
        return {name: json.dumps(value, sort_keys=True) for name, value in asdict(self).items()}

    def manifest(self, key: str, num_tokens: int, tokens_crc32: int) -> Manifest:
        """Of one sequence's states here."""
        return Manifest(
            key=key,
            shape=(num_tokens, len(self.layer_ids), self.hidden_size),
            encoding="bfloat16",
            stripes=1,
            layer_ids=self.layer_ids,
            pre_norm=self.pre_norm,
            target=self.target,
            tokens_crc32=tokens_crc32,
            attempt=0,
            step_tokens=self.step_tokens,
        )


@dataclass(frozen=True)
class Entry:
    """One sequence's states in a shard."""

    shard: Path
    offset: int
    num_tokens: int
    tokens_crc32: int
    xxh3_64: int


def key_of(token_ids: np.ndarray) -> str:
    """The name of a sequence's states: XXH3-128 of its ids as little-endian int32, hex.

    A CRC-32 would not do: among 100,000 sequences two are likely to share one.
    """
    return str(xxhash.xxh3_128_hexdigest(np.ascontiguousarray(token_ids, dtype="<i4").data))


def disk_bytes(num_tokens: int, num_sequences: int, num_layers: int, hidden_size: int) -> int:
    """What the states of so many sequences with so many tokens in all take on disk, at most."""
    return num_tokens * num_layers * hidden_size * torch.bfloat16.itemsize + num_sequences * _HEADER_BYTES


@dataclass(frozen=True)
class KeptStates:
    """A folder of shards. Picklable; whoever has the path reads the same."""

    path: Path
    about: About

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder against other processes that would write; raises BlockingIOError when one does."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock_file = self.path.with_name(self.path.name + ".lock")
        with exclusive(lock_file, f"{self.path}: another run is writing states here; wait for it or stop it"):
            yield

    def entries(self) -> dict[str, Entry]:
        """All states by key. Shards that are not whole or of another kind are left out, and named in the log."""
        entries, refused = self._scan()
        for why in refused.values():
            logger.warning("%s", why)
        return entries

    def read(self, entry: Entry, token_ids: np.ndarray, states_TLD: torch.Tensor) -> None:
        """Fill `states_TLD` (bfloat16) with the states of `token_ids` (int32 [T]).

        Raises HiddenStatesError, naming the shard, unless they are of these tokens and the bytes that were written.
        """
        wanted, found = (len(token_ids), tokens_checksum(token_ids)), (entry.num_tokens, entry.tokens_crc32)
        if found != wanted:
            told = f"{entry.shard}: expected (tokens, CRC-32) {wanted}, found {found}"
            raise HiddenStatesError(f"states of other tokens: {told}")
        left = as_bytes(states_TLD).data
        try:
            with entry.shard.open("rb", buffering=0) as file:
                file.seek(entry.offset)
                while left and (count := file.readinto(left)):
                    left = left[count:]
        except OSError as error:
            raise HiddenStatesError(f"unreadable shard: {entry.shard}: {error}") from error
        checksum = xxhash.xxh3_64_intdigest(as_bytes(states_TLD).data)
        if left or checksum != entry.xxh3_64:
            cause = f"ends {len(left)} bytes early" if left else f"read with XXH3 {checksum:016x}"
            raise HiddenStatesError(
                f"damaged bytes: {entry.shard} at {entry.offset}: written with XXH3 {entry.xxh3_64:016x}, {cause}"
            )

    def missing(self, sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
        """Those without states here, each once. Reads all the others, and puts shards that are damaged out of use.

        Call it, and `fill`, while the folder is `locked`.
        """
        for left_behind in self.path.glob(f"*{_PARTIAL}"):
            left_behind.unlink()
        entries, refused = self._scan()
        needed = {key_of(sequence.input_ids): sequence for sequence in sequences}
        there = [(entries[key], sequence.input_ids) for key, sequence in needed.items() if key in entries]
        with ThreadPoolExecutor(READ_THREADS) as threads:
            damage = zip(there, threads.map(lambda kept: self._damage(*kept), there), strict=True)
            refused |= {entry.shard: why for (entry, _), why in damage if why is not None}
        for shard, why in refused.items():
            aside = shard.rename(shard.with_suffix(_REFUSED))
            logger.warning("%s; now %s, its states are extracted again", why, aside.name)
        return [s for key, s in needed.items() if key not in entries or entries[key].shard in refused]

    def check_space(self, sequences: Sequence[TokenSequence]) -> int:
        """The bytes that their states take; raises ValueError when the disk has not so many."""
        about, tokens = self.about, sum(len(sequence) for sequence in sequences)
        need = disk_bytes(tokens, len(sequences), len(about.layer_ids), about.hidden_size)
        if need > (free := shutil.disk_usage(self.path).free):
            raise ValueError(
                f"hidden_states.transport=disk: the states of {len(sequences)} sequences with {tokens} tokens take "
                f"{need / _GIB:.1f} GiB in {self.path}, found {free / _GIB:.1f} GiB free; free some, choose another "
                "disk with out=…, or stream them with hidden_states.transport=mooncake"
            )
        return need

    def fill(
        self,
        reader: HiddenStatesReader,
        sequences: Sequence[TokenSequence],
        tell: Callable[[int], None],
        shard_bytes: int = SHARD_BYTES,
    ) -> dict[str, str]:
        """Append the states of `sequences`; why not, by key, for those that the reader sets aside.

        `tell` is given the number of sequences done. Raises what the reader does.
        """
        set_aside: dict[str, str] = {}
        shard: dict[str, tuple[np.ndarray, torch.Tensor]] = {}
        batches = reader.read([sequence] for sequence in sequences)
        for done, (sequence, batch) in enumerate(zip(sequences, batches, strict=True), start=1):
            key = key_of(sequence.input_ids)
            if batch.sequences:
                shard[key] = sequence.input_ids, batch.states_TLD
            else:
                [(_, set_aside[key])] = batch.set_aside
            if shard and (done == len(sequences) or sum(states.nbytes for _, states in shard.values()) >= shard_bytes):
                self._append(shard)
                shard = {}
            tell(done)
        return set_aside

    def _damage(self, entry: Entry, token_ids: np.ndarray) -> str | None:
        shape = (len(token_ids), len(self.about.layer_ids), self.about.hidden_size)
        try:
            self.read(entry, token_ids, torch.empty(shape, dtype=torch.bfloat16))
        except HiddenStatesError as error:
            return str(error)
        return None

    def _append(self, shard: dict[str, tuple[np.ndarray, torch.Tensor]]) -> None:
        """Write a new shard, so that it is seen whole or not at all. `shard`: token ids and states by key."""
        final = self.path / f"{min(shard)}{_SUFFIX}"  # no other shard has this key
        beside = final.with_suffix(_PARTIAL)
        sums = {key: f"{xxhash.xxh3_64_intdigest(as_bytes(states).data):016x}" for key, (_, states) in shard.items()}
        manifests = {
            key: asdict(self.about.manifest(key, len(token_ids), tokens_checksum(token_ids)))
            for key, (token_ids, _) in shard.items()
        }
        told = {_CHECKSUMS: json.dumps(sums), _MANIFESTS: json.dumps(manifests)}
        save_file({key: states for key, (_, states) in shard.items()}, beside, self.about.metadata | told)
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.rename(final)

    def _scan(self) -> tuple[dict[str, Entry], dict[Path, str]]:
        """Entries of all shards, and why not of some. Files of other names are not ours."""
        entries: dict[str, Entry] = {}
        refused: dict[Path, str] = {}
        for shard in sorted(self.path.glob(f"*{_SUFFIX}")):
            if _KEY.fullmatch(shard.stem):
                try:
                    entries |= self._shard(shard)
                except HiddenStatesError as error:
                    refused[shard] = str(error)
        return entries, refused

    def _shard(self, shard: Path) -> dict[str, Entry]:
        """Its entries. Raises HiddenStatesError when it is not whole, or what differs from `about`."""
        try:
            with shard.open("rb") as file:
                start = 8 + int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(start - 8, shard.stat().st_size)))
            told = header.pop("__metadata__")
            sums, manifests = json.loads(told[_CHECKSUMS]), json.loads(told[_MANIFESTS])
            wrong = {name: told.get(name) for name, value in self.about.metadata.items() if told.get(name) != value}
            if wrong:
                raise HiddenStatesError(f"{shard}: expected states of {self.about}, found {wrong}")
            wanted = [_DTYPE, len(self.about.layer_ids), self.about.hidden_size]
            entries, size = {}, start
            for key, tensor in header.items():
                num_tokens, *found = tensor["shape"]
                if [tensor["dtype"], *found] != wanted:
                    raise HiddenStatesError(f"{shard}: expected states [T, L, D] of {wanted}, found {tensor}")
                begin, end = tensor["data_offsets"]
                entry = Entry(shard, start + begin, num_tokens, manifests[key]["tokens_crc32"], int(sums[key], 16))
                _check(self.about.manifest(key, num_tokens, entry.tokens_crc32), manifests[key], shard)
                entries[key] = entry
                size = max(size, start + end)
            if size != shard.stat().st_size:
                raise HiddenStatesError(f"{shard}: expected {size} bytes, found {shard.stat().st_size}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise HiddenStatesError(
                f"{shard}: not a whole shard of hidden states: {type(error).__name__}: {error}"
            ) from error
        return entries


def _check(wanted: Manifest, found: dict[str, object], shard: Path) -> None:
    try:
        wanted.check(found)
    except HiddenStatesError as error:
        raise HiddenStatesError(f"{shard}: {wanted.key}: {error}") from error
