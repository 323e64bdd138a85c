"""`RestartBudget`: whether, and when, a process that has died is started again.

A crash loop ends within seconds, four unlucky kills in an hour end nothing: what counts are deaths that are not yet
forgiven, one for each `FORGIVEN_EVERY_S` that the process was up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from pipelinerl.observability.restarts import FORGIVEN_EVERY_S
from pipelinerl.observability.status import RestartStatus

_FIRST_BACKOFF_S: Final = 0.5
_LONGEST_BACKOFF_S: Final = 30.0
#: One that was up this long is no crash loop: it is started again as if it were its first death.
_SETTLED_S: Final = 10.0


@final
@dataclass(slots=True)
class RestartBudget:
    """Of one process, which may have `limit` deaths that are not forgiven; `deaths` are all of them."""

    limit: int
    deaths: int = 0
    unforgiven: float = 0.0

    def is_spent_by(self, up_s: float) -> bool:
        """Would a death after `up_s` seconds be one too many?"""
        return self._after(up_s) > self.limit

    def died(self, up_s: float) -> float:
        """Count a death after `up_s` seconds; returns in how many seconds to start it again."""
        before = round(max(0.0, self._after(up_s) - 1.0))
        self.deaths, self.unforgiven = self.deaths + 1, self._after(up_s)
        return _FIRST_BACKOFF_S if up_s > _SETTLED_S else min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2**before)

    def status(self, name: str) -> RestartStatus:
        """For whoever looks at the run."""
        return RestartStatus(name=name, deaths=self.deaths, unforgiven=self.unforgiven, limit=self.limit)

    def _after(self, up_s: float) -> float:
        return max(0.0, self.unforgiven - up_s / FORGIVEN_EVERY_S) + 1.0
