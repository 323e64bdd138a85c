"""A seeded fuzzer that knows the schemas: it makes requests that are valid except for one or more faults.

Routes are read from the applications. Bodies are made from the valid bodies in this file; a route without a valid body
here gets arbitrary bodies.
"""

from __future__ import annotations

import json
import random
from typing import Any, Final

from pipelinerl.plugins.oubliette.repository import Link
from tests.fakes.scripted_engine import LAYOUT
from tests.security.test_authorisation import routes

_GROUP: Final = {"group": "g", "backend": "gloo", "rendezvous_host": "127.0.0.1", "rendezvous_port": 9, "rank": 1}
_LAYOUT: Final = LAYOUT.model_dump(mode="json")
_VERSION: Final = {"epoch": 1, "version": 1}
_CHAT: Final = {
    "prompt_token_ids": [3, 5], "max_tokens": 2, "n": 2, "temperature": 1.0, "top_p": 0.9, "top_k": 3, "seed": 1,
    "logprobs": True, "return_token_ids": True, "stop": ["b"], "priority": 1,
}  # fmt: skip
_SAID: Final = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2, "stream": True,
                "stream_options": {"include_usage": True}}  # fmt: skip
#: A content link, which stands for the content `abc`. Some valid bodies below contain the content instead of a link.
_LINK: Final = str(Link.of(b"abc"))
_ABC: Final = {"input": _LINK, "output": _LINK, "answer": _LINK}
_PROGRAM: Final = {"language": "python", "program": _LINK}
#: Valid request bodies, by the last part of the route's path.
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
    "/knobs": ({"j": 1, "k": 4}, {"temperature": 0.7, "learning_rate": 1e-3}, {"mode": "rlax"}),
    "/engines": ({"url": "http://127.0.0.1:9", "incarnation": "1", "name": "engine-7", "type": "torch"},),
    "/engines/drain": ({"engine": "engine-7", "grace_s": 1.0},),
    "/engines/request": ({"type": "torch", "count": 1, "replaces": "", "grace_s": 1.0},),
    "/versions": (_VERSION | {"layout": _LAYOUT, "progress": {"engine-0": None}},),
    "/progress": ({"epoch": 1, "progress": {"engine-0": [1, 1]}},),
    "/seal": ({"digest": "0" * 32, "whole": "0" * 32},),
    "/verify": (
        {"protocol": 1, "domain": "words", "rules": "r1", "problem": {
            "problem_id": "words:1", "domain": "words", "messages": [{"role": "user", "content": "say 1"}],
            "ground_truth": "1", "metadata": {"level": 1}}, "answers": [["1", [3, 4], "stop"], ["2", [], "length"]]},
    ),
    "/verifiers": ({"url": "http://127.0.0.1:9", "incarnation": "1", "domains": {"words": "r1"}},),
    "/knobs/check": ({"j": 1, "k": 4}, {"temperature": 0.7}),
    "/engines/add": ({"url": "http://127.0.0.1:9"}, {"type": "torch", "count": 1}),
    "/engines/swap": ({"engine": "engine-7", "type": "torch", "grace_s": 1.0},),
    "/engines/remove": ({"engine": "engine-7"},),
    "/work": (
        {"protocol": 1, "contents": ["YWJj"], "works": [{"type": "check", "how": "tokens", "tolerance": 0.0} | _ABC]},
        {"protocol": 1, "contents": ["YWJj"], "works": [{"type": "check", "how": "exact"} | _ABC, {
            "type": "run", "input": _LINK, "limits": {"cpu_s": 1.0, "wall_s": 2.0}} | _PROGRAM]},
        {"protocol": 1, "works": [{"type": "compile", "language": "c", "source": _LINK, "wall_s": 1.0}]},
    ),
    "/missing": ([[_LINK, _LINK]], {"links": [_LINK]}),
    "/copy": ({"source": "http://127.0.0.1:9", "digest": "0" * 32, "whole": "0" * 32, "timeout_s": 0.05},),
}  # fmt: skip

#: Values for query parameters; for each route, some of them are valid.
_QUERIES: Final = (
    "", "0", "1", "2", "3", "-1", "20", "4000", "9999999999", "1" * 400, "0.5", "nan", "inf", "1e308", "x", "%00",
    "%ff", "%f0%9f%92%a5", "a" * 600, "reward", "reward,entropy,loss", "," * 999, "%2C", "domain/words/accuracy", "0,0",
    "0,1", "step", "seconds", "trained", "any", "evaluation", "reward:0", "with", "asc", "desc", "words", "easy",
    "-inf", "stop", "-16.0:d69ad970d1e1af22:1", "nan:0:0", "1e999:0:0", "inf:ffffffffffffffffff:0", "engine-7",
    "http://127.0.0.1:9",
)  # fmt: skip
#: Fraction of bodies that are larger than any server accepts.
_TOO_LARGE: Final = 0.001

_NUMBERS: Final = (0, -1, 1, 2, 0.5, -0.0, 1e308, 1e-320, 2**31, 2**53, 2**62, 2**63, 2**64, 10**30, 10**400, True)
_TEXTS: Final = (
    "", " ", "a", "A" * 300, "A" * 70_000, "\u0000", "\ud800", "\u202e", "%00", "../../x", "http://[::1", "http://a:99999",
    "http://" + "a" * 70 + ".example", "nan", "-1", "1e9", "${x}", "<script>", "' or 1=1 --", "\n\r\n", "💥", "null",
)  # fmt: skip


def anything(draw, depth=0):
    match draw.randrange(8 if depth < 3 else 5):
        case 0 | 1:
            return draw.choice(_NUMBERS)
        case 2 | 3:
            return draw.choice(_TEXTS)
        case 4:
            return draw.choice((None, True, False, [], {}))
        case 5:
            return [anything(draw, depth + 1) for _ in range(draw.choice((1, 2, 3 if depth else 50)))]
        case 6:
            return {str(draw.choice(_TEXTS))[:20]: anything(draw, depth + 1) for _ in range(draw.choice((1, 3)))}
        case _:
            nested: Any = draw.choice(_NUMBERS)
            for _ in range(draw.choice((2, 30, 300))):
                nested = [nested] if draw.random() < 0.5 else {"a": nested}
            return nested


def mutated(draw, value):
    """Return a copy of a valid body with one fault."""
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
                return value * draw.choice((0, 2, 100 if len(value) < 10 else 3))
            case 1:
                return [*value[:at], *value[at + 1 :]]
            case _:
                return [*value[:at], mutated(draw, value[at]), *value[at + 1 :]]
    if isinstance(value, int | float) and not isinstance(value, bool) and draw.random() < 0.5:
        return value + draw.choice((-2, -1, 1, 2, 1000))
    return anything(draw)


def body(draw, path):
    known = max((end for end in BODIES if path.endswith(end)), key=len, default="")
    value = draw.choice(BODIES[known]) if known else anything(draw)
    for _ in range(draw.choice((0, 1, 1, 1, 2, 5))):
        value = mutated(draw, value)
    if known == "/init_process_group" and isinstance(value, dict):
        value["timeout_s"] = 0.05  # short, because each join of a weight group occupies a thread until this timeout
    if draw.random() < _TOO_LARGE:
        return b'"' + b"a" * (33 * 2**20)
    text = json.dumps(value)
    match draw.randrange(20):
        case 0:
            return text.encode()[: draw.randrange(len(text) + 1)]
        case 1:
            return bytes(draw.randrange(256) for _ in range(draw.choice((1, 7, 200))))
        case 2:
            odd = ("NaN", "Infinity", "1" * 5000, "1e999", "\\ud800", '"\udcff"', "[" * 5000 + "]" * 5000)
            return text.replace("1", draw.choice(odd)).encode(errors="surrogateescape")
        case _:
            return text.encode()


def requests(seed, app, token):
    """Yield an endless stream of requests, each as (method, path with query, headers, body)."""
    pairs = zip(routes(app), (route for route in app.routes for _ in route.methods), strict=True)
    declared = ((pair, getattr(route, "dependant", None)) for pair, route in pairs)
    draw, known, names_of = (
        random.Random(seed),
        [pair for pair in routes(app) if pair[0] != "HEAD"],
        {pair: [each.alias for each in known.query_params] for pair, known in declared if known is not None},
    )
    while True:
        method, path = draw.choice(known)
        if path in ("/stop", "/suspend", "/drain"):
            continue  # skip this route, because it would end the server under test
        names = names_of.get((method, path), ())
        for place in ("/samples/1", "/tokens/1"):
            path = path.replace(place, place[:-1] + draw.choice(("b87d6b86af7d95c5", "1", "x" * 65)))
        path = path.replace("/1/1", "/" + "/".join(draw.choice(("1", "1", "0", "-1", "x", "9" * 30)) for _ in "ab"))
        if draw.random() < 0.1:
            method = draw.choice(("GET", "PUT", "POST", "DELETE", "PATCH", "OPTIONS", "TRACE", "ZZZ"))
        if names and draw.random() < 0.8:
            chosen = draw.sample(names, min(len(names), draw.choice((1, 1, 2, 20))))
            path += "?" + "&".join(f"{name}={draw.choice(_QUERIES)}" for name in chosen)
        elif draw.random() < 0.2:
            path += "?" + draw.choice(("engine=engine-7", "engine=", "engine=%00", "a=" * 100, "engine=x&engine=y"))
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        if draw.random() < 0.2:
            name = draw.choice(
                ("content-type", "range", "content-range", "x-who", "content-encoding", "accept", "host")
            )
            numbers = draw.choice(("bytes=0-9", "bytes 0-9/10", "bytes=9-0", "bytes=-5", "bytes 0-9/99", "1" * 5000))
            headers[name] = draw.choice(("text/plain", "gzip", "a" * 200, "application/json; charset=x", numbers))
        yield method, path, headers, body(draw, path.partition("?")[0])
