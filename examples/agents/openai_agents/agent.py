"""Train on the answers of an OpenAI Agents SDK agent, which is asked twice. Needs `pip install openai-agents`."""

from __future__ import annotations

from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)  # otherwise the SDK sends traces to OpenAI


async def play(task, client):
    """Let the agent answer twice; the domain's verifier judges the last answer."""
    async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as connection:
        agent = Agent(name="solver", model=OpenAIChatCompletionsModel(model="policy", openai_client=connection))
        first = await Runner.run(agent, list(task.messages))
        question = task.messages[-1]["content"]
        await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": question}])
