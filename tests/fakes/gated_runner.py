"""A real runner whose decode steps wait for permission, so that a test controls what happens between two steps."""

import threading
from typing import final

from tests.patience import PATIENCE_S

DEADLINE_S = PATIENCE_S


@final
class GatedRunner:
    """A runner whose `decode` first waits until `allow` permits the step; `waiting` is true while a step waits."""

    def __init__(self, runner):
        self._runner = runner
        self._permits = threading.Semaphore(0)
        self._done = threading.Condition()
        self._free = False
        self.waiting = False
        self.steps = 0
        self.batch_sizes: list[int] = []
        self.log: list[str] = []

    def allow(self, steps):
        """Permit `steps` more decode steps, and return once they are done."""
        target = self.steps + steps
        self._permits.release(steps)
        with self._done:
            assert self._done.wait_for(lambda: self.steps >= target, DEADLINE_S), f"{self.steps} of {target} steps"

    def open(self):
        """Permit all further decode steps."""
        self._free = True
        self._permits.release()

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def clear(self, rows):
        self.log.append(f"clear rows {list(rows)}")
        self._runner.clear(rows)

    def prefill(self, prefills):
        self.log += [f"prefill {len(each.token_ids)} tokens to rows {list(each.rows)}" for each in prefills]
        self._runner.prefill(prefills)

    def copy_cache(self, source, rows, num_tokens):
        self.log.append(f"copy {num_tokens} tokens from row {source} to rows {list(rows)}")
        self._runner.copy_cache(source, rows, num_tokens)

    def decode(self, num_rows):
        if not self._free:
            self.waiting = not self._permits.acquire(blocking=False)
            assert not self.waiting or self._permits.acquire(timeout=DEADLINE_S), "the test did not allow the next step"
            self.waiting = False
        out = self._runner.decode(num_rows)
        with self._done:
            self.steps += 1
            self.batch_sizes.append(num_rows)
            self._done.notify_all()
        return out

    def swap(self):
        self.log.append("swap")
        self._runner.swap()
