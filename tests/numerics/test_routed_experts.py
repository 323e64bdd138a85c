"""Indices of routed experts, as arrays and in the format in which they are sent."""

import numpy as np
import pytest
from pydantic import ValidationError

from inference_contract.routed_experts import RoutedExperts
from pipelinerl.numerics.routed_experts import of_context, off_the_wire, on_the_wire


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, ">u2"])
def test_expert_indices_are_unchanged_after_encoding_as_json_and_decoding(dtype):
    routed = np.arange(3 * 2 * 4).reshape(3, 2, 4).astype(dtype) * 9
    sent = RoutedExperts.model_validate_json(on_the_wire(routed).model_dump_json())
    np.testing.assert_array_equal(off_the_wire(sent), routed)
    whole = RoutedExperts.joined([on_the_wire(routed[:1]), on_the_wire(routed[1:1]), on_the_wire(routed[1:])])
    assert whole == on_the_wire(routed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "AAAA"}, "data must be 4 bytes in base64"),
        ({"data": "AAAAA"}, "not base64"),
        ({"data": "A~AAAA=="}, "not base64"),
        ({"shape": [2, 1]}, "shape"),
        ({"shape": [2, 1, -2]}, "shape"),
        ({"dtype": "uint32"}, "dtype"),
        ({"shape": [2**31 - 1, 2**31 - 1, 2**31 - 1]}, "data must be"),
    ],
)
def test_routed_experts_data_that_does_not_fit_its_shape_is_rejected(changes, message):
    good = {"dtype": "uint8", "shape": [2, 1, 2], "data": "AAAAAA=="}
    RoutedExperts.model_validate(good)
    with pytest.raises(ValidationError, match=message):
        RoutedExperts.model_validate({**good, **changes})


def test_first_context_token_gets_expert_indices_of_zero_because_no_routing_is_recorded_for_it():
    routed = np.arange(2 * 2 * 3, dtype=np.uint8).reshape(2, 2, 3)
    np.testing.assert_array_equal(of_context(on_the_wire(routed)), np.concatenate((routed[:1] * 0, routed)))
