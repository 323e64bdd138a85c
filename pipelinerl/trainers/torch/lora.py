"""`Adapters`, LoRA (Hu et al. 2021, arXiv 2106.09685) on a packed model, with peft.

    base       the model directory's weights, frozen, under their Hugging Face names, the only names that engines use
    trained    A and B of every target, in fp32, and a value head if there is one
    merged     W + (alpha / rank) · B A in fp32, computed for one parameter on demand; the base never changes

Other threads can read the base's weights during passes. Even `forward_at`, which computes with the weights of another
version, does not change what they read. If policy, critic and reference of one process come from one directory, they
share its weights on a device (`SharedBase`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast
from weakref import WeakValueDictionary

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from pipelinerl.models.checkpoint import VALUE_HEAD_FILE, check_weights
from pipelinerl.trainers.torch.options import LoraOptions, share_of
from pipelinerl.trainers.torch.packed_model import PackedModel, PackedValueModel, hold
from trainer_contract.errors import SpecError, StateError

#: peft's name for an adapter; a model has only this one.
_ADAPTER: Final = "default"
#: Name of the model inside the module that hides its type from peft.
_SHELL: Final = "shell"
#: Prefix that peft puts before the names of a model's modules in peft's files.
_PEFT_PREFIX: Final = "base_model.model."
ADAPTER_FILE: Final = "adapter_model.safetensors"
#: Forward methods of linear layers. A subclass with another one, such as Phi-MoE's router, does not return a product.
_PRODUCTS: Final = (nn.Linear.forward, Conv1D.forward, FalconLinear.forward)


class Adapters:
    """The adapters of one model. The model must be unwrapped, and on the CPU or the meta device."""

    def __init__(self, packed: PackedModel | PackedValueModel, options: LoraOptions) -> None:
        """Freeze the model and add adapters, which at first change no result. Raises SpecError for bad targets."""
        from peft import LoraConfig, inject_adapter_in_model

        self.options = options
        self._packed = packed
        #: Parameters of the original model by name, including a value head.
        self.base = dict(packed.named_weights())
        modules = target_modules(packed.model, options)
        if not modules:
            raise SpecError(f"options.lora: {type(packed.model).__name__} has no linear layer; train it whole")
        self._config = LoraConfig(
            r=options.rank,
            lora_alpha=cast(Any, options.alpha),
            lora_dropout=options.dropout,
            target_modules=[f"{_SHELL}.{name}" for name in modules],
            fan_in_fan_out=all(isinstance(module, Conv1D) for module in modules.values()),
            task_type="CAUSAL_LM" if isinstance(packed, PackedModel) else "FEATURE_EXTRACTION",
        )
        random, is_meta = torch.get_rng_state(), any(parameter.is_meta for parameter in self.base.values())
        with warnings.catch_warnings():
            # peft's warnings concern models that peft wraps itself; it does not wrap this model.
            warnings.simplefilter("ignore")
            # If peft saw the type of a mixture, it would redirect targets such as `mlp.up_proj` to the fused experts.
            inject_adapter_in_model(self._config, nn.ModuleDict({_SHELL: packed.model}), adapter_name=_ADAPTER)
        self._layers = {name: cast(Any, packed.model.get_submodule(name)) for name in modules}
        if is_meta:
            torch.set_rng_state(random)
            self._draw()
        self._pairs = {
            f"{name}.{half}.weight": cast(nn.Parameter, getattr(layer, half)[_ADAPTER].weight)
            for name, layer in self._layers.items()
            for half in ("lora_A", "lora_B")
        }
        self._set_dropout(active=False)  # turn dropout off, because modules start in train mode
        self._shared: SharedBase | None = None

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The trained parameters by name: A and B of every target, in the model's order, then the value head's."""
        return self._pairs | self._value_head

    @property
    def counts(self) -> tuple[int, int]:
        """The number of trained parameters, and of the model's parameters without adapters."""
        return sum(p.numel() for p in self.trained.values()), sum(p.numel() for p in self.base.values())

    @property
    def reaches_output(self) -> bool:
        return self._packed.model.get_output_embeddings() in self._layers.values()

    def pair_of(self, name: str) -> tuple[str, str] | None:
        layer = name.removesuffix(".weight")
        return (f"{layer}.lora_A.weight", f"{layer}.lora_B.weight") if layer in self._layers else None

    def merged(self, name: str, own: Tensor) -> Tensor:
        """Merge `own`, the values of the base's parameter `name`, with its adapter; never write to the result."""
        pair = self.pair_of(name)
        return own if pair is None else self.merged_with(name, own, *(self._pairs[half].detach() for half in pair))

    def merged_with(self, name: str, own: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Merge `own`, the values of the base's parameter `name`, with A [rank, in] and B [out, rank], as peft does."""
        layer = self._layers[name.removesuffix(".weight")]
        product = b @ a
        return own.float() + (product.T if layer.fan_in_fan_out else product) * layer.scaling[_ADAPTER]

    @contextmanager
    def off(self) -> Iterator[None]:
        try:
            for layer in self._layers.values():
                layer.enable_adapters(False)
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)

    @contextmanager
    def dropping_out(self) -> Iterator[None]:
        """Within the block, apply dropout to the adapters' inputs; outside the block dropout is off."""
        try:
            self._set_dropout(active=True)
            yield
        finally:
            self._set_dropout(active=False)

    def compact(self) -> None:
        """Keep the base's matrices in bf16, which changes no result; embeddings' outputs are converted, so that the
        residual stream is fp32.
        """
        for parameter in self.base.values():
            if parameter.ndim >= 2 and not parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()
        for module in self._packed.model.modules():
            if isinstance(module, nn.Embedding):
                module.register_forward_hook(lambda _module, _given, output: output.float())

    def to(self, device: torch.device, *, digest: str, read_to: Callable[[torch.device], None]) -> None:
        """Move the model to the device; reuse the base if another trainer of this process has it on that device.

        `digest` identifies the base's directory. `read_to` allocates and reads parameters that are still on the meta
        device, because no other trainer shares them.
        """
        prefix = f"{self._packed.model.base_model_prefix}."
        frozen = {name.removeprefix(prefix): p for name, p in self.base.items() if not p.requires_grad}
        self._shared = shared(frozen, digest=digest, device=device)
        read_to(device)
        self._packed.to(device)
        self._shared.share(frozen)

    # --- on disk ---------------------------------------------------------------------------------------------------

    def save(self, path: Path, *, base: Path, values: Mapping[str, Tensor]) -> None:
        """Write the `values` of the trained parameters into a new directory, which peft can load over `base`."""
        path.mkdir()
        self._exported(base).save_pretrained(str(path))
        tensors = {stored: values[name].detach().contiguous() for name, stored in self._stored_names().items()}
        save_file(tensors, path / ADAPTER_FILE, metadata={"format": "pt"})
        if self._value_head:
            head = {name.rpartition(".")[2]: values[name].detach() for name in self._value_head}
            save_file(head, path / VALUE_HEAD_FILE)

    @torch.no_grad()
    def restore(self, path: Path) -> None:
        """Load the values that `save` wrote. Raises StateError if they are missing, damaged or of other adapters."""
        try:
            names = {stored: name for name, stored in self._stored_names().items()}
            saved = {names.get(stored, stored): each for stored, each in load_file(path / ADAPTER_FILE).items()}
            if self._value_head:
                prefix = next(iter(self._value_head)).rpartition(".")[0]
                saved |= {f"{prefix}.{name}": each for name, each in load_file(path / VALUE_HEAD_FILE).items()}
        except (OSError, SafetensorError) as error:
            raise StateError(
                f"the adapters in {path} are missing or damaged: {error}; restore another checkpoint"
            ) from error
        shapes = {name: each.shape for name, each in self.trained.items()}
        if {name: each.shape for name, each in saved.items()} != shapes:
            raise StateError(f"the adapters in {path} are not those of this model; restore another checkpoint")
        for name, parameter in self.trained.items():
            parameter.copy_(saved[name])

    def record(self, *, digest: str) -> dict[str, Any]:
        """Return the settings that must not change when training resumes; dropout may change."""
        names = last_names(self._layers) if self.options.targets is None else list(self.options.targets)
        return {"rank": self.options.rank, "alpha": self.options.alpha, "targets": names, "base": digest}

    def _stored_names(self) -> dict[str, str]:
        """Return the names of A and B in peft's file; peft renames layers as transformers renames weights."""
        model, names = self._packed.model, {}
        for layer in self._layers:
            weight = torch.empty(0)
            (on_disk,) = revert_weight_conversion(model, {f"{layer}.weight": weight})
            for half in ("lora_A", "lora_B"):
                names[f"{layer}.{half}.weight"] = f"{_PEFT_PREFIX}{on_disk.removesuffix('weight')}{half}.weight"
        return names

    def _exported(self, base: Path) -> Any:
        """Return peft's configuration for these adapters over the model directory `base`.

        While peft loads an adapter for a mixture of experts, it redirects some names of modules to the fused experts.
        It leaves names of parameters alone, so a layer with such a name is listed by its `weight`. For one matrix,
        peft's tensors are the same in both forms.
        """
        redirected = _redirected(self._config, self._packed.model, last_names(self._layers))
        by_weight = [name for name in self._layers if name.rpartition(".")[2] in redirected]
        exported: Any = copy(self._config)
        exported.target_modules = set(self._layers).difference(by_weight)
        exported.base_model_name_or_path, exported.inference_mode = str(base), True
        if by_weight:
            exported.target_parameters = [f"{name}.weight" for name in by_weight]
            exported.lora_dropout = 0.0  # peft supports none on parameters
        return exported

    @property
    def _value_head(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.base.items() if parameter.requires_grad}

    def _draw(self) -> None:
        """Initialise A again as peft does: if the base was on the meta device, peft's initial values were lost."""
        for layer in self._layers.values():
            rank = self.options.rank
            layer.lora_A[_ADAPTER] = nn.Linear(layer.in_features, rank, bias=False)
            layer.lora_B[_ADAPTER] = nn.Linear(rank, layer.out_features, bias=False)
            layer.reset_lora_parameters(_ADAPTER, True)

    def _set_dropout(self, *, active: bool) -> None:
        for layer in self._layers.values():
            layer.lora_dropout.train(active)


def _redirected(config: Any, model: nn.Module, names: Iterable[str]) -> set[str]:
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    found = set()
    for name in names:
        converted = copy(config)
        converted.target_modules = {name}
        try:
            convert_peft_config_for_transformers(converted, model=model, conversions=None)
        except ValueError:  # raised for a name that peft redirects only together with other names
            found.add(name)
        else:
            found |= {name} - set(converted.target_modules)
    return found


@dataclass(slots=True, weakref_slot=True)
class SharedBase:
    """Frozen weights of a directory, which several models share until the last model is freed; never write to them."""

    weights: dict[str, Tensor]

    def share(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Add the weights of `parameters` (on the device) that the base lacks; let the others use the base's."""
        for name, parameter in parameters.items():
            parameter.data = self.weights.setdefault(name, parameter.data)


_BASES: Final[WeakValueDictionary[tuple[str, ...], SharedBase]] = WeakValueDictionary()


def shared(parameters: Mapping[str, nn.Parameter], *, digest: str, device: torch.device) -> SharedBase:
    """Return the shared base for the directory with this digest on the device; let `parameters` use its weights.

    A new base has no weights yet; `SharedBase.share` adds them. A parameter that the base lacks does not change.
    `parameters` are named without the prefix of language models, such as `model.`.
    """
    dtypes = {str(parameter.dtype) for parameter in parameters.values()}
    base = _BASES.setdefault((digest, str(device), *sorted(dtypes)), SharedBase({}))
    for name, parameter in parameters.items():
        if (own := base.weights.get(name)) is not None and own.dtype == parameter.dtype:
            hold(parameter, own)
    return base


def target_modules(model: Any, options: LoraOptions) -> Mapping[str, nn.Module]:
    """Return by name the linear layers that the options select in the text model. Raises SpecError."""
    head = model.get_output_embeddings()
    decoder = model.get_decoder()
    # In ModernBERT's decoder, the name that transformers looks up belongs to the output layer.
    text = {head, *(model.base_model if decoder is head else decoder).modules()}
    linear = {
        name: module for name, module in model.named_modules() if module in text and type(module).forward in _PRODUCTS
    }
    inner = {name: module for name, module in linear.items() if module is not head}
    if options.targets is None:
        return inner
    for target in options.targets:
        _refuse(model, target, linear, offered=inner)
    return {name: module for name, module in linear.items() if any(_is_named(name, each) for each in options.targets)}


def last_names(names: Iterable[str]) -> list[str]:
    """Return the distinct last components of modules' names, sorted."""
    return sorted({name.rpartition(".")[2] for name in names})


def _refuse(model: Any, target: str, linear: Mapping[str, nn.Module], *, offered: Mapping[str, nn.Module]) -> None:
    named = {name: module for name, module in model.named_modules() if _is_named(name, target)}
    linear_names = [name for name in named if name in linear]
    names = ", ".join(last_names(offered))
    if not linear_names:
        is_embedding = any(isinstance(each, nn.Embedding) for each in named.values())
        kind = "is an embedding" if is_embedding else "matches no linear layer"
        raise SpecError(f"options.lora.targets: {target!r} {kind}; linear layers of this model are {names}")
    embedding = model.get_input_embeddings()
    if any(linear[name].weight is embedding.weight for name in linear_names):
        raise SpecError(f"options.lora.targets: {target!r} is tied to the embedding; choose from {names}")


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def described(path: Path, options: LoraOptions) -> str:
    """Describe which parameters LoRA trains in a directory's model. Raises SpecError or ModelError."""
    model = check_weights(path)
    modules = target_modules(model, options)
    # A is [rank, in] and B is [out, rank].
    adapters = sum(options.rank * sum(cast(nn.Linear | Conv1D, each).weight.shape) for each in modules.values())
    share = share_of(adapters, sum(parameter.numel() for parameter in model.parameters()))
    return f"LoRA of rank {options.rank} on {', '.join(last_names(modules))}: {share}"
