"""`pipelinerl warmstart` refuses bad input before fitting, leaves no files behind, and can stop by verifiers'
rewards.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipelinerl.commands.warmstart import WarmStartOptions, make
from pipelinerl.config.recipe import RunConfig, load, parse, to_table
from pipelinerl.enums import Skill
from pipelinerl.errors import UserError
from pipelinerl.models.tokenizer import ChatTokenizer


def options(**changes: object) -> WarmStartOptions:
    return WarmStartOptions(**{"hidden": 8, "layers": 1, "heads": 2, "band": (0.3, 0.4), "seed": 0, **changes})  # type: ignore[arg-type]


def test_existing_output_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(UserError, match=f"{tmp_path} exists; name a new directory"):
        make(load("tiny"), options(), output=tmp_path, say=print)
    assert (tmp_path / "precious").read_text() == "x"


def test_impossible_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected heads to divide hidden"):
        make(load("tiny"), options(heads=3), output=tmp_path / "new", say=print)
    assert list(tmp_path.iterdir()) == []


def two_instructions(verifier: str = "instruction_following") -> RunConfig:
    """Return a recipe with two instructions: one that random tokens follow, and one that they do not."""
    kinds = {"calm": "punctuation:no_comma", "loud": "change_case:english_capital"}
    domains = [
        {
            "name": name,
            "source": "instructions",
            "parameters": {"kinds": [kind], "max_instructions": 1, "sentences": 1},
            "max_tokens": 4,
            "verifier": verifier,
        }
        for name, kind in kinds.items()
    ]
    return parse(to_table(load("tiny")) | {"domains": domains})


def test_band_by_domain_is_of_the_verifiers_rewards(tmp_path: Path) -> None:
    said: list[str] = []
    wanted = options(skill=Skill.REWARD, vocab=300, band=(0.0, 1.0))
    make(two_instructions(), wanted, output=tmp_path / "new", say=said.append)
    assert ChatTokenizer.load(tmp_path / "new").vocab_size == 300
    rewards = dict(re.findall(r"(calm|loud) ([01]\.\d+) after [1-9]", said[-1]))
    assert float(rewards["loud"]) < 0.5 < float(rewards["calm"])


def test_answer_that_cannot_be_judged_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def shy(completion):\n    return None\n")
    config = two_instructions(f"{tmp_path}/mine.py:shy")
    with pytest.raises(UserError, match=r"domains\.calm: an answer could not be judged"):
        make(config, options(skill=Skill.REWARD, band=(0.0, 1.0)), output=tmp_path / "new", say=print)
    assert not (tmp_path / "new").exists()
