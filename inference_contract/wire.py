"""`Wire`, the base class of all contract types."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Wire(BaseModel):
    """Base class of wire types: immutable; unknown fields are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
