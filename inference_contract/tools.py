"""Wire types of tools (functions that a request offers, and calls that the model made) and of `response_format`.

The shapes are OpenAI's. The model's chat template renders tools into the prompt.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final, Literal, Self

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from inference_contract.wire import Wire

#: Parser of a JSON object that limits the nesting depth to what templates can handle.
_ARGUMENTS: Final = TypeAdapter(dict[str, Any])


class FunctionDefinition(Wire):
    """A function that the model may call, with a JSON schema that is not enforced, whatever `strict` says."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Wire):
    """One of the tools that a request offers."""

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """Return the definition in the form that chat templates expect."""
        function = self.function
        described = {"name": function.name, "description": function.description, "parameters": function.parameters}
        return {"type": self.type, "function": {name: value for name, value in described.items() if value is not None}}


class FunctionCall(Wire):
    """The called function's name, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Wire):
    """A call in an assistant message. The `tool` message with its result refers to `id`."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall

    @model_validator(mode="before")
    @classmethod
    def _without_index(cls, fields: Any) -> Any:
        """Drop `index`, which clients copy from stream chunks."""
        return (
            {name: value for name, value in fields.items() if name != "index"} if isinstance(fields, dict) else fields
        )

    def for_template(self) -> dict[str, Any]:
        """Return the call for chat templates: valid JSON arguments, and "" from some clients, become an object."""
        arguments: Any = self.function.arguments if self.function.arguments.strip() else "{}"
        with suppress(ValidationError):  # if the arguments are no JSON object, templates get the text
            arguments = _ARGUMENTS.validate_json(arguments)
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class FunctionCallDelta(Wire):
    """The part of a function's name and arguments that one chunk adds."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(Wire):
    """The part of tool call number `index` that one chunk adds."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta


class NamedSchema(Wire):
    """A named JSON schema. An engine that accepts `response_format` enforces it, whatever `strict` says."""

    model_config = ConfigDict(serialize_by_alias=True)

    name: str
    description: str | None = None
    definition: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(Wire):
    """The required format of the answer. Engines without structured output reject it by name."""

    type: Literal["json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _schema_where_needed(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema must be given with the type 'json_schema', and only with it")
        return self
