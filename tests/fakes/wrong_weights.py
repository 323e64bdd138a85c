"""One table of faults that leave an engine serving something else than it was sent, or than it reports.

`FAULTS` maps what is wrong to a `Fault`, which puts it into the torch engine of this process. Three kinds of tests use
it: those of the conformance kit, those of a run's detectors, and those of whole runs. For a run, `from_options` is an
engine type; `$WRONG_WEIGHTS` names the fault, and `$WRONG_UPDATES` the first and the last wrong update, counted from 1;
faults that are not in the weights are there from the start. Only the engine named engine-1 has the fault.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from pytest import MonkeyPatch

from inference_contract.conformance.faults import WEIGHT_FAULTS, Sent
from inference_contract.conformance.reference import Weights, packed, unpacked
from inference_contract.weights import OnUpdate
from pipelinerl.engines.batching.batching_engine import BatchingEngine
from pipelinerl.engines.batching.model_runner import Scheduler
from pipelinerl.engines.torch import engine as torch_engine, runner as torch_runner
from pipelinerl.engines.torch.blocks import BlockTable
from pipelinerl.engines.torch.decoder import LlamaForward
from pipelinerl.engines.torch.quantized import QuantizedWeights
from pipelinerl.engines.torch.runner import TorchRunner
from pipelinerl.engines.torch.weights import TorchWeights

#: Counts updates from 1; a fault in the weights may be limited to some of them.
Window = Callable[[int], bool]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault: where it lies, how to put it into this process, and the check of the kit that must fail in float32."""

    where: str
    inject: Callable[[MonkeyPatch], None]
    caught_by: str
    edits_directory: Callable[[Path], None] | None = None


# --- weights -----------------------------------------------------------------------------------------------------


def inject_weights(spoil, patch, *, when=lambda _: True):
    """Make every engine of this process spoil the weights of an update after their digest was compared."""
    finish = BatchingEngine.finish_staging
    received: dict[int, list[Weights]] = {}

    def spoiled(engine):
        staging: Any = engine.staging()
        staging = staging if isinstance(staging, torch.Tensor) else torch.from_numpy(staging)
        due = unpacked(staging, engine.layout)
        updates = received.setdefault(id(engine), [])
        updates.append(due)
        if when(len(updates)):
            staging.copy_(packed(spoil(Sent(updates[0], updates[max(len(updates) - 2, 0)], due)), engine.layout))
        finish(engine)

    patch.setattr(BatchingEngine, "finish_staging", spoiled)


def _from_the_first_update(change):
    """Return a fault that changes the torch engine's runner once, just before its first update.

    Not earlier, because an engine compares itself with transformers when it starts.
    """

    def inject(patch):
        swap, changed = TorchRunner.swap, set[int]()

        def swapped(self):
            if id(self) not in changed:
                changed.add(id(self))
                with torch.no_grad():
                    change(self)
            swap(self)

        patch.setattr(TorchRunner, "swap", swapped)

    return inject


def _untie(runner):
    head = runner._model.lm_head.weight.detach().clone()
    runner._forward._head = lambda hidden: torch.nn.functional.linear(hidden, head)


def _other_buffer(runner):
    runner._forward._sin.mul_(1.01)


def _coarser_arithmetic(runner):
    norm = runner._forward._rms_norm
    runner._forward._rms_norm = lambda *given: norm(*given).to(torch.bfloat16).float()


def _stale_scales(patch):
    finish = QuantizedWeights.finish_staging

    def without_scales(self):
        finish(self)
        for scale in self._scales.values():
            self._spare[scale].copy_(self._served[scale])

    patch.setattr(QuantizedWeights, "finish_staging", without_scales)


def _changes_in_service(patch):
    prefill = TorchRunner.prefill

    def changing(self, prefills):
        for parameter in self._model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data * 1.01
        prefill(self, prefills)

    patch.setattr(TorchRunner, "prefill", changing)


# --- updates, labels, caches, positions --------------------------------------------------------------------------


def _label_without_load(patch):
    patch.setattr(TorchRunner, "swap", lambda self: self._table.forget())


def _load_without_label(patch):
    commit = BatchingEngine.commit

    async def mislabelled(self, *, version, epoch, on_update):
        return await commit(self, version=version - 1, epoch=epoch, on_update=on_update)

    patch.setattr(BatchingEngine, "commit", mislabelled)


def _half_a_step_late(patch):
    swap, decode = TorchWeights.swap, TorchRunner.decode
    late: dict[str, Any] = {}

    def half(self):
        old = {name: parameter.data for name, parameter in self._parameters.items()}
        swap(self)
        for name in list(self._parameters)[len(old) // 2 :]:
            late[name] = (self._parameters[name], self._parameters[name].data)
            self._parameters[name].data = old[name]

    def then_whole(self, num_rows):
        try:
            return decode(self, num_rows)
        finally:
            for parameter, data in late.values():
                parameter.data = data
            late.clear()

    patch.setattr(TorchWeights, "swap", half)
    patch.setattr(TorchRunner, "decode", then_whole)


def _keeps_kv(patch):
    commit = BatchingEngine.commit

    async def kept(self, *, version, epoch, on_update):
        return await commit(self, version=version, epoch=epoch, on_update=OnUpdate.CONTINUE)

    patch.setattr(BatchingEngine, "commit", kept)


def _old_prefixes(patch):
    patch.setattr(BlockTable, "forget", lambda self: None)


def _positions_after_an_update(patch):
    swap, fill = TorchRunner.swap, LlamaForward.fill
    off = [0]

    def swapped(self):
        swap(self)
        off[0] = 1

    def shifted(self, token_ids, positions, *rest):
        positions = positions + off[0]
        off[0] = 0
        return fill(self, token_ids, positions, *rest)

    patch.setattr(TorchRunner, "swap", swapped)
    patch.setattr(LlamaForward, "fill", shifted)


def _positions_after_a_preemption(patch):
    preempt, fill = Scheduler.preempt, LlamaForward.fill
    off = [0]

    def preempted(self, row):
        off[0] = 1
        return preempt(self, row)

    def shifted(self, token_ids, positions, *rest):
        positions = positions + off[0]
        off[0] = 0
        return fill(self, token_ids, positions, *rest)

    patch.setattr(Scheduler, "preempt", preempted)
    patch.setattr(LlamaForward, "fill", shifted)


# --- sampling and log-probs --------------------------------------------------------------------------------------


def _asked(**fields):
    """Return a fault that samples with other parameters than the request's, as a server's own defaults would."""

    def inject(patch):
        complete = BatchingEngine.complete

        async def otherwise(self, request):
            return await complete(self, request.model_copy(update=fields))

        patch.setattr(BatchingEngine, "complete", otherwise)

    return inject


def _reported(change):
    def inject(patch):
        complete = BatchingEngine.complete

        async def otherwise(self, request):
            answer = await complete(self, request)
            choices = [
                choice.model_copy(update={"token_logprobs": change(choice.token_logprobs)})
                if choice.token_logprobs
                else choice
                for choice in answer.choices
            ]
            return answer.model_copy(update={"choices": choices})

        patch.setattr(BatchingEngine, "complete", otherwise)

    return inject


def _before_temperature(patch):
    sample = torch_runner.sample

    def raw(logits, **named):
        drawn = sample(logits, **named)
        drawn.logprobs.copy_(torch.log_softmax(logits.float(), -1).gather(1, drawn.token_ids[:, None])[:, 0])
        return drawn

    patch.setattr(torch_runner, "sample", raw)


# --- text --------------------------------------------------------------------------------------------------------


def _nothing(_):
    """Leave this process as it is: the fault lies in the engine's directory."""


def _other_tokenizer(directory):
    path = directory / "tokenizer.json"
    table = json.loads(path.read_text())
    vocab = table["model"]["vocab"]
    one, other = "l", "o"
    vocab[one], vocab[other] = vocab[other], vocab[one]
    path.write_text(json.dumps(table))


def _template(change, directory):
    path = directory / "tokenizer_config.json"
    table = json.loads(path.read_text())
    table["chat_template"] = change(table["chat_template"])
    path.write_text(json.dumps(table))


_UPDATE: Final = "update_reaches_every_tensor"
_IN_FLIGHT: Final = "update_in_flight_computes_with_both_versions"
_SAMPLES: Final = "samples_follow_the_distribution"
_PREEMPTED: Final = "preempted_samples_compute_as_others"
_PROMPTS: Final = "prompts_are_those_of_the_directory"

FAULTS: Final[Mapping[str, Fault]] = {
    **{
        name: Fault("weights", partial(inject_weights, spoil), _UPDATE)
        for name, spoil in WEIGHT_FAULTS.items()
    },
    "the tied head does not follow": Fault("weights", _from_the_first_update(_untie), _UPDATE),
    "a buffer is another": Fault("weights", _from_the_first_update(_other_buffer), _UPDATE),
    "the scales of int8 weights are stale": Fault("weights", _stale_scales, _UPDATE),
    "arithmetic in bfloat16": Fault("weights", _from_the_first_update(_coarser_arithmetic), _UPDATE),
    "weights change in service": Fault("weights", _changes_in_service, _UPDATE),
    "label without load": Fault("update", _label_without_load, _UPDATE),
    "load without label": Fault("update", _load_without_label, _UPDATE),
    "commit in the middle of a step": Fault("update", _half_a_step_late, _IN_FLIGHT),
    "recompute_kv keeps the cache": Fault("cache", _keeps_kv, "recompute_kv_leaves_no_old_cache"),
    "prefixes outlive an update": Fault("cache", _old_prefixes, _UPDATE),
    "positions are off by one after an update": Fault("positions", _positions_after_an_update, _UPDATE),
    "positions are off by one after a preemption": Fault("positions", _positions_after_a_preemption, _PREEMPTED),
    "top-p of the server, processed log-probs": Fault("sampling", _asked(top_p=0.9), _UPDATE),
    "top-p of the server, policy's log-probs": Fault("sampling", _asked(top_p=0.9, policy_logprobs=True), _SAMPLES),
    "top-k of the server, policy's log-probs": Fault("sampling", _asked(top_k=8, policy_logprobs=True), _SAMPLES),
    "min-p of the server, policy's log-probs": Fault("sampling", _asked(min_p=0.1, policy_logprobs=True), _SAMPLES),
    "a penalty of the server": Fault("sampling", _asked(presence_penalty=0.5), _UPDATE),
    "the server's temperature": Fault("sampling", _asked(temperature=0.6), _UPDATE),
    "log-probs before the temperature": Fault("log-probs", _before_temperature, _UPDATE),
    "log-probs shifted by one": Fault("log-probs", _reported(lambda each: [each[-1], *each[:-1]]), _UPDATE),
    "another tokenizer": Fault("text", _nothing, _PROMPTS, _other_tokenizer),
    "another template": Fault("text", _nothing, _PROMPTS, partial(_template, lambda old: old.replace("<|end|>", ""))),
    "another default system prompt": Fault(
        "text", _nothing, _PROMPTS, partial(_template, lambda old: "<|system|>be kind<|end|>" + old)
    ),
}  # fmt: skip

#: Faults of a whole run's tests, by short names for the environment.
IN_RUNS: Final = {
    "frozen": "no tensor follows",
    "zeroed": "one tensor is zero",
    "one": "the largest weight of one tensor is doubled",
    "norms": "two norms are exchanged",
    "layers": "two layers' q are exchanged",
    "half": "half of the layers are the last version's",
    "shifted": "log-probs shifted by one",
}


def from_options(options):
    """Return the torch engine, with the fault of the environment in engine-1."""
    if "engine-1" in sys.argv:
        first, last = map(int, os.environ["WRONG_UPDATES"].split())
        named, patch = IN_RUNS[os.environ["WRONG_WEIGHTS"]], MonkeyPatch()
        if named in WEIGHT_FAULTS:
            inject_weights(WEIGHT_FAULTS[named], patch, when=lambda update: first <= update <= last)
        else:
            FAULTS[named].inject(patch)
    return torch_engine.from_options(options)
