"""Read the arguments of a tool call where they are not plain JSON: texts whose types the tool's schema decides
(Qwen3-Coder, Seed-OSS, GLM, MiniMax, DeepSeek V3.2), Gemma's notation, and Python's (LFM2).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, Final

#: Values that templates write as Python or as JSON does.
_CONSTANTS: Final[Mapping[str, Any]] = {"True": True, "False": False, "None": None, "true": True, "false": False,
                                        "null": None}  # fmt: skip
_NULL: Final = frozenset({"null", "None"})
#: Depth to which a schema's references and alternatives are followed.
_DEPTH: Final = 8
_NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_DOTTED: Final = re.compile(r"\w+(?:\.\w+)*")
_FAILURES: Final = (ValueError, SyntaxError, RecursionError, MemoryError, TypeError)


class CutOff(ValueError):
    """A string that the text does not close: all the rest of the text belongs to it."""


def json_value(text: str, start: int) -> tuple[Any, int]:
    """Parse the JSON value at `start`; return it and its end. Raises ValueError for NaN, Infinity and deep nesting."""
    try:
        return _DECODER.raw_decode(text, start)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant)


def typed(text: str, schema: Any, root: Any) -> Any:
    """Return the value that a parameter's text stands for, by the parameter's JSON schema.

    A text is a string where the schema allows only strings, or where it is nothing that the schema allows. `root` is
    the schema to which references (`$ref`) are relative.
    """
    kinds = _kinds(schema, root, _DEPTH)
    if text.strip() in _NULL and "null" in (kinds or {"null"}):
        return None
    if kinds and kinds <= {"string", "null"}:
        return text
    try:
        value = _literal(text.strip())
    except _FAILURES:
        return text
    if isinstance(value, float) and value.is_integer() and "integer" in kinds and "number" not in kinds:
        return int(value)
    return value if not kinds or not _kind(value).isdisjoint(kinds) else text


def _literal(text: str) -> Any:
    """Parse JSON, or a constant, list or mapping in Python's notation; raises one of `_FAILURES` for other texts."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if text[:1] == '"':
        raise ValueError("strings are written without quotes")
    try:
        value, end = json_value(text, 0)
        if end != len(text):
            raise ValueError("more than one value")
    except ValueError:
        if text[:1] not in ("[", "{"):
            raise
        value = ast.literal_eval(text)
    json.dumps(value, allow_nan=False)  # raises for values that JSON lacks
    return value


def _kinds(schema: Any, root: Any, depth: int) -> set[str]:
    """Return the JSON types that a schema allows; an empty set allows all."""
    if not isinstance(schema, Mapping) or depth == 0:
        return set()
    if isinstance(reference := schema.get("$ref"), str):
        found = root
        for part in reference.removeprefix("#").split("/")[1:]:
            found = found.get(part) if isinstance(found, Mapping) else None
        return _kinds(found, root, depth - 1)
    declared = schema.get("type")
    if isinstance(declared, str | list):
        return {declared} if isinstance(declared, str) else {each for each in declared if isinstance(each, str)}
    if "const" in schema:
        return set(_kind(schema["const"]))
    if isinstance(choices := schema.get("enum"), list):
        return {kind for choice in choices for kind in _kind(choice)}
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(several := schema.get(name), list):
            parts = [_kinds(each, root, depth - 1) for each in several]
            return set().union(*parts) if all(parts) or name == "allOf" else set()
    return {"object"} if "properties" in schema else {"array"} if "items" in schema else set()


def _kind(value: Any) -> set[str]:
    """Return the JSON types that a value has; an integer is also a number."""
    if value is None or isinstance(value, bool):
        return {"null" if value is None else "boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    for kind, python in (("number", float), ("string", str), ("array", list | tuple), ("object", dict)):
        if isinstance(value, python):
            return {kind}
    return set()


def braced(text: str, start: int, quote: str) -> tuple[Any, int]:
    """Parse a value in Gemma's notation: `{key:<|"|>text<|"|>,list:[1,true]}`, where `quote` encloses strings.

    Return the value and its end. Raises ValueError for other texts.
    """
    try:
        return _braced(text, start, quote)
    except (IndexError, RecursionError):
        raise ValueError("cut off, or nested too deeply") from None


def _braced(text: str, at: int, quote: str) -> tuple[Any, int]:
    if text.startswith(quote, at):
        end = text.find(quote, at + len(quote))
        if end < 0:
            raise CutOff("a string is not closed")
        return text[at + len(quote) : end], end + len(quote)
    if text[at] in "[{":
        closing, is_list = "]" if text[at] == "[" else "}", text[at] == "["
        items, fields = list[Any](), dict[str, Any]()
        at += 1
        while text[at] != closing:
            if is_list:
                value, at = _braced(text, at, quote)
                items.append(value)
            else:
                name, at = _key(text, at, quote)
                fields[name], at = _braced(text, at, quote)
            if text[at] == ",":
                at += 1
            elif text[at] != closing:
                raise ValueError(f"expected a comma or {closing} at {at}")
        return (items if is_list else fields), at + 1
    for name, constant in _CONSTANTS.items():
        if text.startswith(name, at):
            return constant, at + len(name)
    number = _NUMBER.match(text, at)
    if number is None:
        raise ValueError(f"expected a value at {at}")
    return json.loads(number[0]), number.end()


def _key(text: str, at: int, quote: str) -> tuple[str, int]:
    quoted = text.startswith(quote, at)
    start = at + len(quote) * quoted
    end = text.index(quote if quoted else ":", start)
    after = end + len(quote) * quoted
    if text[after] != ":":
        raise ValueError(f"expected a colon at {after}")
    return text[start:end], after + 1


def python_calls(source: str) -> list[tuple[str, dict[str, Any]]]:
    """Parse a list of calls in Python's notation, `[f(a=1), g(b="x")]`. Raises ValueError for other texts."""
    try:
        listed = ast.parse(source.strip(), mode="eval").body
        if not isinstance(listed, ast.List) or not listed.elts:
            raise ValueError("not a list of calls")
        calls = []
        for node in listed.elts:
            if not isinstance(node, ast.Call) or node.args or any(each.arg is None for each in node.keywords):
                raise ValueError("not a call with named arguments")
            name = ast.unparse(node.func)
            if _DOTTED.fullmatch(name) is None:
                raise ValueError("not the name of a function")
            calls.append((name, {str(each.arg): _python_value(each.value) for each in node.keywords}))
        return calls
    except _FAILURES as error:
        raise ValueError(f"not a list of calls: {error}") from None


def _python_value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List):
        return [_python_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else ast.literal_eval(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a mapping's keys must be strings")
        return dict(zip(keys, map(_python_value, node.values), strict=True))
    return ast.literal_eval(node)
