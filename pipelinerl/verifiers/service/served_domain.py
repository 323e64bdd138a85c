"""`ServedDomain`: a domain and its verifier; a separate module, so that clients import no web server."""

from __future__ import annotations

from dataclasses import dataclass

from pipelinerl.verifiers.verifier import GroupVerifier


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedDomain:
    """A domain that this service judges.

    Attributes:
        rules: digest of the part of the recipe that defines judging, so that no client gets another recipe's verdicts.
        kept: whether equal answers have equal verdicts, so that verdicts can be cached.
        tier: tier of the domain's sandbox, if it has one.
    """

    verifier: GroupVerifier
    rules: str
    kept: bool
    tier: str = ""
