"""Payloads: exact fp32, bf16 to nearest even, checked lengths."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import ConfigError
from atoll.tensors.codec import PAYLOADS, decode, encode, payload_bytes
from atoll.tensors.hashing import payload_hash

floats = st.lists(st.floats(width=32, min_value=-(2.0**127), max_value=2.0**127), max_size=40)


def bf16_by_hand(value: float) -> float:
    """Round the upper 16 bits of an fp32 to nearest, ties to even, with integers."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    upper, rest = bits >> 16, bits & 0xFFFF
    upper += rest > 0x8000 or (rest == 0x8000 and upper & 1)
    return struct.unpack("<f", struct.pack("<I", upper << 16))[0]


@settings(deadline=None, derandomize=True)
@given(floats)
def test_fp32__is_exact_and_little_endian(values):
    flat = torch.tensor(values, dtype=torch.float32)
    coded = encode(flat, "fp32")
    assert bytes(coded.numpy()) == struct.pack(f"<{len(values)}f", *values)
    assert torch.equal(decode(coded, "fp32", len(values)), flat)


@settings(deadline=None, derandomize=True)
@given(floats)
def test_bf16__rounds_to_nearest_even_as_by_hand(values):
    flat = torch.tensor(values, dtype=torch.float32)
    coded = encode(flat, "bf16")
    expected = [bf16_by_hand(v) for v in flat.tolist()]
    assert bytes(coded.numpy()) == b"".join(struct.pack("<f", v)[2:] for v in expected)
    assert decode(coded, "bf16", len(values)).tolist() == expected


def test_bf16__ties_go_to_even():
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)])
    assert decode(encode(ties, "bf16"), "bf16", 3).tolist() == [1.0, 1 + 2**-6, -1.0]


@pytest.mark.parametrize("payload", PAYLOADS)
def test_decode__takes_any_bytes_and_owns_its_memory(payload):
    flat = torch.arange(100.0)
    coded = encode(flat, payload)
    raw = bytes(coded.numpy())
    padded = torch.cat([torch.zeros(1, dtype=torch.uint8), coded])
    for buffer in (coded, padded[1:], raw, bytearray(raw), memoryview(raw)):
        assert torch.equal(decode(buffer, payload, 100), flat)
    first = decode(coded, payload, 100)
    coded.zero_()
    assert torch.equal(first, flat)
    assert payload_bytes(100, payload) == len(raw)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_encode__into_out_gives_the_same_and_never_shares_memory(payload):
    flat = torch.arange(10.0)
    out = torch.empty(payload_bytes(10, payload), dtype=torch.uint8)
    assert encode(flat, payload, out) is out
    plain = encode(flat, payload)
    assert torch.equal(plain, out)
    flat.zero_()
    assert torch.equal(plain, out)


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("cut", [-1, 1])
def test_decode__wrong_length_is_refused(payload, cut):
    with pytest.raises(ConfigError, match="for 8 values in"):
        decode(bytes(payload_bytes(8, payload) + cut), payload, 8)


def test_codec__wrong_kinds_are_refused():
    with pytest.raises(ConfigError, match="payload='int3' is unknown; use one of bf16, fp32"):
        encode(torch.zeros(2), "int3")
    with pytest.raises(ConfigError, match=r"not torch\.float64"):
        encode(torch.zeros(2, dtype=torch.float64), "fp32")
    with pytest.raises(ConfigError, match="flat uint8"):
        decode(torch.zeros(8), "fp32", 2)
    with pytest.raises(ConfigError, match=r"must be torch.uint8\[4\]"):
        encode(torch.zeros(2), "bf16", torch.empty(8, dtype=torch.uint8))


def test_payload_hash__depends_on_every_bit():
    data = bytearray(64)
    seen = {payload_hash(data)}
    for bit in range(512):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        seen.add(payload_hash(memoryview(flipped)))
    assert len(seen) == 513
    assert all(len(digest) == 32 for digest in seen)
