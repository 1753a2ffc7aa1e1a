"""Extractors: a store, engines whose connector writes into it, and the check that what they write is right.

`states_of` is what stages use: it knows how states travel, so that they need not.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray

from stages.artifacts import Workspace, digest, fingerprint
from stages.corpus import TokenSequence
from stages.engine.args import extractor_args
from stages.engine.config import EngineConfig
from stages.engine.pool import EnginePool
from stages.engine.version import vllm_version
from stages.hidden_states.config import HiddenStatesConfig, check_hidden_states
from stages.hidden_states.contract import Contract
from stages.hidden_states.disk import About, KeptStates
from stages.hidden_states.disk_reader import DiskReader
from stages.hidden_states.layout import Layout
from stages.hidden_states.master import mooncake_master
from stages.hidden_states.proof import Proof
from stages.hidden_states.reader import StreamingReader, misfit
from stages.hidden_states.samples import Endpoint, check_contract
from stages.hidden_states.store import StoreAddress
from stages.hidden_states.wire import OpenReader
from stages.target import Target

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class ExtractorPool:
    """Engines that extract; `proof` is what the contract check found of them."""

    endpoint: Endpoint
    proof: Proof


@contextmanager
def extractor_pool(
    target: Target,
    layer_ids: tuple[int, ...],
    engine: EngineConfig,
    config: HiddenStatesConfig,
    *,
    work: Path,
    references: Sequence[Path] = (),
) -> Iterator[ExtractorPool]:
    """Run `engine.num_actors` engines of `target` whose states can be read; everything ends with the context.

    `layer_ids`: the aux layers and, last, the number of layers (the state before the final norm).
    Logs go to `work`. Raises ValueError for settings that cannot work, EngineError when an engine does
    not start, ContractError when captured states do not reproduce the engine's own log-probabilities, or differ
    from what engines proved to `references`, folders that keep a proof or none.
    """
    num_layers = target.shape.num_layers
    if not layer_ids or layer_ids[-1] != num_layers or not all(0 <= k <= num_layers for k in layer_ids):
        raise ValueError(
            f"layer_ids={layer_ids}: expected ids in 0..{num_layers}, the last one {num_layers} (final state)"
        )
    check_hidden_states(config, engine)
    segment_bytes = config.segment_bytes
    with ExitStack() as stack:
        if master := config.master_address:
            _check_reachable(master)
        else:
            master = stack.enter_context(mooncake_master(_own_host(), work / "mooncake_master.log"))
        store = StoreAddress(master, config.protocol, config.device)
        args = extractor_args(
            target,
            engine,
            layer_ids,
            _kv_transfer(target, store, segment_bytes // engine.tensor_parallel, config),
        )
        engines = stack.enter_context(EnginePool(engine, args, work))
        endpoint = Endpoint(
            actors=engines.actors,
            store=store,
            target=target.identity,
            layer_ids=layer_ids,
            layout=sample_layout(target, layer_ids, engine, config),
            store_bytes=segment_bytes * engine.num_actors,
            segment_bytes=segment_bytes,
            max_running=engine.max_num_seqs * engine.num_actors,
            start_timeout_s=engine.start_timeout_s,
            contract=Contract(
                folder=target.folder,
                dtype=engine.dtype,
                vocab_size=target.shape.vocab_size,
                longest=min(engine.max_model_len, target.shape.max_positions - 1),  # it generates one token
                step_tokens=engine.max_num_batched_tokens,
            ),
        )
        endpoint, proof = check_contract(endpoint, config)
        proof.check_kept(references)
        yield ExtractorPool(endpoint, proof)


def sample_layout(
    target: Target, layer_ids: tuple[int, ...], engine: EngineConfig, config: HiddenStatesConfig
) -> Layout:
    """How the extractors lay out the states of any sequence."""
    return Layout(len(layer_ids), target.shape.hidden_size, config.encoding, engine.tensor_parallel)


def check_sizes(
    sequences: Sequence[TokenSequence],
    target: Target,
    layer_ids: tuple[int, ...],
    engine: EngineConfig,
    config: HiddenStatesConfig,
    *,
    num_ranks: int,
) -> None:
    """Raise ValueError, naming the first, when states of a sequence could never be fetched by one of `num_ranks`."""
    readers = num_ranks if config.transport == "mooncake" else 1  # one alone fills the folder
    window_bytes = config.window_bytes(config.segment_bytes * engine.num_actors, readers)
    layout = sample_layout(target, layer_ids, engine, config)
    for sequence in sequences:
        size = layout.object_bytes(len(sequence))
        if problem := misfit(sequence, size, window_bytes, config.segment_bytes):
            raise ValueError(problem)


@contextmanager
def states_of(
    sequences: Sequence[TokenSequence],
    target: Target,
    layer_ids: tuple[int, ...],
    engine: EngineConfig,
    config: HiddenStatesConfig,
    *,
    work: Path,
    out: Workspace,
    references: Sequence[Path],
) -> Iterator[OpenReader]:
    """Whatever it takes for the states of `sequences` to be read; gives what opens a reader of them.

    With `hidden_states.transport=mooncake` that is an extractor pool, for as long as the context. With `disk`
    it is a folder under the output root, which is filled from a pool first where anything is missing. What the
    engines proved is kept in `out`; it must agree with that of an earlier try, and of `references`.
    Raises ValueError when the disk has no room, and what `extractor_pool` does.
    """
    references = (out.path, *references)
    if config.transport == "mooncake":
        with extractor_pool(target, layer_ids, engine, config, work=work, references=references) as pool:
            pool.proof.record(out)
            yield partial(open_reader, pool.endpoint, config)
        return
    settings = {"engine": fingerprint(engine), "hidden_states": fingerprint(config), "vllm": vllm_version()}
    about = About(target.identity, layer_ids, target.shape.hidden_size, engine.max_num_batched_tokens, settings)
    kept = KeptStates(out.layout.states(digest(about.metadata)), about)
    set_aside: dict[str, str] = {}
    with kept.locked():
        out.events.progress("looking for states", 0, len(sequences), "sequences")
        if missing := kept.missing(sequences):
            need_gib = kept.check_space(missing) / 2**30
            out.events.progress("starting extractors", 0, len(missing), "sequences", f"{need_gib:.2f} GiB on disk")
            with (
                extractor_pool(
                    target, layer_ids, engine, config, work=work, references=(kept.path, *references)
                ) as pool,
                closing(open_reader(pool.endpoint, config, num_ranks=1)) as reader,
            ):
                pool.proof.keep(kept.path)

                def tell(done: int) -> None:
                    out.events.progress("extracting", done, len(missing), "sequences", reader.flow().note)

                set_aside = kept.fill(reader, missing, tell)
                flowed = {f"extraction/{name}": value for name, value in reader.flow().metrics().items()}
                out.events.metrics(flowed, step=0)
    if (proof := Proof.read(kept.path)) is not None:
        proof.check_kept(references)
        proof.record(out)
    yield lambda _: DiskReader(kept, config, set_aside)


def open_reader(endpoint: Endpoint, config: HiddenStatesConfig, num_ranks: int) -> StreamingReader:
    """A reader for one of `num_ranks` processes; close it.

    Raises HiddenStatesError when the store cannot be reached.
    """
    return StreamingReader(endpoint, config, num_ranks=num_ranks)


def _kv_transfer(target: Target, store: StoreAddress, segment_bytes: int, config: HiddenStatesConfig) -> dict[str, Any]:
    return {
        "kv_connector": "HiddenStatesConnector",
        "kv_connector_module_path": "stages.hidden_states.connector",
        "kv_connector_extra_config": {
            "mooncake": {
                "master_server_address": store.master,
                "global_segment_size": segment_bytes,
                "local_buffer_size": 0,  # objects go out of registered memory
                "protocol": store.protocol,
                "device_name": store.device,
                "num_writer_threads": config.writer_threads,
            },
            "keep_s": 2 * config.sample_timeout_s,  # no reader waits longer than one time-out
            "target": target.identity,
        },
    }


def _own_host() -> str:
    """Loopback when all of the Ray cluster is this machine, else this node's address."""
    mine = ray.util.get_node_ip_address()
    return _LOOPBACK if _hosts() == {mine} or _is_loopback(mine) else str(mine)


def _check_reachable(master: str) -> None:
    host, hosts = master.rpartition(":")[0], _hosts()
    if len(hosts) > 1 and _is_loopback(host):
        raise ValueError(
            f"hidden_states.master_address={master}: expected an address that all {len(hosts)} machines of the Ray "
            "cluster reach, found loopback; give the machine's address in their network"
        )


def _hosts() -> set[str]:
    return {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
