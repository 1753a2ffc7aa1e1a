"""The config: every shipped file loads, and whatever cannot work is refused in one line."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeline import checks
from pipeline.bounds import BOUNDS, check_bounds
from pipeline.checks import draft_parameters
from pipeline.config import ROOT, ConfigError, PipelineConfig, conf_path, load, parse, to_yaml
from stages.secrets import without_secrets
from stages.target import TargetConfig, known_shape

CONFS = sorted(path.stem for path in (ROOT / "conf").glob("*.yaml"))


@pytest.fixture
def roomy_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster elsewhere with a large disk: what only a machine can tell is not asked."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    usage = shutil.disk_usage("/")._replace(free=1 << 50)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


@pytest.mark.parametrize("name", CONFS)
def test_shipped_config_passes_every_check(name: str, tmp_path: Path, roomy_cluster: None) -> None:
    overrides = [f"out={tmp_path}"]
    if name == "smollm2":  # its prompts lie outside the project
        overrides.append("datagen.prompts=[conf/prompts/tiny.jsonl]")
    checks.check(load(conf_path(name), overrides))


@pytest.mark.parametrize("name", CONFS)
def test_config_survives_writing_and_reading(name: str, tmp_path: Path) -> None:
    config = load(conf_path(name), ["train.lr=3e-4"])
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load(tmp_path / "again.yaml") == config


def test_k3_draft_has_the_published_number_of_parameters() -> None:
    config = load(conf_path("kimi_k3"))
    shape = known_shape(config.target)
    assert draft_parameters(config, shape) == 2_396_090_241
    assert draft_parameters(config, shape) + 2 * shape.vocab_size * shape.hidden_size == 4_744_900_481


BAD = {
    "train.lrr=1": ["train.lrr", "'lr'"],
    "trian.lr=1": ["trian"],
    "train.lr=fast": ["train.lr", "fast", "Float"],
    "engine.dtype=fp4": ["engine.dtype", "fp4", "bfloat16"],
    "train.epochs=0": ["train.epochs=0", "[1, 1e9]"],
    "draft.mask_token_id=null": ["draft.mask_token_id", "null"],
    "draft.mask_token_id=1024": ["draft.mask_token_id=1024", "0 to 1023"],
    "draft.mask_token_id=-1": ["draft.mask_token_id=-1"],
    "draft.aux_layer_ids=[1,4]": ["draft.aux_layer_ids", "1 to 3"],
    "draft.aux_layer_ids=[2,1]": ["draft.aux_layer_ids", "ascending"],
    "draft.aux_layer_ids=[]": ["draft.aux_layer_ids"],
    "draft.num_speculative_tokens=9": ["draft.num_speculative_tokens=9", "set it to 8"],
    "draft.num_speculative_tokens=4": ["draft.num_speculative_tokens=4", "set it to 8"],
    "draft.block_size=4": ["draft.num_speculative_tokens=8", "draft.block_size=4"],
    "draft.sample_from_anchor=false": ["draft.num_speculative_tokens=8", "set it to 7"],
    "draft.sliding_window=64": ["draft.causal=False", "draft.sliding_window=64"],
    "draft.markov_rank=0": ["draft.markov_rank=0"],
    "draft.num_layers=0": ["draft.num_layers=0"],
    "engine.num_actors=0": ["engine.num_actors=0"],
    "datagen.limit=0": ["datagen.limit=0"],
    "datagen.top_p=0": ["datagen.top_p=0.0", "(0, 1]"],
    "datagen.evaluation_share=0": ["datagen.evaluation_share=0.0", "evaluate needs prompts", "none among 720"],
    "datagen.calibration_share=0": ["datagen.calibration_share=0.0", "draft.confidence_head=false"],
    "datagen.limit=3": ["datagen.calibration_share=0.15", "none among 3"],
    "datagen.evaluation_share=-0.1": ["datagen.evaluation_share=-0.1", "[0, 1)"],
    "datagen.temperature=0.7": ["datagen.temperature=0.7"],
    "engine.kv_cache_gib=null": ["engine.kv_cache_gib"],
    "hidden_states.segment_gib=0.015": ["hidden_states.segment_gib=0.015", "at least 0.015625"],
    "hidden_states.master_address=host": ["hidden_states.master_address=host", "host:port"],
    "hidden_states.master_address=host:0": ["hidden_states.master_address=host:0"],
    "hidden_states.master_address=host:99999": ["hidden_states.master_address=host:99999"],
    "hidden_states.master_address='[::1]:50051'": ["hidden_states.master_address=[::1]:50051", "IPv4"],
    "hidden_states.master_address=http://host:50051": ["hidden_states.master_address=http://host:50051"],
    "train.max_steps=0": ["train.max_steps=0"],
    "evaluate.batch_sequences=0": ["evaluate.batch_sequences=0"],
    "evaluate.cpus=64": ["evaluate.cpus = 64"],
    "calibrate.threads=0": ["calibrate.threads=0"],
    "ray.num_cpus=0": ["ray.num_cpus=0"],
    "ray.num_cpus=nan": ["ray.num_cpus=nan"],
    "train.lr=inf": ["train.lr=inf", "(0, 1]"],
    "train.seed=-1": ["train.seed=-1"],
    "draft.num_kv_heads=0": ["draft.num_kv_heads=0"],
    "draft.rope_theta=nan": ["draft.rope_theta=nan"],
    "evaluate.gpus=1": ["evaluate.gpus = 1 GPUs", "found 0 here"],
    f"out={'a' * 300}": ["out='aaa", "too long"],
    'out="a\\0b"': ["out='a\\x00b'", "null byte"],
    f"target.path={'a' * 300}": ["target.path='aaa", "too long"],
    "datagen.prompts=[~nobody-here/prompts]": ["datagen.prompts='~nobody-here/prompts'", "home"],
    f"train.lr={'9' * 400}": ["train.lr", "too large"],
    f"train.seed={'9' * 400}": ["train.seed"],
    f"train.seed={'9' * 5000}": ["train.seed", "limit"],
    "draft.rope_parameters.rope_type=[yarn]": ["draft.rope_parameters.rope_type=['yarn']"],
    "draft.head_dim=65": ["draft.head_dim=65", "even"],
    "name=../evil": ["name=../evil"],
    "tracking.uri=foo://bar": ["tracking.uri=foo://bar", "sqlite"],
    "tracking.uri=http://me:hidden@host": ["tracking.uri", "MLFLOW_TRACKING_PASSWORD"],
    "train={lr: [1]}": ["train"],
    "draft.num_kv_heads=3": ["draft.num_heads=4", "draft.num_kv_heads=3"],
    "draft.causal=true": ["draft.causal", "draft.sliding_window"],
    "engine.max_model_len=4096": ["engine.max_model_len=4096", "512"],
    "train.max_sequence_tokens=600": ["train.max_sequence_tokens=600", "engine.max_model_len=512"],
    "train.batch_sequences=1": ["train.batch_sequences=1", "train.num_workers=2"],
    "train.cpus_per_worker=50": ["train.cpus_per_worker", "CPUs"],
    "engine.gpus_per_actor=1": ["GPUs"],
    "engine.kv_cache_gib=1000": ["engine.kv_cache_gib", "2000.5 GiB"],
    "datagen.prompts=mine.jsonl": ["datagen.prompts", "a list is written [a,b]"],
    "datagen.prompts=[nowhere.jsonl]": ["nowhere.jsonl"],
    "datagen.prompts=[]": ["datagen.prompts"],
    "datagen.regenerate=false": ["datagen.regenerate=false", "a prompt alone"],
    "datagen.hub=[a/b]": ["datagen.hub=[a/b]"],
    "datagen.hub.chat.pth=a/b": ["datagen.hub.chat.pth", "'path'"],
    "datagen.hub.chat.path=nowhere": ["datagen.hub.chat.path=nowhere"],
    "datagen.domain_shares={chat: 0.5}": ["datagen.domain_shares", "0.5"],
    "target.path=nowhere": ["target"],
    "target.tiny.warmup_steps=0": ["target.tiny.warmup_steps=0", "[1, 1e9]"],
    "target.tiny.vocab_size=100000": ["target.tiny.vocab_size=100000", "[512, 1280]"],
    "target.tiny.seed=20": ["target.tiny.seed=20"],
    "target.tiny=null": ["target", "neither"],
}


BAD_TOGETHER: list[tuple[list[str], list[str]]] = [
    (
        ["train.early_stopping_validations=2", "datagen.validation_share=0"],
        ["datagen.validation_share=0.0", "train.early_stopping_validations=null"],
    ),
    (
        ["datagen.max_new_tokens=384", "engine.max_model_len=384"],
        ["datagen.max_new_tokens=384", "less than engine.max_model_len=384"],
    ),
    (
        ["hidden_states.segment_gib=0.03", "engine.tensor_parallel=2"],
        ["hidden_states.segment_gib=0.03", "at least 0.03125", "engine.tensor_parallel=2"],
    ),
]
CASES = [*(([override], parts) for override, parts in BAD.items()), *BAD_TOGETHER]


def numbers(section: type, prefix: str = "") -> Iterator[str]:
    """Dotted keys of all numbers in a config class and the classes of its fields."""
    hints = typing.get_type_hints(section)
    for f in dataclasses.fields(section):
        kind = hints[f.name]
        inner = [arg for arg in typing.get_args(kind) if arg is not type(None)]
        if isinstance(kind, types.UnionType) and len(inner) == 1:
            kind = inner[0]
        if dataclasses.is_dataclass(kind):
            yield from numbers(kind, f"{prefix}{f.name}.")
        elif kind in (int, float):
            yield prefix + f.name


def test_every_number_has_bounds() -> None:
    assert sorted(numbers(PipelineConfig)) == sorted(BOUNDS)
    check_bounds({"train.lr": 1.0, "train.max_steps": None, "calibrate.fit_share": 0.5})
    for key, value in (("train.lr", 0.0), ("train.lr", math.nan), ("calibrate.fit_share", 1.0)):
        with pytest.raises(ValueError, match=f"{key}={value}"):
            check_bounds({key: value})


@pytest.mark.parametrize(("overrides", "parts"), CASES, ids=[" ".join(overrides)[:80] for overrides, _ in CASES])
def test_bad_value_is_refused_naming_it(overrides: list[str], parts: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        checks.check(load(conf_path("tiny"), [f"out={tmp_path}", *overrides]))
    message = str(refused.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    "override", ["publish.name=${oc.env:HUB_TOKEN}", "train.lr=${oc.env:HUB_TOKEN}", "name=s3cr3t-s3cr3t"]
)
def test_secret_is_refused_and_not_shown(override: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUB_TOKEN", "s3cr3t-s3cr3t")
    with pytest.raises(ConfigError, match="HUB_TOKEN") as refused:
        load(conf_path("tiny"), [override])
    assert "s3cr3t" not in str(refused.value)


def test_a_secret_that_begins_like_another_is_hidden_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "s3cr3t")
    monkeypatch.setenv("B_TOKEN", "s3cr3t-and-more\n")
    assert without_secrets("x s3cr3t-and-more y s3cr3t") == "x <B_TOKEN> y <A_TOKEN>"


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"- 1\n- 2\n", b"train: [1, 2]\n", b"a: [\n"])
def test_conf_that_is_none_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=str(path)) as refused:
        load(path)
    assert "\n" not in str(refused.value)


def test_unknown_conf_names_the_closest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'tiny'.*kimi_k3"):
        conf_path("tniy")
    with pytest.raises(ConfigError, match=r"found kimi_k3"):
        conf_path("a" * 300)


@pytest.mark.parametrize(
    ("content", "part"),
    [("", "empty"), ('{"text": "no turns"}\n', "turns"), ("not json\n", "JSON"), ('{"turns": [3]}\n', "turns")],
)
def test_prompts_file_without_prompts_is_refused(content: str, part: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError) as refused:
        checks.check(load(conf_path("tiny"), [f"out={tmp_path}", f"datagen.prompts=[{path}]"]))
    assert str(path) in str(refused.value)
    assert part in str(refused.value)


def test_given_answers_cannot_calibrate_a_confidence_head(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    row = '{{"messages": [{{"role": "user", "content": "{}"}}, {{"role": "assistant", "content": "a"}}]}}\n'
    path.write_text("".join(row.format(number) for number in range(10)))
    given = [f"out={tmp_path}", f"datagen.prompts=[{path}]", "datagen.regenerate=false"]
    with pytest.raises(ConfigError, match=r"datagen\.regenerate=False: .*draft\.confidence_head=false"):
        checks.check(load(conf_path("tiny"), given))
    without = ["draft.confidence_head=false", "draft.confidence_with_markov=false"]
    checks.check(load(conf_path("tiny"), [*given, *without]))


def test_only_a_run_that_uploads_needs_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    config = load(conf_path("tiny"), [f"out={tmp_path}", "publish.repo_id=me/draft"])
    checks.check(config, ("train", "calibrate"))
    with pytest.raises(ConfigError, match=r"publish\.repo_id=me/draft: expected a write token in HF_TOKEN"):
        checks.check(config)


def test_only_stages_that_read_a_split_need_it(tmp_path: Path) -> None:
    none = ["datagen.validation_share=0", "datagen.calibration_share=0", "datagen.evaluation_share=0"]
    config = load(conf_path("tiny"), [f"out={tmp_path}", *none])
    checks.check(config, ("target", "datagen", "train"))
    with pytest.raises(ConfigError, match=r"datagen\.calibration_share=0\.0: calibrate needs"):
        checks.check(config, ("calibrate",))
    headless = ["draft.confidence_head=false", "draft.confidence_with_markov=false"]
    checks.check(load(conf_path("tiny"), [f"out={tmp_path}", *none, *headless]), ("calibrate",))


def test_gpus_that_are_asked_for_at_once_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    usage = shutil.disk_usage("/")._replace(free=1 << 50)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(checks, "gpus_here", lambda: 1)
    small = ["engine.num_actors=1", "train.num_workers=1", "evaluate.gpus=1", "ray.num_cpus=8", f"out={tmp_path}"]
    config = load(conf_path("qwen3_8b"), small)
    with pytest.raises(ConfigError, match=r"engine\.gpus_per_actor \+ train\..* = 2 GPUs: found 1 here") as refused:
        checks.check(config)
    assert "\n" not in str(refused.value)
    checks.check(config, ("target", "datagen", "evaluate"))
    checks.check(load(conf_path("qwen3_8b"), [*small, "hidden_states.transport=disk"]))
    monkeypatch.setattr(checks, "gpus_here", lambda: 2)
    checks.check(config)


def test_gpus_are_found_as_ray_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert checks.gpus_here(tmp_path) == 3
    for visible, found in (("", 0), ("1", 1), ("0,1,2,3", 3)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert checks.gpus_here(tmp_path) == found


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_incomplete_target_folder_is_refused(missing: str, tmp_path: Path) -> None:
    shape = '{"num_hidden_layers": 4, "hidden_size": 8, "vocab_size": 9, "max_position_embeddings": 99}'
    folder = tmp_path / "target"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        if name != missing:
            (folder / name).write_text(shape)
    with pytest.raises(ConfigError, match=str(folder)):
        checks.check(load(conf_path("tiny"), ["target.tiny=null", f"target.path={folder}"]))


@pytest.mark.parametrize(
    ("file", "content", "part"),
    [
        ("model.safetensors", b"", "model.safetensors"),
        ("model.safetensors", b"cut", "model.safetensors"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "lost.safetensors"}}', "lost.safetensors"),
        ("model.safetensors.index.json", b"[1]", "an index of weights"),
        ("config.json", b"[1, 2]", "a model config"),
        ("config.json", b'{"text_config": null}', "a model config"),
        ("config.json", b'{"num_hidden_layers": 4, "hidden_size": "8"}', "hidden_size='8'"),
    ],
)
def test_damaged_target_folder_is_refused(file: str, content: bytes, part: str, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    folder.mkdir()
    save_file({"a": torch.zeros(2)}, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    shape = {"num_hidden_layers": 4, "hidden_size": 8, "vocab_size": 9, "max_position_embeddings": 99}
    (folder / "config.json").write_text(json.dumps(shape))
    assert known_shape(TargetConfig(path=str(folder))).vocab_size == 9
    (folder / file).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(part)):
        known_shape(TargetConfig(path=str(folder)))


def test_output_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_file = tmp_path / "file"
    a_file.write_text("")
    with pytest.raises(ConfigError, match=r"out=.*a file"):
        checks.check(load(conf_path("tiny"), [f"out={a_file}/below"]))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ConfigError, match=r"out=.*read-only"):
        checks.check(load(conf_path("tiny"), [f"out={tmp_path}"]))


def test_too_little_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=r"out=.*needs about .* GiB, found 0\.0 GiB"):
        checks.check(load(conf_path("tiny"), [f"out={tmp_path}"]))


def test_command_line_is_split() -> None:
    request = parse(["conf=smollm2", "stages=train,calibrate", "train.lr=3e-4"])
    assert request.conf == "smollm2"
    assert request.stages == ("train", "calibrate")
    assert request.overrides == ("train.lr=3e-4",)
    for args in (["conf=a", "conf=b"], ["stages="], ["run="]):
        with pytest.raises(ConfigError, match=r"=: expected one value"):
            parse(args)
    with pytest.raises(ConfigError, match=r"key=value"):
        parse(["--fast"])
    with pytest.raises(ConfigError, match=r"both"):
        parse(["conf=tiny", "run=x"])
