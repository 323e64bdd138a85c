"""The entropy probe is an objective that only measures the mean entropy in the loss mask; its gradients are zero."""

import numpy as np
import torch

from pipelinerl.numerics.entropy_probe import EntropyProbe
from pipelinerl.trainers.ranks.commands import decode_objective, encode_objective
from trainer_contract.types import HeadMeasure, MeasuringObjective, measures_of

ENTROPIES = np.array([0.5, np.nan, 1.5, 1.0], np.float32)
LOGPROBS = np.array([-1.0, np.nan, -2.0, -3.0], np.float32)
MASK = np.array([True, False, True, True])


def test_entropy_probe_value_is_the_mean_entropy_over_the_loss_mask():
    columns = {HeadMeasure.ENTROPY: ENTROPIES, "loss_mask": MASK}
    assert EntropyProbe().evaluate(LOGPROBS, columns) == 1.0
    assert measures_of(EntropyProbe()) == (HeadMeasure.ENTROPY,) and isinstance(EntropyProbe(), MeasuringObjective)
    assert not EntropyProbe().prediction_gradient(LOGPROBS[MASK], columns).any()
    assert not EntropyProbe().measure_gradients(LOGPROBS[MASK], columns)[HeadMeasure.ENTROPY].any()


def test_entropy_probe_records_only_tokens_in_the_loss_mask_and_its_records_do_not_affect_equality():
    numpys, torchs = EntropyProbe(), EntropyProbe()
    numpys.evaluate(LOGPROBS, {HeadMeasure.ENTROPY: ENTROPIES, "loss_mask": MASK})
    columns = {HeadMeasure.ENTROPY: torch.from_numpy(ENTROPIES), "loss_mask": torch.from_numpy(MASK)}
    torchs.evaluate(torch.from_numpy(LOGPROBS), columns)
    for (seen,) in (numpys.seen, torchs.seen):
        assert seen.dtype == np.float32 and seen.tolist() == [0.5, 1.5, 1.0]
    assert numpys == EntropyProbe() and hash(numpys) == hash(EntropyProbe())


def test_entropy_probe_is_equal_after_encoding_and_decoding_for_other_processes():
    probe = EntropyProbe()
    probe.evaluate(LOGPROBS, {HeadMeasure.ENTROPY: ENTROPIES, "loss_mask": MASK})
    made = decode_objective(encode_objective(probe))
    assert made == probe and isinstance(made, EntropyProbe) and made.seen == []
