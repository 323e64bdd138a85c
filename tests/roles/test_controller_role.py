"""What the controller is built from when its run goes on."""

from __future__ import annotations

from pipelinerl.config import load
from pipelinerl.roles.controller_role import overruled
from pipelinerl.roles.parts import knobs_of


def test_it_says_which_knobs_an_edited_recipe_does_not_change() -> None:
    config = load("tiny", ["optimizer.learning_rate=1e-5"])
    knobs = knobs_of(config)
    assert overruled(config, knobs) == []
    (sentence,) = overruled(config, knobs.patched({"learning_rate": 0.5}))
    assert sentence == (
        "learning_rate is 0.5, as it was set while the run was live; the recipe says 1e-05: `pipelinerl knobs set` "
        "changes it"
    )
