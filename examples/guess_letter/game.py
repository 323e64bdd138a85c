"""A game: guess a letter from `a` to `g` in three turns; after each wrong guess, a hint says where the letter lies.

The first letter of an answer is the guess. A hint is one character, so that even a bigram model, which sees one token,
can learn to halve the remaining letters: `1` to `7` after the guesses `a` to `g` if the letter comes later in the
alphabet, and `8`, `9`, `0`, `+`, `-`, `*`, `/` if it comes earlier.
"""

from __future__ import annotations

from itertools import product

LETTERS = "abcdefg"


def problems() -> list[dict[str, str]]:
    """Return games whose prompts differ, so that some can be held out; a prompt says nothing about the letter."""
    names = ("".join(digits) for digits in product("0123456789", repeat=3))
    return [{"prompt": f"{name}?", "answer": LETTERS[place % 7]} for place, name in enumerate(names)]


def hint(guess: str, letter: str) -> str:
    """Return the hint after a guess, or the opening question if the guess is not a letter of the game."""
    place = LETTERS.find(guess)
    if not guess or place < 0:
        return "?"
    return ("1234567" if letter > guess else "890+-*/")[place]


async def play(task, client):
    """Return 1 for a right guess within three turns, else 0."""
    messages = list(task.messages)
    for _ in range(3):
        answer = await client.chat(messages)
        guess = answer.content[:1]
        if guess == task.ground_truth:
            return 1.0
        messages += [answer, {"role": "user", "content": hint(guess, task.ground_truth)}]
    return 0.0
