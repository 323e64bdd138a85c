"""`guessing`: the lightest model that can play `examples/guess_letter`: a bigram that sees the hint as the previous
token.
"""

from __future__ import annotations

from pathlib import Path

from pipelinerl.models.bigram import BigramModel
from pipelinerl.models.tiny_decoder import SPECIAL_TOKENS, char_tokenizer

#: Adds no token at the start of the assistant's turn, so that the first sampled token directly follows the hint.
_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
)


def guessing(model: Path) -> tuple[str, ...]:
    """Create such a model in `model`; return overrides with which the example trains it."""
    tokenizer = char_tokenizer(alphabet="abcdefg" + "0123456789+-*/?")
    tokenizer.chat_template = _TEMPLATE
    made = BigramModel.random(len(tokenizer), seed=0, scale=0.0, context_length=64)
    letters = slice(len(SPECIAL_TOKENS), len(SPECIAL_TOKENS) + 7)
    made.logits[:, letters] = 3.0
    made.logits[letters, :] = 0.0
    made.logits[letters, tokenizer.eos_token_id] = 4.0  # makes answers of one letter likely
    made.save(model)
    tokenizer.save_pretrained(str(model), save_jinja_files=False)
    return (
        f"model.path={model}",
        "engine.type=bigram",
        "trainer.type=bigram",
        "engine.context_length=64",
        "optimizer.learning_rate=0.2",
        "optimizer.warmup_steps=0",
        "objective.grad2.beta=0.01",
        "run.steps=150",
    )
