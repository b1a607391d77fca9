"""The byte model: shapes, causality, chance, and fragments that come out even."""

from __future__ import annotations

import pytest
import torch

from atoll.core.layout import BALANCE_MAX, largest_balanced_fragments, make_layout
from atoll.errors import ConfigError
from atoll.recipes.model import MODELS, ByteModel, Experts, ModelConfig, build_model, rotate
from atoll.recipes.sample import sample
from atoll.tensors.names import specs_of

NANO = ModelConfig(layers=2, width=16, heads=2, hidden=24, context=12)


def nano() -> ByteModel:
    torch.manual_seed(1)
    model = ByteModel(NANO)
    for block in model.blocks:  # zero at birth, which would hide what attention sees
        torch.nn.init.normal_(block.attention.out.weight, std=0.5)
        torch.nn.init.normal_(block.mlp.down.weight, std=0.5)
    return model


@pytest.mark.parametrize(("name", "millions"), [("tiny", (0.7, 1.1)), ("small", (8.0, 12.0))])
def test_model__size_and_even_fragments(name, millions):
    with torch.device("meta"):
        specs = specs_of(ByteModel(MODELS[name]))
    assert millions[0] < sum(spec.size for spec in specs) / 1e6 < millions[1]
    for fragments in (2, 4, 8, 24):
        assert make_layout(specs, fragments).balance <= BALANCE_MAX
    assert largest_balanced_fragments(specs, limit=24, divides=24) == 24


def test_model__embedding_and_head_are_averaged_and_nothing_else():
    averaged = [spec.name for spec in specs_of(build_model("tiny", 0)) if spec.averaged]
    assert averaged == ["embed.weight", "lm_head.weight"]


def test_model__begins_near_the_uniform_loss():
    model = build_model("tiny", 0)
    tokens = torch.arange(128)[None]
    loss = torch.nn.functional.cross_entropy(model(tokens)[0], tokens[0])
    assert loss.item() == pytest.approx(torch.log(torch.tensor(256.0)).item(), abs=0.2)


def test_model__sees_only_the_past_and_all_of_it():
    model = nano()
    tokens = torch.arange(10)[None] + 60
    plain = model(tokens)
    changed = tokens.clone()
    changed[0, 4] = 200
    other = model(changed)
    assert torch.equal(plain[:, :4], other[:, :4])
    assert all(not torch.allclose(plain[0, i], other[0, i], atol=1e-4) for i in range(4, 10))


def test_model__knows_the_order_of_what_it_has_seen():
    model = nano()
    ab = model(torch.tensor([[1, 2, 3]]))[0, -1]
    ba = model(torch.tensor([[2, 1, 3]]))[0, -1]
    assert not torch.allclose(ab, ba, atol=1e-3)


def test_rotate__keeps_norms_and_depends_on_distance_only():
    query, key = torch.randn(8), torch.randn(8)
    q, k = (rotate(x.expand(1, 1, 9, 8))[0, 0] for x in (query, key))
    torch.testing.assert_close(q.norm(dim=1), query.norm().expand(9))
    scores = q @ k.T
    for shift in (1, 3):
        torch.testing.assert_close(scores[shift:, shift:], scores[:-shift, :-shift], rtol=1e-4, atol=1e-5)


def test_build_model__same_seed_same_bits_and_global_chance_is_left_alone():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    one, two, other = build_model("tiny", 7), build_model("tiny", 7), build_model("tiny", 8)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.embed.weight, other.embed.weight)


def test_model__wrong_names_lengths_and_shapes_are_refused():
    with pytest.raises(ConfigError, match="model='huge' is unknown; use one of tiny, "):
        build_model("huge", 0)
    with pytest.raises(ConfigError, match="length=13 must be at most the model's context=12"):
        nano()(torch.zeros(1, 13, dtype=torch.int64))
    with pytest.raises(ConfigError, match="width=18 must be a multiple of"):
        ModelConfig(layers=1, width=18, heads=2, hidden=8, context=8)
    with pytest.raises(ConfigError, match="layers=0"):
        ModelConfig(layers=0, width=16, heads=2, hidden=8, context=8)


def test_sample__is_the_prompt_and_more_and_repeatable():
    model = nano()
    text = sample(model, "ab", length=30, seed=4)
    assert text.startswith("ab")
    assert text == sample(model, "ab", length=30, seed=4)
    assert text != sample(model, "ab", length=30, seed=5)
    assert sample(model, "ab", length=0) == "ab"
    assert model.training


def test_sample__empty_prompt_starts_after_a_newline_that_is_not_returned():
    model = nano()
    assert sample(model, "", length=0) == ""
    assert "\n" + sample(model, "", length=5) == sample(model, "\n", length=5)


def test_sample__of_a_long_prompt_the_model_sees_the_last_bytes():
    model = nano()
    seen: list[list[int]] = []
    model.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0][0].tolist()))
    prompt = "".join(map(chr, range(40, 100)))
    assert sample(model, prompt, length=2).startswith(prompt)
    assert seen[0] == list(prompt[-12:].encode())
    assert seen[1][:11] == list(prompt[-11:].encode())


def test_sample__temperature_zero_is_the_likeliest_and_a_tiny_one_agrees():
    model = nano()
    greedy = sample(model, "q", length=12, temperature=0, seed=1)
    assert greedy == sample(model, "q", length=12, temperature=0, seed=2)
    assert greedy == sample(model, "q", length=12, temperature=1e-30)
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="temperature="):
            sample(model, "q", temperature=bad)


def test_sample__bytes_that_are_no_text_become_replacement_marks():
    model = nano()
    with torch.no_grad():
        model.lm_head.weight.zero_()  # even odds: half of all bytes are no ASCII
    assert "�" in sample(model, "é", length=60)


def test_experts__each_position_goes_through_its_best_and_balance_is_1_where_all_are_used_alike() -> None:
    config = ModelConfig(layers=1, width=16, heads=2, hidden=8, context=8, experts=4, active=2)
    layer = Experts(config)
    x = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(1))
    best, chosen = layer.router(x).topk(2, dim=-1)
    every = torch.stack([expert(x) for expert in layer.experts], dim=-2)
    picked = torch.gather(every, -2, chosen[..., None].expand(-1, -1, -1, 16))
    expected = (picked * best.softmax(dim=-1)[..., None]).sum(dim=-2)
    torch.testing.assert_close(layer(x), expected)
    torch.nn.init.zeros_(layer.router.weight)
    layer(x)
    assert layer.balance is not None
    assert layer.balance.item() == pytest.approx(1.0)


def test_experts__one_of_many_that_gets_all_is_out_of_balance() -> None:
    layer = Experts(ModelConfig(layers=1, width=16, heads=2, hidden=8, context=8, experts=4, active=1))
    torch.nn.init.zeros_(layer.router.weight)
    with torch.no_grad():
        layer.router.weight[2] = 1.0
    layer(torch.ones(1, 8, 16))
    assert layer.balance is not None
    assert layer.balance.item() > 3.9
