"""Text files of a data source, and what of it was left out: nothing that a user named is passed over in silence."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from atoll.errors import DataError

STDLIB = "stdlib"
NAMED_MOST = 3
"""Names that are told of each kind of what was left out."""
BOM = b"\xef\xbb\xbf"
NO_TEXTS = frozenset({"site-packages", "dist-packages", "__pycache__"})
"""Folders of the standard library that are not its own sources."""


class Texts:
    """The text files of all sources, each of them once, and what was left out.

    UTF-8 is taken (a byte order mark at the start is cut off); a file of another encoding would teach the model bytes
    that no text of the others has, so it is left out and named.
    """

    def __init__(self) -> None:
        self.files: list[tuple[str, bytes]] = []
        """(path below its source, content)."""
        self._seen: set[str] = set()
        self._left_out: dict[str, list[str]] = {}

    def add(self, source: str | os.PathLike[str]) -> None:
        """A text file, a folder (recursive), or the running Python's own library. DataError for a bad file."""
        path = Path(source)
        if source == STDLIB:
            self._add_stdlib()
        elif path.is_dir():
            for found in self._walk(path):
                self._add_found(path, found)
        else:
            self._add_file(path)

    @property
    def left_out(self) -> str:
        """Kinds with counts and names, for people; empty where nothing was left out."""
        return "; ".join(f"{len(names)} {why} ({_some(names)})" for why, names in self._left_out.items())

    @property
    def remark(self) -> str:
        """What was left out and how much was read; empty where nothing was left out."""
        if not self._left_out:
            return ""
        count, size = len(self.files), sum(len(content) for _, content in self.files)
        read = f"{count:,} text{'' if count == 1 else 's'}, {size:,} bytes in all"
        return f"read: {read}; left out: {self.left_out}"

    # ------------------------------------------------------------ one source

    def _add_stdlib(self) -> None:
        """As it is, sorted by relative path: whole folders of it test other encodings, and it is nobody's to mend."""
        root = Path(sysconfig.get_path("stdlib"))
        found: list[Path] = []
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in NO_TEXTS and not name.startswith(".")]
            found += [Path(folder, name) for name in names if name.endswith(".py") and not name.startswith(".")]
        for path in sorted(found, key=lambda path: path.relative_to(root).as_posix()):
            name = path.relative_to(root).as_posix()
            content = self._read(path, name)
            if content and str(path) not in self._seen:
                self._seen.add(str(path))
                self.files.append((name, content))

    def _walk(self, root: Path) -> list[Path]:
        """Files below root, sorted by relative path. Hidden names, and folders behind links, are left out."""
        found: list[Path] = []

        def unreadable(error: OSError) -> None:
            self._leave_out("unreadable", os.path.relpath(error.filename, root))

        for folder, folders, names in os.walk(root, onerror=unreadable):
            for name in [*folders, *names]:
                if name.startswith("."):
                    self._leave_out("with a hidden name", os.path.relpath(Path(folder, name), root))
            for name in folders:
                if not name.startswith(".") and Path(folder, name).is_symlink():
                    self._leave_out("behind a link to a folder", os.path.relpath(Path(folder, name), root))
            folders[:] = [name for name in folders if not name.startswith(".")]
            found += [Path(folder, name) for name in names if not name.startswith(".")]
        return sorted(found, key=lambda path: path.relative_to(root).as_posix())

    def _add_found(self, root: Path, path: Path) -> None:
        """One file of a folder."""
        name = path.relative_to(root).as_posix()
        content = self._read(path, name)
        if content is None:
            return
        why = why_no_text(content)
        if why:
            self._leave_out(why, name)
        else:
            self._take(name, path, content)

    def _add_file(self, path: Path) -> None:
        """A file that was named by itself: what is wrong with it is an error."""
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise DataError(f"data {str(path)!r} does not exist; give a file, a folder or {STDLIB!r}") from None
        except OSError as error:
            raise DataError(f"data {str(path)!r} is unreadable ({error.strerror}); check its mode") from None
        why = why_no_text(content)
        if why and content.removeprefix(BOM):
            raise DataError(f"data {str(path)!r} is {why}; give a text in UTF-8 (iconv converts others), or a folder")
        if why:
            self._leave_out(why, path.name)
        else:
            self._take(path.name, path, content)

    # ------------------------------------------------------------ one file

    def _take(self, name: str, path: Path, content: bytes) -> None:
        """Once, under whichever name: a text that counts twice could be trained on and held out."""
        real = os.path.realpath(path)
        if real in self._seen:
            self._leave_out("named twice", name)
            return
        self._seen.add(real)
        self.files.append((name, content.removeprefix(BOM)))

    def _read(self, path: Path, name: str) -> bytes | None:
        try:
            if path.is_file():
                return path.read_bytes()
            why = "behind a link that leads nowhere" if path.is_symlink() else "not a regular file"
        except OSError:
            why = "unreadable"
        self._leave_out(why, name)
        return None

    def _leave_out(self, why: str, name: str) -> None:
        self._left_out.setdefault(why, []).append(name)


def why_no_text(content: bytes) -> str:
    """Why these bytes are no text in UTF-8, for people; empty: they are."""
    if not content.removeprefix(BOM):
        return "empty"
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "in UTF-16 or UTF-32, not UTF-8"
    if b"\0" in content:
        return "binary, not UTF-8 text"
    try:
        content.decode()
    except UnicodeDecodeError:
        return "not UTF-8 text"
    return ""


def _some(names: list[str]) -> str:
    """The first ones."""
    more = len(names) - NAMED_MOST
    return ", ".join(map(_shown, names[:NAMED_MOST])) + (f" and {more:,} more" if more > 0 else "")


def _shown(name: str) -> str:
    """Names that are not UTF-8, or have line breaks, on one line."""
    return name if name.isprintable() else ascii(name)[1:-1]
