"""A number from 1 to 7 is to be guessed in three turns; after each wrong guess the environment says where it lies.

A hint is one letter: `a` to `g` after the guesses 1 to 7 when the number is higher, `h` to `n` when it is lower. So
even a bigram model, which sees one token, can learn to halve what is left.
"""

from __future__ import annotations

from itertools import product

GUESSES = "1234567"


def problems() -> list[dict[str, str]]:
    """Games whose prompts differ, so that some are held out; the prompt says nothing about the number."""
    names = ("".join(letters) for letters in product("opqrstuvwxyz", repeat=3))
    return [{"prompt": f"{name}?", "answer": GUESSES[place % 7]} for place, name in enumerate(names)]


def hint(guess: str, number: str) -> str:
    """Where the number lies."""
    if guess not in GUESSES or len(guess) != 1:
        return "?"
    return ("abcdefg" if number > guess else "hijklmn")[GUESSES.index(guess)]


async def play(task, client):
    """1 for a right guess within three turns."""
    messages = list(task.messages)
    for _ in range(3):
        answer = await client.chat(messages)
        if answer.content == task.ground_truth:
            return 1.0
        messages += [answer, {"role": "user", "content": hint(answer.content, task.ground_truth)}]
    return 0.0
