"""`Section`: base class of the tables of a recipe, those of the run and those of its components.

A component's section is both its table in the recipe and the type of its settings.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base class of every section of a recipe: immutable, and unknown keys are rejected.

    A field `key_variable` names an environment variable that holds a secret; user code does not get that variable.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
