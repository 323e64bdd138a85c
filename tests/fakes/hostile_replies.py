"""Structure-aware mutations of a JSON message: values of wrong types and sizes, and damaged bytes."""

import copy
import json
from collections.abc import Callable

#: JSON texts that replace a node; some of them are no values that Python's own encoder would write.
NODES = (
    "null", "true", "0", "-1", "1e999", "-1e999", "NaN", "Infinity", "1" + "0" * 400, "1" + "0" * 5_000, "0.5", "1e308",
    '""', '"8"', '"\\ud800"', '"\\u0000"', '"<|im_end|>"', "[]", "{}", "[[]]", '[{"type": "text", "text": "x"}]',
    '[{"type": "text"}]', '[{"type": "text", "text": 3}]', '["x"]', '{"a": 1}', "[" * 900 + "]" * 900,
    "[" * 200_000, '{"a":' * 2_000, '"' + "x" * 100_000 + '"',
)  # fmt: skip
_MARK = "\x00 the node \x00"


def _paths(value, path=()):
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(each for key, item in children for each in _paths(item, (*path, key)))]


def _replaced(value, path, node):
    if not path:
        return node
    value = copy.deepcopy(value)
    place = value
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = _MARK
    return json.dumps(value).replace(json.dumps(_MARK), node)


def _without(value, path):
    value = copy.deepcopy(value)
    place = value
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return value


def _damaged(body, draw):
    at = draw.randrange(len(body) + 1)
    changes: tuple[Callable[[], bytes], ...] = (
        lambda: body[:at],
        lambda: body[:at] + b"\xff" + body[at:],
        lambda: body + body,
        lambda: b"\xef\xbb\xbf" + body,
        lambda: body.decode(errors="replace").encode("utf-16"),
        lambda: b"\xff",
        lambda: b"[" * 200_000,
        lambda: b"<html>busy</html>",
        lambda: body[:at] + bytes([draw.randrange(256)]) + body[at + 1 :],
    )
    return draw.choice(changes)()


def mutated(valid, draw, *, nodes=NODES):
    """Return the bytes of a valid message after one or two mutations; `nodes` are the texts that replace a node."""
    path = draw.choice(_paths(valid))
    if path and draw.random() < 0.2:
        body = json.dumps(_without(valid, path)).encode()
    else:
        body = _replaced(valid, path, draw.choice(nodes)).encode()
    return _damaged(body, draw) if draw.random() < 0.3 else body
