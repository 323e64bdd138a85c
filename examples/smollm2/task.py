"""The task: express the content of a sentence as JSON. A hash decides which of the 4,800 sentences are held out."""

from __future__ import annotations

import json
from itertools import product

NAMES = (
    *("Anna", "Ben", "Carla", "David", "Emma", "Frank", "Grace", "Henry", "Iris", "Jack"),
    *("Kate", "Leo", "Mary", "Nick", "Olga", "Paul", "Rosa", "Sam", "Tina", "Will"),
)
ITEMS = (
    *("apple", "book", "candle", "chair", "coin", "cup", "hat", "key", "lamp", "lemon"),
    *("map", "pen", "plate", "ring", "rope", "shoe", "spoon", "stamp", "table", "watch"),
)
VERBS = ("bought", "got", "stole", "took")
KEYS = ("who", "other", "item", "count")


def problems() -> list[dict[str, object]]:
    """Return sentences such as "Anna got 5 candles from Leo.", each with its content as JSON."""
    rows = []
    for name, item, verb, count in product(NAMES, ITEMS, VERBS, (2, 5, 9)):
        other = NAMES[(NAMES.index(name) + 1 + len(rows) % (len(NAMES) - 1)) % len(NAMES)]
        truth = json.dumps({"who": name, "other": other, "item": item, "count": count})
        prompt = f"{name} {verb} {count} {item}s from {other}."
        rows.append({"prompt": prompt, "answer": truth, "tags": [f"verb={verb}"]})
    return rows


def parses(completion: str) -> float:
    """Return 1 if the answer is one JSON object and nothing else, otherwise 0."""
    return float(_object(completion) is not None)


def right(completion: str, answer: str) -> float:
    """Return the share of expected keys with the right value; 0 if the completion has a key that is not expected."""
    said, truth = _object(completion), json.loads(answer)
    if said is None or not said.keys() <= truth.keys():
        return 0.0
    return sum(said.get(key) == truth[key] for key in KEYS) / len(KEYS)


def _object(text: str) -> dict[str, object] | None:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None
