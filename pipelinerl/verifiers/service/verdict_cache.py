"""`VerdictCache`: verdicts by a hash of their inputs, in a bounded number of bytes.

A key is the hash of everything that a verdict depends on: the rules, the problem with its ground truth, and the whole
answer. An answer that is only similar to a cached one therefore learns nothing, neither from its verdict nor from the
response time. Only judgements are cached, never a failure or a timeout. The least recently used entry is evicted first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, final

import msgspec

from pipelinerl.types import Problem, Verdict

#: Size of an entry besides the verdict's bytes: the key, and Python's objects around key and verdict.
_PLACE_BYTES: Final = 256


def keys_of(rules: str, problem: Problem, texts: Iterable[str]) -> list[bytes]:
    """Return for each answer a 32-byte hash of everything that a deterministic verifier's verdict depends on.

    The part before the text is one JSON array, so that the encoding is unambiguous. That part is hashed once, not once
    per answer: a problem may have megabytes, and four thousand answers.
    """
    inputs = [rules, problem.domain, problem.messages, problem.ground_truth, problem.metadata]
    of_all = hashlib.blake2b(msgspec.json.encode(inputs, order="sorted"), digest_size=32)
    keys = []
    for text in texts:
        of_one = of_all.copy()
        of_one.update(msgspec.json.encode(text))
        keys.append(of_one.digest())
    return keys


@final
class VerdictCache:
    """A cache of at most `most_bytes`; with 0 it stores nothing."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Verdict)
        self.num_bytes = 0
        """Size of the cached entries."""

    def find(self, key: bytes) -> Verdict | None:
        """Return the verdict cached under the key, if there is one."""
        encoded = self._kept.get(key)
        if encoded is None:
            return None
        self._kept.move_to_end(key)
        return self._decoder.decode(encoded)

    def keep(self, key: bytes, verdict: Verdict) -> None:
        """Cache a verdict if it is a judgement."""
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
