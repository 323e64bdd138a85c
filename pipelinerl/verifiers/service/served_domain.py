"""`ServedDomain`: a domain with what judges it, apart from the service: who asks one imports no web server."""

from __future__ import annotations

from dataclasses import dataclass

from pipelinerl.verifiers.verifier import GroupVerifier


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedDomain:
    """A domain as it is judged here.

    Attributes:
        rules: digest of the part of the recipe that says how, so that nobody is judged by another recipe's.
        kept: whether equal answers have equal verdicts, which then need not be reached again.
        tier: of the sandbox, where there is one.
    """

    verifier: GroupVerifier
    rules: str
    kept: bool
    tier: str = ""
