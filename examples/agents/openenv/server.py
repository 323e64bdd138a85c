"""A server of the OpenEnv framework: the model spells a word backward in two attempts. It needs its own packages:

python3 -m venv openenv && openenv/bin/pip install 'openenv>=0.10'
openenv/bin/python server.py
"""

from __future__ import annotations

import random

import uvicorn
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

WORDS = ("cat", "dog", "sun", "map", "pen", "box", "hat", "red", "car", "bus", "key", "jam", "owl", "fox", "net", "cup")


class Spelling(Action):
    """An action: the model's answer."""

    text: str


class Question(Observation):
    """An observation: the text that the model reads."""

    question: str = ""


class Backward(Environment):
    """An environment: spell one word backward in two attempts. An attempt earns half of its share of right letters."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, index=None, **_):
        self.word = random.Random(index if seed is None else seed).choice(WORDS)
        self.attempts = 0
        return Question(question=f"Spell this word backward (example: sun -> nus): {self.word}")

    def step(self, action, timeout_s=None, **_):
        self.attempts += 1
        pairs = zip(action.text, reversed(self.word), strict=False)
        reward = sum(a == b for a, b in pairs) / max(len(self.word), len(action.text))
        return Question(question=self.word, reward=reward / 2, done=self.attempts == 2)

    @property
    def state(self):
        return State(step_count=self.attempts)


if __name__ == "__main__":
    app = create_app(Backward, Spelling, Question, env_name="backward", max_concurrent_envs=256)
    uvicorn.run(app, host="127.0.0.1", port=8000, log_level="warning")
