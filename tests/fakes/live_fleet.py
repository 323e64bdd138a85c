"""Shared actions and checks for tests that change the engines of a live run with `pipelinerl engines`."""

from itertools import cycle, islice, pairwise

from pipelinerl.commands.remote import controller_of
from pipelinerl.errors import UserError
from pipelinerl.observability.status import RunStatus
from tests.fakes.live_run import output_of
from tests.patience import PATIENCE_S


def engines(run, *arguments):
    command, *rest = arguments
    return output_of("engines", command, str(run.directory), *rest)


def status(run):
    """Return the run's status from its controller, or an empty status if no controller answers."""
    try:
        with controller_of(run.directory) as controller:
            return controller.status()
    except UserError:
        return RunStatus(run="")


def fleet(run):
    return {engine.name: engine for engine in status(run).fleet.engines}


def until_serving(run, *names):
    def serve(run):
        known = fleet(run)
        return all(name in known and known[name].state == "healthy" for name in names)

    run.until(serve, f"{', '.join(names)} to serve")


def until_steps(run, more):
    wanted = status(run).step + more
    run.until(lambda run: status(run).step >= wanted, f"step {wanted}")


def swap_to_and_fro(run, types, *, times, engine="engine-0", grace_s=60.0):
    """Replace `engine`, then its replacement, and so on, `times` times in all; return the last engine's name.

    The replacements take their types from `types` in turn. After each swap, assert that the old process ends, and that
    the run makes steps with the new engine alone.
    """
    for kind in islice(cycle(types), times):
        old, process = engine, run.role(engine)
        joined, gone = engines(run, "swap", old, "--type", kind, "--timeout", f"{grace_s}").splitlines()
        engine = joined.split()[0]
        assert joined.split()[1:3] == [kind, "healthy"] and gone.split()[0] == old and "drained" in gone
        process.wait(PATIENCE_S)
        until_steps(run, 2)
    return engine


def kill_again_and_again(run, names, *, times):
    """Kill the engines `names` in turn, each while it generates; after a kill, wait until the engine serves again."""
    for name in islice(cycle(names), times):
        run.until(lambda run, name=name: fleet(run)[name].running > 0, f"{name} to have work")  # type: ignore[misc]
        run.role(name).kill()
        run.until(lambda run, name=name: fleet(run)[name].state != "healthy", f"{name} to be missed")  # type: ignore[misc]
        until_serving(run, *names)
        until_steps(run, 1)


def longest_stall_s(run):
    return max(float(b["elapsed_s"] - a["elapsed_s"]) for a, b in pairwise(run.events("step")))


def assert_nothing_lost(run):
    """Assert that each order ended once, none failed, and no engine served before its canary check."""
    (finished,) = run.events("run_finished")
    ledger = finished["ledger"]
    assert ledger["issued"] == sum(count for fate, count in ledger.items() if fate != "issued"), ledger
    assert ledger["failed"] == 0 and not run.events("group_failed"), (ledger, run.events("group_failed"))
    trained = [order for step in run.events("step") for order in step["orders"]]
    assert len(trained) == len(set(trained)) == ledger["trained"], "each order trains at most once"
    assert not run.events("engine_canary_failed"), run.events("engine_canary_failed")
    assert all(event["worst"] <= 1e-4 for event in run.events("engine_verified"))
