"""Where inputs, answers, programs and outputs lie, each under the name of what it contains: its `Link`.

`PersistentRepository` is a folder: inputs, answers and compiled checkers, which are laid there once (`pipelinerl
oubliette upload`) and named by problems and requests from then on. `TransientRepository` is memory, bounded, for what
runs write and for programs that are judged once; what has not been used for longest is forgotten first.

Promises: what is read under a link is what was laid there, byte for byte, or `ContentMissing`; a file that a crash cut
off or that somebody changed is missing, never used. The same content is kept once. Writers may die at any point, and be
several processes.
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
from typing import Final, Protocol, Self, final

from pipelinerl.errors import PipelineError, UserError

_PREFIX: Final = "oub"
_TEXT: Final = re.compile(rf"{_PREFIX}:([0-9a-f]{{64}}):([0-9]{{1,15}})")
#: A link in a problem's metadata is an object with this key, so that no text can be taken for one.
LINK: Final = "link"


class ContentMissing(PipelineError):
    """Nothing whole lies under a link; says nothing of any answer."""


class ContentTooLarge(PipelineError):
    """A content that comes has more bytes than it may have."""


@dataclass(frozen=True, slots=True)
class Link:
    """What a content is called: the hash of its bytes (blake2b, 32 bytes, hexadecimal), and their number."""

    digest: str
    size: int

    @classmethod
    def of(cls, data: bytes) -> Self:
        """The content's."""
        return cls(hashlib.blake2b(data, digest_size=32).hexdigest(), len(data))

    @classmethod
    def parsed(cls, text: str) -> Self:
        """Read `str` of one. Raises `ValueError` for another text."""
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ValueError(f"a link must be {_PREFIX}:<64 hexadecimal digits>:<bytes>, got {text!r:.100}")
        return cls(found[1], int(found[2]))

    def __str__(self) -> str:
        return f"{_PREFIX}:{self.digest}:{self.size}"


#: What a program reads or is: the bytes, or where they lie.
Content = bytes | Link


def size_of(content: Content) -> int:
    """In bytes."""
    return content.size if isinstance(content, Link) else len(content)


class Repository(Protocol):
    """Where contents lie."""

    def put(self, data: bytes) -> Link:
        """Lay a content there."""
        ...

    def get(self, link: Link) -> bytes:
        """The content. Raises `ContentMissing`."""
        ...

    def __contains__(self, link: Link) -> bool: ...


@final
class PersistentRepository:
    """Contents in a folder, by their digests, and compiled programs by what they were compiled of."""

    def __init__(self, folder: Path) -> None:
        """Raises `UserError` where the folder cannot be made."""
        self._folder = folder
        try:
            for name in ("content", "compiled"):
                (folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"the repository must be a folder that can be written to, {folder} is none: {error}"
            ) from None

    def put(self, data: bytes) -> Link:
        """Lay a content there; what lies there already is left as it is."""
        link = Link.of(data)
        if link not in self:
            self._write(self._path(link), data)
        return link

    async def put_parts(self, parts: AsyncIterator[bytes], *, most_bytes: int) -> Link:
        """Lay a content there that comes in parts, of which no more than one is in memory.

        Raises:
            ContentTooLarge: it has more than `most_bytes`; nothing of it is kept.
        """
        hashed, size = hashlib.blake2b(digest_size=32), 0
        with tempfile.NamedTemporaryFile(dir=self._folder / "content", prefix="draft-", delete=False) as file:
            draft = Path(file.name)
            try:
                async for part in parts:
                    size += len(part)
                    if size > most_bytes:
                        raise ContentTooLarge(f"a content must have at most {most_bytes} bytes")
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
        """The content, whose hash is looked at. Raises `ContentMissing`."""
        path = self._path(link)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise ContentMissing(f"{link} does not lie in {self._folder}; upload it") from None
        if Link.of(data) != link:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            raise ContentMissing(f"{link} in {self._folder} was damaged; upload it again")
        return data

    def __contains__(self, link: Link) -> bool:
        """By its name and its number of bytes."""
        try:
            return self._path(link).stat().st_size == link.size
        except OSError:
            return False

    def compiled(self, key: str) -> Link | None:
        """The program that was compiled of what `key` is the digest of, if it is still there."""
        try:
            link = Link.parsed((self._folder / "compiled" / key).read_text())
        except (OSError, ValueError):
            return None
        return link if link in self else None

    def keep_compiled(self, key: str, program: bytes) -> Link:
        """Lay a compiled program there, and remember of what."""
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


@final
class TransientRepository:
    """Contents in memory, `most_bytes` together; from any thread."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._contents: OrderedDict[Link, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def put(self, data: bytes) -> Link:
        """Lay a content there; others may have to go."""
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
        """The content. Raises `ContentMissing`."""
        with self._lock:
            data = self._contents.get(link)
            if data is None:
                raise ContentMissing(f"{link} is not held any more")
            self._contents.move_to_end(link)
            return data

    def __contains__(self, link: Link) -> bool:
        return link in self._contents
