"""Run scenarios by name and seed; the exit status is 1 for a broken promise, and 2 for an unknown name."""

import argparse
import logging
import signal
import sys

from tests.faults.scenarios.scenario import find, names, play, summary


def main(arguments=None):
    """Run the scenarios that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(prog="pipelinerl chaos")
    parser.add_argument("--scenario", default="all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args(arguments)
    known = names()
    if given.scenario not in ("all", *known):
        print(f"no scenario is called {given.scenario!r}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    chosen = known if given.scenario == "all" else [given.scenario]
    if given.list:
        print("\n".join(f"{name:<18} {summary(name)}" for name in chosen))
        return 0
    # SIGTERM raises an exception, so that `finally` clauses run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    logging.disable(logging.ERROR)  # killed roles log errors, which are expected
    broken = False
    for name in chosen:
        seeds = range(given.seed, given.seed + given.count)
        tally = play(find(name), seeds, report=lambda line: print(line, file=sys.stderr, flush=True))
        print(tally, flush=True)
        broken = broken or bool(tally.broken)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
