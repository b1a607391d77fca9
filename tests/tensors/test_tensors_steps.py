"""The outer step, taking updates, and whole methods against references written apart from the code."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from atoll.core.layout import Piece, TensorSpec, make_layout
from atoll.tensors.codec import decode, encode
from atoll.tensors.flat import gather, scatter_
from atoll.tensors.merge import merge_piece
from atoll.tensors.names import parameters_by_name, specs_of
from atoll.tensors.outer import nesterov
from atoll.tensors.take import displacement, overwrite, rebase, rebase_buffers, revert

law = settings(deadline=None, derandomize=True)
values = st.lists(st.floats(width=32, min_value=-1000, max_value=1000), min_size=20, max_size=20)


def piece_of(size: int) -> Piece:
    return Piece(0, (TensorSpec("w", (size,), "float32"),))


def vector(numbers: list[float]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


@pytest.mark.parametrize(("lr", "mu"), [(0.7, 0.9), (0.4, 0.9), (1.0, 0.0)])
def test_nesterov__equals_torch_sgd(lr, mu):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(100))
    sgd = torch.optim.SGD([weight], lr=lr, momentum=mu, nesterov=mu > 0)
    theta, momentum = weight.detach().clone(), torch.zeros(100)
    for _ in range(6):
        weight.grad = torch.randn(100)
        theta, momentum = nesterov(theta, momentum, weight.grad, lr=lr, mu=mu)
        sgd.step()
        torch.testing.assert_close(theta, weight.detach(), rtol=1e-6, atol=1e-6)


def test_nesterov__equals_numpy_bit_for_bit_and_leaves_its_arguments():
    rng = np.random.default_rng(0)
    theta, momentum, delta = (rng.standard_normal(70_001).astype(np.float32) for _ in range(3))
    lr, mu = np.float32(0.7), np.float32(0.9)
    buf = momentum * mu + delta
    expected = theta - (delta + buf * mu) * lr
    arguments = [torch.from_numpy(x.copy()) for x in (theta, momentum, delta)]
    got, got_buf = nesterov(*arguments, lr=0.7, mu=0.9)
    assert np.array_equal(got.numpy(), expected)
    assert np.array_equal(got_buf.numpy(), buf)
    assert all(np.array_equal(a.numpy(), x) for a, x in zip(arguments, (theta, momentum, delta), strict=True))


@law
@given(values, values)
def test_hazard_1__one_learner_lands_on_its_own_weights(anchor, theta):
    a, b = vector(anchor), vector(theta)
    delta = -decode(encode(displacement(b, a), "fp32"), "fp32", 20)
    merged = merge_piece([delta], [123.0], piece_of(20), "average")
    landed, _ = nesterov(a, torch.zeros(20), merged, lr=1.0, mu=0.0)
    peak = torch.maximum(a.abs(), b.abs())
    ulp = torch.nextafter(peak, torch.full_like(peak, torch.inf)) - peak
    assert bool(((landed - b).abs() <= ulp).all())


def test_hazard_6__many_small_bf16_deltas_add_up_without_bias():
    steps = 4000
    delta = decode(encode(-torch.full((8,), 2.0**-12), "bf16"), "bf16", 8)
    theta, momentum = torch.ones(8), torch.zeros(8)
    swallowed = torch.ones(8, dtype=torch.bfloat16)
    for _ in range(steps):
        theta, momentum = nesterov(theta, momentum, merge_piece([delta], [1.0], piece_of(8)), lr=1.0, mu=0.0)
        swallowed = swallowed - delta.bfloat16()
    torch.testing.assert_close(theta, torch.full((8,), 1 + steps * 2.0**-12), rtol=1e-5, atol=0)
    assert swallowed.float().max() == 1.0  # what a syncer in bf16 would do


@law
@given(values, values, values)
def test_overwrite_and_revert__are_copies_of_the_anchor(theta, anchor, anchor_new):
    new = vector(anchor_new)
    for taken in (overwrite(new), revert(new)):
        assert torch.equal(taken, new)
        assert taken.data_ptr() != new.data_ptr()


@law
@given(values, values, values)
def test_rebase_buffers__never_leaves_what_was_observed(theta, base, anchor_new):
    t, b, n = vector(theta), vector(base), vector(anchor_new)
    taken = rebase_buffers(t, b, n)
    assert torch.equal(rebase_buffers(t, t, n), n), "nothing was observed since"
    assert (taken >= torch.minimum(t, n)).all()
    assert (taken <= torch.maximum(t, n)).all()
    within = (n + (t - b) >= torch.minimum(t, n)) & (n + (t - b) <= torch.maximum(t, n))
    assert torch.equal(taken[within], (n + (t - b))[within])


@law
@given(values, values, values, values)
def test_rebase__equals_the_rule_in_numpy(theta, anchor, anchor_new, sent):
    t, a, n, s = (np.array(x, dtype=np.float32) for x in (theta, anchor, anchor_new, sent))
    plain = rebase(vector(theta), vector(anchor), vector(anchor_new), None)
    merged = rebase(vector(theta), vector(anchor), vector(anchor_new), vector(sent))
    assert np.array_equal(plain.numpy(), n + (t - a))
    assert np.array_equal(merged.numpy(), n + ((t - a) - s))


def test_rebase__no_own_work_lands_on_the_anchor():
    a, n = torch.randn(50), torch.randn(50)
    assert torch.equal(rebase(a, a, n, None), n)


def test_rebase__what_the_codec_lost_comes_with_the_next_contribution():
    """Work below the codec's grain: over many sends the sum of what was sent follows the sum of the work."""
    anchor = theta = torch.zeros(64)
    work, received = torch.zeros(64), torch.zeros(64)
    rng = torch.Generator().manual_seed(0)
    for _ in range(200):
        step = torch.rand(64, generator=rng) + 1.0
        theta, work = theta + step, work + step
        sent = decode(encode(displacement(theta, anchor), "bf16"), "bf16", 64)
        received += sent
        anchor_new = anchor + sent
        theta = rebase(theta, anchor, anchor_new, sent)
        anchor = anchor_new
    assert (received - work).abs().max() < 0.02
    assert (decode(encode(work, "bf16"), "bf16", 64) - work).abs().max() > 0.02


LEARNERS, ROUNDS, INNER = 2, 4, 3


def a_model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def an_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, learner: int, step: int) -> None:
    rng = torch.Generator().manual_seed(1000 * learner + step)
    x = torch.randn(8, 4, generator=rng)
    loss = (model(x) - x.sum(1, keepdim=True) * (learner + 1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def reference_diloco(kind: str) -> nn.Module:
    """DiLoCo, algorithm 1, with torch's own SGD as the outer optimiser."""
    glob = a_model()
    outer = torch.optim.SGD(glob.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    models = [copy.deepcopy(glob) for _ in range(LEARNERS)]
    inners = [an_optimizer(kind, m) for m in models]
    for turn in range(ROUNDS):
        for i, (m, o) in enumerate(zip(models, inners, strict=True)):
            m.load_state_dict(glob.state_dict())
            for h in range(INNER):
                inner_step(m, o, i, turn * INNER + h)
        for g, *own in zip(glob.parameters(), *(m.parameters() for m in models), strict=True):
            g.grad = sum((g.detach() - p.detach()) for p in own) / LEARNERS
        outer.step()
    return glob


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_diloco__lock_step_equals_the_reference(kind):
    models = [a_model() for _ in range(LEARNERS)]
    inners = [an_optimizer(kind, m) for m in models]
    (piece,) = make_layout(specs_of(models[0]), 1).pieces
    theta = gather(parameters_by_name(models[0]), piece)
    momentum = torch.zeros_like(theta)
    for turn in range(ROUNDS):
        sent = []
        for i, (model, inner) in enumerate(zip(models, inners, strict=True)):
            for h in range(INNER):
                inner_step(model, inner, i, turn * INNER + h)
            sent.append(-displacement(gather(parameters_by_name(model), piece), theta))
        merged = merge_piece(sent, [INNER * 8.0] * LEARNERS, piece, "average")
        theta, momentum = nesterov(theta, momentum, merged, lr=0.7, mu=0.9)
        for model in models:
            scatter_(parameters_by_name(model), piece, overwrite(theta))
    expected = gather(parameters_by_name(reference_diloco(kind)), piece)
    torch.testing.assert_close(theta, expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(theta, gather(parameters_by_name(a_model()), piece), atol=0.01)


STREAM_STEPS, TAU = 12, 1


def reference_streaming() -> nn.Module:
    """Streaming DiLoCo, algorithm 2: H = 4, two fragments (layers), sent every H steps, taken tau later."""
    glob = a_model()
    models = [copy.deepcopy(glob) for _ in range(LEARNERS)]
    inners = [an_optimizer("adamw", m) for m in models]
    outers = [torch.optim.SGD(glob[k].parameters(), lr=0.4, momentum=0.9, nesterov=True) for k in (0, 2)]
    arriving = {}
    for step in range(STREAM_STEPS):
        for i, (m, o) in enumerate(zip(models, inners, strict=True)):
            inner_step(m, o, i, step)
        if step in arriving:
            k = arriving.pop(step)
            for m in models:
                m[k].load_state_dict(glob[k].state_dict())
        if step % 2 == 1:
            k = (2, 0)[step // 2 % 2]
            for g, *own in zip(glob[k].parameters(), *(m[k].parameters() for m in models), strict=True):
                g.grad = sum((g.detach() - p.detach()) for p in own) / LEARNERS
            outers[k // 2].step()
            arriving[step + TAU] = k
    return glob


def test_streaming__two_fragments_one_step_of_overlap_equal_the_reference():
    models = [a_model() for _ in range(LEARNERS)]
    inners = [an_optimizer("adamw", m) for m in models]
    specs = specs_of(models[0])
    pieces = [Piece(j, tuple(s for s in specs if s.name.startswith(k))) for j, k in enumerate("20")]
    theta = [gather(parameters_by_name(models[0]), p) for p in pieces]
    anchors = [[t.clone() for t in theta] for _ in models]
    momentum = [torch.zeros_like(t) for t in theta]
    arriving: dict[int, int] = {}
    for step in range(STREAM_STEPS):
        for i, (model, inner) in enumerate(zip(models, inners, strict=True)):
            inner_step(model, inner, i, step)
        if (j := arriving.pop(step, None)) is not None:
            for i, model in enumerate(models):
                anchors[i][j] = theta[j]
                scatter_(parameters_by_name(model), pieces[j], overwrite(theta[j]))
        if step % 2 == 1:
            j = step // 2 % 2
            now = [gather(parameters_by_name(model), pieces[j]) for model in models]
            sent = [-displacement(t, anchors[i][j]) for i, t in enumerate(now)]
            merged = merge_piece(sent, [32.0] * LEARNERS, pieces[j], "average")
            theta[j], momentum[j] = nesterov(theta[j], momentum[j], merged, lr=0.4, mu=0.9)
            arriving[step + TAU] = j
    expected = parameters_by_name(reference_streaming())
    for piece, got in zip(pieces, theta, strict=True):
        torch.testing.assert_close(got, gather(expected, piece), rtol=1e-5, atol=1e-6)
        assert not torch.allclose(got, gather(parameters_by_name(a_model()), piece), atol=0.01)
