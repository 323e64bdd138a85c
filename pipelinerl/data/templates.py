"""`Template`: a prompt with placeholders for a problem's fields, as a Jinja template or with `{field}` alone.

Field values stay text and are never parsed as a template. A template can access only the fields (Jinja's sandbox). A
missing field raises an error that names it; it never renders as an empty string.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final, final

from pipelinerl.errors import RecipeError

_PLACE: Final = re.compile(r"\{([A-Za-z_]\w*)\}|\{\{\}\}")
#: Syntax that only Jinja has: `{{ name }}`, `{% if … %}`, `{# … #}`. LaTeX's `\boxed{}` and `\boxed{{}}` do not match.
_JINJA: Final = re.compile(r"\{\{-?\s*[^\s{}-]|\{%|\{#")
#: Errors raised when a template computes with a field of an unexpected type.
_FAILURES: Final = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError)


@final
class Template:
    """One template; errors begin with `where`, the template's key in the recipe. Templates with equal text are equal.

    Raises:
        RecipeError: the text uses Jinja syntax but is not a valid template.
    """

    def __init__(self, text: str, *, where: str = "prompt_template") -> None:
        self.text = text
        self._where = where
        self.is_jinja = _JINJA.search(text) is not None
        if self.is_jinja:
            _ = self._compiled

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Template) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def fields(self) -> frozenset[str]:
        """The fields that the template mentions."""
        return self._compiled[1] if self.is_jinja else frozenset(filter(None, _PLACE.findall(self.text)))

    def render(self, fields: Mapping[str, Any]) -> str:
        """Return the text with the fields filled in; a field that is None counts as missing.

        Raises:
            RecipeError: a field is missing, or the template cannot compute with it.
        """
        present = {name: value for name, value in fields.items() if value is not None}
        if self.is_jinja:
            return self._rendered(present)
        missing = next((name for name in sorted(self.fields) if name not in present), None)
        if missing is not None:
            raise self._missing(missing, present)
        return _PLACE.sub(lambda place: str(present[place[1]]) if place[1] else "{}", self.text)

    def _rendered(self, fields: Mapping[str, Any]) -> str:
        from jinja2 import TemplateError, UndefinedError

        try:
            return str(self._compiled[0].render(fields))
        except UndefinedError as error:
            missing = next((name for name in sorted(self.fields) if name not in fields), None)
            if missing is not None:
                raise self._missing(missing, fields) from None
            raise RecipeError(f"{self._where}: {error.message}") from None
        except (TemplateError, *_FAILURES) as error:
            raise RecipeError(f"{self._where}: {type(error).__name__}: {error}") from None

    @cached_property
    def _compiled(self) -> tuple[Any, frozenset[str]]:
        """The compiled Jinja template, and the fields that it mentions."""
        from jinja2 import StrictUndefined, TemplateSyntaxError, meta
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        world = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
        try:
            fields = frozenset(meta.find_undeclared_variables(world.parse(self.text)))
            return world.from_string(self.text), fields
        except TemplateSyntaxError as error:
            raise RecipeError(
                f"{self._where} is not a valid Jinja template: line {error.lineno}: {error.message}"
            ) from None

    def _missing(self, field: str, fields: Mapping[str, Any]) -> RecipeError:
        there = ", ".join(sorted(fields)) or "no field"
        return RecipeError(f'{self._where}: field "{field}" is missing; available: {there}')
