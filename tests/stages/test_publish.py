"""Publication: what a release holds, what is refused, and an upload to a small Hub on loopback."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import urlparse

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from stages.artifacts import Workspace, write_json, write_whole
from stages.corpus import Corpus
from stages.draft.artifact import Calibration, Draft, Release, Report
from stages.draft.checkpoint import check_checkpoint, export_draft, head_digest, scale_confidence
from stages.draft.model import build_draft
from stages.evaluate.acceptance import by_domain, macro, pooled
from stages.evaluate.report import acceptance_json, markdown
from stages.evaluate.stage import weights_digests
from stages.publish import stage
from stages.publish.config import PublishConfig
from stages.publish.hub import check, check_access, upload
from stages.target import Target
from tests.stages.draft_helpers import DRAFT, SHAPE, write_target
from tests.stages.served_helpers import artifact

LOCAL = PublishConfig()
REPO = "someone/tiny-speculator.dspark"


def write_report(path: Path, checkpoint: Path) -> Report:
    rounds = {"math": [[3, 2, 1, 1, 3]], "chat": [[9, 1, 0, 0, 0]]}
    arrays = {domain: torch.tensor(counts).numpy() for domain, counts in rounds.items()}
    options = {"samples": 20, "seed": 0}
    domains = by_domain(arrays, **options)
    facts = {
        "acceptance": acceptance_json(macro(arrays, **options), pooled(arrays, **options), domains),
        "text": {"compared": 2, "near_ties": 0},
        "draft": {"weights_sha256": weights_digests(checkpoint), "num_speculative_tokens": 4},
        "target": {"model": "org/target", "identity": "t"},
        "corpus": {"identity": "c"},
        "sampling": {"temperature": 0.0},
        "prompts": {"digest": "d", "counts": {"evaluated": 2, "prompts_in": 2}},
        "engine": {"gpus": [], "cpu": "a CPU", "kernels": "interpreter", "vllm": "0.32.0", "dtype": "bfloat16"},
    }
    report = artifact(Report, path, {"draft": facts["draft"]})
    write_json(path / "report.json", facts)
    write_whole(path / "report.md", markdown(facts))
    for name in ("acceptance.png", "positions.png"):
        (path / name).write_bytes(b"png")
    return report


@pytest.fixture
def made(tmp_path: Path) -> tuple[Target, Corpus, Draft, Calibration, Report]:
    """What a run hands to publish: a target on the Hub, a calibrated random draft and its report."""
    folder = write_target(tmp_path / "model")
    facts = {"built": False, "model": "org/target", "revision": "abc", "trust_remote_code": False}
    draft = artifact(Draft, tmp_path / "draft", {"verifier": "org/target"})
    export_draft(build_draft(DRAFT, SHAPE, folder, verifier="org/target", seed=0), draft.checkpoint)
    calibration = artifact(Calibration, tmp_path / "calibration", {"calibrated": True, "scale": 0.5, "shift": -1.0})
    calibration.record.facts["flags"] = ["", "", "too_few_records"]
    calibration.record.metrics["ece_survival/raw"] = 0.25
    scale_confidence(draft.checkpoint, calibration.checkpoint, 0.5, -1.0)
    calibration.record.facts["head_digest"] = head_digest(calibration.checkpoint)
    for name in ("confidence_calibration.json", "calibration.json"):
        write_json(calibration.path / name, {"temperatures": [1.0] * 4})
    return (
        artifact(Target, tmp_path / "target", facts),
        artifact(Corpus, tmp_path / "corpus", {"temperature": 0.0, "target": {"model": "org/target"}}),
        draft,
        calibration,
        write_report(tmp_path / "report", calibration.checkpoint),
    )


def publish(made: tuple, final: Path, config: PublishConfig = LOCAL, **provenance: object) -> Release:
    with Workspace(final, "p").locked() as out:
        return stage.run(config, *made, draft=DRAFT, provenance=provenance, out=out)


def test_release_holds_what_users_need(made: tuple, tmp_path: Path) -> None:
    release = publish(made, tmp_path / "release", mlflow_run_id="run7")
    assert release == Release.load(tmp_path / "release")
    folder = release.folder
    assert {path.name for path in folder.iterdir()} == set(release.record.facts["files"])
    assert "reliability.png" not in release.record.facts["files"]
    assert subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=folder, check=False).returncode == 0
    serving = json.loads((folder / "speculative_config.json").read_text())
    assert serving == {
        "model": ".",
        "method": "dspark",
        "num_speculative_tokens": 4,
        "draft_sample_method": "greedy",
        "rejection_sample_method": "standard",
    }
    card = ModelCard.load(folder / "README.md")
    assert card.data.base_model == "org/target"
    assert card.data.library_name == "speculators"
    assert card.data.license == "apache-2.0"
    assert card.data.model_name == "target-speculator.dspark"
    assert "| math | 1 | 10 | 2.90 |" in card.text  # 10 rounds, 19 accepted
    assert "0.5 z + -1" in card.text
    assert "raw 0.250. Not to be relied on: temperature 2: too_few_records." in card.text
    provenance = json.loads((folder / "provenance.json").read_text())
    assert json.loads((folder / "config.json").read_text()) == json.loads(
        (made[3].checkpoint / "config.json").read_text()
    )
    assert provenance["mlflow_run_id"] == "run7"
    assert provenance["artifacts"]["Corpus"]["identity"] == "corpus"


@pytest.mark.parametrize("step", ["copy_inputs", "model_card", "replace_folders", "check_release", "write_sums"])
def test_what_a_killed_publish_left_is_made_anew(
    step: str, made: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = (publish(made, tmp_path / "straight").path / "release" / "SHA256SUMS").read_text()
    final = tmp_path / "killed"
    with monkeypatch.context() as patched:
        patched.setattr(stage, step, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            publish(made, final)
    assert not final.exists()
    [left] = tmp_path.glob("killed.partial/release")
    (left / "half-written").write_text("x")
    assert (publish(made, final).path / "release" / "SHA256SUMS").read_text() == wanted


def test_speculative_config_is_one_that_vllm_takes(made: tuple, tmp_path: Path) -> None:
    from typing import get_args

    from vllm.config.speculative import DraftSampleMethod, RejectionSampleMethod, SpeculativeConfig

    serving = json.loads((publish(made, tmp_path / "release").folder / "speculative_config.json").read_text())
    assert serving.keys() <= SpeculativeConfig.__dataclass_fields__.keys()
    assert serving["draft_sample_method"] in get_args(DraftSampleMethod)
    assert serving["rejection_sample_method"] in get_args(RejectionSampleMethod)


def test_card_says_when_calibration_did_not_help(made: tuple, tmp_path: Path) -> None:
    made[3].record.facts.update(scale=1.0, shift=0.0)
    text = (publish(made, tmp_path / "release").folder / "README.md").read_text()
    assert "The confidence head is as trained" in text
    assert "is calibrated" not in text


def test_local_target_is_not_named_as_base_model(made: tuple, tmp_path: Path) -> None:
    target, *rest = made
    target.record.facts["built"] = True
    card = ModelCard.load(publish((target, *rest), tmp_path / "release").folder / "README.md")
    assert card.data.base_model is None
    assert card.data.model_name == "tiny-speculator.dspark"


@pytest.mark.parametrize(("built", "name"), [(True, "tiny-target"), (False, "My Modèl")])
def test_release_does_not_tell_where_the_target_lay(built: bool, name: str, made: tuple, tmp_path: Path) -> None:
    """The target moved between the stages, and each of them wrote down where it was."""
    target, corpus, draft, calibration, report = made
    places = [str(tmp_path / place / "My Modèl") for place in ("now", "corpus", "draft", "report")]
    target.record.facts.update(built=built, model="model" if built else places[0])
    places[0] = target.model
    corpus.record.facts["target"]["model"] = places[1]
    draft.record.facts["verifier"] = places[2]
    config = json.loads((calibration.checkpoint / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = places[2]
    write_json(calibration.checkpoint / "config.json", config)
    facts = json.loads((report.path / "report.json").read_text())
    facts["target"]["model"] = facts["sampling"]["written_by"] = places[3]
    facts["like_it"] = [places[3] + "2", "https://host" + places[3]]
    write_json(report.path / "report.json", facts)
    write_whole(report.path / "report.md", markdown(facts))

    folder = publish(made, tmp_path / "release").folder
    released = json.loads((folder / "report.json").read_text())
    assert released == facts | {
        "target": {"model": name, "identity": "t"},
        "sampling": {"temperature": 0.0, "written_by": name},
    }
    assert f"| target | {name} (`t`) |" in (folder / "report.md").read_text()
    for path in (folder / n for n in ("config.json", "provenance.json", "report.md", "README.md")):
        text = path.read_text()
        assert not [place for place in places if place in text or json.dumps(place)[1:-1] in text]
    assert json.loads((folder / "config.json").read_text())["speculators_config"]["verifier"]["name_or_path"] == name
    check_checkpoint(folder)
    assert weights_digests(folder) == weights_digests(calibration.checkpoint)
    assert subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=folder, check=False).returncode == 0


def test_provenance_names_files_but_not_where_they_lay(made: tuple, tmp_path: Path) -> None:
    made[1].record.facts["prompts"] = {"/home/me/my prompts/a.jsonl": "1f"}
    folder = publish(made, tmp_path / "release", told={"datagen": {"prompts": ["/home/me/my prompts"]}}).folder
    text = (folder / "provenance.json").read_text()
    assert "/home/me" not in text
    told = json.loads(text)
    assert told["told"]["datagen"]["prompts"] == ["my prompts"]
    assert told["artifacts"]["Corpus"]["facts"]["prompts"] == {"a.jsonl": "1f"}


def test_weights_that_were_not_evaluated_are_refused(made: tuple, tmp_path: Path) -> None:
    weights = made[3].checkpoint / "model.safetensors"
    tensors = load_file(weights)
    tensors["confidence_head.proj.bias"] += 0.1
    save_file(tensors, weights)
    with pytest.raises(ValueError, match="expected the evaluated weights"):
        publish(made, tmp_path / "release")
    assert not (tmp_path / "release").exists()


def test_tensor_that_does_not_fit_the_config_is_refused(made: tuple, tmp_path: Path) -> None:
    checkpoint = made[3].checkpoint
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["confidence_head.proj.weight"] = torch.zeros(1, 3)
    save_file(tensors, checkpoint / "model.safetensors")
    made[4].record.facts["draft"]["weights_sha256"] = weights_digests(checkpoint)
    with pytest.raises(ValueError, match=r"confidence_head\.proj\.weight: expected"):
        publish(made, tmp_path / "release")


@pytest.mark.parametrize("variable", ["HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "WANDB_API_KEY"])
def test_secret_is_refused(variable: str, made: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, 'sécret"value')
    with pytest.raises(ValueError, match=rf"provenance\.json: holds the value of a secret .*\({variable}\)"):
        publish(made, tmp_path / "release", environment={"seen": 'x sécret"value y'})


def test_stray_file_is_refused(made: tuple, tmp_path: Path) -> None:
    (made[3].checkpoint / "config.py").write_text("print()")
    with pytest.raises(ValueError, match=r"found also \['config\.py'\]"):
        publish(made, tmp_path / "release")


def test_draft_without_confidence_head_says_so(made: tuple, tmp_path: Path) -> None:
    made[3].record.facts.clear()
    made[3].record.facts["calibrated"] = False
    release = publish(made, tmp_path / "release")
    assert not (release.folder / "confidence_calibration.json").exists()
    assert "no confidence head" in (release.folder / "README.md").read_text()


def check_refused(
    check: Callable[[PublishConfig], None], config: PublishConfig, message: str, made: tuple, folder: Path
) -> None:
    """In one line, by the check before the start and by the stage, which leaves nothing."""
    with pytest.raises(ValueError, match=message) as error:
        check(config)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=message):
        publish(made, folder / "release", config)
    assert not list((folder / "release.partial").iterdir())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PublishConfig(repo_id="no-owner"), "expected owner/name"),
        (PublishConfig(repo_id="a/b/c"), "expected owner/name"),
        (PublishConfig(license="Apache 2.0"), r"publish\.license"),
    ],
)
def test_what_would_fail_at_the_end_is_refused_at_the_start(
    config: PublishConfig, message: str, made: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    check_refused(check, config, message, made, tmp_path)


@pytest.mark.parametrize(
    ("token", "offline", "message"),
    [("", False, "a write token in HF_TOKEN, found none"), ("hf_test", True, "HF_HUB_OFFLINE forbids")],
)
def test_machine_that_cannot_upload_is_refused_at_the_start(
    token: str, offline: bool, message: str, made: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    config = PublishConfig(repo_id=REPO)
    check(config)
    check_refused(check_access, config, message, made, tmp_path)


class FakeHub(BaseHTTPRequestHandler):
    """As much of the Hub as a commit needs. `files` is the repository, `commits` what it was told."""

    files: dict[str, bytes]
    commits: list[list[dict]]
    lose: str | None

    def do_HEAD(self) -> None:
        self._file(self.files[urlparse(self.path).path.rpartition("/")[2]])

    def do_GET(self) -> None:
        names = [name for name in sorted(self.files) if name != self.lose or not self.commits]
        if "/resolve/" in self.path:
            self.wfile.write(self._file(self.files[urlparse(self.path).path.rpartition("/")[2]]))
        elif "/tree/" in urlparse(self.path).path:
            self._answer([{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in names])
        else:
            self._answer({"id": REPO, "sha": "f" * 40, "siblings": [{"rfilename": name} for name in names]})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        assert self.headers["Authorization"] == "Bearer hf_test"
        path = urlparse(self.path).path
        if path.endswith("/repos/create"):
            self._answer({"url": f"http://{self.headers['Host']}/{REPO}"})
        elif path.endswith("/validate-yaml"):
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            files = [file["path"] for file in json.loads(body)["files"]]
            self._answer({"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in files]})
        elif "/commit/" in path:
            self.commits.append(operations := [json.loads(line) for line in body.splitlines()])
            for operation in operations:
                value = operation["value"]
                if operation["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                elif operation["key"] == "deletedFile":
                    del self.files[value["path"]]
            self._answer(
                {"commitUrl": f"http://{self.headers['Host']}/{REPO}/commit/{'f' * 40}", "commitOid": "f" * 40}
            )

    def _file(self, content: bytes) -> bytes:
        self.send_response(200)
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": "f" * 40}
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        return content

    def _answer(self, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, type[FakeHub]]]:
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # the server is on loopback
    state = type("Hub", (FakeHub,), {"files": {}, "commits": [], "lose": None})
    server = HTTPServer(("127.0.0.1", 0), state)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", state
    server.shutdown()
    thread.join()
    server.server_close()


OWNERS_FILES = (".gitattributes", "notes.txt", "banner.png", "assets/logo.png", "eval/results.json", "eval/model.bin")


@pytest.mark.parametrize("sums", [None, "0  config.json\n0  reliability.png\n0  eval/results.json\n\n"])
def test_upload_is_one_commit_that_replaces_the_old_release(
    sums: str | None, made: tuple, tmp_path: Path, hub: tuple[str, type[FakeHub]]
) -> None:
    endpoint, state = hub
    shards = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
    state.files |= dict.fromkeys((*OWNERS_FILES, *shards, "config.json", "reliability.png"), b"old")
    if sums is not None:
        state.files["SHA256SUMS"] = sums.encode()
    release = publish(made, tmp_path / "release")
    names = release.record.facts["files"]
    (release.folder / "left_over.txt").write_text("not part of the release")
    assert upload(release.folder, names, PublishConfig(repo_id=REPO), endpoint) == "f" * 40
    assert len(state.commits) == 1
    unlisted = {"reliability.png"} if sums is None else set()  # nothing tells that a release brought it
    assert set(state.files) == {*names, *OWNERS_FILES, *unlisted}
    for name in names:
        assert state.files[name] == (release.folder / name).read_bytes()


def test_upload_that_lost_a_file_is_an_error(made: tuple, tmp_path: Path, hub: tuple[str, type[FakeHub]]) -> None:
    endpoint, state = hub
    state.lose = "model.safetensors"
    release = publish(made, tmp_path / "release")
    with pytest.raises(RuntimeError, match=r"lacks \['model\.safetensors'\]"):
        upload(release.folder, release.record.facts["files"], replace(PublishConfig(), repo_id=REPO), endpoint)
