"""Routes and messages of an Oubliette service, shared by client and service.

    GET  /health       liveness, without a token
    GET  /status       → `OublietteStatus`: tier, languages, number of slots, queue
    PUT  /content      raw bytes → `Stored`: their link in the persistent repository
    GET  /content      ?link=… → the content of the link, while it is stored
    POST /missing      `MissingRequest` → `Missing`: those links whose data the service does not store
    POST /work         `WorkRequest` → `WorkAnswer`: thousands of work items and their results, in order. Before the
                       answer, the service sends a space each second as heartbeat

Inputs, answers, programs and outputs are named by links (`repository.Link`). Data that a request carries in `contents`,
such as the source of a model's answer, is kept only while there is room.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from pipelinerl.plugins.oubliette.checkers import Checker, Protocol
from pipelinerl.plugins.oubliette.runs import Ending, Limits, Tier

#: Version of this protocol; incompatible changes increase it.
PROTOCOL: Final = 1

HEALTH: Final = "/health"
STATUS: Final = "/status"
CONTENT: Final = "/content"
MISSING: Final = "/missing"
WORK: Final = "/work"

MOST_WORKS: Final = 8192
#: Maximum number of bytes of an upload.
MOST_CONTENT_BYTES: Final = 256 << 20
#: Number of bytes of a program's output and errors that are returned with its result.
MOST_SHOWN: Final = 300

#: Error codes of rejected requests.
TOO_LARGE: Final = "content_too_large"

_LinkText = Annotated[str, Meta(max_length=100)]
_Language = Annotated[str, Meta(max_length=20)]


class CompileWork(msgspec.Struct, frozen=True, kw_only=True, tag="compile"):
    """Request to compile a source, and to keep the program in memory for a while (`TransientRepository`)."""

    language: _Language
    source: _LinkText
    wall_s: Annotated[float, Meta(gt=0)]


class RunWork(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """Request to run a program on an input."""

    language: _Language
    program: _LinkText
    input: _LinkText
    limits: Limits


class CheckerProgram(msgspec.Struct, frozen=True, kw_only=True):
    """A problem's own checker: links to its source and accompanying files, or to the compiled `program`."""

    language: _Language
    protocol: Protocol
    source: _LinkText = ""
    files: Annotated[tuple[tuple[str, _LinkText], ...], Meta(max_length=16)] = ()
    program: _LinkText = ""


class CheckWork(msgspec.Struct, frozen=True, kw_only=True, tag="check"):
    """Request to judge an output, by a built-in comparison (`how`) or by the problem's checker."""

    how: Checker | None = None
    checker: CheckerProgram | None = None
    tolerance: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    input: _LinkText
    output: _LinkText
    answer: _LinkText


class CompileChecker(msgspec.Struct, frozen=True, kw_only=True, tag="compile_checker"):
    """Request to compile a checker, and to store the program in the persistent repository."""

    checker: CheckerProgram


Work = CompileWork | RunWork | CheckWork | CompileChecker


class WorkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request with work items, and with data (`contents`) to which they link and which the service may lack."""

    protocol: int
    contents: tuple[bytes, ...] = ()
    works: Annotated[tuple[Work, ...], Meta(min_length=1, max_length=MOST_WORKS)]


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """Result of a run, or of a failed compilation; `output` links to its standard output, which begins with `head`."""

    ending: Ending
    code: int
    output: _LinkText
    head: bytes
    stderr: bytes
    cpu_s: float
    wall_s: float
    tier: Tier


class Checked(msgspec.Struct, frozen=True, kw_only=True, tag="checked"):
    """Result of a check: the share of the points, 0 to 1, that the output earns."""

    share: Annotated[float, Meta(ge=0, le=1)]


class Compiled(msgspec.Struct, frozen=True, kw_only=True, tag="compiled"):
    """The link to a program, and the seconds spent compiling it."""

    program: _LinkText
    wall_s: Annotated[float, Meta(ge=0)] = 0.0


class NotDone(msgspec.Struct, frozen=True, kw_only=True, tag="not_done"):
    """The reason why a work item could not be done, which says nothing about any answer."""

    cause: Annotated[str, Meta(max_length=20)]
    why: str


#: Causes in `NotDone`: the sandbox was lost, linked data is not stored, a checker failed, a language is missing.
LOST: Final = "lost"
NO_CONTENT: Final = "no_content"
CHECKER: Final = "checker"
NO_TOOLCHAIN: Final = "no_toolchain"

Done = Ended | Checked | Compiled | NotDone


class WorkAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The results of all work items, in order."""

    done: tuple[Done, ...]


class Stored(msgspec.Struct, frozen=True):
    """Response to an upload: the link of the stored bytes."""

    link: str


class MissingRequest(msgspec.Struct, frozen=True):
    """Links whose data the client will upload if the service lacks it."""

    links: Annotated[tuple[_LinkText, ...], Meta(max_length=100_000)]


class Missing(msgspec.Struct, frozen=True):
    """The requested links whose data the service does not store."""

    links: tuple[str, ...]


class OublietteStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of a service.

    Attributes:
        tier: tier of the sandbox. languages: the installed languages.
        at_once: number of programs that run concurrently. queue: number of accepted work items that are not done.
        runs: number of work items done since the service started.
        transient_bytes: size of the transient repository.
    """

    protocol: int
    version: str
    tier: Tier
    languages: tuple[str, ...]
    at_once: int
    queue: int
    runs: int
    transient_bytes: int
