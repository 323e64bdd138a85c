"""Engine and trainer compute the same log-probs, with shared prompts, temperatures and a weight update in flight."""

import pytest

from benchmarks.parity import BF16_P95, FP32_MAX, Arm, measure, model_in
from trainer_contract.types import HeadPrecision, Kernels, Precision


def measured_parity(folder, precision, head, kernels=Kernels.FAST, *, top_p=1.0):
    arm = Arm(precision=precision, head=head, kernels=kernels, top_p=top_p)
    parity = measure(model_in(folder, arm.dtype), arm, prompts=9)
    assert parity.switched > 0, "no sample was in flight when the weights changed"
    assert min(each.num_tokens for each in parity.versions.values()) > 100
    return parity


@pytest.mark.parametrize("head", HeadPrecision)
def test_engine_and_trainer_logprobs_in_fp32_agree_for_every_token(tmp_path, head):
    parity = measured_parity(tmp_path, Precision.FP32, head)
    assert parity.all_tokens.max <= FP32_MAX
    assert parity.bit_equal > 0.2


@pytest.mark.parametrize("head", HeadPrecision)
def test_engine_and_trainer_logprobs_in_bf16_agree_for_95_percent_of_the_tokens(tmp_path, head):
    """The bound is the same for both precisions of the output layer, as the error may arise in the hidden states."""
    assert measured_parity(tmp_path, Precision.BF16, head).all_tokens.p95 <= BF16_P95


@pytest.mark.parametrize("kernels", Kernels)
def test_engine_and_trainer_logprobs_agree_as_closely_if_top_p_truncates_sampling(tmp_path, kernels):
    parity = measured_parity(tmp_path, Precision.FP32, HeadPrecision.MODEL, kernels, top_p=0.8)
    assert parity.all_tokens.max <= FP32_MAX
    assert kernels is Kernels.FAST or parity.bit_equal == 1.0


@pytest.mark.parametrize("head", HeadPrecision)
@pytest.mark.parametrize("precision", Precision)
def test_engine_and_trainer_with_batch_invariant_kernels_have_bit_identical_logprobs(tmp_path, precision, head):
    parity = measured_parity(tmp_path, precision, head, Kernels.BATCH_INVARIANT)
    assert parity.bit_equal == 1.0
