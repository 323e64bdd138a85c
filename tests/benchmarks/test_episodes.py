"""The benchmark `episodes`: many concurrent episodes keep small engines busy, and all episodes end."""

from benchmarks.episodes import Crowd, busy


def test_engine_slots_stay_busy_with_many_episodes_that_use_slow_tools():
    crowd = Crowd(groups=6, slots=4, step_s=0.02, longest_tool_s=1.0, warm_s=2.0, seconds=4.0)
    crowded = busy(crowd)
    assert crowded.busy >= 0.9
    assert crowded.stuck == 0 and crowded.episodes >= crowd.groups * crowd.group_size
