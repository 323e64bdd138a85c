"""Model directories in Hugging Face's format, loaded from local disk and saved atomically.

Loading runs no code from the directory and reads weights only from safetensors.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import xxhash

from pipelinerl.errors import ModelError
from pipelinerl.models.directory_files import foreign_failures, json_object, one_line, refuse_not_finite, text_config
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.system.files import sync
from trainer_contract.types import WeightDType

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

#: Name of the file with a value model's head, in the model's directory. It holds `weight` [1, D] and `bias` [1], fp32.
VALUE_HEAD_FILE: Final = "value_head.safetensors"
#: Maximum size in bytes of a safetensors file's header; the safetensors library rejects longer ones.
_LONGEST_HEADER: Final = 100_000_000
#: Pattern of a model's name on the Hugging Face hub, such as `Qwen/Qwen3-8B`.
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
#: Files of tokenizers that are not supported, but that can be converted to a tokenizer.json.
_SLOW_TOKENIZERS: Final = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
#: Number of bytes per read when files are hashed.
_BLOCK_BYTES: Final = 2**20
#: Dtypes: safetensors' name for each, mapped to its name in torch and NumPy.
_DTYPES: Final = {
    "F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    **{f"{kind[0].upper()}{size}": f"{kind}{size}" for kind in ("int", "uint") for size in (8, 16, 32, 64)},
}  # fmt: skip
#: Size in bytes of one value, by safetensors' dtype name.
_WIDTHS: Final = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8}
#: The part of a model to load: the whole causal language model, or only its layers, which output the last hidden
#: states.
Part = Literal["causal_lm", "trunk"]


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file: its dtype, its shape, the offset of its first byte, and its size in bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def check_directory(path: Path, *, needs: Sequence[str] = ("config.json", "tokenizer.json")) -> None:
    """Raise ModelError if a file in `needs` or the weights are missing, or config.json or the index is damaged."""
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing there"
        download = f"; get the hub's {path} by: hf download {path} --local-dir models/{path.name}"
        hub = download if found != "a file" and _HUB_NAME.fullmatch(str(path)) and not path.parent.exists() else ""
        raise ModelError(f"expected a model directory at {path}, found {found}; give the path of a local one{hub}")
    adapter = path / "adapter_config.json"
    if adapter.is_file():  # transformers would load it into a base model
        base = json_object(adapter).get("base_model_name_or_path")
        raise ModelError(
            f"{path} holds a LoRA adapter{f' of {base}' if base else ''}; merge it into its model: peft's "
            "AutoPeftModelForCausalLM.from_pretrained(…).merge_and_unload().save_pretrained(…) does it"
        )
    weights = sorted(path.glob("*.safetensors"))
    if not weights and (pickled := sorted(path.glob("pytorch_model*.bin"))):
        raise ModelError(
            f"{path} has its weights only in {pickled[0].name}, a pickle, which may run code and is not loaded; save "
            "them as safetensors: transformers' AutoModelForCausalLM.from_pretrained(…).save_pretrained(…) does it"
        )
    missing = [name for name in needs if not (path / name).is_file()]
    if not weights:
        missing.append("*.safetensors")
    if missing == ["tokenizer.json"] and any((path / name).is_file() for name in _SLOW_TOKENIZERS):
        raise ModelError(
            f"{path} lacks tokenizer.json, and has its tokenizer in another form; transformers' "
            "AutoTokenizer.from_pretrained(…).save_pretrained(…) makes it"
        )
    if missing:
        raise ModelError(f"{path} lacks {', '.join(missing)}; a model directory needs config, tokenizer and weights")
    if "config.json" in needs:
        text_config(path)
    weight_files(path)


def quantisation(path: Path) -> str | None:
    """Return the name of the method by which config.json says that the weights are quantised, or None."""
    quantised = json_object(path / "config.json").get("quantization_config")
    if not quantised:
        return None
    return str(quantised.get("quant_method") or "unknown" if isinstance(quantised, dict) else "unknown")


def refuse_quantised(path: Path) -> None:
    """Raise ModelError for a directory with quantised weights, which cannot be trained as they are."""
    method = quantisation(path)
    if method is not None:
        raise ModelError(
            f"{path} keeps its weights quantised ({method}), which cannot be trained; write a copy in bf16: pipelinerl "
            f"dequantise {path} {path}-bf16"
        )


def model_type(path: Path) -> str:
    """Return the `model_type` that config.json declares. Raises ModelError if it declares none."""
    declared = json_object(path / "config.json").get("model_type")
    if not isinstance(declared, str) or not declared:
        raise ModelError(f"{path / 'config.json'} must be a JSON object that names a model_type; copy it again")
    return declared


def weight_files(path: Path) -> list[Path]:
    """Return the files of the index, else model.safetensors, else all others. Raises ModelError for a damaged index."""
    index, whole = path / "model.safetensors.index.json", path / "model.safetensors"
    if not index.is_file():
        others = sorted(file for file in path.glob("*.safetensors") if file.name != VALUE_HEAD_FILE)
        return [whole] if whole.is_file() else others
    try:
        names = sorted(set(json_object(index)["weight_map"].values()))
    except (KeyError, TypeError, AttributeError):
        raise ModelError(f"{index} must be a JSON object with a weight_map; copy it again") from None
    for name in names:
        if not isinstance(name, str) or "/" in name or "\0" in name or not name.endswith(".safetensors"):
            raise ModelError(
                f"{index} may only name safetensors files next to it, got {name!r:.80}; copy the model again"
            )
    if absent := [name for name in names if not (path / name).is_file()]:
        raise ModelError(f"{path} lacks {', '.join(absent)}, which its index names; copy the model again")
    return [path / name for name in names]


def weights_digest(path: Path) -> str:
    """Return the XXH3-128 of the bytes of all weight files, as 32 hex digits. Raises ModelError if unreadable."""
    digest = xxhash.xxh3_128()
    for file in weight_files(path):
        try:
            with file.open("rb", buffering=0) as stream:
                while block := stream.read(_BLOCK_BYTES):
                    digest.update(block)
        except OSError as error:
            raise ModelError(f"{file} cannot be read: {error}; copy it again") from error
    return digest.hexdigest()


def model_dtype(path: Path) -> WeightDType:
    """Return the dtype in config.json, else that of most bytes. Raises ModelError if engines cannot serve it."""
    try:
        table, text = json_object(path / "config.json"), text_config(path)
        named = [part.get(key) for part in (table, text) for key in ("dtype", "torch_dtype")]
        name = next((str(each).removeprefix("torch.") for each in named if each), "")
        if not name:
            sizes: Counter[str] = Counter()
            for tensor in (tensor for file in weight_files(path) for tensor in stored_tensors(file).values()):
                sizes[tensor.dtype] += tensor.size
            name = max(sizes, key=lambda each: sizes[each], default="float32")
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {one_line(error)}; copy it again") from None
    try:
        return WeightDType(name)
    except ValueError:
        raise ModelError(
            f"{path} keeps its weights in {name:.40}; expected {', '.join(WeightDType)}: save the model in one of these"
        ) from None


def stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name, from its header alone. Raises ModelError for any other file."""
    found = {}
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(length, _LONGEST_HEADER)))
            most = os.fstat(stream.fileno()).st_size - 8 - length
        for name, tensor in header.items():
            if name != "__metadata__":
                found[name] = _stored(tensor, before=8 + length, most=most)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file} is no safetensors file: {one_line(error)}; copy it again") from None
    return found


def _stored(tensor: Mapping[str, Any], *, before: int, most: int) -> StoredTensor:
    """Parse a tensor's entry; `before` bytes precede all tensors' `most`. Raises ValueError, TypeError or KeyError."""
    (start, end), code, shape = tensor["data_offsets"], str(tensor["dtype"]), tuple(tensor["shape"])
    numbers = (start, end, *shape)
    if any(isinstance(each, bool) or not isinstance(each, int) or each < 0 for each in numbers):
        raise ValueError("a tensor's shape and offsets must be whole numbers")
    if not start <= end <= most:
        raise ValueError(f"a tensor ends at byte {end}, and the file has {most}")
    if code in _WIDTHS and _WIDTHS[code] * math.prod(shape) != end - start:
        raise ValueError(f"a tensor of shape {list(shape)} in {code} must not have {end - start} bytes")
    return StoredTensor(_DTYPES.get(code, code), shape, before + start, end - start)


def vocab_size(path: Path) -> int | None:
    """Return the vocabulary's size from config.json, or None if it is absent there."""
    try:
        return int(text_config(path)["vocab_size"])
    except (ModelError, ValueError, KeyError, TypeError):
        return None


def check_weights(path: Path) -> PreTrainedModel:
    """Return a directory's causal LM on the meta device. Raises ModelError if stored names or shapes do not fit."""
    return _load(path, device_map="meta")


def check_values(path: Path, *, most_bytes: int) -> int:
    """Raise ModelError if a tensor has NaN or infinity. Check at most `most_bytes`; return the bytes left unchecked."""
    room, left = most_bytes, 0
    for file in weight_files(path):
        for name, tensor in stored_tensors(file).items():
            if tensor.size > room:
                left += tensor.size
                continue
            room -= tensor.size
            if tensor.size and tensor.dtype in _DTYPES.values():
                width = tensor.size // math.prod(tensor.shape)
                words = np.memmap(file, f"u{width}", "r", offset=tensor.start, shape=tensor.shape or (1,))
                refuse_not_finite(path, name, words, tensor.dtype)
    return left


def empty_model(path: Path) -> PreTrainedModel:
    """Return a causal LM on the meta device by config.json alone, without reading weight files. Raises ModelError."""
    import torch
    from transformers import AutoConfig

    factory = model_factory(path)
    with foreign_failures(f"the model in {path} cannot be built"), torch.device("meta"):
        config = AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        model: PreTrainedModel = factory.from_config(config, trust_remote_code=False)
    return model


def model_factory(path: Path) -> Any:
    """Return transformers' class for a model, whole if it sees images. Raises ModelError if it writes no text."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto

    kind = model_type(path)
    if kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind not in CONFIG_MAPPING:
        return AutoModelForCausalLM
    if kind in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return AutoModelForImageTextToText
    raise ModelError(f"{path} holds a {kind}, which is no causal language model; use one that writes text")


def load_skeleton(path: Path, *, dtype: WeightDType) -> PreTrainedModel:
    """Return a directory's causal LM in `dtype`, on the meta device, with parameters in the order trainers use."""
    import torch

    skeleton: Any = check_weights(path)
    named: PreTrainedModel = skeleton.to(getattr(torch, dtype))
    return named


def load_model(path: Path, *, dtype: WeightDType = WeightDType.FLOAT32, part: Part = "causal_lm") -> PreTrainedModel:
    """Return a causal LM, or only its layers (`trunk`), on CPU in eval mode. Raises ModelError."""
    import torch

    return _load(path, part=part, dtype=getattr(torch, dtype)).eval()


def load_structure(path: Path, *, part: Part = "causal_lm") -> PreTrainedModel:
    """Return the model of `load_model` in fp32, with its weights on the meta device, unread. Raises ModelError."""
    import torch

    model: Any = _load(path, part=part, device_map="meta", dtype=torch.float32)
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta and name in module._non_persistent_buffers_set:
                setattr(module, name, torch.empty_like(buffer, device="cpu"))
        module._is_hf_initialized = False  # of all modules, because some create buffers of their children
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # so `initialize_weights` skips this parameter
    model.initialize_weights()  # creates the buffers, as transformers' own loading does
    structure: PreTrainedModel = model.eval()
    return structure


def replace_attention(model: PreTrainedModel, name: str) -> None:
    """Let a model attend by the function `name` in transformers' `AttentionInterface`. Raises ModelError."""
    with foreign_failures(f"the attention of {type(model).__name__} cannot be replaced", "use another model"):
        model.set_attn_implementation(name)


def _load(path: Path, *, part: Part = "causal_lm", **options: Any) -> PreTrainedModel:
    check_directory(path, needs=["config.json"])
    refuse_quantised(path)
    _refuse_more_layers_than_stored(path)
    from transformers import CONFIG_MAPPING, AutoModel
    from transformers.utils import logging as transformers_logging

    factory: Any = model_factory(path) if part == "causal_lm" else AutoModel
    transformers_logging.disable_progress_bar()  # the progress bar would log a line for each parameter
    transformers_logging.set_verbosity_error()  # hides tables of mismatched weights; the error below names the first
    advice = (
        "copy it again, or use another model"
        if model_type(path) in CONFIG_MAPPING
        else "use another model, or a transformers version that supports it"
    )
    with foreign_failures(f"the model in {path} cannot be loaded", advice):
        loaded: Any = factory.from_pretrained(
            str(path),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    model: PreTrainedModel
    report: dict[str, Any]
    model, report = loaded
    # transformers only warns about missing weights and fills them with random values.
    if report["missing_keys"] or report["mismatched_keys"]:
        names = sorted([*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])])
        raise ModelError(
            f"{path}: weights do not fit config.json: {len(names)} absent or of another shape, first {names[0]}; copy "
            "all files again, from one model"
        )
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            refuse_unusable(path, name, parameter)
    return model


def _refuse_more_layers_than_stored(path: Path) -> None:
    """Raise ModelError, before the model is built, if config.json names more layers than the files have tensors."""
    text = text_config(path)
    layers = next((text[name] for name in ("num_hidden_layers", "n_layer") if name in text), 0)
    stored = sum(len(stored_tensors(file)) for file in weight_files(path))
    if layers > stored:
        raise ModelError(
            f"{path}: weights do not fit config.json: it names {layers:,} layers, and the files hold {stored:,} "
            "tensors; copy it again"
        )


def refuse_unusable(path: Path, name: str, values: Tensor) -> None:
    """Raise ModelError if `values`, a parameter of the directory `path` on the CPU, contains NaN or infinity."""
    import torch

    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    if values.is_floating_point() and values.element_size() in integers:
        words = values.detach().view(integers[values.element_size()])  # integers, since NumPy has no bfloat16
        refuse_not_finite(path, name, words.numpy(), str(values.dtype).removeprefix("torch."))


def save_model(model: PreTrainedModel, tokenizer: ChatTokenizer, path: Path) -> None:
    """Write model and tokenizer atomically and durably. Raises ModelError if `path` exists or cannot be written."""
    if path.exists():
        raise ModelError(f"{path} exists already; choose another path or remove it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise ModelError(f"{path.parent} cannot be written: {error}; choose another path") from error
    with ExitStack() as undone:
        undone.callback(shutil.rmtree, staging, ignore_errors=True)
        model.save_pretrained(str(staging))
        tokenizer.save(staging)
        staging.chmod(0o755)
        for file in staging.iterdir():
            file.chmod(0o644)  # safetensors creates files that only their owner can read
            sync(file)
        sync(staging)
        staging.rename(path)
        undone.pop_all()
    sync(path.parent)
