"""`VerdictCache`: verdicts that need not be reached again, by what was judged, in a bounded number of bytes.

Promises: a verdict is found by the hash of all that it depends on (the rules, the problem with its ground truth, the
whole answer) and by nothing else: of an answer that is nearly one that is known, neither verdict nor time tells more
than of any other. Only judgements are kept, never a failure or a timeout. What was looked at longest ago goes first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, final

import msgspec

from pipelinerl.types import Problem, Verdict

#: What a place takes beside the verdict's own bytes: the key, the objects around both.
_PLACE_BYTES: Final = 256


def keys_of(rules: str, problem: Problem, texts: Iterable[str]) -> list[bytes]:
    """The hash of what the verdict on each answer of a deterministic verifier depends on: 32 bytes.

    What stands before a text is one JSON array, so that no two things have one hash. It is read once, not once for each
    answer: a problem may have megabytes, and four thousand answers.
    """
    asked = [rules, problem.domain, problem.messages, problem.ground_truth, problem.metadata]
    of_all = hashlib.blake2b(msgspec.json.encode(asked, order="sorted"), digest_size=32)
    keys = []
    for text in texts:
        of_one = of_all.copy()
        of_one.update(msgspec.json.encode(text))
        keys.append(of_one.digest())
    return keys


@final
class VerdictCache:
    """At most `most_bytes`; with 0 it keeps nothing."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Verdict)
        self.num_bytes = 0
        """What is held."""

    def find(self, key: bytes) -> Verdict | None:
        """The verdict that was kept under the key, if it still is."""
        encoded = self._kept.get(key)
        if encoded is None:
            return None
        self._kept.move_to_end(key)
        return self._decoder.decode(encoded)

    def keep(self, key: bytes, verdict: Verdict) -> None:
        """Keep a judgement."""
        if not verdict.outcome.is_judgement:
            return
        encoded = self._encoder.encode(verdict)
        if (known := self._kept.pop(key, None)) is not None:
            self.num_bytes -= len(known) + _PLACE_BYTES
        self._kept[key] = encoded
        self.num_bytes += len(encoded) + _PLACE_BYTES
        while self.num_bytes > self._most_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.num_bytes -= len(oldest) + _PLACE_BYTES
