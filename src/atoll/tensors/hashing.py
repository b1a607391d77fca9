"""The hash that travels with a payload. No torch here: processes that only move bytes use it too."""

from __future__ import annotations

import hashlib

HASH_BYTES = 16


def payload_hash(payload: bytes | bytearray | memoryview) -> str:
    """blake2b-128 of the bytes, 32 hex digits (protocol R6: every contribution and update carries one)."""
    return hashlib.blake2b(payload, digest_size=HASH_BYTES).hexdigest()
