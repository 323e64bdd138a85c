"""The torch trainer: any Hugging Face causal language model, as a policy or, with a value head, as a critic."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import TrainerComponent

COMPONENT: Final = TrainerComponent(
    build="pipelinerl.trainers.torch.trainer:TorchTrainer",
    needs=("torch", "transformers", "accelerate"),
    check_options="pipelinerl.trainers.torch.options:options_of",
    check="pipelinerl.trainers.torch.findings:findings",
    replays_routing=True,
    casts=True,
    use_threads="torch:set_num_threads",
)
