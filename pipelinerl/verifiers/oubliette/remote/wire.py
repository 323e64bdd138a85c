"""What is asked of an Oubliette service, and what it answers: paths and values, the same at both ends.

GET  /health       liveness, without a token
GET  /status       → `OublietteStatus`: tier, languages, programs at once, queue
PUT  /content      raw bytes → `Stored`: the link under which they lie in the persistent repository
GET  /content      ?link=… → the bytes that lie under it, for as long as they do
POST /missing      `MissingRequest` → `Missing`: which of these links lead to nothing there
POST /work         `WorkRequest` → `WorkAnswer`: thousands of pieces of work, each done or not done, in their order.
                   Spaces may come before it, one each second, by which a service that works is told from one that
                   does not

Inputs, answers, programs and outputs are named by links (`repository.Link`), never sent twice; what a request brings
along in `contents`, such as the source of a model's answer, is held while there is room, and no longer than needed.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from pipelinerl.verifiers.oubliette.checkers import Checker, Protocol
from pipelinerl.verifiers.oubliette.runs import Ending, Limits, Tier

#: The number of this agreement; it rises with each change that the other end has to know of.
PROTOCOL: Final = 1

HEALTH: Final = "/health"
STATUS: Final = "/status"
CONTENT: Final = "/content"
MISSING: Final = "/missing"
WORK: Final = "/work"

MOST_WORKS: Final = 8192
#: Of one content that is laid into the repository.
MOST_CONTENT_BYTES: Final = 256 << 20
#: Characters of what a program has written, and of what went wrong, that come back themselves.
MOST_SHOWN: Final = 300

#: Codes of refusals.
OTHER_PROTOCOL: Final = "other_protocol"
IS_FULL: Final = "full"
TOO_LARGE: Final = "content_too_large"

_LinkText = Annotated[str, Meta(max_length=100)]
_Language = Annotated[str, Meta(max_length=20)]


class CompileWork(msgspec.Struct, frozen=True, kw_only=True, tag="compile"):
    """Compile a source; the program is held where outputs are."""

    language: _Language
    source: _LinkText
    wall_s: Annotated[float, Meta(gt=0)]


class RunWork(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """Run a program on an input."""

    language: _Language
    program: _LinkText
    input: _LinkText
    limits: Limits


class CheckerProgram(msgspec.Struct, frozen=True, kw_only=True):
    """A problem's own checker: its source and what lies beside it, or the `program` that was compiled of it."""

    language: _Language
    protocol: Protocol
    source: _LinkText = ""
    files: Annotated[tuple[tuple[str, _LinkText], ...], Meta(max_length=16)] = ()
    program: _LinkText = ""


class CheckWork(msgspec.Struct, frozen=True, kw_only=True, tag="check"):
    """Judge an output, by comparing (`how`) or by the problem's checker."""

    how: Checker | None = None
    checker: CheckerProgram | None = None
    tolerance: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    input: _LinkText
    output: _LinkText
    answer: _LinkText


class CompileChecker(msgspec.Struct, frozen=True, kw_only=True, tag="compile_checker"):
    """Compile a checker into the persistent repository."""

    checker: CheckerProgram


Work = CompileWork | RunWork | CheckWork | CompileChecker


class WorkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Work, and contents that it names and the service may not have."""

    protocol: int
    contents: tuple[bytes, ...] = ()
    works: Annotated[tuple[Work, ...], Meta(min_length=1, max_length=MOST_WORKS)]


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """How a run, or a compilation, ended; `output` is the link to what it has written."""

    ending: Ending
    code: int
    output: _LinkText
    head: bytes
    stderr: bytes
    cpu_s: float
    wall_s: float
    tier: Tier


class Checked(msgspec.Struct, frozen=True, kw_only=True, tag="checked"):
    """The share of the points."""

    share: Annotated[float, Meta(ge=0, le=1)]


class Compiled(msgspec.Struct, frozen=True, kw_only=True, tag="compiled"):
    """The link to a program, and the seconds that compiling took."""

    program: _LinkText
    wall_s: Annotated[float, Meta(ge=0)] = 0.0


class NotDone(msgspec.Struct, frozen=True, kw_only=True, tag="not_done"):
    """Why a piece of work could not be done; says nothing of any answer."""

    cause: Annotated[str, Meta(max_length=20)]
    why: str


#: Causes: the sandbox was lost, a link leads to nothing, a checker failed, a language is not there.
LOST: Final = "lost"
NO_CONTENT: Final = "no_content"
CHECKER: Final = "checker"
NO_TOOLCHAIN: Final = "no_toolchain"

Done = Ended | Checked | Compiled | NotDone


class WorkAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of each piece of work, in their order."""

    done: tuple[Done, ...]


class Stored(msgspec.Struct, frozen=True):
    """Where a content lies now."""

    link: str


class MissingRequest(msgspec.Struct, frozen=True):
    """Links of what is to be uploaded."""

    links: Annotated[tuple[_LinkText, ...], Meta(max_length=100_000)]


class Missing(msgspec.Struct, frozen=True):
    """Those of them that lead to nothing."""

    links: tuple[str, ...]


class OublietteStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a service is.

    Attributes:
        tier: of its sandbox. languages: those that it has.
        at_once: programs that run beside one another. queue: pieces of work that were taken and are not done.
        runs: pieces done since it came up.
        transient_bytes: what its transient repository holds.
    """

    protocol: int
    version: str
    tier: Tier
    languages: tuple[str, ...]
    at_once: int
    queue: int
    runs: int
    transient_bytes: int
