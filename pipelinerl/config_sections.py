"""Sections of a recipe that say how a run is carried, not what it learns; `config` puts the whole together."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from inference_contract.weights import BaseUrl, Transport


class Section(BaseModel):
    """Base of every section: immutable and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class WeightsSection(Section):
    """How the trainer's weights reach the engines."""

    transport: Transport = Transport.BROADCAST
    """Pushed to all engines at once, or pulled by each from a parameter server."""


class ParameterServerSection(Section):
    """Servers that hold versions of the weights in memory, for the transport `pull`."""

    replicas: int = Field(default=1, ge=1, le=64)
    """How many the launcher starts, each with everything; engines are spread over them."""
    urls: tuple[BaseUrl, ...] = ()
    """Servers that run already, here or elsewhere; with any, the launcher starts none."""
    versions: int = Field(default=3, ge=2)
    """Most that a server holds: one that serves, one that comes, and one that may still be being saved."""
    copies: str | None = None
    """Directory, or URL that fsspec knows, of the persistent copies; by default below the run's directory."""

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        if len(set(self.urls)) != len(self.urls):
            raise ValueError("parameter_server.urls must name each server once")
        return self


class LaunchSection(Section):
    """How the local launcher runs the roles."""

    threads: int = Field(default=1, ge=1)
    pin: Literal["auto", "none"] = "auto"
    start_timeout_s: float = Field(default=120.0, gt=0)
    restarts: int = Field(default=3, ge=0)
    grace_s: float = Field(default=5.0, gt=0)
