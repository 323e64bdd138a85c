"""A program that asks a model twice over OpenAI's API. It knows nothing of pipelinerl and needs no packages."""

from __future__ import annotations

import json
import os
import sys
import urllib.request


def answer(messages):
    """Return the model's answer."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps({"model": "policy", "messages": messages}).encode(),
        headers={"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


question = {"role": "user", "content": sys.argv[1]}
first = answer([question])
second = answer([question, first, question])
print(second["content"])
