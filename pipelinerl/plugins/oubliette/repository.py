"""Content-addressed storage of inputs, answers, programs and outputs; a `Link` is the name of stored bytes.

`PersistentRepository` is a folder for inputs, answers and compiled checkers. They are uploaded once (`pipelinerl
oubliette upload`); problems and requests then refer to them by link. `TransientRepository` is bounded memory for
outputs of runs and for programs that are judged once.

A truncated or modified file counts as missing. Several processes may write, and may die at any point.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from pipelinerl.errors import PipelineError, UserError

_PREFIX: Final = "oub"
_TEXT: Final = re.compile(rf"{_PREFIX}:([0-9a-f]{{64}}):([0-9]{{1,15}})")
#: Key of a link in a problem's metadata. A link is written as an object, so that no text can be mistaken for a link.
LINK: Final = "link"


class ContentMissing(PipelineError):
    """The bytes that a link names are missing or damaged; this does not mean that an answer is wrong."""


class ContentTooLarge(PipelineError):
    """Uploaded data exceeds the size limit."""


@dataclass(frozen=True, slots=True)
class Link:
    """Name of stored bytes: their hash (blake2b, 32 bytes, hexadecimal) and their number."""

    digest: str
    size: int

    @classmethod
    def of(cls, data: bytes) -> Self:
        return cls(hashlib.blake2b(data, digest_size=32).hexdigest(), len(data))

    @classmethod
    def parsed(cls, text: str) -> Self:
        """Parse the `str` form of a link. Raises `ValueError` for other text."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"a link must be {_PREFIX}:<64 hexadecimal digits>:<bytes>, got {text!r:.100}")
        return cls(match[1], int(match[2]))

    def __str__(self) -> str:
        return f"{_PREFIX}:{self.digest}:{self.size}"


#: Data that a program reads, or the program itself: the bytes, or a link to them.
Content = bytes | Link


def size_of(content: Content) -> int:
    """Return the number of bytes of `content`, which may be a link."""
    return content.size if isinstance(content, Link) else len(content)


class PersistentRepository:
    """Repository in a folder, which also stores compiled checkers under the digest of source, files and compiler."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            for name in ("content", "compiled"):
                (folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"the repository must be a writable folder, and {folder} is not: {error}") from None

    def put(self, data: bytes) -> Link:
        """Store `data`, unless it is stored already, and return its link."""
        link = Link.of(data)
        if link not in self:
            self._write(self._path(link), data)
        return link

    async def put_parts(self, parts: AsyncIterator[bytes], *, most_bytes: int) -> Link:
        """Store data that arrives in parts. Raises `ContentTooLarge` if it has more than `most_bytes`."""
        hashed, size = hashlib.blake2b(digest_size=32), 0
        with tempfile.NamedTemporaryFile(dir=self._folder / "content", prefix="draft-", delete=False) as file:
            draft = Path(file.name)
            try:
                async for part in parts:
                    size += len(part)
                    if size > most_bytes:
                        raise ContentTooLarge(f"content must have at most {most_bytes} bytes")
                    hashed.update(part)
                    file.write(part)
                file.flush()
                link = Link(hashed.hexdigest(), size)
                if link not in self:
                    path = self._path(link)
                    path.parent.mkdir(exist_ok=True)
                    draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)
        return link

    def get(self, link: Link) -> bytes:
        """Return the bytes of a link after checking their hash. Raises `ContentMissing`."""
        path = self._path(link)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise ContentMissing(f"{link} is not in {self._folder}; upload it") from None
        if Link.of(data) != link:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            raise ContentMissing(f"{link} in {self._folder} was damaged; upload it again")
        return data

    def __contains__(self, link: Link) -> bool:
        """Return whether the folder has a file for `link` with the right size; the file's content is not checked."""
        try:
            return self._path(link).stat().st_size == link.size
        except OSError:
            return False

    def compiled(self, key: str) -> Link | None:
        """Return the link to the compiled checker whose `CustomChecker.key` is `key`; None if it is not stored."""
        try:
            link = Link.parsed((self._folder / "compiled" / key).read_text())
        except (OSError, ValueError):
            return None
        return link if link in self else None

    def keep_compiled(self, key: str, program: bytes) -> Link:
        """Store a compiled checker under its `CustomChecker.key`, and return its link."""
        link = self.put(program)
        self._write(self._folder / "compiled" / key, str(link).encode())
        return link

    def _path(self, link: Link) -> Path:
        return self._folder / "content" / link.digest[:2] / link.digest

    @staticmethod
    def _write(path: Path, data: bytes) -> None:
        path.parent.mkdir(exist_ok=True)
        draft = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
        try:
            draft.write_bytes(data)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


class TransientRepository:
    """Thread-safe repository of `most_bytes` in memory, which evicts the least recently used data first."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._contents: OrderedDict[Link, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def put(self, data: bytes) -> Link:
        """Store `data`, evict other data to make room, and return the link."""
        link = Link.of(data)
        with self._lock:
            if link not in self._contents:
                self._contents[link] = data
                self.num_bytes += len(data)
            self._contents.move_to_end(link)
            while self.num_bytes > self._most_bytes and len(self._contents) > 1:
                self.num_bytes -= self._contents.popitem(last=False)[0].size
        return link

    def get(self, link: Link) -> bytes:
        with self._lock:
            data = self._contents.get(link)
            if data is None:
                raise ContentMissing(f"{link} is no longer stored")
            self._contents.move_to_end(link)
            return data

    def __contains__(self, link: Link) -> bool:
        return link in self._contents
