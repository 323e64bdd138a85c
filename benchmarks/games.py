"""Games of the benchmark `episodes`: `examples/guess_letter` for a bigram model, and a conversation with slow tools."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

from pipelinerl import rng
from pipelinerl.plugins.bigram.model import BigramModel
from pipelinerl.plugins.episodes.environment import Task
from pipelinerl.plugins.warmstart.tiny_decoder import SPECIAL_TOKENS, char_tokenizer

#: Shortest wait for a tool, as a share of the longest wait.
_SHORTEST: Final = 0.01 / 60
#: Maximum number of answers in an episode with tools.
MOST_TURNS: Final = 6

#: A chat template without tokens at the start of the assistant's turn, so the first sampled token follows the hint.
_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
)


def guessing(model: Path) -> tuple[str, ...]:
    """Create a bigram model in the folder `model`; return the recipe overrides that train it."""
    tokenizer = char_tokenizer(alphabet="abcdefg" + "0123456789+-*/?")
    tokenizer.chat_template = _TEMPLATE
    made = BigramModel.random(len(tokenizer), seed=0, scale=0.0, context_length=64)
    letters = slice(len(SPECIAL_TOKENS), len(SPECIAL_TOKENS) + 7)
    made.logits[:, letters] = 3.0
    made.logits[letters, :] = 0.0
    made.logits[letters, tokenizer.eos_token_id] = 4.0  # makes one-letter answers likely
    made.save(model)
    tokenizer.save_pretrained(str(model), save_jinja_files=False)
    return (
        f"model.path={model}",
        "engine.type=bigram",
        "trainer.type=bigram",
        "engine.context_length=64",
        "optimizer.learning_rate=0.4",
        "optimizer.warmup_steps=0",
        "objective.grad2.beta=0.004",
        "run.steps=80",
    )


async def use_tools(task: Task, client: Any, *, longest_s: float) -> float:
    """Play an episode with a slow tool after each answer (log-uniform, up to `longest_s` s); the reward is always 1."""
    draw, messages = rng.generator(task.seed, "tools"), list(task.messages)
    for _ in range(int(draw.integers(2, MOST_TURNS + 1))):
        answer = await client.chat(messages)
        await asyncio.sleep(longest_s * _SHORTEST ** draw.random())
        messages = [*messages, answer, {"role": "user", "content": "1"}]
    return 1.0
