"""Tests of fencing: of two trainers, the controller follows the later one and ignores reports of the earlier one."""

import msgspec

from pipelinerl.controller.state.inputs_and_effects import EngineRegistered, Send
from pipelinerl.messages import Checkpointed, TrainerReady
from tests.controller.world import ENGINE, World, controller


def ready(run, name):
    return TrainerReady(report_id=f"ready-{name}", incarnation=name, model_version=0, consumed=run.consumed())


def taken_over():
    run = World(controller()).begin()
    run.tell(ready(run, "2"))
    return run


def test_repeated_report_of_a_replaced_trainer_does_not_displace_its_replacement():
    """A trainer repeats its report until answered, so a copy may arrive after the later trainer's first report."""
    run = taken_over()
    assert run.controller.handle(ready(run, "1"), now=1.0) == []
    assert run.state.epoch == 2
    (answer,) = run.controller.handle(ready(run, "2"), now=1.0)
    assert isinstance(answer, Send) and answer.directive.epoch == 2
    run.controller.handle(ready(run, "3"), now=2.0)
    assert run.state.epoch == 3


def test_new_trainer_epoch_exceeds_every_epoch_recorded_in_the_trainers_directory():
    """A new controller on another machine has a new stream server, which has recorded none of these epochs."""
    run = World(controller())
    run.give(EngineRegistered(now=0.0, url=ENGINE))
    (_, answer) = run.controller.handle(msgspec.structs.replace(ready(run, "1"), claimed=5), now=1.0)
    assert isinstance(answer, Send) and answer.directive.epoch == 6


def test_checkpoint_report_of_a_replaced_trainer_is_ignored():
    run = taken_over()
    assert run.controller.handle(Checkpointed(epoch=1, model_version=3, path="p"), now=1.0) == []
    assert run.controller.handle(Checkpointed(epoch=2, model_version=3, path="p"), now=1.0) != []
