"""The entropy probe is an objective that only measures; `test_entropy_meter.py` compares what it measures."""

import numpy as np

from pipelinerl.numerics.entropy_probe import EntropyProbe
from pipelinerl.trainers.ranks.commands import decode_objective, encode_objective
from trainer_contract.types import HeadMeasure


def test_entropy_probe_measures_tokens_in_the_loss_mask_without_gradient_also_in_other_processes():
    probe, logprobs = decode_objective(encode_objective(EntropyProbe())), np.array([-1.0, np.nan, -2.0], np.float32)
    columns = {HeadMeasure.ENTROPY: np.array([0.5, np.nan, 1.5], np.float32), "loss_mask": ~np.isnan(logprobs)}
    assert probe.evaluate(logprobs, columns) == 1.0 and [seen.tolist() for seen in probe.seen] == [[0.5, 1.5]]
    assert probe == EntropyProbe() and hash(probe) == hash(EntropyProbe()), "what it saw does not matter"
    assert not probe.prediction_gradient(np.nan_to_num(logprobs), columns).any()
    assert not probe.measure_gradients(np.nan_to_num(logprobs), columns)[HeadMeasure.ENTROPY].any()
