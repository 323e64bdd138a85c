"""Plain copies, in bf16, of model directories whose weights are quantised, so that they can be trained and served.

The weights are decoded tensor by tensor: memory holds one file of the copy at a time. `plain_directory` makes a copy
once per machine, below `$XDG_CACHE_HOME/pipelinerl/models` (default: `~/.cache`), in a folder that is named by the
content of the source. Processes that need the same copy wait for the first of them. `outline` writes the shapes alone,
from which `pipelinerl check` predicts memory and disk.

    method               stored tensors of a weight W                                     source
    fp8, fbgemm_fp8      W in 8 bits, W_scale_inv or W_scale                              DeepSeek-V3, 3.3.1
    mxfp4                W_blocks, W_scales: 32 values share an exponent                  OCP Microscaling Formats 1.0
    modelopt             as fp8, or 4 bits with W_scale for 16 values, W_scale_2 for all  NVFP4
    gptq                 qweight, qzeros, scales, g_idx: rows of W' packed in 32 bits     Frantar et al. 2022
    awq                  qweight, qzeros, scales: columns of W' packed in 32 bits         Lin et al. 2023
    bitsandbytes         W, W.absmax, W.quant_map, W.quant_state…; in 8 bits W, SCB       Dettmers et al. 2023
    compressed-tensors   as fp8, W in int8, or W_packed with W_scale and W_shape          vLLM's format

Random matrices decode as in bitsandbytes 0.50 (its generic code), auto-gptq 0.7 (2, 4 and 8 bits, any order of
columns), gptqmodel 7.7 (AWQ), compressed-tensors 0.20 (NVFP4, 4 and 8 bits) and transformers 5.23 (MXFP4), up to the
rounding of their dtypes. bitsandbytes' kernel for CPUs itself misreads the scales of rows that are no multiple of a
block: it decodes its own codes with twice the error.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer
import xxhash

from pipelinerl.component import Need
from pipelinerl.errors import ModelError
from pipelinerl.models.checkpoint import (
    StoredTensor,
    check_directory,
    quantisation,
    stored_tensors,
    weight_files,
    weights_digest,
)
from pipelinerl.models.directory_copy import copy_model_files
from pipelinerl.models.directory_files import foreign_failures, json_object
from pipelinerl.system.files import from_home, sync

if TYPE_CHECKING:
    from torch import Tensor

#: Most bytes of a file of the copy, unless a single tensor has more.
_FILE_BYTES: Final = 2 * 2**30
#: Endings of the names of tensors that only serve products with quantised activations or a quantised KV cache.
_UNUSED: Final = re.compile(
    r".*(\.|_)(input_scale|activation_scale|input_zero_point|output_scale|k_scale|v_scale|kv_scale|weight_format|"
    r"input_global_scale|zero_point|g_idx|SCB)"
)
#: Dtypes of stored tensors that hold codes, which mean nothing without their scales.
_CODES: Final = frozenset({"int8", "uint8", "int32", "float8_e4m3fn", "float8_e5m2"})
#: The values of the 4 bits of MXFP4 (OCP Microscaling Formats 1.0, 5.3.3): sign, two bits of exponent, one of mantissa.
_FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: The column whose code each 4 bits of a word hold, in AWQ.
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)


class _Part(NamedTuple):
    file: Path
    key: str
    stored: StoredTensor

    def read(self) -> Tensor:
        from safetensors import safe_open

        with safe_open(self.file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(self.key)
        return tensor


class PlainTensor(NamedTuple):
    """A tensor of the copy: its dtype, its shape, the stored tensors that hold it, and how they are decoded."""

    dtype: str
    shape: tuple[int, ...]
    parts: Sequence[_Part]
    decode: Callable[..., Tensor] | None = None

    @property
    def size(self) -> int:
        """The number of bytes."""
        return math.prod(self.shape) * (4 if self.dtype == "float32" else 2)

    def read(self) -> Tensor:
        """Return the decoded tensor."""
        import torch

        values = [part.read() for part in self.parts]
        decoded = values[0] if self.decode is None else self.decode(*values)
        return decoded.to(getattr(torch, self.dtype)).reshape(self.shape).contiguous()


@dataclass(frozen=True, slots=True)
class _Directory:
    """The stored tensors of a quantised directory, and the settings of the method that quantised it."""

    parts: Mapping[str, _Part]
    settings: Mapping[str, Any]

    def with_suffix(self, suffix: str) -> Iterator[tuple[str, _Part]]:
        """Yield the tensors whose names end with `suffix`, with the name before it."""
        for key, part in self.parts.items():
            if key.endswith(suffix):
                yield key.removesuffix(suffix), part

    def made(self, shape: Sequence[int], keys: Sequence[str], decode: Callable[..., Tensor]) -> PlainTensor:
        """Return a tensor in bf16; raise ModelError if a stored tensor in `keys` is absent."""
        if absent := [key for key in keys if key not in self.parts]:
            raise ModelError(f"{keys[0]} lacks {absent[0]}, without which it cannot be decoded; copy the model again")
        return PlainTensor("bfloat16", tuple(shape), [self.parts[key] for key in keys], decode)


#: Yields the decoded tensors of one format, by name.
_Format = Callable[[_Directory], Iterator[tuple[str, PlainTensor]]]


# --- formats ----------------------------------------------------------------------------------------------------------


def _scaled(directory: _Directory) -> Iterator[tuple[str, PlainTensor]]:
    """Codes of 8 bits, times a scale for the tensor, for each row, or for each block."""
    block = _block_of(directory.settings)
    for key, part in directory.parts.items():
        if part.stored.dtype not in ("int8", "float8_e4m3fn", "float8_e5m2") or key + "_scale_2" in directory.parts:
            continue
        stem = key.removesuffix("weight")
        if stem + "SCB" in directory.parts:  # bitsandbytes in 8 bits: a scale is the largest value of a row
            scales, zeros, factor = stem + "SCB", [], 1 / 127
        else:
            scales = next((key + end for end in ("_scale_inv", "_scale") if key + end in directory.parts), "")
            zeros, factor = [each for each in (key + "_zero_point",) if each in directory.parts], 1.0
        if not scales:
            continue

        def decode(codes: Tensor, scale: Tensor, zero: Tensor | None = None, by: float = factor) -> Tensor:
            values = codes.float()
            if zero is not None:
                values = values - _spread(zero, values.shape, block)
            return values * (_spread(scale, values.shape, block) * by)

        yield key, directory.made(part.stored.shape, [key, scales, *zeros], decode)


def _block_of(settings: Mapping[str, Any]) -> Sequence[int] | None:
    """Return the rows and columns that share a scale, if the settings name them."""
    groups = [(each.get("weights") or {}) for each in (settings.get("config_groups") or {}).values()]
    sizes = [settings.get("weight_block_size"), *(each.get("block_structure") for each in groups)]
    return next((size for size in sizes if isinstance(size, list) and len(size) == 2), None)


def _spread(scales: Tensor, shape: Sequence[int], block: Sequence[int] | None) -> Tensor:
    """Repeat the scales of blocks so that they multiply a tensor of `shape`."""
    spread = scales.float()
    if spread.numel() == 1:
        return spread.reshape(())
    if spread.ndim < len(shape):
        spread = spread.reshape(*spread.shape, *[1] * (len(shape) - spread.ndim))
    for place, count in enumerate(shape):
        if spread.shape[place] not in (1, count):
            last = place - len(shape)  # -2 for rows and -1 for columns
            size = block[last] if block is not None and last >= -2 else -(-count // spread.shape[place])
            spread = spread.repeat_interleave(size, dim=place).narrow(place, 0, count)
    return spread


def _mxfp4(directory: _Directory) -> Iterator[tuple[str, PlainTensor]]:
    """Blocks of 16 bytes u8 [experts, rows, blocks, 16] and their exponents; the model holds the transposed matrix."""
    for name, part in directory.with_suffix("_blocks"):
        experts, rows, blocks, size = part.stored.shape
        keys = [f"{name}_blocks", f"{name}_scales"]
        yield name, directory.made((experts, blocks * size * 2, rows), keys, _decode_mxfp4)


def _decode_mxfp4(codes: Tensor, exponents: Tensor) -> Tensor:
    import torch

    values = torch.ldexp(_fp4(codes), exponents.int()[..., None] - 127)
    return values.flatten(2).transpose(1, 2)


def _nvfp4(directory: _Directory) -> Iterator[tuple[str, PlainTensor]]:
    """Two codes of 4 bits per byte, a scale in fp8 for 16 of them, and one for all, which vLLM's format divides by."""
    for ends in (("", "_scale", "_scale_2"), ("_packed", "_scale", "_global_scale")):
        for name, _ in directory.with_suffix(f"weight{ends[2]}"):
            keys = [f"{name}weight{end}" for end in ends]
            if keys[0] not in directory.parts or directory.parts[keys[0]].stored.dtype != "uint8":
                continue

            def decode(codes: Tensor, scale: Tensor, of_all: Tensor, divides: bool = bool(ends[0])) -> Tensor:
                values, whole = _fp4(codes), of_all.float().reciprocal() if divides else of_all.float()
                return values * _spread(scale.float() * whole.reshape(()), values.shape, None)

            *outer, last = directory.parts[keys[0]].stored.shape
            yield f"{name}weight", directory.made((*outer, 2 * last), keys, decode)


def _fp4(codes: Tensor) -> Tensor:
    """Return f32 [.., 2 n], the values of bytes u8 [.., n]; the low 4 bits come first."""
    import torch

    table = torch.tensor([*_FP4, *(-value for value in _FP4)])
    return table[torch.stack((codes & 15, codes >> 4), dim=-1).int()].flatten(-2)


def _gptq(directory: _Directory) -> Iterator[tuple[str, PlainTensor]]:
    """Codes i32 [in / packed, out], zero points i32 [groups, out / packed] and scales [groups, out] of W' [in, out]."""
    bits = _bits(directory.settings.get("bits"))
    # In the first version of the format, zero points are stored minus 1.
    offset = 0 if directory.settings.get("checkpoint_format") == "gptq_v2" else 1
    for name, part in directory.with_suffix(".qweight"):
        columns = part.stored.shape[0] * 32 // bits

        def decode(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor | None = None) -> Tensor:
            import torch

            values = _unpacked(codes.T, bits).T
            group = torch.arange(len(values)) // (len(values) // len(scales)) if groups is None else groups.long()
            zero = _unpacked(zeros, bits)[:, : values.shape[1]] + offset
            return ((values - zero[group]) * scales.float()[group]).T

        keys = [f"{name}.{end}" for end in ("qweight", "qzeros", "scales")]
        indices = [f"{name}.g_idx"] if f"{name}.g_idx" in directory.parts else []
        yield f"{name}.weight", directory.made((part.stored.shape[1], columns), [*keys, *indices], decode)


def _awq(directory: _Directory) -> Iterator[tuple[str, PlainTensor]]:
    """Codes i32 [in, out / 8], zero points i32 [groups, out / 8] and scales [groups, out] of W' [in, out]."""
    if _bits(directory.settings.get("bits", directory.settings.get("w_bit"))) != 4:
        raise ModelError("AWQ has 4 bits, and quantization_config names another number; use another model")
    if (version := str(directory.settings.get("version", "gemm")).lower()) != "gemm":
        raise ModelError(
            f"AWQ's version {version:.20} packs weights in an order that is unknown here; use version gemm"
        )
    for name, part in directory.with_suffix(".qweight"):

        def decode(codes: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
            import torch

            order = torch.tensor(_AWQ_ORDER).argsort()
            values, zero = (
                _unpacked(each, 4).view(len(each), -1, 8)[:, :, order].flatten(1) for each in (codes, zeros)
            )
            size = len(values) // len(scales)
            return ((values - zero.repeat_interleave(size, 0)) * scales.float().repeat_interleave(size, 0)).T

        keys = [f"{name}.{end}" for end in ("qweight", "qzeros", "scales")]
        yield f"{name}.weight", directory.made((part.stored.shape[1] * 8, part.stored.shape[0]), keys, decode)


def _packed(directory: _Directory) -> Iterator[tuple[str, PlainTensor]]:
    """Codes i32 [out, in / packed] with scales [out, groups]; zero points are packed along the rows."""
    for name, part in directory.with_suffix("weight_packed"):
        if f"{name}weight_global_scale" in directory.parts:
            continue
        if f"{name}weight_shape" not in directory.parts:
            raise ModelError(f"{name}weight_packed lacks {name}weight_shape; copy the model again")
        shape = directory.parts[f"{name}weight_shape"].read().tolist()
        bits = _bits(round(32 * part.stored.shape[-1] / shape[-1]))
        named = {end: f"{name}weight_{end}" for end in ("zero_point", "g_idx")}
        extras = [end for end, key in named.items() if key in directory.parts]

        def decode(
            codes: Tensor,
            scales: Tensor,
            *others: Tensor,
            extras: Sequence[str] = extras,
            bits: int = bits,
            columns: int = shape[-1],
        ) -> Tensor:
            given = dict(zip(extras, others, strict=True))
            values = _unpacked(codes, bits)[:, :columns].float()
            scales, zero, group = scales.float(), given.get("zero_point"), given.get("g_idx")
            zeros = (
                scales.new_full(scales.shape, 2 ** (bits - 1))
                if zero is None
                else _unpacked(zero.T, bits).T[: len(values)].float()
            )
            if group is not None:
                return (values - zeros[:, group.long()]) * scales[:, group.long()]
            return (values - _spread(zeros, values.shape, None)) * _spread(scales, values.shape, None)

        keys = [f"{name}weight_packed", f"{name}weight_scale", *(named[end] for end in extras)]
        yield f"{name}weight", directory.made(shape, keys, decode)


def _four_bits(directory: _Directory) -> Iterator[tuple[str, PlainTensor]]:
    """Codes u8 [n / 2, 1], the high 4 bits first; the scales of blocks may be quantised themselves."""
    states = re.compile(r"(.*)\.quant_state\.bitsandbytes__(nf4|fp4)")
    for key, part in directory.parts.items():
        if (match := states.fullmatch(key)) is None:
            continue
        name, state = match[1], json.loads(bytes(part.read().tolist()))
        nested = ["nested_absmax", "nested_quant_map"] if f"{match[1]}.nested_absmax" in directory.parts else []

        def decode(
            codes: Tensor, absmax: Tensor, quant_map: Tensor, *of_scales: Tensor, state: Mapping[str, Any] = state
        ) -> Tensor:
            import torch

            if of_scales:
                sizes = of_scales[0].float().repeat_interleave(int(state["nested_blocksize"]))[: len(absmax)]
                absmax = of_scales[1].float()[absmax.int()] * sizes + float(state["nested_offset"])
            each = torch.stack((codes >> 4, codes & 15), dim=-1).flatten().int()
            scales = absmax.float().repeat_interleave(int(state["blocksize"]))[: len(each)]
            return (quant_map.float()[each] * scales)[: math.prod(state["shape"])]

        keys = [name, *(f"{name}.{end}" for end in ("absmax", "quant_map", *nested))]
        yield name, directory.made(state["shape"], keys, decode)


def _bits(given: Any) -> int:
    if given not in (2, 4, 8):
        raise ModelError(f"weights in {given} bits cannot be decoded here, only in 2, 4 or 8; use another model")
    return int(given)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Return i32 [rows, n · 32 / bits], the unsigned codes of words i32 [rows, n]; the lowest bits come first."""
    import torch

    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


#: The formats of each method's tensors, by the name of the method in config.json.
_FORMATS: Final[Mapping[str, Sequence[_Format]]] = {
    "fp8": [_scaled],
    "fbgemm_fp8": [_scaled],
    "mxfp4": [_mxfp4],
    "modelopt": [_nvfp4, _scaled],
    "gptq": [_gptq],
    "awq": [_awq],
    "bitsandbytes": [_four_bits, _scaled],
    "compressed-tensors": [_scaled, _nvfp4, _packed],
}


# --- copies -----------------------------------------------------------------------------------------------------------


def plain_tensors(source: Path) -> dict[str, PlainTensor]:
    """Return the tensors of a quantised directory's copy, by name. Raises ModelError if they cannot be decoded."""
    method = quantisation(source)
    if method not in _FORMATS:
        raise ModelError(
            f"{source} keeps its weights quantised ({method}), and only {', '.join(_FORMATS)} can be decoded; use the "
            "model from which it was made"
        )
    settings = json_object(source / "config.json")["quantization_config"]
    parts = {key: _Part(file, key, each) for file in weight_files(source) for key, each in stored_tensors(file).items()}
    directory, made = _Directory(parts, settings), dict[str, PlainTensor]()
    with foreign_failures(f"the weights in {source} cannot be decoded ({method})", "copy it again"):
        for form in _FORMATS[str(method)]:
            made |= dict(form(directory))
    used = {part.key for tensor in made.values() for part in tensor.parts}
    states = tuple(f"{name}." for name in made)
    for key, part in parts.items():
        if key in used or _UNUSED.fullmatch(key) or key.startswith(states) or key.endswith("weight_shape"):
            continue
        if part.stored.dtype in _CODES:
            raise ModelError(
                f"{source} keeps {key} in {part.stored.dtype} without the scales that {method} has; use the model from "
                "which it was made"
            )
        made[key] = PlainTensor("float32" if part.stored.dtype == "float32" else "bfloat16", part.stored.shape, [part])
    return made


def dequantise(source: Path, target: Path) -> None:
    """Write `source` in bf16 into the new directory `target`. Raises ModelError if it cannot, or `target` exists."""
    check_directory(source)
    if quantisation(source) is None:
        raise ModelError(f"{source} is not quantised; use it as it is")
    tensors = plain_tensors(source)
    if target.exists():
        raise ModelError(f"{target} exists already; choose another path or remove it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        needed, free = sum(each.size for each in tensors.values()), shutil.disk_usage(target.parent).free
        if needed > free:
            raise ModelError(
                f"the copy of {source} in bf16 takes {gib(needed)}, and {gib(free)} are free in {target.parent}; make "
                "room there, or set XDG_CACHE_HOME to a larger disk"
            )
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            _write(source, draft, tensors)
            draft.chmod(0o755)
            draft.rename(target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        sync(target.parent)
    except OSError as error:
        raise ModelError(f"{target} cannot be written: {error}; choose another path") from error


def _write(source: Path, target: Path, tensors: Mapping[str, PlainTensor]) -> None:
    from safetensors.torch import save_file

    _write_configuration(source, target)
    files, sizes = [list[str]()], [0]
    for name, tensor in tensors.items():
        if files[-1] and sizes[-1] + tensor.size > _FILE_BYTES:
            files.append([])
            sizes.append(0)
        files[-1].append(name)
        sizes[-1] += tensor.size
    weight_map = dict[str, str]()
    for number, names in enumerate(files):
        file = f"model-{number + 1:05}-of-{len(files):05}.safetensors" if len(files) > 1 else "model.safetensors"
        with foreign_failures(f"the weights in {source} cannot be decoded"):
            save_file({name: tensors[name].read() for name in names}, target / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    for written in target.iterdir():
        if written.is_file():
            written.chmod(0o644)
            sync(written)


def _write_configuration(source: Path, target: Path) -> None:
    copy_model_files(source, target)
    config = json_object(source / "config.json")
    for table in (config, config.get("text_config")):
        if isinstance(table, dict):
            table.pop("quantization_config", None)
            table.pop("torch_dtype", None)
            table["dtype"] = "bfloat16"
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def outline(source: Path, target: Path) -> int:
    """Write a plain copy of zeros (a hole in the file), never to be trained, to `target`; return the copy's bytes."""
    header, size = dict[str, Any](), 0
    for name, tensor in plain_tensors(source).items():
        code = "F32" if tensor.dtype == "float32" else "BF16"
        header[name] = {"dtype": code, "shape": tensor.shape, "data_offsets": [size, size := size + tensor.size]}
    _write_configuration(source, target)
    text = json.dumps(header).encode()
    with (target / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
    return size


def write_copy(
    source: Annotated[Path, typer.Argument(help="A local model directory with quantised weights.")],
    target: Annotated[Path, typer.Argument(help="Directory to create for the copy.")],
) -> None:
    """Write the copy that `pipelinerl dequantise` makes, and say so. Raises `ModelError`."""
    dequantise(source, target)
    typer.echo(f"{target} is written; name it as model.path")


@contextmanager
def outlined(sources: Sequence[Path]) -> Iterator[tuple[Mapping[Path, Path], list[Need]]]:
    """Yield the sources' copies, or stand-ins with their shapes until the block ends, and the disk that is needed."""
    folder, needs, stands = cache_folder(), list[Need](), dict[Path, Path]()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".outline", dir=folder) as place:
            for number, path in enumerate(sources):
                stands[path] = copy_of(path)
                if stands[path].is_dir():
                    continue
                stands[path] = Path(place, str(number), path.resolve().name)
                stands[path].mkdir(parents=True)
                size, free = outline(path, stands[path]), shutil.disk_usage(folder).free
                text = f"{path} is quantised ({quantisation(path)}): the run first writes a copy in bf16, {gib(size)}"
                needs.append(Need("disk", f"{text}, in {folder}, where {gib(free)} are free", size > free))
            yield stands, needs
    except OSError as error:
        raise ModelError(f"{folder} cannot be written: {error}; set XDG_CACHE_HOME to another folder") from error


def cache_folder() -> Path:
    """Return the folder with this user's copies of quantised models."""
    root = os.environ.get("XDG_CACHE_HOME") or from_home("~/.cache")
    return Path(root) / "pipelinerl" / "models"


def copy_of(source: Path) -> Path:
    """Return the place of a quantised directory's plain copy, which may not exist yet. Raises OSError."""
    return cache_folder() / _content_of(source) / source.resolve().name


def plain_directory(source: Path) -> Path:
    """Return this machine's plain copy of a directory whose weights are quantised.

    The copy is written if it is absent, which a line on stderr reports with its size and duration. Its folder has the
    name of `source`, so the model keeps its name. Raises ModelError if the copy can neither be read nor made.
    """
    check_directory(source)
    try:
        target = copy_of(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / "lock", f"another process decodes the weights of {source}"):
            if not target.is_dir():
                begun = time.monotonic()
                dequantise(source, target)
                size, took = sum(file.stat().st_size for file in weight_files(target)), time.monotonic() - begun
                _tell(
                    f"{source} keeps its weights quantised ({quantisation(source)}): a copy in bf16, {gib(size)}, was "
                    f"written to {target} in {took:,.1f} s; later runs use it"
                )
    except OSError as error:
        raise ModelError(
            f"the copy in bf16 of {source} cannot be kept: {error}; set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return target


def _content_of(source: Path) -> str:
    """Return a digest of all files of the copy. The digest of the weights is kept while their files do not change."""
    digest, files = xxhash.xxh3_128(), weight_files(source)
    for file in sorted(each for each in source.iterdir() if each.is_file() and each not in files):
        if file.suffix in (".json", ".jinja", ".txt", ".model", ".py", ""):
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    stats = [(str(file.resolve()), stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]]
    known = cache_folder() / "digests" / xxhash.xxh3_128_hexdigest(json.dumps(stats).encode())
    if known.is_file():
        of_weights = known.read_text()
    else:
        of_weights = weights_digest(source)
        known.parent.mkdir(parents=True, exist_ok=True)
        draft = known.with_name(f"{known.name}.{os.getpid()}")
        draft.write_text(of_weights)
        draft.rename(known)
    digest.update(of_weights.encode())
    return digest.hexdigest()


@contextmanager
def _locked(file: Path, waiting: str) -> Iterator[None]:
    """Hold an exclusive lock; the system frees it when its holder ends, so the wait lasts no longer than the copy."""
    with file.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _tell(f"{waiting}; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _tell(sentence: str) -> None:
    print(f"pipelinerl: {sentence}", file=sys.stderr, flush=True)


def gib(size: int) -> str:
    """Format bytes as `3.10 GiB`."""
    return f"{size / 2**30:,.2f} GiB"
