"""`pipelinerl conformance` reports on each promise of the contract, and whether all are kept."""

import pytest

from pipelinerl.errors import ModelError, RecipeError
from pipelinerl.plugins.bigram.model import BigramModel
from pipelinerl.plugins.bigram.trainer import BigramTrainer
from pipelinerl.plugins.conformance.command_line import check_engine, check_trainer
from tests.fakes.scripted_engine import application
from tests.fakes.served import in_thread


class Forgetful:
    """A bigram trainer that breaks the contract, because it does not count its steps."""

    def __init__(self):
        self._trainer = BigramTrainer()

    def __getattr__(self, name):
        return getattr(self._trainer, name)

    model_version = 0


@pytest.fixture
def model(tmp_path):
    BigramModel.random(7, seed=0).save(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("name", "keeps"), [("bigram", True), (f"{__name__}:Forgetful", False)])
def test_conformance_command_says_whether_a_trainer_keeps_the_contract(model, name, keeps):
    messages = []
    assert check_trainer(name, model, say=messages.append) is keeps
    assert messages[-1].endswith(", 0 broken") is keeps
    assert any(line.startswith("failed") for line in messages) is not keeps


def test_conformance_command_rejects_an_invalid_trainer_or_model(model, tmp_path):
    with pytest.raises(RecipeError, match=r"expected package\.module:attribute or path\.py:attribute, got 'zzz'"):
        check_trainer("zzz", model, say=print)
    for content in ("{", "[]", "{}", '{"vocab_size": "many"}'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ModelError, match=r"must be a model directory whose config.json says vocab_size"):
            check_trainer("bigram", tmp_path, say=print)


def test_conforming_engine_passes_the_conformance_command():
    messages = []
    with in_thread(application(token="secret")) as url:
        assert check_engine(url, token="secret", say=messages.append), "\n".join(messages)
        assert not check_engine(url, token="other", say=lambda _: None)
