"""`LeastBusy`: picks the engine with the fewest outstanding tokens. Pure: no I/O.

The result equals `min` over all engines, at a cost that hardly grows with their number, so a request need not scan a
thousand engines. Each change adds an entry to a heap; an entry that a later change has made stale is dropped when it
reaches the top.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heappush
from typing import Final, final

from pipelinerl import rng

#: Stale heap entries are removed once the heap has this many entries per engine.
_ENTRIES: Final = 4


@final
class LeastBusy:
    """Engines by base URL, with their outstanding tokens. Ties are broken by name or, with `ties`, in a pseudorandom
    order that depends on `ties`.

    Each client counts only its own outstanding tokens. If several clients broke ties in the same order, they would
    all start with the same engines and leave the others idle.
    """

    def __init__(self, ties: str = "") -> None:
        self._ties = ties
        self._tokens: Counter[str] = Counter()
        self._rank: dict[str, tuple[int, str]] = {}  # only engines that may be picked
        self._heap: list[tuple[int, tuple[int, str]]] = []

    @property
    def outstanding(self) -> Mapping[str, int]:
        """The outstanding tokens of each engine that may be picked."""
        return {url: self._tokens[url] for url in self._rank}

    def serve(self, urls: Iterable[str]) -> None:
        """Set the engines that may be picked; the token counts of all engines are kept."""
        if (serving := set(urls)) == self._rank.keys():
            return
        known = self._rank
        self._rank = {url: known.get(url) or self._rank_of(url) for url in serving}
        self._sweep()

    def add(self, url: str, tokens: int) -> None:
        """Add to an engine's outstanding tokens; a negative number subtracts."""
        self._tokens[url] += tokens
        if url in self._rank:
            heappush(self._heap, (self._tokens[url], self._rank[url]))
            if len(self._heap) > _ENTRIES * (len(self._rank) + 16):
                self._sweep()
        elif not self._tokens[url]:
            del self._tokens[url]

    def pick(self, passed_over: Callable[[str], bool]) -> str | None:
        """Return the engine with the fewest outstanding tokens, skipping those for which `passed_over` is true; None if
        none is left.
        """
        aside: list[tuple[int, tuple[int, str]]] = []
        found = None
        while self._heap:
            tokens, (_, url) = entry = self._heap[0]
            if url not in self._rank or tokens != self._tokens[url] or (aside and aside[-1] == entry):
                heappop(self._heap)
            elif passed_over(url):
                aside.append(heappop(self._heap))
            else:
                found = url
                break
        for entry in aside:
            heappush(self._heap, entry)
        return found

    def _rank_of(self, url: str) -> tuple[int, str]:
        return (rng.key(0, self._ties, url) if self._ties else 0), url

    def _sweep(self) -> None:
        """Rebuild the heap with one current entry per engine."""
        self._heap = [(self._tokens[url], rank) for url, rank in self._rank.items()]
        heapify(self._heap)
