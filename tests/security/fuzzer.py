"""A seeded fuzzer that knows the schemas: requests that are right but for one thing, and often for several.

Routes are found from the applications, bodies from valid ones: a route that is new, or has no valid body here, is asked
with anything. One request after another goes through the whole application, and a task beside it, on the same event
loop, measures for how long others would have waited.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from tests.fakes.scripted_engine import LAYOUT
from tests.security.test_authorisation import routes

#: Refusals above 499 that say what somebody else did, or that this server ends: none is a server's own failure.
HONEST: Final = frozenset({"dirty", "engine_stopped", "peer_lost", "deadline_exceeded", "digest_mismatch", "failed"})
#: Longer than any answer that is not one to a question that waits for others.
_PATIENCE_S: Final = 1.0

_GROUP: Final = {"group": "g", "backend": "gloo", "rendezvous_host": "127.0.0.1", "rendezvous_port": 9, "rank": 1}
_LAYOUT: Final = LAYOUT.model_dump(mode="json")
_VERSION: Final = {"epoch": 1, "version": 1}
_CHAT: Final = {
    "prompt_token_ids": [3, 5], "max_tokens": 2, "n": 2, "temperature": 1.0, "top_p": 0.9, "top_k": 3, "seed": 1,
    "logprobs": True, "return_token_ids": True, "stop": ["b"], "priority": 1,
}  # fmt: skip
_SAID: Final = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2, "stream": True,
                "stream_options": {"include_usage": True}}  # fmt: skip
#: Valid bodies, by the end of the path.
BODIES: Final[dict[str, tuple[Any, ...]]] = {
    "/chat/completions": (_CHAT, _SAID, _CHAT | {"prefixes": [{"index": 0, "token_ids": [4]}], "n": 1}),
    "/chat/completion": (_CHAT, _SAID),
    "/init_process_group": (_GROUP | {"world_size": 2, "generation": 1, "timeout_s": 0.05},),
    "/request_weight_update": (
        _VERSION | {"phase": "prepare", "group": "g", "generation": 1, "layout": _LAYOUT, "timeout_s": 0.05},
        _VERSION | {"phase": "prepare", "transport": "pull", "sources": ["http://127.0.0.1:9"], "layout": _LAYOUT,
                    "digest": "0" * 32, "timeout_s": 0.05},
        _VERSION | {"phase": "commit", "digest": "0" * 32, "timeout_s": 0.05},
        _VERSION | {"phase": "abort"},
    ),
    "/knobs": ({"j": 1, "k": 4}, {"temperature": 0.7, "learning_rate": 1e-3}, {"preset": "rlax"}),
    "/engines": ({"url": "http://127.0.0.1:9", "incarnation": "1", "name": "engine-7", "type": "torch"},),
    "/engines/drain": ({"engine": "engine-7", "grace_s": 1.0},),
    "/engines/request": ({"type": "torch", "count": 1, "replaces": "", "grace_s": 1.0},),
    "/versions": (_VERSION | {"layout": _LAYOUT, "progress": {"engine-0": None}},),
    "/progress": ({"epoch": 1, "progress": {"engine-0": [1, 1]}},),
    "/seal": ({"digest": "0" * 32, "whole": "0" * 32},),
    "/copy": ({"source": "http://127.0.0.1:9", "digest": "0" * 32, "whole": "0" * 32, "timeout_s": 0.05},),
}  # fmt: skip

_NUMBERS: Final = (0, -1, 1, 2, 0.5, -0.0, 1e308, 1e-320, 2**31, 2**53, 2**62, 2**63, 2**64, 10**30, 10**400, True)
_TEXTS: Final = (
    "", " ", "a", "A" * 300, "A" * 70_000, "\u0000", "\ud800", "\u202e", "%00", "../../x", "http://[::1", "http://a:99999",
    "http://" + "a" * 70 + ".example", "nan", "-1", "1e9", "${x}", "<script>", "' or 1=1 --", "\n\r\n", "💥", "null",
)  # fmt: skip


@dataclass(slots=True)
class Findings:
    """What came of a campaign."""

    requests: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    waited: int = 0
    failures: list[str] = field(default_factory=list)
    longest_stall_s: float = 0.0
    stalled_by: str = ""
    grown_bytes: int = 0

    def __str__(self) -> str:
        counted = ", ".join(f"{count} × {status}" for status, count in sorted(self.statuses.items()))
        return (
            f"{self.requests} requests: {counted}; {self.waited} waited for others; {len(self.failures)} failures; "
            f"longest stall {self.longest_stall_s * 1e3:.0f} ms; {self.grown_bytes / 2**20:+.1f} MiB"
            f"\nlongest stall by: {self.stalled_by}"
        )


def anything(draw: random.Random, depth: int = 0) -> Any:
    """A value of no particular type."""
    match draw.randrange(8 if depth < 3 else 5):
        case 0 | 1:
            return draw.choice(_NUMBERS)
        case 2 | 3:
            return draw.choice(_TEXTS)
        case 4:
            return draw.choice((None, True, False, [], {}))
        case 5:
            return [anything(draw, depth + 1) for _ in range(draw.choice((1, 2, 50)))]
        case 6:
            return {str(draw.choice(_TEXTS))[:20]: anything(draw, depth + 1) for _ in range(draw.choice((1, 3)))}
        case _:
            nested: Any = draw.choice(_NUMBERS)
            for _ in range(draw.choice((2, 30, 300))):
                nested = [nested] if draw.random() < 0.5 else {"a": nested}
            return nested


def mutated(draw: random.Random, value: Any) -> Any:
    """A copy of a valid body in which something is not."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(sorted(value))
        match draw.randrange(6):
            case 0:
                return {key: held for key, held in value.items() if key != name}
            case 1:
                return value | {draw.choice(("zzz", name.upper(), "__class__", "")): anything(draw)}
            case _:
                return value | {name: mutated(draw, value[name])}
    if isinstance(value, list) and value and draw.random() < 0.7:
        at = draw.randrange(len(value))
        match draw.randrange(4):
            case 0:
                return value * draw.choice((0, 2, 100))
            case 1:
                return [*value[:at], *value[at + 1 :]]
            case _:
                return [*value[:at], mutated(draw, value[at]), *value[at + 1 :]]
    if isinstance(value, int | float) and not isinstance(value, bool) and draw.random() < 0.5:
        return value + draw.choice((-2, -1, 1, 2, 1000))
    return anything(draw)


def body(draw: random.Random, path: str) -> bytes:
    """The bytes of a request's body."""
    known = max((end for end in BODIES if path.endswith(end)), key=len, default="")
    value = draw.choice(BODIES[known]) if known else anything(draw)
    for _ in range(draw.choice((0, 1, 1, 1, 2, 5))):
        value = mutated(draw, value)
    if known == "/init_process_group" and isinstance(value, dict):
        value["timeout_s"] = 0.05  # a join that waits has a thread as long
    text = json.dumps(value)
    match draw.randrange(20):
        case 0:
            return text.encode()[: draw.randrange(len(text) + 1)]
        case 1:
            return bytes(draw.randrange(256) for _ in range(draw.choice((1, 7, 200))))
        case 2:
            return text.replace("1", draw.choice(("NaN", "Infinity", "1" * 5000, "1e999", "\\ud800"))).encode()
        case _:
            return text.encode()


def requests(seed: int, app: Any, token: str) -> Iterator[tuple[str, str, dict[str, str], bytes]]:
    """Method, path with query, headers and body, without an end."""
    draw, known = random.Random(seed), [pair for pair in routes(app) if pair[0] != "HEAD"]
    while True:
        method, path = draw.choice(known)
        if path in ("/stop",) and draw.random() < 0.99:
            continue
        path = path.replace("/1/1", "/" + "/".join(draw.choice(("1", "1", "0", "-1", "x", "9" * 30)) for _ in "ab"))
        if draw.random() < 0.1:
            method = draw.choice(("GET", "PUT", "POST", "DELETE", "PATCH", "OPTIONS", "TRACE", "ZZZ"))
        if draw.random() < 0.2:
            path += "?" + draw.choice(("engine=engine-7", "engine=", "engine=%00", "a=" * 100, "engine=x&engine=y"))
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        if draw.random() < 0.2:
            name = draw.choice(
                ("content-type", "range", "content-range", "x-who", "content-encoding", "accept", "host")
            )
            numbers = draw.choice(("bytes=0-9", "bytes 0-9/10", "bytes=9-0", "bytes=-5", "bytes 0-9/99", "1" * 5000))
            headers[name] = draw.choice(("text/plain", "gzip", "a" * 200, "application/json; charset=x", numbers))
        yield method, path, headers, body(draw, path)


async def campaign(app: Any, *, seed: int, count: int, token: str) -> Findings:
    """Ask `count` requests one after another."""
    found = Findings()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    stream, settled = requests(seed, app, token), 0
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        for number in range(count):
            method, path, headers, content = next(stream)
            watching = asyncio.create_task(_longest_stall())
            await asyncio.sleep(0)  # it watches from here on: what it took to make the request is not the server's
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    answer = await http.request(method, path, headers=headers, content=content)
            except TimeoutError:
                found.waited += 1
                continue
            finally:
                watching.cancel()
                if (stall := (await asyncio.gather(watching))[0]) > found.longest_stall_s:
                    found.longest_stall_s = stall
                    found.stalled_by = f"{method} {path} {len(content)} bytes {content[:200]!r}"
            found.statuses[answer.status_code] += 1
            if answer.status_code >= 500 and _code(answer) not in HONEST:
                found.failures.append(
                    f"{answer.status_code} to {method} {path} {headers} {content[:300]!r}: {answer.text}"
                )
            if number == count // 4:
                settled = _resident_bytes()
    found.requests, found.grown_bytes = count, _resident_bytes() - settled
    return found


async def _longest_stall() -> float:
    """Until it is cancelled: the longest that this event loop computed between two turns of a task of 5 ms.

    In processor seconds of its thread: what a busy machine takes for others is no stall of this server.
    """
    longest, step, before = 0.0, 0.005, time.thread_time()
    try:
        while True:
            await asyncio.sleep(step)
            now = time.thread_time()
            longest, before = max(longest, now - before), now
    except asyncio.CancelledError:
        return max(longest, time.thread_time() - before)


def _code(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
