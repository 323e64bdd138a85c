"""A problem whose fields have defaults where a test does not care about them."""

from pipelinerl.types import Message, Problem


def problem(ground_truth="", *, question="?", problem_id="d:1", domain="d", tags=(), **metadata):
    return Problem(
        problem_id=problem_id,
        domain=domain,
        messages=(Message("user", question),),
        ground_truth=ground_truth,
        metadata=metadata,
        tags=tags,
    )
