"""`WeightReader`: the parameters of a model directory, read on demand and only in the requested rows.

A checkpoint may use other parameter names than the model, and store separate experts that the model fuses into one
parameter. transformers' table of conversions says which stored tensors form a parameter. `WeightReader` applies the
table to names when it is created, and to values when it reads them.

If a parameter is stored as one tensor, only the requested rows are read; otherwise all tensors that form it. NaN and
infinity are rejected.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from pipelinerl.errors import ModelError
from pipelinerl.models.checkpoint import refuse_unusable, stored_tensors, weight_files

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class StoredPart(NamedTuple):
    """A stored tensor that is a parameter, or a part of one."""

    file: Path
    key: str
    shape: tuple[int, ...]
    #: Pattern in transformers' table that selects this tensor for a conversion; None if the tensor needs no conversion.
    pattern: str | None

    def read(self, rows: slice | None = None) -> Tensor:
        """Return the tensor, or some of its rows. Raises ModelError if it is damaged or not finite."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.file, framework="pt") as file:
                stored: Any = file.get_slice(self.key)
                read: Tensor = stored[rows] if rows is not None else stored[...]
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{self.file} cannot be read: {error}; copy it again") from error
        refuse_unusable(self.file.parent, self.key, read)
        return read


@dataclass(frozen=True, slots=True)
class ConversionTable:
    """transformers' conversions from the stored tensors of a model to the tensors of its `state_dict`."""

    model: PreTrainedModel
    renamings: list[Any]
    #: Converters by the pattern that selects their stored tensors.
    converters: Mapping[str, Any]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Return the table for a model of `checkpoint.load_structure` or `checkpoint.empty_model`."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        table = get_model_conversion_mapping(model)
        converters = {
            pattern: each for each in table if isinstance(each, WeightConverter) for pattern in each.source_patterns
        }
        return cls(model, [each for each in table if isinstance(each, WeightRenaming)], converters)

    def stored_parts(self, path: Path) -> dict[str, tuple[StoredPart, ...]]:
        """Map names to their stored tensors as they are joined; a conversion to several is under the first's name."""
        from transformers.core_model_loading import dot_natural_key, rename_source_key

        prefix, expected = self.model.base_model_prefix, self.model.state_dict()
        distinct = list({id(each): each for each in self.converters.values()}.values())
        found: dict[str, list[StoredPart]] = defaultdict(list)
        keys = {
            key: (file, tensor.shape) for file in weight_files(path) for key, tensor in stored_tensors(file).items()
        }
        for key in sorted(keys, key=dot_natural_key):
            name, pattern = rename_source_key(key, self.renamings, distinct, prefix, expected)
            if name not in expected and key in expected:
                name, pattern = rename_source_key(key, [], [], prefix, expected)
            if name in expected:
                file, shape = keys[key]
                found[name].append(StoredPart(file, key, shape, pattern))
        return {name: tuple(parts) for name, parts in found.items()}

    def converted(self, name: str, parts: Iterable[tuple[StoredPart, Any]]) -> dict[str, Tensor]:
        """Return the tensors of the conversion `name` in `stored_parts`, from its parts and their tensors or reads."""
        given = list(parts)
        converter = deepcopy(self.converters[str(given[0][0].pattern)])
        for part, values in given:
            converter.add_tensor(name, part.key, part.pattern, values)
        made: dict[str, Any] = converter.convert(name, model=self.model, config=self.model.config)
        return {target: each[0] if isinstance(each, list) else each for target, each in made.items()}

    def names_before(self, key: str) -> tuple[str, ...]:
        """Return the names that a stored tensor may have when its converter gets it: with and without the prefix."""
        from transformers.core_model_loading import rename_source_key

        renamed, prefix = rename_source_key(key, self.renamings, [])[0], f"{self.model.base_model_prefix}."
        return renamed, renamed.removeprefix(prefix), f"{prefix}{renamed}"


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Reader of one model's parameters and buffers, by their names in the model."""

    _table: ConversionTable
    _stored: Mapping[str, tuple[StoredPart, ...]]

    @classmethod
    def of(cls, path: Path, model: PreTrainedModel) -> Self | None:
        """Return a reader of the directory from which `load_structure` made the model.

        Return None if transformers must load the whole model at once: its conversion table turns one set of stored
        tensors into several parameters, the files store tied parameters twice, or a tensor is missing or misshapen.
        """
        table = ConversionTable.of(model)
        stored = table.stored_parts(path)
        tied = model.all_tied_weights_keys or {}
        if any(target in stored and source in stored for target, source in tied.items()):
            return None
        wanted = _with_aliases(model, stored)
        expected = model.state_dict()
        for name, parts in wanted.items():
            first = parts[0]
            if first.pattern is None and (len(parts) > 1 or first.shape != tuple(expected[name].shape)):
                return None
            if first.pattern is not None and len(table.converters[first.pattern].target_patterns) > 1:
                return None
        if any(name not in wanted for name, each in expected.items() if each.is_meta):
            return None
        return cls(table, wanted)

    def rows(self, name: str, wanted: slice) -> Tensor:
        """Return the `wanted` rows of a parameter or buffer, read-only. Raises ModelError if damaged or not finite."""
        parts = self._stored[name]
        return parts[0].read(wanted) if parts[0].pattern is None else self._converted(name, parts)[wanted]

    def whole(self, name: str) -> Tensor:
        """Return a whole parameter or buffer, which may be a scalar. Raises ModelError like `rows`."""
        parts = self._stored[name]
        return parts[0].read() if parts[0].pattern is None else self._converted(name, parts)

    def _converted(self, name: str, parts: tuple[StoredPart, ...]) -> Tensor:
        return self._table.converted(name, [(part, partial(part.read)) for part in parts])[name]


def _with_aliases(
    model: PreTrainedModel, stored: Mapping[str, tuple[StoredPart, ...]]
) -> dict[str, tuple[StoredPart, ...]]:
    """Add entries for all names of shared parameters, since files store these under one name only."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, each in model.state_dict(keep_vars=True).items():
        names[id(each)].append(name)
    found: dict[str, tuple[StoredPart, ...]] = {}
    for shared in names.values():
        there = next((name for name in shared if name in stored), None)
        if there is not None:
            found |= dict.fromkeys(shared, stored[there])
    return found
