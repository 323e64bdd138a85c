"""Generate the reference pages of the site from the code: recipe keys and the command line.

MkDocs loads this file as a hook (`hooks` in mkdocs.yml). `python docs/reference_pages.py` prints the pages.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from enum import Enum
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer.main
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.cli import get_docs_for_click
from typer.core import TyperGroup

from pipelinerl.cli import app
from pipelinerl.config.recipe import RunConfig


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the files of the site; MkDocs calls this hook."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def pages() -> dict[str, str]:
    """Return the Markdown of each generated page by its path below docs/."""
    return {"reference/recipe.md": recipe_page(), "reference/cli.md": cli_page()}


def recipe_page() -> str:
    """Return a table of keys for each section of a recipe."""
    head = (
        "# Recipe keys\n\nA recipe is a TOML file. Each section below is a table in it; `pipelinerl run RECIPE "
        "section.key=value` overrides a key.\n"
    )
    return head + "".join(_section(RunConfig, ""))


def _section(model: type[BaseModel], path: str, *, repeats: bool = False) -> Iterator[str]:
    texts = _field_docs(model)
    scalars = {name: field for name, field in model.model_fields.items() if _submodel(field) is None}
    if path:
        yield f"\n## `{f'[[{path}]]' if repeats else f'[{path}]'}`\n\n{inspect.getdoc(model) or ''}\n"
    if scalars:
        yield "\n| key | type | default | meaning |\n|---|---|---|---|\n"
    for name, field in scalars.items():
        cells = (
            f"`{name}`",
            f"`{_type_name(field.annotation)}`",
            _default(field),
            field.description or texts.get(name, ""),
        )
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |\n"
    for name, field in model.model_fields.items():
        child = _submodel(field)
        if child is not None:
            repeats = get_origin(field.annotation) in (list, tuple)
            yield from _section(child, f"{path}.{name}" if path else name, repeats=repeats)


def _submodel(field: FieldInfo) -> type[BaseModel] | None:
    """Return the class of the recipe section that a field holds, directly or in a list; None if it holds no section."""
    pending: list[Any] = [field.annotation]
    while pending:
        kind = pending.pop()
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
        pending.extend(get_args(kind))
    return None


def _field_docs(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each field, by field name, for the model and the classes that it extends."""
    texts: dict[str, str] = {}
    for each in reversed(model.__mro__):
        if not issubclass(each, BaseModel) or each is BaseModel:
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                match text:
                    case ast.Expr(value=ast.Constant(value=str(words))):
                        texts[field.target.id] = " ".join(words.split())
    return texts


def _type_name(kind: Any) -> str:
    """Return a type as recipe authors read it: an enum as its values, a list as "list of" its elements' type."""
    if get_origin(kind) is Annotated:
        return _type_name(get_args(kind)[0])
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " or ".join(str(each.value) for each in kind)
    parts = [each for each in get_args(kind) if each not in (type(None), ...)]
    origin = get_origin(kind)
    if origin is Literal:
        return " or ".join(map(str, parts))
    if origin in (Union, UnionType):
        return " or ".join(map(_type_name, parts))
    if origin in (list, tuple, frozenset):
        return f"list of {' or '.join(map(_type_name, parts))}"
    if origin in (dict, Mapping):
        return "table"
    return str(getattr(kind, "__name__", kind))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return "left out"
    return f"`{value.value if isinstance(value, Enum) else value}`"


def cli_page() -> str:
    """Return the help of every command."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    context = group.context_class(group, info_name="pipelinerl", **group.context_settings)
    text = get_docs_for_click(obj=group, ctx=context, name="pipelinerl")
    return text.replace("# `pipelinerl`", "# Command line", 1)


if __name__ == "__main__":
    for path, text in pages().items():
        print(f"--- {path}\n{text}")
