"""Products of two numbers, with a calculator as a tool: the model calls it in turn one and answers in turn two.

A wrong answer after a good call earns a little, so that calls are learnt before right answers.
"""

from __future__ import annotations

import json
import re

NUMBERS = [number for number in range(12, 99) if number % 10]
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
PRODUCT = re.compile(r"\s*(\d{1,6})\s*\*\s*(\d{1,6})\s*")


def problems() -> list[dict[str, str]]:
    """Return questions that a small model cannot answer without the tool."""
    pairs = [(one, two) for one in NUMBERS for two in NUMBERS if one < two]
    return [{"prompt": f"What is {one} times {two}?", "answer": str(one * two)} for one, two in pairs]


def calculated(arguments: str) -> str:
    """Return the product that the arguments of a tool call ask for, or an error message."""
    try:
        expression = json.loads(arguments)["expression"]
    except (ValueError, KeyError, TypeError):
        return "error: no expression"
    match = PRODUCT.fullmatch(expression) if isinstance(expression, str) else None
    return str(int(match[1]) * int(match[2])) if match else "error: write a product"


async def run(task, client):
    """Return the reward: 0 without a call, else 1 for a right answer, 0.3 if only the call was right, 0.1 otherwise."""
    messages = list(task.messages)
    answer = await client.chat(messages, tools=[TOOL])
    if len(answer.tool_calls) != 1:
        return 0.0
    (call,) = answer.tool_calls
    known = call["function"]["name"] == "calculator"
    result = calculated(call["function"]["arguments"]) if known else "error: no such tool"
    messages += [answer, {"role": "tool", "tool_call_id": call["id"], "content": result}]
    answer = await client.chat(messages, tools=[TOOL])
    if answer.content.strip() == task.ground_truth:
        return 1.0
    return 0.3 if result == task.ground_truth else 0.1
