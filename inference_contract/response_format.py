"""`ResponseFormat`, OpenAI's request for a JSON answer or for JSON that satisfies a schema."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from inference_contract.wire import Wire


class NamedSchema(Wire):
    """A named JSON schema. An engine that accepts it enforces it, whatever `strict` says."""

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
