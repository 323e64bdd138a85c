"""Logit bias and penalties stay with their samples when rows move; penalties count the tokens of each sample."""

import numpy as np

from pipelinerl.engines.batching.logit_changes import LogitChange, LogitChanges

PENALTY = LogitChange({}, frequency_penalty=0.5, presence_penalty=1.0)
BIAS = LogitChange({3: 2.0}, frequency_penalty=0.0, presence_penalty=0.0)


def added(changes, num_rows):
    rows, tokens, values = changes.of(range(num_rows))
    return {
        (row, token): value for row, token, value in zip(rows.tolist(), tokens.tolist(), values.tolist(), strict=True)
    }


def test_frequency_and_presence_penalties_count_each_sampled_token():
    changes = LogitChanges()
    changes.place(0, PENALTY, [7])
    changes.place(1, BIAS, [7])
    for token in (7, 2):
        changes.count(np.array([token, token]))
    assert added(changes, 2) == {(0, 7): -2.0, (0, 2): -1.5, (1, 3): 2.0}


def test_logit_bias_and_penalties_of_a_sample_follow_it_to_another_batch_row():
    changes = LogitChanges()
    changes.place(0, BIAS, [])
    changes.place(1, PENALTY, [])
    changes.place(3, PENALTY, [5])
    changes.move([3, 2], [0, 1])
    assert added(changes, 4) == {(0, 5): -1.5}


def test_request_without_bias_clears_the_logit_changes_of_a_reused_batch_row():
    changes = LogitChanges()
    changes.place(0, BIAS, [])
    changes.place(0, None, [])
    assert not changes and not added(changes, 1)


def test_logit_bias_and_penalties_of_rows_outside_the_batch_are_ignored():
    changes = LogitChanges()
    changes.place(2, BIAS, [])
    assert changes and not added(changes, 2)
