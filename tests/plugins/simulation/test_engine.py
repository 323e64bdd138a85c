"""The simulation chooses among waiting groups as the trainer's real `Batcher` does."""

from hypothesis import given, settings as effort, strategies as st

from pipelinerl.enums import NoSignal
from pipelinerl.plugins.simulation.engine import SimulatedGroup, WaitingGroups
from pipelinerl.staleness import StalenessBounds
from pipelinerl.training.rollouts.admission import ConsumedLedger, GroupOutcome, Lineage
from pipelinerl.training.rollouts.batcher import Batcher, StepBudget
from tests.fakes.rollouts import group


@effort(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(st.lists(st.integers(0, 6), max_size=6), min_size=1, max_size=8),
    k=st.integers(1, 5),
    rollouts=st.sampled_from([2, 3, 6]),
)
def test_simulation_trains_on_the_same_groups_as_the_trainers_batcher(arrivals, k, rollouts):
    """The simulation also drops the same groups as stale as the `Batcher`."""
    real = Batcher(ledger=ConsumedLedger(), lineage=Lineage(1, 0), no_signal=NoSignal.TRAIN)
    twin = WaitingGroups()
    bounds, index, producing = StalenessBounds(1, k), 0, 7
    for versions in arrivals:
        for version in versions:
            real.offer(group(index, version=version))
            twin.offer(SimulatedGroup(index, 2, [2, 2], 0.0, oldest=version))
            index += 1
        taken = real.take(StepBudget(rollouts=rollouts), producing=producing, bounds=bounds)
        chosen = twin.take(rollouts, producing=producing, bounds=bounds)
        assert _indices(taken) == _indices(chosen)
        assert real.ledger.counts[GroupOutcome.STALE] == len(twin.dropped)
        assert len(real.waiting) == len(twin)
        producing += taken is not None


def _indices(groups):
    return None if groups is None else sorted(each.index for each in groups)
