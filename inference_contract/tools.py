"""Tools on the wire: functions that a request offers, and calls that a model has made of them.

The shapes are OpenAI's. Tools are rendered into the prompt by the model's own chat template.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final, Literal

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from inference_contract.wire import Wire

#: A JSON object, of a depth that templates can walk through.
_ARGUMENTS: Final = TypeAdapter(dict[str, Any])


class FunctionDefinition(Wire):
    """A function that the model may call. `parameters` is a JSON schema.

    `strict` is accepted and has no effect: the model writes the arguments freely, so the caller has to validate them.
    """

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Wire):
    """One of the tools offered by a request."""

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """Return the definition as chat templates expect it."""
        function = self.function
        described = {"name": function.name, "description": function.description, "parameters": function.parameters}
        return {"type": self.type, "function": {name: value for name, value in described.items() if value is not None}}


class FunctionCall(Wire):
    """The name of the called function, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


class ToolCall(Wire):
    """A call in an assistant's message. The `tool` message that answers the call names its `id`."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall

    @model_validator(mode="before")
    @classmethod
    def _without_index(cls, fields: Any) -> Any:
        """Drop the position that clients keep from a stream's parts: the list already has that order."""
        return (
            {name: value for name, value in fields.items() if name != "index"} if isinstance(fields, dict) else fields
        )

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates expect it: with the arguments as an object, where they are one."""
        arguments: Any = self.function.arguments
        with suppress(ValidationError):  # the model wrote something else: templates show the text as it is
            arguments = _ARGUMENTS.validate_json(arguments)
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class FunctionCallDelta(Wire):
    """What a chunk adds to a function's name and arguments."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(Wire):
    """What a chunk adds to call `index` of a choice."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta
