from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.layout import (
    TensorSpec,
    balance_warning,
    fingerprint,
    first_difference,
    is_embedding_like,
    largest_balanced_fragments,
    make_layout,
)
from atoll.errors import ConfigError, LayoutError

sizes = st.lists(st.integers(1, 60), min_size=1, max_size=9)


def specs(values: list[int]) -> list[TensorSpec]:
    return [TensorSpec(f"t{i}", (n,), "float32") for i, n in enumerate(values)]


def best_peak(values: list[int], fragments: int) -> int:
    """By trying every assignment."""
    best = sum(values)
    for choice in product(range(fragments), repeat=len(values)):
        loads = [0] * fragments
        for size, target in zip(values, choice, strict=True):
            loads[target] += size
        best = min(best, max(loads))
    return best


@given(sizes, st.integers(1, 3))
def test_greedy_is_within_4_thirds_of_brute_force(values: list[int], fragments: int) -> None:
    fragments = min(fragments, len(values))
    layout = make_layout(specs(values), fragments)
    assert max(layout.piece_sizes) * 3 <= best_peak(values, fragments) * 4
    assert sum(layout.piece_sizes) == sum(values)
    names = [t.name for p in layout.pieces for t in p.tensors]
    assert sorted(names) == sorted(t.name for t in specs(values)), "whole tensors, each once"


@given(sizes.flatmap(lambda v: st.tuples(st.just(v), st.permutations(range(len(v))))), st.integers(1, 4))
def test_layout_does_not_depend_on_input_order(case: tuple[list[int], list[int]], fragments: int) -> None:
    values, order = case
    tensors = specs(values)
    fragments = min(fragments, len(values))
    assert make_layout(tensors, fragments) == make_layout([tensors[i] for i in order], fragments)


def test_ties_are_broken_by_name() -> None:
    layout = make_layout([TensorSpec(n, (4,), "float32") for n in "dcba"], 2)
    assert [[t.name for t in p.tensors] for p in layout.pieces] == [["a", "c"], ["b", "d"]]


def test_offsets_lay_tensors_end_to_end_by_name() -> None:
    [piece] = make_layout([TensorSpec("b", (2, 3), "float32"), TensorSpec("a", (), "float32")], 1).pieces
    assert [(t.name, a, b) for t, a, b in piece.offsets()] == [("a", 0, 1), ("b", 1, 7)]


def test_uneven_pieces_are_warned_of_with_the_largest_even_number() -> None:
    layout = make_layout(specs([100, 10, 10, 10]), 4)
    warning = balance_warning(layout)
    assert warning is not None
    assert "fragments=1" in warning
    assert balance_warning(make_layout(specs([10, 10, 10, 10]), 2)) is None
    assert largest_balanced_fragments(specs([10] * 24), 24, divides=24) == 24
    assert largest_balanced_fragments(specs([10] * 23), 24, divides=24) == 12


@pytest.mark.parametrize(
    "changed",
    [
        TensorSpec("a", (3, 2), "float32"),
        TensorSpec("a", (2, 3), "bfloat16"),
        TensorSpec("a", (2, 3), "float32", averaged=True),
        TensorSpec("a", (2, 3), "float32", aliases=("z",)),
        TensorSpec("aa", (2, 3), "float32"),
    ],
)
def test_fingerprint_sees_shape_dtype_merge_kind_ties_and_name(changed: TensorSpec) -> None:
    """Hazard 9: same-sized layouts of different tensors were accepted."""
    ours = [TensorSpec("a", (2, 3), "float32"), TensorSpec("b", (4,), "float32")]
    theirs = [changed, ours[1]]
    assert fingerprint(ours) != fingerprint(theirs)
    difference = first_difference(ours, theirs)
    assert difference is not None
    assert "a float32[2,3]" in difference
    assert first_difference(ours, list(reversed(ours))) is None


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [TensorSpec("a", (2,), "float32"), TensorSpec("a", (2,), "float32")],
        [TensorSpec("a", (2,), "float32", aliases=("a",))],
        [TensorSpec("", (2,), "float32")],
        [TensorSpec("a" * 600, (2,), "float32")],
        [TensorSpec("a", (2, 0), "float32")],
        [TensorSpec("a", (1,) * 9, "float32")],
        [TensorSpec("a", (2,), "int8")],
    ],
)
def test_a_list_that_is_no_model_is_refused(tensors: list[TensorSpec]) -> None:
    with pytest.raises(LayoutError):
        make_layout(tensors, 1)


def test_more_fragments_than_tensors_names_both() -> None:
    with pytest.raises(ConfigError, match="fragments=3 is more than the model's 2 tensors"):
        make_layout(specs([1, 1]), 3)


def test_embedding_like_names() -> None:
    assert is_embedding_like("model.embed_tokens.weight")
    assert is_embedding_like("lm_head.weight")
    assert not is_embedding_like("blocks.0.attention.query.weight")
