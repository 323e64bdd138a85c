"""`guessing`: the lightest model that can play `examples/guess_number`, a bigram that sees the hint."""

from __future__ import annotations

from pathlib import Path
from string import ascii_lowercase

from pipelinerl.models.bigram import BigramModel
from pipelinerl.models.tiny_decoder import char_tokenizer

#: No token opens the assistant's turn, so that the first sampled one follows the hint.
_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
)


def guessing(model: Path) -> tuple[str, ...]:
    """Changes by which the example trains such a model, made in `model`."""
    tokenizer = char_tokenizer(alphabet="1234567?" + ascii_lowercase)
    tokenizer.chat_template = _TEMPLATE
    made = BigramModel.random(len(tokenizer), seed=0, scale=0.0, context_length=64)
    made.logits[:, 6:13] += 3.0  # a digit is likely
    made.logits[6:13, :] = 0.0
    made.logits[6:13, tokenizer.eos_token_id] = 4.0  # and ends there
    made.save(model)
    tokenizer.save_pretrained(str(model), save_jinja_files=False)
    return (
        f"model.path={model}",
        "engine.type=bigram",
        "trainer.type=bigram",
        "engine.context_length=64",
        "optimizer.learning_rate=0.1",
        "objective.grad2.beta=0.01",
    )
