"""What vLLM does otherwise than the contract asks: what is refused for that, and the noise of a sample's rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from inference_contract.errors import InvalidRequest
from pipelinerl import rng
from pipelinerl.engines.batching.sequence import Request, Sequence
from pipelinerl.errors import ModelError
from pipelinerl.models.routing import mixture_of

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


def check_continued(request: Request) -> None:
    """Raise `InvalidRequest` for a continued answer where vLLM would have to know the tokens sampled before."""
    change = request.change
    depends = request.response_format is not None or (change is not None and change.penalizes)
    if depends and not request.shares_prompt:
        raise InvalidRequest(
            "prefixes: vLLM applies penalties and response_format to the tokens that it samples itself; ask for the "
            "whole answer, or leave them out",
            param="prefixes",
        )


def sampling_of(sequence: Sequence) -> dict[str, Any]:
    """vLLM's sampling parameters of one sample, whose ends are ours: the limit and its `stop_ids`."""
    request = sequence.request
    parameters: dict[str, Any] = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "seed": seed_of(sequence),
        "max_tokens": sequence.token_limit,
        "stop_token_ids": sorted(request.stop_ids),
        "logprobs": request.num_top,  # besides the sampled token's
        "detokenize": False,
    }
    if request.min_p:
        parameters["min_p"] = request.min_p
    if request.change is not None:
        parameters["frequency_penalty"] = request.change.frequency_penalty
        parameters["presence_penalty"] = request.change.presence_penalty
        parameters["logit_bias"] = dict(request.change.bias) or None
    return parameters


def structure_of(request: Request) -> dict[str, Any]:
    """vLLM's word for the request's `response_format`; nothing where it has none."""
    form = request.response_format
    if form is None:
        return {}
    return {
        "structured_outputs": {"json_object": True}
        if form.json_schema is None
        else {"json": form.json_schema.definition}
    }


def check_experts_on_cpu(path: Path) -> None:
    """Raise `ModelError` for experts, which vLLM repacks as it loads them: what an update brings would be read wrongly.

    Log-probs of a tiny Qwen3-MoE in float32 were off by 0.3 nats after an update, and by 2e-7 before.
    """
    if mixture_of(path) is not None:
        raise ModelError(
            f"vLLM on a CPU repacks the experts of the model in {path} and can be given no others; use engine.type = "
            '"torch", or vLLM on a GPU'
        )


def seed_of(sequence: Sequence) -> int:
    """The seed of a sample's generator, which vLLM reads from its beginning, wherever in the answer the sample begins.

    One that another engine began is given another seed, or it would draw the noise of its first tokens again.
    """
    begun = len(sequence.prefix)
    return rng.key(sequence.noise_key, "continued", begun) if begun else sequence.noise_key
