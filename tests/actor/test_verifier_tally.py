"""The verifier tally counts verdicts and errors by domain, and the errors in a row since the last verdict."""

from __future__ import annotations

from pipelinerl.actor.verifier_tally import VerifierTally
from pipelinerl.messages import VerifierFigures
from pipelinerl.verifiers.verifier import Judgement, correct, failed, timed_out, wrong


def test_verifier_errors_are_counted_by_domain_and_a_verdict_resets_the_count_of_consecutive_errors() -> None:
    tally = VerifierTally()
    tally.note("math", [Judgement(correct("1"), 0.5), Judgement(failed("broke"), 0.25), Judgement(timed_out(2.0), 2.0)])
    tally.note("code", [Judgement(failed("x"), 0.0)] * 3)
    assert tally.by_domain == {
        "math": VerifierFigures(
            judged=1,
            errors=1,
            timeouts=1,
            seconds=2.75,
            errors_in_a_row=1,
            timeouts_in_a_row=1,
            reason="timeout: no judgement within 2 s",
        ),
        "code": VerifierFigures(errors=3, errors_in_a_row=3, reason="verifier_error: x"),
    }
    tally.note("math", [Judgement(wrong("no"), 0.25)])
    assert tally.by_domain["math"] == VerifierFigures(judged=2, errors=1, timeouts=1, seconds=3.0)
    assert tally.by_domain["code"].errors_in_a_row == 3
