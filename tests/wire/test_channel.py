"""Addresses, tokens and pacing."""

from __future__ import annotations

import pytest

from atoll.errors import ConfigError
from atoll.wire import channel
from atoll.wire.pacing import Pacer


@pytest.mark.parametrize(
    ("text", "pair"),
    [("127.0.0.1:7700", ("127.0.0.1", 7700)), ("[::1]:0", ("::1", 0)), ("host.example:1", ("host.example", 1))],
)
def test_address__there_and_back(text: str, pair: tuple[str, int]) -> None:
    assert channel.parse_address(text) == pair
    assert channel.format_address(*pair) == text


WRONG = ("", "7700", ":7700", "host:", "host:x", "host:70000", "::1:7700", "h:-1", "h:²", "h:٣٣", "h: 7", "h:7_0")


@pytest.mark.parametrize("text", WRONG)
def test_address__that_is_none__is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^address=.* must be HOST:PORT"):
        channel.parse_address(text)
    with pytest.raises(ConfigError, match=r"^listen=.* must be HOST:PORT"):
        channel.parse_address(text, "listen")


def test_token__comes_from_environment_or_file(tmp_path) -> None:
    (tmp_path / "token").write_text("from-file\n")
    path = str(tmp_path / "token")
    assert channel.load_token({}) == ""
    assert channel.load_token({"ATOLL_TOKEN": "a"}) == "a"
    assert channel.load_token({"ATOLL_TOKEN_FILE": path}) == "from-file"
    assert channel.load_token({"ATOLL_TOKEN": "", "ATOLL_TOKEN_FILE": path}) == "from-file"
    with pytest.raises(ConfigError, match="both set"):
        channel.load_token({"ATOLL_TOKEN": "a", "ATOLL_TOKEN_FILE": path})
    (tmp_path / "blank").write_text(" \n")
    with pytest.raises(ConfigError, match="is empty"):
        channel.load_token({"ATOLL_TOKEN_FILE": str(tmp_path / "blank")})
    with pytest.raises(ConfigError, match="ATOLL_TOKEN_FILE"):
        channel.load_token({"ATOLL_TOKEN_FILE": path + "x"})
    with pytest.raises(ConfigError, match="one line"):
        channel.load_token({"ATOLL_TOKEN": "a\nb"})


def test_listening__for_others_without_a_token__is_refused() -> None:
    channel.check_listening("127.0.0.1", "")
    channel.check_listening("0.0.0.0", "secret")
    with pytest.raises(ConfigError, match="ATOLL_TOKEN"):
        channel.check_listening("0.0.0.0", "")


def test_token_ok__only_with_the_same_token() -> None:
    assert channel.token_ok(None, "")
    assert channel.token_ok(channel.credentials_of("t"), "t")
    assert not channel.token_ok(channel.credentials_of("u"), "t")
    assert not channel.token_ok((), "t")


def test_pacer__on_a_free_link__never_waits_and_grows() -> None:
    pacer = Pacer()
    for _ in range(10):
        assert pacer.written(pacer.chunk_bytes, 100_000) == 0
    assert pacer.chunk_bytes == channel.CHUNK_BYTES_MAX


def test_pacer__on_a_link_of_one_megabyte_per_second__leaves_a_tenth() -> None:
    pacer = Pacer()
    pacer.chunk_bytes = channel.CHUNK_BYTES_MAX
    sent = elapsed = 0
    for _ in range(100):
        duration = pacer.chunk_bytes * 1000
        sent += pacer.chunk_bytes
        elapsed += duration + pacer.written(pacer.chunk_bytes, duration)
    assert 0.89e-3 < sent / elapsed < 0.91e-3
    assert pacer.chunk_bytes * 1000 <= 60_000_000
