"""Verification of answers that are programs: the sandbox that runs them, its tiers, and its remote service."""
