"""The domain `last_letter`: the prompt is a word, and an answer that gives the word's last letter is rewarded."""

from __future__ import annotations

from itertools import product


def problems() -> list[dict[str, object]]:
    """Return pronounceable four-letter words, each with its last letter; a hash decides which words are held out."""
    consonants, vowels = "bdfgklmnprst", "aeiou"
    words = ("".join(letters) for letters in product(consonants, vowels, consonants, vowels))
    return [{"prompt": word, "answer": word[-1], "tags": [f"ends={word[-1]}"]} for word in words]


def last_letter(completion: str, answer: str) -> float:
    """Return 1 if the answer begins with the letter, otherwise 0."""
    return float(completion.startswith(answer))


def brief(completion: str) -> float:
    """Return 1 for one letter, and less for every further letter."""
    return max(0.0, 1.0 - abs(len(completion) - 1) / 3)
