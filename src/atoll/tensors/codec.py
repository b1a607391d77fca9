"""Payloads: how a flat fp32 piece becomes bytes.

A piece (`encode_piece`): its parameters in the run's payload format, then its buffers in fp32, whatever that is (R29).

`fp32`: four bytes a value, exact. `bf16`: two bytes a value, rounded to nearest, ties to even; what it costs
is kept by the learner under rebase (protocol R20). Both little-endian, no header: size and hash travel in the
message. A delta that must add up on both sides is `decode(encode(x))`, on the CPU (protocol R7, R17).
"""

from __future__ import annotations

import sys
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from atoll.core.layout import Piece
from atoll.errors import ConfigError

PAYLOADS = {"bf16": torch.bfloat16, "fp32": torch.float32}
Bytes: TypeAlias = Tensor | bytes | bytearray | memoryview


def _dtype(payload: str) -> torch.dtype:
    if sys.byteorder != "little":
        raise ConfigError(f"byte order {sys.byteorder!r} is not supported; payloads are little-endian")
    if payload not in PAYLOADS:
        raise ConfigError(f"payload={payload!r} is unknown; use one of {', '.join(PAYLOADS)}")
    return PAYLOADS[payload]


def payload_bytes(size: int, payload: str) -> int:
    """Bytes of `size` values."""
    width: int = _dtype(payload).itemsize
    return size * width


def encode(flat: Tensor, payload: str, out: Tensor | None = None) -> Tensor:
    """fp32 [n] -> uint8 [payload_bytes(n)], into `out` where given. Never shares memory with `flat`.

    A value beyond bf16's largest (3.39e38) becomes infinite; the receiver then refuses it (protocol R25).
    """
    dtype = _dtype(payload)
    if flat.dtype != torch.float32 or flat.dim() != 1:
        raise ConfigError(f"a payload is made of a flat float32 tensor, not {flat.dtype}{list(flat.shape)}")
    coded = flat.detach().to("cpu", dtype).contiguous().view(torch.uint8)
    if out is None:
        return coded.clone() if dtype == torch.float32 else coded
    if out.dtype != torch.uint8 or out.shape != coded.shape:
        raise ConfigError(f"out {out.dtype}{list(out.shape)} must be torch.uint8[{len(coded)}] for {payload}")
    return out.copy_(coded)


def _byte_array(buffer: Bytes) -> np.ndarray:
    if not isinstance(buffer, Tensor):
        return cast(np.ndarray, np.frombuffer(buffer, dtype=np.uint8))
    if buffer.dtype != torch.uint8 or buffer.dim() != 1:
        raise ConfigError(f"a payload is a flat uint8 tensor, not {buffer.dtype}{list(buffer.shape)}")
    return cast(np.ndarray, buffer.cpu().numpy())


def decode(buffer: Bytes, payload: str, size: int) -> Tensor:
    """Bytes -> fp32 [size], on the CPU, in memory of its own. The length is checked before that is taken."""
    dtype = _dtype(payload)
    source = _byte_array(buffer)
    wanted = payload_bytes(size, payload)
    if len(source) != wanted:
        raise ConfigError(f"payload of {len(source)} bytes must have {wanted} for {size} values in {payload}")
    raw = torch.empty(size, dtype=dtype, device="cpu")
    raw.view(torch.uint8).numpy()[:] = source
    return raw.to(torch.float32)


def encode_piece(flat: Tensor, piece: Piece, payload: str, out: Tensor | None = None) -> Tensor:
    """fp32 [piece.size] -> uint8 [piece.payload_bytes(payload)], into `out` where given."""
    trained = piece.parameters.size
    if trained == piece.size:
        return encode(flat, payload, out)
    target = torch.empty(piece.payload_bytes(payload), dtype=torch.uint8, device="cpu") if out is None else out
    cut = payload_bytes(trained, payload)
    encode(flat[:trained], payload, target[:cut])
    encode(flat[trained:], "fp32", target[cut:])
    return target


def decode_piece(buffer: Bytes, piece: Piece, payload: str) -> Tensor:
    """Bytes -> fp32 [piece.size], on the CPU, in memory of its own."""
    trained = piece.parameters.size
    if trained == piece.size:
        return decode(buffer, payload, piece.size)
    source = buffer if isinstance(buffer, Tensor) else memoryview(buffer)
    cut = payload_bytes(trained, payload)
    parts = decode(source[:cut], payload, trained), decode(source[cut:], "fp32", piece.size - trained)
    return torch.cat(parts)
