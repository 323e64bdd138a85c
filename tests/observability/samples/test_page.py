"""The report's section of samples: hostile text is escaped, long text is shortened, best and worst are shown."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from pipelinerl.observability.report import render, write_report
from pipelinerl.observability.run_history import tell
from pipelinerl.observability.samples.page import samples_section
from pipelinerl.observability.samples.record import SampleKind
from pipelinerl.observability.samples.sample_log import SampleLog
from tests.observability.samples.groups import HOSTILE, answer, group
from tests.observability.synthetic import events


class Elements(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_hostile_sample_text_is_escaped_in_the_report() -> None:
    evil = group(
        5,
        answer(HOSTILE, reason=HOSTILE, finish_reason=HOSTILE),
        domain=HOSTILE,
        tags=(HOSTILE,),
        prompt=HOSTILE,
        ground_truth=HOSTILE,
        problem_id=HOSTILE,
    )
    filtered = group(5, answer(HOSTILE), kind=SampleKind.FILTERED, why=HOSTILE)
    page = samples_section([evil, filtered])
    elements = Elements(page)
    assert set(elements.tags) == {"h3", "details", "summary", "dl", "dt", "dd"}
    assert page.count("</details>") == page.count("<details"), "none is closed from within"
    assert "<script>alert(1)</script>" in elements.text, "and it can be read"
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", page)
    page.encode()


def test_long_sample_text_is_shortened_in_the_report() -> None:
    page = samples_section([group(1, answer("<" * 10**6), prompt="&" * 10**6)])
    assert len(page) < 60_000 and "characters left out" in page


def test_report_shows_the_best_and_worst_samples_of_the_last_steps() -> None:
    made = [group(step, answer(f"good {step}", reward=1.0), answer(f"bad {step}", reward=0.0)) for step in range(1, 21)]
    text = Elements(samples_section(made)).text
    assert "Best of the last steps" in text and "Worst of the last steps" in text
    assert "good 20" in text and "bad 20" in text and "good 15" not in text


def test_report_contains_the_samples_of_its_run(tmp_path: Path) -> None:
    assert "No samples were kept." in render(tell(events(3)), "")
    (tmp_path / "events.jsonl").write_text("")
    log = SampleLog(tmp_path / "samples", "training", max_bytes=2**20)
    log.put(lambda: [group(1, answer("what it said"))])
    log.close()
    assert "what it said" in write_report(tmp_path).html.read_text()
