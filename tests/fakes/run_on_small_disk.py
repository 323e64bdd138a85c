"""A whole run in this process whose checkpoint disk fills up again and again.

    python -m tests.fakes.run_on_small_disk DIRECTORY ROUNDS       DIRECTORY/checkpoints is a small disk

Controller, actor, engine, broadcast and training loop are real; only the streams are in memory. Prints one JSON object.
"""

import asyncio
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelinerl.controller.decisions.giving_up import waiting_for
from pipelinerl.engines.http.server import create_app
from pipelinerl.engines.options import EngineOptions
from pipelinerl.errors import CheckpointError
from pipelinerl.plugins.bigram import engine as bigram_engine
from pipelinerl.streams.memory_stream import MemoryStream
from pipelinerl.training.checkpoints.checkpoint import CheckpointStore, load
from tests.end_to_end.test_bigram_run import model_in, new_controller, run
from tests.fakes.served import in_thread
from tests.fakes.small_disk import fill, free

#: Number of calls of `look` (one each 0.05 s) without a new version after which the trainer counts as paused.
_LOOKS = 6


@dataclass
class Disk:
    """Fills the checkpoint disk after each checkpoint, and frees it once the trainer pauses for lack of space."""

    checkpoints: Path
    store: CheckpointStore
    rounds: int
    pauses: list[dict[str, Any]] = field(default_factory=list)
    unloadable: list[str] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    made: int = 0
    is_full: bool = False

    def look(self, controller):
        """Fill the disk after a new checkpoint, or free it if the trainer is paused; return False to continue."""
        state = controller.state
        newest = max((int(path.name[5:]) for path in self.store.all()), default=0)
        if not self.is_full and newest > self.made and len(self.pauses) < self.rounds:
            self.made, self.is_full, self.seen = newest, True, []
            fill(self.checkpoints)
        elif self.is_full:
            self.seen.append(state.version)
            still = self.seen[-_LOOKS:]
            if state.trainer.unsaved and len(still) == _LOOKS and len(set(still)) == 1:
                self.pauses.append({"version": state.version, "waits_for": waiting_for(state, now=0.0)})
                self.unloadable += [str(error) for path in self.store.all() if (error := damage(path))]
                self.is_full = False
                free(self.checkpoints)
        return False


def damage(path):
    """Return the error that loading the checkpoint raises, or None if it loads."""
    try:
        load(path)
    except CheckpointError as error:
        return error
    return None


async def main(directory, rounds):
    model = model_in(directory / "model")
    controller = new_controller(steps=10 * (rounds + 2))
    # With a low learning rate, the answers of a group still differ at the end; equal answers would be filtered.
    controller.state.knobs = controller.state.knobs.patched({"learning_rate": 1e-3})
    store = CheckpointStore(directory / "checkpoints", keep=2, model_directory=model)
    disk = Disk(store.directory, store, rounds)
    options = EngineOptions(model_path=model, model_id="bigram", slots=64, max_waiting=4096, context_length=64)
    with in_thread(create_app(bigram_engine.from_options(options), token=None)) as url:
        events = await run(directory, model, url, controller=controller, stream=MemoryStream(), until=disk.look)
    return {
        "steps": [event["step"] for event in events if event["kind"] == "step"],
        "checkpoints": [event["model_version"] for event in events if event["kind"] == "checkpoint"],
        "delayed": [event["model_version"] for event in events if event["kind"] == "checkpoint_delayed"],
        "ledger": controller.state.account.ledger(),
        "pauses": disk.pauses,
        "unloadable": disk.unloadable,
        "finished": events[-1]["kind"],
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))))
