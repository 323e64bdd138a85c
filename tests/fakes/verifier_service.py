"""A real verifier service, in this process or in a process that a test can kill.

python -m tests.fakes.verifier_service domain [port]      prints its port, serves until it is killed
"""

import sys
import time
from collections.abc import Mapping
from typing import Any

from pipelinerl.controller.routes import VerifierLease
from pipelinerl.plugins.oubliette.section import OublietteSection
from pipelinerl.plugins.oubliette.verifier import Oubliette
from pipelinerl.plugins.verifier_service.server import VerdictCache, VerifierService, create_app
from pipelinerl.plugins.verifier_service.wire import ServedDomain
from pipelinerl.system.http_service import listen, serve
from pipelinerl.types import Message, Problem
from pipelinerl.verifiers.user_code import PooledReward, RewardFunction
from pipelinerl.verifiers.verifier import GroupVerifier, PerAnswerVerifier
from tests.patience import PATIENCE_S

RULES = "r1"
TOKEN = "secret"


def echoed(completion: str, answer: str) -> float:
    """Return 1 if the completion is the ground truth, else 0, after a pause in which a test may kill the process."""
    time.sleep(0.03)
    return float(completion == answer)


def verifier(domain: str) -> GroupVerifier:
    """Return a verifier: `words` runs a function in worker processes, `code` runs programs in a sandbox."""
    if domain == "code":
        return PerAnswerVerifier(Oubliette(OublietteSection(), deadline_s=PATIENCE_S, workers=2))
    reference = f"{__file__}:echoed"
    reward = RewardFunction.of_callable(echoed)
    return PooledReward(reference, reward, correct_at=1.0, deadline_s=PATIENCE_S, workers=2)


def service(domains: Mapping[str, ServedDomain] | None = None, **settings: Any) -> VerifierService:
    """Return a verifier service for `domains`, by default only for the domain `words`."""
    served = domains or {"words": ServedDomain(verifier=verifier("words"), rules=RULES, kept=False)}
    return VerifierService(served, cache=VerdictCache(1 << 20), **settings)


def lease(url: str, *, life: str = "1", domains: tuple[str, ...] = ("words",), rules: str = RULES) -> VerifierLease:
    """Return the lease of a service at `url`, as the controller keeps it."""
    return VerifierLease(url=url, incarnation=f"{url} {life}", domains=dict.fromkeys(domains, rules))


def problem(number: int, *, domain: str = "words", **metadata: Any) -> Problem:
    """Return problem `number`, whose right answer is the number itself."""
    return Problem(
        problem_id=f"{domain}:{number}",
        domain=domain,
        messages=(Message("user", f"say {number}"),),
        ground_truth=str(number),
        metadata=metadata,
    )


if __name__ == "__main__":
    name, port = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with listen("127.0.0.1", port) as listener:
        print(listener.getsockname()[1], flush=True)
        served = ServedDomain(verifier=verifier(name), rules=RULES, kept=False)
        serve(create_app(service({name: served}), token=TOKEN), listener)
