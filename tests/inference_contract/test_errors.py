"""Errors of the inference contract keep their class and message when they are sent over HTTP."""

import pytest

from inference_contract import errors
from inference_contract.errors import ContractError, from_wire

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ContractError)]


@pytest.mark.parametrize("kind", KINDS)
def test_error_sent_over_http_keeps_its_class_and_message(kind):
    error = kind("what was expected", param="layout")
    back = from_wire(error.status, error.to_wire())
    assert type(back) is kind
    assert (back.message, back.param) == ("what was expected", "layout")


def test_contract_error_codes_are_unique():
    codes = [kind.code for kind in KINDS]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("body", [None, "text", {}, {"error": "text"}, {"error": {"code": "of_another_server"}}])
def test_unknown_error_body_becomes_a_plain_contract_error(body):
    assert type(from_wire(502, body)) is ContractError
