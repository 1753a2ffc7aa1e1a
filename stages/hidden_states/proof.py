"""What engines have proved when they were checked: kept with what is made of their states, and held against the next.

The log-probabilities of `contract.py` prove the last captured layer alone. Of the others the size is known: the
contract's short prompts are always the same, so each layer's median RMS on them is the same from every honest
engine, whenever it was started. Layers that are swapped, one off or of another revision of the target have another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import torch

from stages.artifacts import ArtifactError, Workspace, read_json, write_json
from stages.hidden_states.contract import Agreement, ContractError

CONTRACT = "contract.json"

# Of a median RMS. No rounding moves a row's RMS by more than the row's L2 error, which in bf16 against fp32 is at most
# 1.7 % (SmolLM2, median of the worst layer); the medians moved by 0.3 %. Of its 30 neighbouring layers 25 differ by
# more than 2 %.
_TOLERANCE = 0.02


def layer_rms(states_RLD: torch.Tensor) -> list[float]:
    """Of each layer the median over rows of a row's root mean square; the states of a token at the start of a
    sequence can be a thousand times larger than others. Raises RuntimeError without rows."""
    # Not by way of squares in fp32: of 64 rows they are fresh memory of megabytes, and took 20 times as long.
    norms_RL = torch.linalg.vector_norm(states_RLD, dim=-1, dtype=torch.float32)
    return (norms_RL / states_RLD.shape[-1] ** 0.5).median(0).values.tolist()


@dataclass(frozen=True)
class Proof:
    """Of one engine, or of a pool: its first engine's sizes and the worst agreement."""

    agreement: Agreement
    rms: dict[int, float]  # by layer id: see `layer_rms`

    @classmethod
    def of(cls, agreement: Agreement, layer_ids: Sequence[int], states: Iterable[torch.Tensor]) -> Self:
        """`states`: [T, L, D] of the contract's short prompts."""
        return cls(agreement, dict(zip(layer_ids, layer_rms(torch.cat(list(states))), strict=True)))

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The one that was kept in `folder`, if any. Raises ArtifactError naming a file that holds something else."""
        if not (path := folder / CONTRACT).exists():
            return None
        told = read_json(path)
        try:
            agreement = Agreement(**{name: told[name] for name in Agreement.__dataclass_fields__})
            return cls(agreement, {int(layer): float(value) for layer, value in told["rms"].items()})
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(f"{path}: expected what engines have proved, found {error!r}") from error

    def keep(self, folder: Path) -> bool:
        """Write it to `folder`; False when there is one already, with which this one must have been compared."""
        if (folder / CONTRACT).exists():
            return False
        rms = {str(layer): value for layer, value in self.rms.items()}
        write_json(folder / CONTRACT, self._measures | {"rms": rms})
        return True

    def record(self, out: Workspace) -> None:
        """Keep it with the artifact that is made of these states, and say it to the tracking server."""
        if self.keep(out.path):
            measures = {f"contract/{name}": float(value) for name, value in self._measures.items()}
            rms = {f"contract/rms_layer_{layer}": value for layer, value in self.rms.items()}
            out.events.metrics(measures | rms, step=0)

    def check_same(self, other: Self, whose: str) -> None:
        """Raise ContractError unless the layers that both have are of one size; `whose` says who gave the other."""
        for layer in sorted(self.rms.keys() & other.rms.keys()):
            found, expected = self.rms[layer], other.rms[layer]
            if not abs(found - expected) <= _TOLERANCE * expected:
                raise ContractError(
                    f"layer {layer}: expected states of median RMS {expected:.4g}, as {whose}, found {found:.4g} "
                    f"(tolerance {_TOLERANCE:.0%}); layers are mixed up, or the target or vLLM is another"
                )

    def check_kept(self, folders: Iterable[Path]) -> None:
        """`check_same` for what was kept in any of the folders."""
        for folder in folders:
            if (other := type(self).read(folder)) is not None:
                self.check_same(other, f"{folder / CONTRACT} has")

    @property
    def _measures(self) -> dict[str, float]:
        return asdict(self.agreement) | {"tolerance": self.agreement.tolerance}
