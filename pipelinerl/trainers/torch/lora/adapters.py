"""`Adapters`: LoRA (Hu et al. 2021, arXiv 2106.09685) on a packed model, by peft: what trains, what is merged, where.

    base       the model directory's weights, frozen, under Hugging Face's names; engines know these names alone
    trained    A and B of every target, in fp32, and a value head if there is one
    merged     W + (alpha / rank) · B A, made for one parameter when it is asked for, in fp32; the base never changes

What is read beside passes is the base's own storage, so that weights lent to the passes meanwhile are not seen.

The policy, a critic and a reference that begin from one directory compute with one copy of it, once per process and
device: each has a model of its own, whose frozen parameters are views of the same memory (`SharedBase`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, cast, final
from weakref import WeakValueDictionary

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pipelinerl.models.checkpoint import VALUE_HEAD_FILE
from pipelinerl.trainers.torch.lora.lora_options import LoraOptions
from pipelinerl.trainers.torch.lora.targets import last_names, target_modules
from pipelinerl.trainers.torch.packed_model import PackedModel, hold
from pipelinerl.trainers.torch.value_model import PackedValueModel
from trainer_contract.errors import SpecError, StateError

#: peft's name of the one adapter that there is.
_ADAPTER: Final = "default"
#: What peft puts before the names of a model's modules in the files that it reads.
_PEFT_PREFIX: Final = "base_model.model."
ADAPTER_FILE: Final = "adapter_model.safetensors"


@final
class Adapters:
    """Of one model, which must not be wrapped yet and lies on the CPU, or with its parameters on the meta device."""

    def __init__(self, packed: PackedModel | PackedValueModel, options: LoraOptions) -> None:
        """Freeze the model and put adapters beside its targets; B is 0, so nothing that it computes changes.

        A is drawn from torch's generator, which whoever loads a model seeds.

        Raises:
            SpecError: the model has no such targets, or nothing to adapt.
        """
        from peft import LoraConfig, inject_adapter_in_model

        self.options = options
        self._packed = packed
        #: Parameters of the model as it was, by name, a value head's among them.
        self.base = dict(packed.named_weights())
        modules = target_modules(packed.model, options)
        if not modules:
            raise SpecError(f"options.lora: {type(packed.model).__name__} has no linear layer; train it whole")
        self._config = LoraConfig(
            r=options.rank,
            lora_alpha=cast(Any, options.alpha),
            lora_dropout=options.dropout,
            target_modules=last_names(modules) if options.targets is None else list(options.targets),
            fan_in_fan_out=all(isinstance(module, Conv1D) for module in modules.values()),
            task_type="CAUSAL_LM" if isinstance(packed, PackedModel) else "FEATURE_EXTRACTION",
        )
        random, is_meta = torch.get_rng_state(), any(parameter.is_meta for parameter in self.base.values())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft's advice is about models that it wraps whole
            inject_adapter_in_model(self._config, packed.model, adapter_name=_ADAPTER)
        self._layers = {name: cast(Any, packed.model.get_submodule(name)) for name in modules}
        if is_meta:
            torch.set_rng_state(random)
            self._draw()
        self._pairs = {
            f"{name}.{half}.weight": cast(nn.Parameter, getattr(layer, half)[_ADAPTER].weight)
            for name, layer in self._layers.items()
            for half in ("lora_A", "lora_B")
        }
        self._set_dropout(active=False)  # modules begin in train mode
        self._shared: SharedBase | None = None

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """What the optimizer holds, by name: A and B of every target, in the model's order; then a value head."""
        return self._pairs | self._value_head

    @property
    def counts(self) -> tuple[int, int]:
        """How many parameters train, and how many the model has without adapters."""
        return sum(p.numel() for p in self.trained.values()), sum(p.numel() for p in self.base.values())

    @property
    def reaches_output(self) -> bool:
        """Is the output layer a target?"""
        return self._packed.model.get_output_embeddings() in self._layers.values()

    def pairs_of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of tensors by name those of A and B."""
        return {name: tensors[name] for name in self._pairs}

    def pair_of(self, name: str) -> tuple[str, str] | None:
        """Names of the A and the B of the base's parameter `name`; None where it has none."""
        layer = name.removesuffix(".weight")
        return (f"{layer}.lora_A.weight", f"{layer}.lora_B.weight") if layer in self._layers else None

    def merged(self, name: str, own: Tensor) -> Tensor:
        """The value of the base's parameter `name`, whose storage is `own`, with its adapter; not for writing to."""
        pair = self.pair_of(name)
        return own if pair is None else self.merged_with(name, own, *(self._pairs[half].detach() for half in pair))

    def merged_with(self, name: str, own: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """`merged` with these values of A [rank, in] and B [out, rank], as peft computes it."""
        layer = self._layers[name.removesuffix(".weight")]
        product = b @ a
        return own.float() + (product.T if layer.fan_in_fan_out else product) * layer.scaling[_ADAPTER]

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within it, passes are of the base alone."""
        try:
            for layer in self._layers.values():
                layer.enable_adapters(False)
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)

    @contextmanager
    def dropping_out(self) -> Iterator[None]:
        """Within it, and nowhere else, adapters' inputs are dropped out as the options say."""
        try:
            self._set_dropout(active=True)
            yield
        finally:
            self._set_dropout(active=False)

    def compact(self) -> None:
        """Keep the base's matrices in bf16.

        Where they came from bf16 and products are of bf16 (autocast), every result keeps its bits: vectors stay fp32,
        and what an embedding looks up is made fp32 again, as the residual stream is over an fp32 base.
        """
        for parameter in self.base.values():
            if parameter.ndim >= 2 and not parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()
        for module in self._packed.model.modules():
            if isinstance(module, nn.Embedding):
                module.register_forward_hook(lambda _module, _given, found: found.float())

    def to(self, device: torch.device, *, digest: str, read_to: Callable[[torch.device], None]) -> None:
        """Move the model to the device, but for a base which another trainer of this process has there already.

        Args:
            digest: of the directory that the base is from.
            read_to: gives what is on the meta device its values on another.
        """
        prefix = f"{self._packed.model.base_model_prefix}."
        frozen = {name.removeprefix(prefix): p for name, p in self.base.items() if not p.requires_grad}
        self._shared = shared(frozen, digest=digest, device=device)
        read_to(device)
        self._packed.to(device)
        self._shared.take_up(frozen)

    # --- on disk ---------------------------------------------------------------------------------------------------

    def save(
        self, path: Path, *, base: Path, own: Mapping[str, Tensor], pairs: Mapping[str, Tensor] | None = None
    ) -> None:
        """Write peft's own directory, which any tool that knows peft loads over `base`; a value head lies in it.

        Args:
            own: storage of the base's parameters, of which the value head is written.
            pairs: values of A and B by name; None takes this process' own.
        """
        path.mkdir()
        self._config.base_model_name_or_path = str(base)
        self._config.inference_mode = True
        self._config.save_pretrained(str(path))
        tensors = {
            f"{_PEFT_PREFIX}{name}": tensor.detach().contiguous() for name, tensor in (pairs or self._pairs).items()
        }
        save_file(tensors, path / ADAPTER_FILE, metadata={"format": "pt"})
        if self._value_head:
            head = {name.rpartition(".")[2]: own[name] for name in self._value_head}
            save_file(head, path / VALUE_HEAD_FILE)

    @torch.no_grad()
    def restore(self, path: Path) -> None:
        """Take the values that `save` wrote. Raises StateError when they are missing, damaged or of other adapters."""
        try:
            saved = {name.removeprefix(_PEFT_PREFIX): each for name, each in load_file(path / ADAPTER_FILE).items()}
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
        """What must be the same where training goes on: of dropout nothing, which may change."""
        names = sorted(self._config.target_modules or ())
        return {"rank": self.options.rank, "alpha": self.options.alpha, "targets": names, "base": digest}

    @property
    def _value_head(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.base.items() if parameter.requires_grad}

    def _draw(self) -> None:
        """Draw A once more, as peft does: it puts adapters beside their base, and on the meta device it loses them."""
        for layer in self._layers.values():
            rank = self.options.rank
            layer.lora_A[_ADAPTER] = nn.Linear(layer.in_features, rank, bias=False)
            layer.lora_B[_ADAPTER] = nn.Linear(rank, layer.out_features, bias=False)
            layer.reset_lora_parameters(_ADAPTER, True)

    def _set_dropout(self, *, active: bool) -> None:
        for layer in self._layers.values():
            layer.lora_dropout.train(active)

    @classmethod
    def of(cls, packed: PackedModel | PackedValueModel, options: LoraOptions | None) -> Self | None:
        """Adapters, if the options ask for them. Raises as the class does."""
        return None if options is None else cls(packed, options)


@final
@dataclass(slots=True, weakref_slot=True)
class SharedBase:
    """The frozen weights of a model directory, held by each who computes with them; the last to be dropped frees them.

    Promise: whoever takes them up never writes to them.
    """

    weights: dict[str, Tensor]

    def take_up(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Give what is not here yet, once it is on the device; take what is."""
        for name, parameter in parameters.items():
            parameter.data = self.weights.setdefault(name, parameter.data)


_BASES: Final[WeakValueDictionary[tuple[str, ...], SharedBase]] = WeakValueDictionary()


def shared(parameters: Mapping[str, nn.Parameter], *, digest: str, device: torch.device) -> SharedBase:
    """The base from the directory with this digest; what of it is on the device takes the parameters' place there.

    Args:
        parameters: by the names that they have in the layers alone, without what is before these in a language model.
    """
    dtypes = {str(parameter.dtype) for parameter in parameters.values()}
    base = _BASES.setdefault((digest, str(device), *sorted(dtypes)), SharedBase({}))
    for name, parameter in parameters.items():
        if (own := base.weights.get(name)) is not None and own.dtype == parameter.dtype:
            hold(parameter, own)
    return base
