"""Layouts of data sets: the files of each split, in a deterministic order.

a file, a glob, a list of them         a single split without a name
dataset_dict.json                      a `DatasetDict` saved by `datasets`: a folder for each split
state.json, dataset_info.json          a `Dataset` saved by `datasets`
README.md with `configs: data_files`   the hub's layout: files by configuration and split
any other folder                       its data files; folder or file names give the split

A description may name only files within its folder.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic_core import from_json

from pipelinerl.data.files.rows import suffix_of
from pipelinerl.data.source import Split
from pipelinerl.errors import RecipeError
from pipelinerl.system.files import from_home

#: Files of each split. The keys are the data set's own names for its splits; "" is a split without a name.
Layout = Mapping[str, tuple[Path, ...]]

SUFFIXES: Final = (".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".arrow")
#: For each split, names that data sets commonly give it, most frequent first.
NAMES: Final[Mapping[Split, tuple[str, ...]]] = {
    Split.TRAIN: ("train", "training"),
    Split.VALIDATION: ("validation", "valid", "val", "dev"),
    Split.HELD_OUT: ("test", "held_out", "testing", "eval", "evaluation"),
}
_OF_DATASETS: Final = ("dataset_infos.json", "dataset_info.json", "state.json", "dataset_dict.json")


def layout_of(paths: Sequence[str], *, config: str, where: str) -> Layout:
    """Return the files at these paths by split; several paths form a single split.

    Raises `RecipeError` if a path matches no file, a folder's description is invalid, or a folder in the hub's layout
    has several configurations and `config` names none of them.
    """
    if len(paths) == 1 and (folder := from_home(paths[0])).is_dir():
        layout = _of_folder(folder, config)
        if not any(layout.values()):
            raise RecipeError(f"{where}: {folder} holds no data file; known are {', '.join(SUFFIXES)}")
        return {split: files for split, files in layout.items() if files}
    if config:
        raise RecipeError(f"{where}: config applies only to a folder in the hub's layout, got {', '.join(paths)}")
    files = [file for path in paths for file in _named(path, where)]
    return {"": tuple(files)}


def _named(path: str, where: str) -> list[Path]:
    text = str(from_home(path))
    paths = [Path(text)] if Path(text).is_file() else [Path(name) for name in sorted(glob.glob(text, recursive=True))]
    files = [file for file in paths if file.is_file()]
    if not files:
        raise RecipeError(f"{where} must be the path of a file or folder, got {path!r}, which does not exist")
    for file in files:
        if suffix_of(file) not in SUFFIXES:
            raise RecipeError(f"{where}: {file} has an unknown format; known are {', '.join(SUFFIXES)}")
    return files


def _of_folder(folder: Path, config: str) -> Layout:
    if (folder / "dataset_dict.json").is_file():
        description = folder / "dataset_dict.json"
        return {str(split): _saved(_within(folder, split, description)) for split in _described(description, "splits")}
    if (folder / "state.json").is_file():
        return {"": _saved(folder)}
    configs = _configs(folder / "README.md")
    if configs or config:
        return _of_config(folder, configs, config)
    return _by_name(folder, sorted(path for path in folder.rglob("*") if _is_data(path, folder)))


def _saved(folder: Path) -> tuple[Path, ...]:
    description = folder / "state.json"
    files = _described(description, "_data_files")
    try:
        paths = tuple(_within(folder, file["filename"], description) for file in files)
    except (TypeError, KeyError):
        raise RecipeError(f"{description}: expected _data_files with filename, got {files!r:.120}") from None
    if missing := [path for path in paths if not path.is_file()]:
        raise RecipeError(f"{description} names {missing[0].name}, and there is no such file; copy it, too")
    return paths


def _within(folder: Path, name: Any, description: Path) -> Path:
    """Return the path `name` in the folder. Raises `RecipeError` if it is no relative path, or leads out of it."""
    if not isinstance(name, str) or "\0" in name or ".." in Path(name).parts or Path(name).is_absolute():
        raise RecipeError(f"{description} must name only files of its folder, got {name!r:.120}")
    return folder / name


def _described(path: Path, key: str) -> list[Any]:
    try:
        value = from_json(path.read_bytes(), allow_inf_nan=False)[key]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RecipeError(f"{path}: expected an object with {key}: {type(error).__name__}: {error}") from None
    if not isinstance(value, list):
        raise RecipeError(f"{path}: {key} must be a list, got {value!r:.120}")
    return value


def _is_data(path: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return not hidden and path.is_file() and suffix_of(path) in SUFFIXES and path.name not in _OF_DATASETS


def _by_name(folder: Path, files: Iterable[Path]) -> Layout:
    """Group files by the split's name in their path; if some are named, others are training files or omitted."""
    splits: dict[str, list[Path]] = {}
    for file in files:
        words = re.split(r"[^a-z]+", file.relative_to(folder).as_posix().lower())
        named = (names[0] for names in NAMES.values() if not set(names).isdisjoint(words))
        splits.setdefault(next(named, ""), []).append(file)
    if len(splits) > 1 and "" in splits:
        if NAMES[Split.TRAIN][0] in splits:
            del splits[""]
        else:
            splits[NAMES[Split.TRAIN][0]] = splits.pop("")
    return {split: tuple(members) for split, members in splits.items()}


# --- the hub's layout ------------------------------------------------------------------------------------------------


def _configs(readme: Path) -> dict[str, Any]:
    if not readme.is_file():
        return {}
    match = re.match(r"---\s*\n(.*?\n)---\s*(\n|$)", readme.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    if match is None:
        return {}
    import yaml

    try:
        front_matter = yaml.safe_load(match[1])
        configs = front_matter.get("configs") or []
        return {str(config["config_name"]): config for config in configs if config.get("data_files")}
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise RecipeError(f"{readme}: its front matter is not the hub's: {type(error).__name__}: {error}") from None


def _of_config(folder: Path, configs: Mapping[str, Any], config: str) -> Layout:
    default = next((name for name, settings in configs.items() if settings.get("default")), "")
    chosen = config or default or ("default" if "default" in configs else "")
    if not chosen and len(configs) == 1:
        (chosen,) = configs
    if chosen not in configs:
        known = ", ".join(configs) or "none"
        wrong = f"has no configuration {config!r}" if config else "has several configurations; name one as config"
        raise RecipeError(f"{folder} {wrong}: {known}")
    readme, data_files = folder / "README.md", configs[chosen]["data_files"]
    base = _within(folder, configs[chosen].get("data_dir") or "", readme)
    if isinstance(data_files, list) and all(isinstance(entry, dict) for entry in data_files):
        if any("split" not in entry for entry in data_files):
            raise RecipeError(f"{readme}: each entry of data_files must have split and path, got {data_files!r:.120}")
        return {str(entry["split"]): _matching(base, entry.get("path"), folder) for entry in data_files}
    return _by_name(folder, _matching(base, data_files, folder))


def _matching(base: Path, patterns: Any, folder: Path) -> tuple[Path, ...]:
    readme, listed = folder / "README.md", patterns if isinstance(patterns, list) else [patterns]
    files: list[Path] = []
    for pattern in listed:
        _within(folder, pattern, readme)
        try:
            matching = sorted(path for path in base.glob(pattern) if _is_data(path, folder))
        except (ValueError, OSError, IndexError) as error:
            raise RecipeError(f"{readme}: data_files has the invalid pattern {pattern!r:.120}: {error}") from None
        if not matching:
            raise RecipeError(f"{readme}: data_files names {pattern!r}, and there is no such file")
        files += matching
    return tuple(dict.fromkeys(files))
