"""A `Request` of the batching engines, for tests of the parts that schedule it or write its response."""

from pipelinerl.engines.batching.sequence import Request


def sample_request(prompt, *, token_limit, **others):
    """Return a request without samples that keeps every token and stops at none, unless `others` say otherwise."""
    fields = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "streams": False, "stop_ids": frozenset()}
    return Request(prompt_token_ids=list(prompt), token_limit=token_limit, **{"request_id": "r"} | fields | others)
