"""Laws that every merge rule keeps, and references written apart from the code."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.layout import Piece, TensorSpec
from atoll.errors import ConfigError
from atoll.tensors.merge import (
    BAND_VALUES,
    BLOCK_VALUES,
    METHODS,
    is_finite,
    merge_piece,
    normalised,
    piece_norm,
    weight,
)

BORDER_SIZES = [1, 2, 3, 1000, BLOCK_VALUES - 1, BLOCK_VALUES, BLOCK_VALUES + 1, 3 * BLOCK_VALUES + 17]
both = pytest.mark.parametrize("method", METHODS)


def piece_of(*sizes: int, averaged: bool = False) -> Piece:
    specs = [TensorSpec(f"t{i}", (size,), "float32", averaged) for i, size in enumerate(sizes)]
    return Piece(0, tuple(specs))


def random_deltas(seed: int, learners: int, size: int, scale: float = 1.0) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=rng) * scale for _ in range(learners)]


def reference(deltas, weights, piece, method):
    """The formula as printed, in numpy doubles."""
    share = np.array(weights) / np.sum(weights)
    out = np.zeros(piece.size)
    for spec, a, b in piece.offsets():
        x = np.stack([d[a:b].numpy().astype(np.float64) for d in deltas])
        if method == "average" or spec.averaged:
            out[a:b] = share @ x
            continue
        norm = np.linalg.norm(x, axis=1)
        direction = share @ np.divide(x, norm[:, None], out=np.zeros_like(x), where=norm[:, None] > 0)
        length = np.linalg.norm(direction)
        out[a:b] = share @ norm * direction / length if length else 0.0
    return out


merge_cases = st.tuples(
    st.integers(0, 2**31),
    st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=6),
    st.lists(st.integers(8, 40), min_size=1, max_size=4),
)
law = settings(deadline=None, max_examples=30, derandomize=True)


@both
@law
@given(merge_cases)
def test_merge__equals_the_printed_formula(method, case):
    seed, weights, sizes = case
    piece = piece_of(*sizes)
    deltas = random_deltas(seed, len(weights), piece.size)
    expected = reference(deltas, weights, piece, method)
    merged = merge_piece(deltas, weights, piece, method).numpy()
    np.testing.assert_allclose(merged, expected, rtol=1e-5, atol=1e-6)


@both
@law
@given(merge_cases, st.randoms(use_true_random=False), st.floats(1e-6, 1e6))
def test_merge__order_of_learners_and_scale_of_weights_do_not_matter(method, case, chance, factor):
    seed, weights, sizes = case
    piece = piece_of(*sizes)
    deltas = random_deltas(seed, len(weights), piece.size)
    plain = merge_piece(deltas, weights, piece, method)
    order = chance.sample(range(len(weights)), len(weights))
    other = merge_piece([deltas[i] for i in order], [weights[i] * factor for i in order], piece, method)
    torch.testing.assert_close(other, plain, rtol=1e-5, atol=1e-6)


@both
@law
@given(st.integers(0, 2**31), st.floats(1e-3, 1e6), st.integers(1, 50))
def test_merge__one_learner_is_its_own_delta(method, seed, w, size):
    (delta,) = random_deltas(seed, 1, size)
    merged = merge_piece([delta], [w], piece_of(size), method)
    if method == "average":
        assert torch.equal(merged, delta)
    torch.testing.assert_close(merged, delta, rtol=2e-7, atol=0)


@both
@pytest.mark.parametrize("learners", [2, 3, 8])
def test_merge__identical_deltas_give_that_delta(method, learners):
    (delta,) = random_deltas(1, 1, 500)
    merged = merge_piece([delta] * learners, [1.0 + i for i in range(learners)], piece_of(200, 300), method)
    torch.testing.assert_close(merged, delta, rtol=3e-7, atol=1e-9)


@both
def test_merge__zero_deltas_give_zero_and_one_zero_delta_harms_nobody(method):
    zero, (delta,) = torch.zeros(30), random_deltas(2, 1, 30)
    piece = piece_of(30)
    assert torch.equal(merge_piece([zero, zero], [1.0, 2.0], piece, method), zero)
    torch.testing.assert_close(merge_piece([zero, delta], [1.0, 3.0], piece, method), delta * 0.75)


@law
@given(st.integers(0, 2**31), st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.integers(8, 300))
def test_rda__norm_is_the_weighted_mean_of_norms(seed, weights, size):
    deltas = [d * (i + 0.1) for i, d in enumerate(random_deltas(seed, len(weights), size))]
    merged = merge_piece(deltas, weights, piece_of(size), "rda")
    mean = sum(w * d.double().norm().item() for w, d in zip(weights, deltas, strict=True)) / sum(weights)
    assert merged.double().norm().item() == pytest.approx(mean, rel=1e-6)


def test_rda__averaging_shrinks_orthogonal_deltas_and_rda_does_not():
    deltas = [torch.eye(8)[i] for i in range(8)]
    norms = {m: merge_piece(deltas, [1.0] * 8, piece_of(8), m).norm().item() for m in METHODS}
    assert norms == pytest.approx({"rda": 1.0, "average": 8**-0.5})


@pytest.mark.parametrize("factor", [-1.0, -0.3, -7.7])
def test_rda__opposite_directions_cancel_to_zero_not_to_noise(factor):
    (delta,) = random_deltas(3, 1, 100)
    merged = merge_piece([delta, delta * factor], [1.0, 1.0], piece_of(100), "rda")
    assert torch.equal(merged, torch.zeros(100))


def test_rda__is_per_tensor_and_leaves_averaged_tensors_to_the_average():
    specs = (TensorSpec("a", (50,), "float32"), TensorSpec("e", (70,), "float32", averaged=True))
    piece = Piece(3, specs)
    deltas = random_deltas(4, 3, 120)
    merged = merge_piece(deltas, [1.0, 2.0, 3.0], piece, "rda")
    alone = merge_piece([d[:50] for d in deltas], [1.0, 2.0, 3.0], Piece(0, specs[:1]), "rda")
    mean = merge_piece([d[50:] for d in deltas], [1.0, 2.0, 3.0], piece_of(70), "average")
    assert torch.equal(merged, torch.cat([alone, mean]))


@both
@pytest.mark.parametrize("size", [*BORDER_SIZES, BAND_VALUES + 5])
def test_merge__same_bits_for_any_number_of_threads(method, size):
    deltas = random_deltas(size, 3, size, 1e-3)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(merge_piece(deltas, [1.7, 0.3, 2.9], piece_of(size), method))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def norm_by_the_book(values: list[float]) -> float:
    """Step 3 of the module's text with Python floats only."""
    total = 0.0
    for start in range(0, len(values), 65_536):
        y = [v * v for v in values[start : start + 65_536]]
        y += [0.0] * (65_536 - len(y))
        while len(y) > 1:
            half = len(y) // 2
            y = [y[i] + y[i + half] for i in range(half)]
        total = total + y[0]
    return math.sqrt(total)


@pytest.mark.parametrize("size", BORDER_SIZES)
def test_piece_norm__equals_plain_python_bit_for_bit(size):
    (flat,) = random_deltas(size, 1, size)
    assert piece_norm(flat) == norm_by_the_book(flat.tolist())
    assert piece_norm(flat) == pytest.approx(flat.double().norm().item(), rel=1e-12)


def test_merge__equals_the_documented_steps_bit_for_bit():
    size, weights = 70_001, [3.7, 0.2, 11.0]
    deltas = random_deltas(9, 3, size, 0.01)
    total = (0.0 + weights[0] + weights[1]) + weights[2]
    share = [w / total for w in weights]
    norms = [norm_by_the_book(d.tolist()) for d in deltas]
    c = [s / n for s, n in zip(share, norms, strict=True)]
    columns = list(zip(*(d.tolist() for d in deltas), strict=True))
    mean = [(x * share[0] + y * share[1]) + z * share[2] for x, y, z in columns]
    direction = [(x * c[0] + y * c[1]) + z * c[2] for x, y, z in columns]
    magnitude = ((0.0 + share[0] * norms[0]) + share[1] * norms[1]) + share[2] * norms[2]
    scale = magnitude / norm_by_the_book(direction)
    expected = {"average": mean, "rda": [v * scale for v in direction]}
    for method in METHODS:
        merged = merge_piece(deltas, weights, piece_of(size), method)
        assert merged.tolist() == np.array(expected[method]).astype(np.float32).tolist()


def test_merge__huge_and_tiny_deltas_neither_overflow_nor_vanish():
    for scale in (1e-40, 1e37):
        deltas = [d * scale for d in random_deltas(5, 2, 64)]
        merged = merge_piece(deltas, [1.0, 1.0], piece_of(64), "rda")
        mean = sum(d.double().norm().item() for d in deltas) / 2
        assert is_finite(merged)
        assert merged.double().norm().item() == pytest.approx(mean, rel=1e-4)


def test_merge__leaves_its_arguments_alone():
    deltas = random_deltas(6, 2, 10)
    copies = [d.clone() for d in deltas]
    for method in METHODS:
        merge_piece(deltas, [1.0, 2.0], piece_of(10), method).fill_(9)
    assert all(torch.equal(d, c) for d, c in zip(deltas, copies, strict=True))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_weights__anything_but_finite_and_positive_is_refused(bad):
    with pytest.raises(ConfigError, match=f"weight {bad} of contribution 1"):
        normalised([1.0, bad])


def test_weights__normalise_and_overflow_is_refused():
    assert normalised([1.0, 3.0]) == [0.25, 0.75]
    with pytest.raises(ConfigError, match="add up to inf"):
        normalised([1.7e308, 1.7e308])


@pytest.mark.parametrize(
    ("deltas", "weights"),
    [([], []), ([torch.zeros(4)], [1.0, 1.0]), ([torch.zeros(5)], [1.0]), ([torch.zeros(4).double()], [1.0])],
)
def test_merge__wrong_shapes_and_counts_are_refused(deltas, weights):
    with pytest.raises(ConfigError):
        merge_piece(deltas, weights, piece_of(4))


def test_merge__unknown_rule_is_refused():
    with pytest.raises(ConfigError, match="merge='median' is unknown; use one of rda, average"):
        merge_piece([torch.zeros(4)], [1.0], piece_of(4), "median")


def test_weight__is_tokens_times_tokens_per_step():
    assert weight(3000, 6) == 3000 * 500.0
    for tokens, steps in [(0, 1), (10, 0), (-5, 2)]:
        with pytest.raises(ConfigError, match="must be above 0"):
            weight(tokens, steps)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_is_finite__sees_a_single_bad_value(bad):
    flat = torch.zeros(70_000)
    assert is_finite(flat)
    flat[-1] = bad
    assert not is_finite(flat)


def test_merge__norms_that_are_known_change_no_bit() -> None:
    from atoll.core.layout import TensorSpec, make_layout
    from atoll.tensors.merge import norm_of, piece_norm, tensor_norms

    shapes = {"a": (300, 300), "b": (70_000,), "c": (1,)}
    specs = [TensorSpec(name, shape, "float32") for name, shape in shapes.items()]
    [piece] = make_layout(specs, 1).pieces
    deltas = [torch.randn(piece.size, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    norms = [tensor_norms(delta, piece) for delta in deltas]
    plain = merge_piece(deltas, [1.0, 2.0, 3.0], piece, "rda")
    assert torch.equal(plain, merge_piece(deltas, [1.0, 2.0, 3.0], piece, "rda", norms))
    assert norm_of(norms[0]) == pytest.approx(piece_norm(deltas[0]), rel=1e-12)
