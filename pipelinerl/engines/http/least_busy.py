"""`LeastBusy`: engines by how many tokens they have yet to answer, and the one of them that has the fewest. Pure.

It promises what `min` over all engines would say, at a cost that hardly grows with their number: a thousand engines are
not looked at for each request. Each change leaves an entry in a heap; one that a later change has made untrue is
dropped when it comes up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heappush
from typing import Final, final

from pipelinerl import rng

#: Untrue entries are swept out when there are so many entries for each engine.
_ENTRIES: Final = 4


@final
class LeastBusy:
    """Engines by base URL. Ties go by name, or, with `ties`, in an order of its own.

    Who picks by what they have asked for themselves do not know of one another. Where several did so in one order, they
    would all begin with the same engines, and leave the others idle.
    """

    def __init__(self, ties: str = "") -> None:
        self._ties = ties
        self._tokens: Counter[str] = Counter()
        self._rank: dict[str, tuple[int, str]] = {}  # of those that may be picked
        self._heap: list[tuple[int, tuple[int, str]]] = []

    @property
    def outstanding(self) -> Mapping[str, int]:
        """Tokens asked for and not yet answered, by engine that may be picked."""
        return {url: self._tokens[url] for url in self._rank}

    def serve(self, urls: Iterable[str]) -> None:
        """These may be picked from now on, and no others; what is known of any stays."""
        if (serving := set(urls)) == self._rank.keys():
            return
        known = self._rank
        self._rank = {url: known.get(url) or self._rank_of(url) for url in serving}
        self._sweep()

    def add(self, url: str, tokens: int) -> None:
        """So many more are outstanding; fewer, if it is negative."""
        self._tokens[url] += tokens
        if url in self._rank:
            heappush(self._heap, (self._tokens[url], self._rank[url]))
            if len(self._heap) > _ENTRIES * (len(self._rank) + 16):
                self._sweep()
        elif not self._tokens[url]:
            del self._tokens[url]

    def pick(self, passed_over: Callable[[str], bool]) -> str | None:
        """The one with the fewest outstanding tokens, of those that are not passed over; None where all are."""
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
        """As many entries as engines, all of them true."""
        self._heap = [(self._tokens[url], rank) for url, rank in self._rank.items()]
        heapify(self._heap)
