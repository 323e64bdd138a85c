"""The objective's metrics of a step equal their definitions, for one micro-batch and for several."""

import numpy as np

from pipelinerl.objective.catalogue import PRESETS
from pipelinerl.objective.statistics import statistics, trained_tokens
from trainer_contract.types import MicroBatch

GRPO = PRESETS["grpo"].objective


def micro_batch(columns, **others):
    """Build a micro-batch from columns; token ids and positions are arbitrary."""
    total = len(columns["segment_ids"])
    given = {name: columns[name].astype(np.float32) for name in ("advantages", "weights")}
    given["behavior_logprobs"] = columns["behavior_logprobs"].astype(np.float32)
    nothing = np.zeros(total, np.int32)
    return MicroBatch(
        token_ids=nothing,
        position_ids=nothing,
        segment_ids=columns["segment_ids"].astype(np.int32),
        loss_mask=columns["loss_mask"],
        temperatures=np.ones(total, np.float32),
        num_segments=columns["num_segments"],
        **(given | others),
    )


def test_objective_metrics_match_their_definitions_on_and_off_policy(columns_of):
    logprobs, columns = columns_of(6)
    inside, now = columns["loss_mask"], logprobs.astype(np.float32)
    same = micro_batch(columns, behavior_logprobs=np.where(inside, now, 0).astype(np.float32))
    on = statistics(GRPO, trained_tokens([same], [now]))
    assert (on["ess"], on["ratio_mean"], on["kl_k3"], on["clip_fraction"]) == (1.0, 1.0, 0.0, 0.0)
    batch = micro_batch(columns)
    off = statistics(GRPO, trained_tokens([batch], [now]))
    difference = (now.astype(float) - batch.behavior_logprobs)[inside]
    ratio, a = np.exp(difference), batch.advantages[inside]
    assert off["clip_fraction"] == np.mean(((a > 0) & (ratio > 1.2)) | ((a < 0) & (ratio < 0.8))) > 0
    np.testing.assert_allclose(off["ess"], ratio.sum() ** 2 / (ratio**2).sum() / len(ratio))
    np.testing.assert_allclose(off["kl_k3"], np.mean(ratio - 1 - difference))
    np.testing.assert_allclose(off["logprob_difference_max"], np.abs(difference).max())
    np.testing.assert_allclose(off["entropy"], -now[inside].astype(float).mean())


def test_objective_metrics_of_several_micro_batches_equal_those_of_one_large_micro_batch(columns_of):
    logprobs, columns = columns_of(7)
    now, batch = logprobs.astype(np.float32), micro_batch(columns)
    one = trained_tokens([batch, batch], [now, now])
    assert one.columns["num_segments"] == 10 and set(one.columns["segment_ids"]) > {0, 9}
    np.testing.assert_allclose(
        list(statistics(GRPO, one).values()), list(statistics(GRPO, trained_tokens([batch], [now])).values())
    )


def test_batch_without_trained_tokens_has_no_metrics(columns_of):
    logprobs, columns = columns_of(8)
    idle = micro_batch(columns | {"loss_mask": np.zeros(len(logprobs), bool)})
    assert trained_tokens([], []) is None
    assert statistics(GRPO, trained_tokens([idle], [logprobs.astype(np.float32)])) == {}
