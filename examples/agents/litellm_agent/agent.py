"""Train on the answers of a program that calls litellm twice. Needs `pip install litellm`."""

from __future__ import annotations

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # without this setting, the import downloads a table of prices

import litellm


async def play(task, client):
    """Let the model answer twice; the domain's verifier judges the last answer."""
    messages = list(task.messages)
    for _ in range(2):
        answer = await litellm.acompletion(
            "openai/policy", messages=messages, api_base=client.base_url, api_key=client.api_key
        )
        said = {"role": "assistant", "content": answer.choices[0].message.content}
        messages += [said, task.messages[-1]]
