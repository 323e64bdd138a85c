"""The entropy probe is an objective that only measures; `test_entropy_meter.py` compares what it measures."""

import numpy as np

from pipelinerl.numerics.entropy_probe import EntropyProbe
from pipelinerl.trainers.ranks.commands import decode_objective, encode_objective
from trainer_contract.types import HeadMeasure


def test_entropy_probe_is_equal_after_encoding_and_decoding_for_other_processes():
    probe, logprobs = EntropyProbe(), np.array([-1.0, -2.0], np.float32)
    probe.evaluate(logprobs, {HeadMeasure.ENTROPY: -logprobs, "loss_mask": np.array([True, False])})
    made = decode_objective(encode_objective(probe))
    assert made == probe and isinstance(made, EntropyProbe) and made.seen == []
