"""The domain `last_letter`: words, and what an answer to "what is its last letter?" is worth."""

from __future__ import annotations

from itertools import product


def problems() -> list[dict[str, object]]:
    """Four-letter words that can be said, each with its last letter; the hash splits them."""
    consonants, vowels = "bdfgklmnprst", "aeiou"
    words = ("".join(letters) for letters in product(consonants, vowels, consonants, vowels))
    return [{"prompt": word, "answer": word[-1], "tags": [f"ends={word[-1]}"]} for word in words]


def last_letter(completion: str, answer: str) -> float:
    """1 where the answer begins with the letter."""
    return float(completion.startswith(answer))


def brief(completion: str) -> float:
    """1 for one letter, less for every further one."""
    return max(0.0, 1.0 - abs(len(completion) - 1) / 3)
