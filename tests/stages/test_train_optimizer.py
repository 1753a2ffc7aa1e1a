"""What the optimiser does with a gradient: by hand, for every value of its configuration."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from stages.draft.model import build_draft, trainable
from stages.train.loop import Worker
from stages.train.optimizer import Optimizer, lr_factor
from stages.train.step import run_pass
from tests.stages.draft_helpers import CONFIG, DRAFT, SHAPE, FakeReader, write_target
from tests.stages.train_helpers import group_of_one, rows, usual_job

DECAYING = replace(CONFIG, lr=0.1, weight_decay=0.2, muon_lr_factor=3.0)
EPS = 1e-8  # Adam's


def test_learning_rate_is_a_function_of_the_step() -> None:
    """Ten steps, two of them warm up; half of the rest is done at step 6."""

    def at(schedule: str, *steps: int) -> list[float]:
        return [lr_factor(step, 10, 0.2, schedule) for step in steps]

    assert at("constant", 0, 1, 2, 6, 9) == [0.5, 1, 1, 1, 1]
    assert at("linear", 0, 1, 2, 4, 6, 10) == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0])
    assert at("cosine", 0, 1, 2, 4, 6, 10) == pytest.approx([0.5, 1, 1, 0.5 + math.sqrt(0.125), 0.5, 0])
    assert lr_factor(0, 10, 0.16, "cosine") == 0.5  # the nearest number of steps
    assert lr_factor(0, 1, 0.0, "cosine") == 1


def test_adamw_by_hand() -> None:
    """Two steps at other factors, with gradients so small that Adam's epsilon counts."""
    parameter = Parameter(torch.tensor([1.0]))
    optimizer = Optimizer({"w": parameter}, DECAYING)
    weight, first, second = 1.0, 0.0, 0.0
    for step, (gradient, factor) in enumerate([(1e-6, 0.5), (-3e-6, 0.8)], start=1):
        parameter.grad = torch.tensor([gradient])
        optimizer.step(factor)
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        mean, size = first / (1 - 0.9**step), math.sqrt(second / (1 - 0.999**step))
        weight = weight * (1 - 0.1 * factor * 0.2) - 0.1 * factor * mean / (size + EPS)
        assert parameter.item() == pytest.approx(weight, abs=1e-6)


def test_muon_by_hand() -> None:
    """Of an orthogonal gradient Newton-Schulz changes the one singular value alone."""
    gradient = torch.tensor([[0.6, -0.8], [0.8, 0.6]])
    parameter = Parameter(torch.full((2, 2), 5.0))
    parameter.grad = gradient.clone()
    parameters = {"fc.weight": Parameter(torch.zeros(1)), "layers.0.w": parameter}
    optimizer = Optimizer(parameters, replace(DECAYING, optimizer="muon"))
    optimizer.step(0.5)
    value = 1 / math.sqrt(2)  # of the gradient, scaled to a Frobenius norm of 1
    for _ in range(5):
        value = 3.4445 * value - 4.7750 * value**3 + 2.0315 * value**5
    rate = 0.1 * 3 * 0.5
    expected = 5.0 * (1 - rate * 0.2) - rate * value * gradient
    torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=0.02 * rate)  # it computes in bf16
    torch.testing.assert_close(optimizer.tensors()["layers.0.w|momentum_buffer"], 0.05 * gradient)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_which_weights_decay_and_at_which_rate(kind: str, tmp_path: Path) -> None:
    """All do; under Muon the matrices of layers at its own rate. Nothing else moves a weight without a gradient."""
    parameters = trainable(build_draft(DRAFT, SHAPE, write_target(tmp_path), verifier="x", seed=0))
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    Optimizer(parameters, replace(DECAYING, optimizer=kind)).step(0.5)
    faster = set()
    for name, parameter in parameters.items():
        rate = 0.1 * 0.5 * (3 if kind == "muon" and name.startswith("layers.") and parameter.ndim == 2 else 1)
        torch.testing.assert_close(parameter.detach(), before[name] * (1 - rate * 0.2), msg=name)
        if rate > 0.1:
            faster.add(name.split(".")[2])
    assert faster == ({"self_attn", "mlp"} if kind == "muon" else set())


@pytest.mark.parametrize("clip_norm", [0.01, 1e6])
def test_a_step_moves_as_the_clipped_gradient_at_the_rate_of_its_schedule(clip_norm: float, tmp_path: Path) -> None:
    """The seventh of nine steps, of which four warm up; Adam's first, in which a weight moves by all of its rate."""
    job = usual_job(tmp_path, clip_norm=clip_norm, warmup_share=0.5, schedule="linear")
    with group_of_one():
        worker = Worker(job, FakeReader(job.target.folder), torch.device("cpu"))
        gradients, share = worker.weights.gradients, worker._share(6)
        before = {name: parameter.detach().clone() for name, parameter in worker.parameters.items()}
        worker.state.step = 6
        taken = run_pass(worker.learner, worker.reader.read(share), len(share), (job.config.seed, 2, 6), backward=True)
        gradient, norm = gradients.flat / taken.sums.weight, float((gradients.flat / taken.sums.weight).norm())
        worker._step(worker.reader.read(worker._from(6)))
    assert 0.01 < norm < 1e6
    gradient *= min(1.0, clip_norm / norm)
    rate = job.config.lr * 3 / 5
    moved = torch.cat([(before[name] - parameter.detach()).flatten() for name, parameter in worker.parameters.items()])
    torch.testing.assert_close(moved, rate * gradient / (gradient.abs() + EPS), rtol=0, atol=1e-3 * rate)
    [(_, values)] = rows(job.out.path)
    assert (values["grad_norm"], values["lr"]) == pytest.approx((norm, rate))
    mean = torch.cat([worker.optimizer.tensors()[f"{name}|exp_avg"].flatten() for name in worker.parameters])
    torch.testing.assert_close(mean, 0.1 * gradient)
