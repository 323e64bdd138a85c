"""Verifiers map an answer to an outcome and a reward. A failure of the verifier never counts as a wrong answer."""
