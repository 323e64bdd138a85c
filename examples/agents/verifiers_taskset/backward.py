"""A taskset of the library `verifiers`: spell a word backward. Its rubric scores the share of right letters."""

from __future__ import annotations

from itertools import product

import verifiers.v1 as vf


class Word(vf.TaskData):
    """The data of one task: a word to spell backward."""

    word: str


class Spelling(vf.Task[Word]):
    """A task that stops after one answer and scores it."""

    @vf.stop
    async def one_answer(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward
    async def letters(self, trace: vf.Trace) -> float:
        answer = trace.last_reply or ""
        pairs = zip(answer, reversed(self.data.word), strict=False)
        return sum(a == b for a, b in pairs) / max(len(answer), len(self.data.word))


class BackwardConfig(vf.TasksetConfig):
    """Settings of the taskset, from the key `taskset` of the recipe's environment_options."""

    letters: str = "abdegnoprst"


class Backward(vf.Taskset[Spelling, BackwardConfig]):
    """The taskset: all words of three letters that can be made from the configured letters."""

    def load(self):
        for number, letters in enumerate(product(self.config.letters, repeat=3)):
            word = "".join(letters)
            prompt = f"Spell this word backward (example: sun -> nus): {word}"
            yield Spelling(Word(idx=number, prompt=prompt, word=word), self.config.task)


__all__ = ["Backward"]
