"""Train on the answers of a LangChain model, which is asked twice. Needs `pip install langchain-openai`."""

from __future__ import annotations

from langchain_openai import ChatOpenAI


async def play(task, client):
    """Let the model answer twice; the domain's verifier judges the last answer."""
    model = ChatOpenAI(model="policy", base_url=client.base_url, api_key=client.api_key)
    messages = list(task.messages)
    for _ in range(2):
        answer = await model.ainvoke(messages)
        messages += [answer, task.messages[-1]]
