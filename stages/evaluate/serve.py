"""Serves the same prompts with and without the draft, side by side when there is room, and resumes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import ray

from stages.artifacts import digest, write_json
from stages.engine.requests import EngineError
from stages.engine.serving import Served, ServedAnswer, ServingSpec, SpeculationCounters, room_for, serving
from stages.evaluate.prompts import EvaluationPrompt

Role = Literal["draft", "baseline"]
Chunk = tuple[EvaluationPrompt, ...]


@dataclass(frozen=True)
class ServedFiles:
    """One JSON file per role and chunk in `folder`, named by the chunk's content; a file that exists is whole."""

    folder: Path

    def chunk(self, role: Role, chunk: Chunk) -> Path:
        content = [[prompt.id, list(prompt.token_ids), prompt.max_new_tokens] for prompt in chunk]
        return self.folder / f"{role}-{digest(content)}.json"

    @property
    def engine(self) -> Path:
        return self.folder / "engine.json"

    def read_engine(self) -> dict[str, Any]:
        """Versions and hardware, as the server with the draft told them."""
        return dict(json.loads(self.engine.read_text(encoding="utf-8")))

    def missing(self, role: Role, chunks: Sequence[Chunk]) -> list[Chunk]:
        return [chunk for chunk in chunks if not self.chunk(role, chunk).exists()]

    def read(self, role: Role, chunk: Chunk) -> Served:
        value = json.loads(self.chunk(role, chunk).read_text(encoding="utf-8"))
        counters = value["counters"]
        return Served(
            tuple(_answer(answer) for answer in value["answers"]),
            SpeculationCounters(**counters | {"accepted_per_position": tuple(counters["accepted_per_position"])}),
            value["seconds"],
        )


def serve_all(
    specs: Mapping[Role, ServingSpec],
    chunks: Sequence[Chunk],
    files: ServedFiles,
    progress: Callable[[int], None],
    chunk_timeout_s: float,
) -> None:
    """Serve every chunk that has no file yet, for every role. `progress` is told the chunks done, of all roles.

    Raises EngineError when a server does not start, ends, or answers no chunk for `chunk_timeout_s`.
    """
    files.folder.mkdir(parents=True, exist_ok=True)
    missing = {role: files.missing(role, chunks) for role in specs}
    needed = [role for role in specs if missing[role]]
    done = len(specs) * len(chunks) - sum(map(len, missing.values()))
    together = len(needed) > 1 and room_for(specs[needed[0]], len(needed))
    for group in [needed] if together else [[role] for role in needed]:
        for _ in _serve_group({role: specs[role] for role in group}, missing, files, chunk_timeout_s):
            done += 1
            progress(done)


def _serve_group(
    specs: Mapping[Role, ServingSpec],
    missing: Mapping[Role, list[Chunk]],
    files: ServedFiles,
    chunk_timeout_s: float,
) -> Iterator[None]:
    """Servers of all roles in `specs` at once, each with one chunk in flight; yields after every chunk."""
    with ExitStack() as stack:
        actors = {role: stack.enter_context(serving(spec)) for role, spec in specs.items()}
        for role, actor in actors.items():
            described = _get(actor.describe.remote(), specs[role], timeout_s=specs[role].engine.start_timeout_s)
            if role == "draft":
                write_json(files.engine, described)
        queues = {role: iter(missing[role]) for role in specs}
        flying: dict[Any, tuple[Role, Chunk]] = {}

        def submit(role: Role) -> None:
            chunk = next(queues[role], None)
            if chunk is not None:
                asked = [(list(prompt.token_ids), prompt.max_new_tokens) for prompt in chunk]
                flying[actors[role].serve.remote(asked)] = (role, chunk)

        for role in specs:
            submit(role)
        while flying:
            answered, _ = ray.wait(list(flying), num_returns=1, timeout=chunk_timeout_s)
            if not answered:
                logs = ", ".join(str(specs[role].log) for role, _ in flying.values())
                raise EngineError(f"no answer within evaluate.chunk_timeout_s={chunk_timeout_s} (log: {logs})")
            role, chunk = flying.pop(answered[0])
            write_json(files.chunk(role, chunk), asdict(_get(answered[0], specs[role])))
            submit(role)
            yield


def _get(reference: Any, spec: ServingSpec, timeout_s: float | None = None) -> Any:
    try:
        return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise EngineError(f"no server after engine.start_timeout_s={timeout_s} (log: {spec.log})") from error
    except ray.exceptions.RayError as error:
        ended = str(error).strip().splitlines()[-1]  # the cause: Ray puts tracebacks before it
        raise EngineError(f"the server of {spec.draft or spec.model} ended: {ended} (log: {spec.log})") from error


def _answer(value: dict[str, Any]) -> ServedAnswer:
    return ServedAnswer(
        tuple(value["token_ids"]),
        tuple(value["rounds_by_accepted"]),
        value["drafted"],
        tuple((token, gap) for token, gap in value["runner_up"]),
    )
