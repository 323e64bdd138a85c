"""Verifiers: map an answer to outcome and reward. A failure of the verifier itself is never a wrong answer."""
