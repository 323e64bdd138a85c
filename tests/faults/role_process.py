"""One role of a run in its own process, which can kill itself at a chosen point, and its witness files.

The role, its streams and its recipe are real. `Mortal` wraps the real stream: before and after each operation, the
process passes a point at which its `Fuse` may send it SIGKILL or SIGSTOP. Such points also surround each phase of a
weight update, each checkpoint, and a trainer's claim to the checkpoint directory. Witness files record events and
survive the process:

    made.jsonl      a group was appended and acknowledged by the server: its actor may rely on it from here on
    groups/         the payload of each such group, which the trainer may have trimmed from its stream
    trained.jsonl   a step is about to be reported, with its groups and two counts: the tokens sampled in its trained
                    rollouts, and the tokens in its loss
    published/      the weights of each (epoch, version), written before they leave the trainer
    trimmed.jsonl   the server has trimmed a stream; with the time just before the request

`MUTANTS` are flawed designs that look right; each can replace the design of its role.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final
from zlib import crc32

import numpy as np

from pipelinerl.config.recipe import parse
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.messages import REPORTS, ROLLOUTS, StepDone, decode_report
from pipelinerl.plugins.bigram import engine as bigram_engine  # noqa: F401  imported before the fork, not after each
from pipelinerl.plugins.episodes import episode
from pipelinerl.plugins.parameter_server import server as parameter_server_role
from pipelinerl.roles import actor_role, controller_role, engine_role, process, trainer_role
from pipelinerl.streams.records import decode_group
from pipelinerl.streams.stream import Entry
from pipelinerl.training import loop, publishing
from pipelinerl.training.checkpoints import checkpoint, checkpoint as checkpoint_fence
from pipelinerl.training.rollouts import admission, rollout_reader
from pipelinerl.types import Outcome, Verdict, VersionSpan
from pipelinerl.weights.broadcast import collective  # noqa: F401  likewise, with torch

OPERATIONS = (
    *("none", "append", "read", "claim", "acknowledge", "trim", "renew", "last_id", "update", "checkpoint"),
    *("claimed", "durable", "turn"),
)
VERIFIER = "tests.faults.role_process:Coin"
TOKEN = "of this test"


@final
class Coin:
    async def verify(self, problem, text):
        right = bool(crc32(text.encode()) & 1)
        return Verdict(outcome=Outcome.CORRECT if right else Outcome.WRONG, reward=float(right))


@final
class Fuse:
    """Shared memory by which one process makes another send itself a signal at a chosen point.

    Its three bytes are the operation, the number of points to pass first, and the signal.
    """

    def __init__(self, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_bytes(bytes(3))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), 3)

    def light(self, operation, points, number=signal.SIGKILL):
        """Make the process send itself the signal at `operation`, after it has passed `points` further points there."""
        self._shared[1] = points
        self._shared[2] = number
        self._shared[0] = OPERATIONS.index(operation)

    def put_out(self):
        self._shared[0] = 0

    def point(self, operation):
        if self._shared[0] and OPERATIONS[self._shared[0]] == operation:
            if self._shared[1] == 0:
                self.put_out()
                # Signal this thread: a signal to the whole process could reach another thread first.
                signal.pthread_kill(threading.get_ident(), self._shared[2])
                return
            self._shared[1] -= 1


@dataclass(frozen=True, slots=True)
class GroupEndpoint:
    role: str
    name: str
    recipe: Mapping[str, Any]
    run_dir: Path
    redis_url: str
    controller_url: str
    port: int = 0
    mutant: str = ""

    @property
    def fuse(self):
        return self.run_dir / "fuses" / self.name


def fingerprint(group):
    digest = hashlib.blake2b(digest_size=12)
    for rollout in group.rollouts:
        digest.update(f"{rollout.epoch}.{rollout.oldest_version}.{rollout.newest_version}".encode())
        for turn in rollout.turns:
            digest.update(turn.token_ids.tobytes() + turn.behavior_logprobs.tobytes())
    return digest.hexdigest()


@final
class Witness:
    def __init__(self, directory):
        self._directory = directory
        self._step: dict[str, Any] = {}

    def note_batch(self, batch):
        rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
        learning = [rollout for rollout, learns in zip(rollouts, batch.learns, strict=True) if learns]
        self._step = {
            "groups": [(group.index, fingerprint(group)) for group in batch.groups],
            "sampled": sum(rollout.num_sampled_tokens for rollout in learning),
            "in_loss": sum(int(each.loss_mask.sum()) for each in batch.micro_batches),
        }

    def published(self, epoch, version, weights):
        (self._directory / "published").mkdir(exist_ok=True)
        arrays = {name: np.asarray(array) for name, array in weights()}
        file = self._directory / "published" / f"{epoch}-{version}"
        np.savez(file.with_suffix(".new.npz"), **arrays)
        file.with_suffix(".new.npz").replace(file.with_suffix(".npz"))

    def will_report(self, payload):
        report = decode_report(payload)
        if isinstance(report, StepDone):
            self._write("trained", [{"epoch": report.epoch, "version": report.model_version, **self._step}])

    def made(self, payloads, first_id):
        lines = []
        (self._directory / "groups").mkdir(exist_ok=True)
        for number, payload in enumerate(payloads, start=first_id):
            (self._directory / "groups" / str(number)).write_bytes(payload)
            group = decode_group(payload)
            epoch = min(rollout.epoch for rollout in group.rollouts)
            newest = max(rollout.newest_version for rollout in group.rollouts)
            facts = {"index": group.index, "entry": number, "copy": fingerprint(group), "time": time.time()}
            lines.append(facts | {"epoch": epoch, "newest": newest})
        self._write("made", lines)

    def trimmed(self, stream, *, requested_at):
        self._write("trimmed", [{"stream": stream, "pid": os.getpid(), "requested_at": requested_at}])

    def _write(self, name, lines):
        handle = os.open(self._directory / f"{name}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(handle, "".join(json.dumps(line) + "\n" for line in lines).encode())
        os.close(handle)


@final
class Mortal:
    """A stream that may signal its own process before and after each operation."""

    def __init__(self, inner, fuse, witness):
        self._inner = inner
        self._fuse = fuse
        self._witness = witness

    async def append(self, stream, payloads, *, first_id=None):
        self._fuse.point("append")
        if stream == REPORTS:
            self._witness.will_report(payloads[0])
        new = await self._inner.append(stream, payloads, first_id=first_id)
        if stream.startswith(ROLLOUTS) and first_id is not None:
            self._witness.made(payloads, first_id)
        self._fuse.point("append")
        return new

    def __getattr__(self, name):
        method = getattr(self._inner, name)
        if not callable(method):
            return method

        async def called(*arguments, **named):
            self._fuse.point(name)
            requested_at = time.time()
            answer = await method(*arguments, **named)
            if name == "trim":
                self._witness.trimmed(arguments[0], requested_at=requested_at)
            self._fuse.point(name)
            return answer

        return called


@final
class SharedReader:
    """A rollout reader for the flawed trainers: it reads through a consumer group, not from the checkpoint's offset.

    It acknowledges entries as soon as it has read them (`early`), or only when a checkpoint contains them.
    """

    early = True

    def __init__(self, stream, **offsets):
        self._directives = rollout_reader.RolloutReader(stream, offsets={})
        self._stream = stream
        self._held: list[Entry] = []

    async def start(self):
        await self._directives.start()

    async def read_directives(self, *, block_s):
        return await self._directives.read_directives(block_s=block_s)

    async def read(self, *, block_s):
        groups = []
        for partition in await self._stream.streams(ROLLOUTS):
            entries = await self._stream.claim(
                partition, group="trainer", consumer="t", count=64, block_s=0.02, reclaim_idle_s=0.2
            )
            new = [entry for entry in entries if entry not in self._held]
            groups += [decode_group(entry.payload) for entry in new]
            self._held += new
        if self.early:
            await self._acknowledge()
        return rollout_reader.Arrivals(groups, await self._directives.read_directives(block_s=min(block_s, 0.05)))

    def safe_offsets(self, is_waiting):
        return {}

    async def trim(self, offsets, epoch):
        if not self.early:
            await self._acknowledge()

    async def _acknowledge(self):
        for entry in self._held:
            await self._stream.acknowledge(entry.stream, group="trainer", entry_ids=[entry.entry_id])
        self._held = []


def acknowledge_before_training():
    loop.RolloutReader = SharedReader  # type: ignore[misc,assignment]


def acknowledge_after_checkpoint():
    """Install a trainer that acknowledges groups only after a checkpoint and keeps no record of ended orders."""
    SharedReader.early = False
    loop.RolloutReader = SharedReader  # type: ignore[misc,assignment]
    admission.ConsumedLedger.has = lambda self, index: False  # type: ignore[method-assign]


def claim_nothing():
    """Install a trainer that commits checkpoints even after another trainer has claimed the directory."""
    checkpoint_fence.CheckpointFence.check = lambda self, epoch: None  # type: ignore[method-assign]


def name_the_newest_version():
    """Install an actor that records the newest version as the one that sampled the whole answer."""
    honest = episode._turn

    def turn(choice, context):
        made = honest(choice, context)
        return replace(made, spans=(VersionSpan(made.spans[-1].model_version, len(made.token_ids)),))

    episode._turn = turn


#: For each mutant, the role whose design it replaces, and the function that installs it.
MUTANTS: Mapping[str, tuple[str, Callable[[], None]]] = {
    "": ("", lambda: None),
    "unfenced": ("trainer", claim_nothing),
    "ack_before": ("trainer", acknowledge_before_training),
    "ack_after": ("trainer", acknowledge_after_checkpoint),
    "newest": ("actor", name_the_newest_version),
}


async def control(identity):
    """Run the controller; after a kill it continues from its journal, as when the launcher restarts it."""
    died_before = (identity.run_dir / "events.jsonl").exists()
    await controller_role.run(identity, from_journal=died_before)


ROLES: Mapping[str, Any] = {
    "controller": control,
    "controller_afresh": controller_role.run,
    "engine": engine_role.run,
    "parameter_server": parameter_server_role.run,
    "trainer": trainer_role.run,
    "actor": actor_role.run,
}


def play_role(seat):
    """Run one role in this process, with its `Fuse` and `Witness`."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the process that forked this one
    log = os.open(seat.run_dir / f"{seat.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    fuse, witness = Fuse(seat.fuse), Witness(seat.run_dir)
    open_stream, build = process.open_stream, loop.build

    async def opened(*arguments, **named):
        return Mortal(await open_stream(*arguments, **named), fuse, witness)

    def noted(groups, *arguments, **named):
        batch = build(groups, *arguments, **named)
        witness.note_batch(batch)
        return batch

    process.open_stream, loop.build = opened, noted
    update, sync = EngineClient.request_weight_update, checkpoint._sync_tree
    claim, record, publication = checkpoint.CheckpointStore.claim, episode.Episode.record, publishing.Publication

    async def updated(*arguments, **named):
        fuse.point("update")
        answer = await update(*arguments, **named)
        fuse.point("update")
        return answer

    def synced(directory):
        fuse.point("checkpoint")
        sync(directory)
        fuse.point("checkpoint")  # the files are written, but not yet renamed into place
        fuse.point("durable")

    def claimed(store, epoch):
        claim(store, epoch)
        fuse.point("claimed")

    def recorded(self, planned, completion):
        fuse.point("turn")
        turn = record(self, planned, completion)
        fuse.point("turn")
        return turn

    def published(**fields):
        witness.published(fields["epoch"], fields["version"], fields["weights"])
        return publication(**fields)

    EngineClient.request_weight_update, checkpoint._sync_tree = updated, synced  # type: ignore[method-assign]
    checkpoint.CheckpointStore.claim, episode.Episode.record = claimed, recorded  # type: ignore[method-assign]
    publishing.Publication = published  # type: ignore[misc,assignment]
    _, install = MUTANTS[seat.mutant]
    install()
    identity = process.Identity(
        config=parse(seat.recipe),
        run_dir=seat.run_dir,
        name=seat.name,
        redis_url=seat.redis_url,
        controller_url=seat.controller_url,
        token=TOKEN,
        port=seat.port,
    )
    process.run_until_signalled(ROLES[seat.role], identity)
