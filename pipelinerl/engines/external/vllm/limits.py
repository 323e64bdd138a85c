"""What vLLM does otherwise than it was asked for, so that a request for it is refused."""

from __future__ import annotations

from typing import Final

from inference_contract.errors import InvalidRequest
from pipelinerl.engines.batching.sequence import Request

#: vLLM 0.32 takes any temperature between this and 0 for this (`SamplingParams.__post_init__`).
LEAST_TEMPERATURE: Final = 0.01
#: It refuses more (`SamplingParams._verify_args`).
MOST_TEMPERATURE: Final = 2.0


def check_request(request: Request) -> None:
    """Raise `InvalidRequest` where vLLM refuses, or the log-probs would be those of another distribution."""
    if request.temperature > MOST_TEMPERATURE:
        raise InvalidRequest(
            f"vLLM samples at temperatures up to {MOST_TEMPERATURE:g}, got {request.temperature:g}", param="temperature"
        )
    if 0 < request.temperature < LEAST_TEMPERATURE:
        raise InvalidRequest(
            f"vLLM samples at no temperature between 0 and {LEAST_TEMPERATURE:g}, got {request.temperature:g}; ask for "
            "0, which is greedy, or for more",
            param="temperature",
        )
