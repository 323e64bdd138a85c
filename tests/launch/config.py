"""The smallest recipe that can be planned, with changes."""

from pipelinerl.config.recipe import parse
from pipelinerl.observability.events import read_events

#: Sections of a recipe without GPUs.
WITHOUT_GPUS = {"engine": {"type": "bigram"}, "trainer": {"type": "bigram"}}


def config_of(**sections):
    return parse({"model": {"path": "m"}, "domains": [{"name": "d", "source": "s"}], **sections})


def events_of(directory, kind):
    path = directory / "events.jsonl"
    return [event for event in (read_events(path) if path.is_file() else []) if event["kind"] == kind]
