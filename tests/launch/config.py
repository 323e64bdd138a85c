"""The smallest recipe that can be planned, with changes."""

from pipelinerl.config.recipe import parse

#: Sections of a recipe without GPUs.
WITHOUT_GPUS = {"engine": {"type": "bigram"}, "trainer": {"type": "bigram"}}


def config_of(**sections):
    return parse({"model": {"path": "m"}, "domains": [{"name": "d", "source": "s"}], **sections})
