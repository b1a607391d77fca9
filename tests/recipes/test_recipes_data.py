"""Corpora, held-out files and shares."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from atoll.errors import ConfigError, DataError
from atoll.recipes.data import CHUNK_BYTES, Corpus, batches, check_corpus, load_corpus, shard_of
from atoll.recipes.evaluate import evaluate


def corpus_of(train: int, heldout: int = 1000) -> Corpus:
    rng = np.random.default_rng(0)
    parts = (rng.integers(0, 256, size, dtype=np.uint8) for size in (train, heldout))
    return Corpus(name="made up", train=next(parts), heldout=next(parts))


def draw(corpus, count=3, **changes):
    who = {"learner_index": 0, "learners": 2, "seed": 0, "name": "l0", "generation": 1}
    options = who | {"batch": 4, "length": 16}
    return list(itertools.islice(batches(corpus, **(options | changes)), count))


def write_folder(root, count=200):
    for i in range(count):
        path = root / f"part{i % 3}" / f"f{i}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"<{i}>" * 10)
    return root


def test_stdlib__is_large_python_text_with_whole_files_held_out():
    corpus = load_corpus("stdlib")
    assert len(corpus.train) > 10_000_000
    assert 0.01 < len(corpus.heldout) / len(corpus.train) < 0.12
    text = corpus.train.tobytes()
    assert b"class OrderedDict" in text or b"class OrderedDict" in corpus.heldout.tobytes()
    assert corpus.heldout.tobytes()[:200] not in text


def test_folder__one_file_in_twenty_is_held_out_whole_and_alike_wherever_it_lies(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    one, two = (load_corpus(write_folder(tmp_path / name)) for name in "xy")
    assert np.array_equal(one.train, two.train)
    train, heldout = one.train.tobytes().decode(), one.heldout.tobytes().decode()
    for i in range(200):
        assert (train.count(f"<{i}>"), heldout.count(f"<{i}>")) in [(10, 0), (0, 10)]
    assert 2 <= sum(f"<{i}>" in heldout for i in range(200)) <= 25


def test_folder__what_is_no_text_is_left_out_and_named(tmp_path):
    """Not a kind is passed over in silence; a name of no encoding fits on the line all the same."""
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "good.txt").write_text("good" * 50)
    (texts / "signed.txt").write_bytes(b"\xef\xbb\xbf" + b"good" * 50)
    (texts / "nul.bin").write_bytes(b"a\0b")
    for i in range(5):
        (texts / f"latin{i}.txt").write_text("déjà vu", encoding="latin-1")
    (texts / "wide.txt").write_text("wide", encoding="utf-16")
    (texts / "empty.txt").write_bytes(b"")
    (texts / "only-a-mark.txt").write_bytes(b"\xef\xbb\xbf")
    (texts / ".git").mkdir()
    (texts / ".git" / "config").write_text("hidden")
    (texts / os.fsdecode(b"odd\xff\n.bin")).write_bytes(b"\0")
    os.symlink(tmp_path / "nowhere", texts / "dangling.txt")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "text.txt").write_text("behind")
    os.symlink(tmp_path / "elsewhere", texts / "linked")
    os.symlink(texts / "good.txt", texts / "good-again.txt")
    os.mkfifo(texts / "pipe")
    corpus = load_corpus(texts)
    assert sorted(corpus.train.tobytes() + corpus.heldout.tobytes()) == sorted(b"good" * 100)
    assert corpus.remark.startswith(f"data {str(texts)!r}: read: 2 texts, 400 bytes in all; left out: ")
    assert set(corpus.remark.partition("left out: ")[2].split("; ")) == {
        "2 binary, not UTF-8 text (nul.bin, odd\\udcff\\n.bin)",
        "5 not UTF-8 text (latin0.txt, latin1.txt, latin2.txt and 2 more)",
        "1 in UTF-16 or UTF-32, not UTF-8 (wide.txt)",
        "2 empty (empty.txt, only-a-mark.txt)",
        "1 with a hidden name (.git)",
        "1 behind a link that leads nowhere (dangling.txt)",
        "1 behind a link to a folder (linked)",
        "1 named twice (good.txt)",
        "1 not a regular file (pipe)",
    }


def test_folder__of_texts_only_needs_no_remark(tmp_path):
    assert load_corpus(write_folder(tmp_path)).remark == ""
    assert load_corpus("stdlib").remark == ""


def test_folder__an_unreadable_file_and_folder_are_named(tmp_path, monkeypatch):
    """As the superuser nothing is unreadable, so the error is made here."""
    (tmp_path / "good.txt").write_text("good" * 50)
    (tmp_path / "locked.txt").write_text("locked")
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "text.txt").write_text("closed")
    read, scan = Path.read_bytes, os.scandir

    def refuse(path):
        if path.name == "locked.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    def refuse_folder(path):
        if str(path).endswith("room"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    monkeypatch.setattr("os.scandir", refuse_folder)
    assert load_corpus(tmp_path).remark.endswith("left out: 2 unreadable (room, locked.txt)")


def test_folder__without_a_text_says_why(tmp_path):
    (tmp_path / "latin.txt").write_text("déjà vu", encoding="latin-1")
    with pytest.raises(DataError, match=r"holds no text \(1 not UTF-8 text \(latin.txt\)\); give text files"):
        load_corpus(tmp_path)


def test_paths__a_text_that_is_named_twice_counts_once(tmp_path):
    """Else it could be held out by one of its names and trained on by the other."""
    write_folder(tmp_path, 40)
    once, twice = load_corpus(tmp_path), load_corpus(tmp_path, tmp_path / "part1", tmp_path / "part2" / "f2.txt")
    assert np.array_equal(once.train, twice.train)
    assert np.array_equal(once.heldout, twice.heldout)
    assert "14 named twice (f1.txt, f10.txt, f13.txt and 11 more)" in twice.remark


@pytest.mark.parametrize("name", [f"book{i}.txt" for i in range(40)])
def test_single_file__its_last_twentieth_is_held_out_whatever_its_name(tmp_path, name):
    text = bytes(range(32, 127)) * 20
    (tmp_path / name).write_bytes(text)
    corpus = load_corpus(tmp_path / name)
    assert len(corpus.heldout) == len(text) // 20
    assert corpus.train.tobytes() + corpus.heldout.tobytes() == text


def test_paths__several_add_up(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 100)
    (tmp_path / "b.txt").write_text("b" * 200)
    corpus = load_corpus(tmp_path / "a.txt", str(tmp_path / "b.txt"))
    both = corpus.train.tobytes() + corpus.heldout.tobytes()
    assert (both.count(b"a"), both.count(b"b")) == (100, 200)


def test_load__errors_name_the_path_and_the_remedy(tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "bin").write_bytes(b"\0\0")
    with pytest.raises(DataError, match=r"gone.txt' does not exist; give a file, a folder or 'stdlib'"):
        load_corpus(tmp_path / "gone.txt")
    with pytest.raises(DataError, match=r"empty.txt' holds no text"):
        load_corpus(tmp_path / "empty.txt")
    with pytest.raises(DataError, match="is binary, not UTF-8 text; give a text in UTF-8"):
        load_corpus(tmp_path / "bin")
    (tmp_path / "latin.txt").write_text("déjà vu", encoding="latin-1")
    with pytest.raises(DataError, match=r"latin.txt' is not UTF-8 text; give a text in UTF-8 \(iconv"):
        load_corpus(tmp_path / "latin.txt")
    with pytest.raises(DataError, match="no data given"):
        load_corpus()


def test_load__unreadable_file_is_an_error_of_ours(tmp_path, monkeypatch):
    path = tmp_path / "locked.txt"
    path.write_text("x")

    def refuse(_self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    with pytest.raises(DataError, match=r"is unreadable \(Permission denied\)"):
        load_corpus(path)


@pytest.mark.parametrize("size", [100, 1001, 3 * CHUNK_BYTES + 5, 10 * CHUNK_BYTES + 77])
@pytest.mark.parametrize("learners", [1, 2, 3, 7])
def test_shards__are_disjoint_equal_and_together_everything(size, learners):
    corpus = Corpus(name="n", train=np.arange(size, dtype=np.uint32), heldout=np.zeros(0, np.uint8))
    shards = [shard_of(corpus, learner_index=i, learners=learners) for i in range(learners)]
    assert np.array_equal(np.sort(np.concatenate(shards)), corpus.train)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1 + size // CHUNK_BYTES
    again = shard_of(corpus, learner_index=learners, learners=learners)
    assert np.array_equal(again, shards[0])


def test_shards__of_a_sorted_corpus_look_alike():
    rising = np.arange(100 * CHUNK_BYTES) // CHUNK_BYTES
    corpus = Corpus(name="n", train=rising, heldout=np.zeros(0, np.uint8))
    means = [shard_of(corpus, learner_index=i, learners=4).mean() for i in range(4)]
    assert max(means) - min(means) <= 4


def test_batches__windows_come_from_the_own_shard_and_targets_are_one_on():
    corpus = corpus_of(5000)
    own = shard_of(corpus, learner_index=1, learners=2).tobytes()
    for inputs, targets in draw(corpus, learner_index=1):
        assert (inputs.dtype, inputs.shape, targets.shape) == (torch.int64, (4, 16), (4, 16))
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        for row, last in zip(inputs.tolist(), targets[:, -1].tolist(), strict=True):
            assert bytes([*row, last]) in own


def test_batches__every_byte_of_the_shard_can_be_drawn():
    corpus = Corpus(name="n", train=np.arange(160, dtype=np.uint8), heldout=np.zeros(20, np.uint8))
    seen: set[int] = set()
    for inputs, targets in draw(corpus, count=300, learners=1, batch=8, length=4):
        seen |= set(inputs.flatten().tolist()) | set(targets.flatten().tolist())
    assert seen == set(range(160))


def test_batches__chance_is_seed_name_and_generation():
    corpus = corpus_of(50_000)
    first = torch.stack([inputs for inputs, _ in draw(corpus)])
    assert torch.equal(first, torch.stack([inputs for inputs, _ in draw(corpus)]))
    for change in ({"seed": 1}, {"name": "l1"}, {"generation": 2}):
        assert not torch.equal(first, torch.stack([inputs for inputs, _ in draw(corpus, **change)]))


def test_batches__too_short_is_refused_with_the_numbers():
    with pytest.raises(DataError, match="bytes, 100 for each of 2 learners; length=16 needs 136"):
        draw(corpus_of(200))
    check_corpus(corpus_of(272), learners=2, length=16)
    with pytest.raises(DataError, match=r"16 held-out bytes; length=16 needs 17"):
        check_corpus(corpus_of(272, heldout=16), learners=2, length=16)
    with pytest.raises(ConfigError, match="batch=0"):
        draw(corpus_of(5000), batch=0)
    with pytest.raises(ConfigError, match="learners=0"):
        shard_of(corpus_of(10), learner_index=0, learners=0)


class Uniform(nn.Module):
    """Every next byte as likely, but for a bias on byte 0."""

    def __init__(self, bias: float) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor(bias))
        self.seen: list[torch.Tensor] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert not self.training
        self.seen.append(tokens)
        return torch.nn.functional.one_hot(torch.zeros_like(tokens), 256) * self.bias


def test_evaluate__is_mean_nats_per_byte_on_fixed_windows():
    corpus = corpus_of(500, heldout=700)
    model = Uniform(0.0)
    assert evaluate(model, corpus, batches=3, batch=4, length=32) == pytest.approx(np.log(256))
    first, model.seen = model.seen, []
    evaluate(model, corpus, batches=3, batch=4, length=32)
    assert all(torch.equal(a, b) for a, b in zip(first, model.seen, strict=True))
    rows = torch.cat(first).to(torch.uint8)
    assert rows[0].numpy().tobytes() == corpus.heldout[:32].tobytes()
    assert rows[-1].numpy().tobytes() == corpus.heldout[-33:-1].tobytes()
    assert model.training


def test_evaluate__a_model_that_knows_does_better():
    corpus = Corpus(name="zeros", train=np.zeros(300, np.uint8), heldout=np.zeros(300, np.uint8))
    knows = evaluate(Uniform(20.0), corpus, batches=2, batch=2, length=8)
    assert knows < 1e-4 < evaluate(Uniform(-1.0), corpus, batches=2, batch=2, length=8)


def test_evaluate__too_little_held_out_is_refused():
    with pytest.raises(DataError, match="8 held-out bytes; length=8 needs 9"):
        evaluate(Uniform(0.0), corpus_of(100, heldout=8), length=8)
