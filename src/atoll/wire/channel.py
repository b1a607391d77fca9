"""gRPC settings, addresses and the token: everything that both ends of a connection must agree on."""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from atoll.errors import ConfigError

KIB = 1024
MIB = 1024 * KIB
CHUNK_BYTES_MIN = 16 * KIB
CHUNK_BYTES_MAX = 2 * MIB
CONTROL_BYTES_MAX = 16 * MIB
"""A Hello of 100,000 tensors fits."""
BULK_BYTES_MAX = CHUNK_BYTES_MAX + 64 * KIB
TOKEN_LENGTH_MAX = 4096
AUTHORIZATION = "authorization"
PORT_MAX = 65_535
PORT = re.compile(r"[0-9]{1,5}")

Options = tuple[tuple[str, int], ...]


def _options(message_bytes_max: int) -> Options:
    return (
        ("grpc.max_receive_message_length", message_bytes_max),
        ("grpc.max_send_message_length", message_bytes_max),
        # A peer that vanished without a word is noticed in ~30 s, also while no call moves.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        # Without it two channels to one target share one TCP connection (hazard 39).
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
    )


CONTROL_OPTIONS = _options(CONTROL_BYTES_MAX)
BULK_OPTIONS = _options(BULK_BYTES_MAX)
SERVER_OPTIONS: Options = (
    # Two syncers must not share a port: the second would get half of the learners.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.max_ping_strikes", 0),
    # A connection that says nothing holds a descriptor: so long it has to speak HTTP/2, and then to begin a call. A
    # learner has its stream all the time, and connects again when it has bulk bytes to move.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 10_000),
)


def parse_address(text: str, name: str = "address") -> tuple[str, int]:
    """`host:port` or `[v6]:port` -> (host, port); ConfigError tells what is wrong with the option `name`."""
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    number = int(port) if PORT.fullmatch(port) else PORT_MAX + 1
    if not colon or not bare or number > PORT_MAX or (":" in bare and bare == host):
        raise ConfigError(f"{name}={text[:120]!r} must be HOST:PORT, such as 127.0.0.1:7700 or [::1]:7700")
    return bare, number


def format_address(host: str, port: int) -> str:
    """The inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """True where only this machine can connect."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load_token(environ: Mapping[str, str] = os.environ) -> str:
    """The shared token from ATOLL_TOKEN, or from the file that ATOLL_TOKEN_FILE names; empty where neither is set."""
    token = environ.get("ATOLL_TOKEN", "")
    path = environ.get("ATOLL_TOKEN_FILE", "")
    if token.strip() and path:
        raise ConfigError(f"ATOLL_TOKEN and ATOLL_TOKEN_FILE={path!r} are both set; unset one of them")
    if path:
        try:
            if Path(path).exists() and not Path(path).is_file():
                raise ConfigError(f"ATOLL_TOKEN_FILE={path!r} is not a regular file; put the token into one")
            with open(path, encoding="utf-8") as file:
                token = file.read(2 * TOKEN_LENGTH_MAX)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"ATOLL_TOKEN_FILE={path!r} cannot be read: {error}; give a readable file") from error
        if not token.strip():
            raise ConfigError(f"ATOLL_TOKEN_FILE={path!r} is empty; put the token into it, or unset it")
    token = token.strip()
    if len(token) > TOKEN_LENGTH_MAX or not token.isascii() or not (token.isprintable() or not token):
        raise ConfigError(f"the token must be one line of at most {TOKEN_LENGTH_MAX} printable ASCII characters")
    return token


def check_listening(host: str, token: str) -> None:
    """ConfigError where others could connect and no token is set."""
    if not token and not is_loopback(host):
        raise ConfigError(
            f"listening on {host} needs a token; set ATOLL_TOKEN or ATOLL_TOKEN_FILE for syncer and learners"
        )


def credentials_of(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a call."""
    return ((AUTHORIZATION, f"Bearer {token}"),) if token else ()


def token_ok(metadata: Sequence[tuple[str, str | bytes]] | None, token: str) -> bool:
    """True where the call carries the token, or none is needed. Takes the same time for any wrong token."""
    if not token:
        return True
    expected = f"Bearer {token}".encode()
    for key, value in metadata or ():
        if key == AUTHORIZATION:
            given = value if isinstance(value, bytes) else value.encode()
            return hmac.compare_digest(given, expected)
    return False
