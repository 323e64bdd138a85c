"""Math answers: the table of public forms, exact values, deadlines, and what breaks or deceives the comparison."""

import asyncio
import time
import tomllib
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from pipelinerl.plugins.math_answer import expressions, verifier as math_answers
from pipelinerl.plugins.math_answer.final_answer import final_answer, reference_answer
from pipelinerl.plugins.math_answer.notation import canonical, normal_form
from pipelinerl.plugins.math_answer.quantities import number
from pipelinerl.plugins.math_answer.structures import equal
from pipelinerl.plugins.math_answer.verifier import MathAnswer, boxed_reference
from pipelinerl.types import Outcome
from tests.fakes.problems import problem
from tests.patience import SOON_S

#: Mark of tests that share the math verifier: they must run on the verifier's event loop.
shared_loop = pytest.mark.asyncio(loop_scope="module")

PAIRS = tomllib.loads((Path(__file__).parents[3] / "benchmarks/math_answers.toml").read_text())
#: An expression that no evaluation ends.
ENDLESS = r"\sum_{k=1}^{10^{12}} \lfloor \sqrt{k} \rfloor"


def judged(gold, answer):
    try:
        return equal(reference_answer(gold), final_answer(answer), expressions.equal_expressions)
    except expressions.UnreadableReference:
        return False


@pytest.mark.parametrize("part", PAIRS)
def test_answers_in_the_forms_of_public_data_sets_are_judged_right(part):
    misjudged = [
        (gold, answer, right)
        for gold, answer, right in PAIRS[part]
        if judged(gold.replace("⏎", "\n"), answer.replace("⏎", "\n")) is not right
    ]
    rewarded = [pair for pair in misjudged if not pair[2]]
    assert not rewarded, "wrong answers are rewarded"
    assert len(misjudged) <= (0.02 * len(PAIRS[part]) if part == "held_out" else 0)


@st.composite
def notations(draw):
    """Draw a rational number as an answer may write it, and its value."""
    above, below = draw(st.integers(0, 10**9)), draw(st.integers(1, 10**6))
    whole, exponent = divmod(above, below)[0], draw(st.integers(-30, 30))
    rest = Fraction(above, below) - whole
    sign = draw(st.sampled_from(["", "-"]))
    text, value = draw(
        st.sampled_from(
            [
                (f"{above}", Fraction(above)),
                (f"{above:,}", Fraction(above)),
                (f"{above}/{below}", Fraction(above, below)),
                (rf"\dfrac{{{above}}}{{{below}}}", Fraction(above, below)),
                (rf"{whole}\frac{{{rest.numerator}}}{{{rest.denominator}}}", whole + rest),
                (f"{whole} {rest.numerator}/{rest.denominator}", whole + rest),
                (rf"{above} \times 10^{{{exponent}}}", above * Fraction(10) ** exponent),
                (f"{above}e{exponent}", above * Fraction(10) ** exponent),
                (f"{above}.{below}", Fraction(f"{above}.{below}")),
            ]
        )
    )
    return sign + text, -value if sign else value


@given(notations(), notations())
def test_rational_numbers_in_all_notations_are_read_and_compared_exactly(one, other):
    for text, value in (one, other):
        read = number(canonical(text))
        assert read is not None
        assert read.value == value
    assert judged(one[0], rf"\boxed{{{other[0]}}}") is (one[1] == other[1])


@shared_loop
async def test_answers_judged_in_the_worker_get_the_same_verdict_as_in_the_table(math_answer):
    pairs = [
        ("x+1", r"\boxed{1+x}", Outcome.CORRECT),
        ("x+1", r"\boxed{x+2}", Outcome.WRONG),
        (r"2\sqrt{2}", r"\boxed{\sqrt{8}}", Outcome.CORRECT),
        (r"\frac{1}{2004!}", r"\boxed{\frac{1}{2006!}}", Outcome.WRONG),
        (r"\{1,\sqrt{4}\}", r"\boxed{\{2,1\}}", Outcome.CORRECT),
        (r"\frac{1}{", r"\boxed{42}", Outcome.VERIFIER_ERROR),
        (r"x \foo< 1", r"\boxed{x \foo< 1}", Outcome.CORRECT),
        ("9^{9^{9^9}}", r"\boxed{42}", Outcome.VERIFIER_ERROR),
    ]
    verdicts = await asyncio.gather(*(math_answer.verify(problem(gold), text) for gold, text, _ in pairs))
    assert [verdict.outcome for verdict in verdicts] == [outcome for *_, outcome in pairs]


@shared_loop
async def test_verdicts_on_mathematically_equal_answers_contain_the_same_normalised_answer(math_answer):
    texts = ["\\boxed{0.50}", "\\boxed{\\frac{1}{2}}", "it is \\boxed{1/3}", "", "\\boxed{\\sin 30^\\circ}"]
    verdicts = [await math_answer.verify(problem("1/2"), text) for text in texts]
    assert [v.answer for v in verdicts] == ["1/2", "1/2", "1/3", "", "1/2"]


@pytest.mark.parametrize(
    "ground_truth", ["48/2 = 24 clips.\n24 + 48 = 72.\n#### 72", r"so it is $\boxed{72}$.", "$72$", "72"]
)
def test_reference_answer_in_a_box_is_what_check_judges(ground_truth):
    verdict = MathAnswer().at_once(problem(ground_truth), "It is \\boxed{72}.")
    assert verdict is not None
    assert (verdict.outcome, verdict.answer) == (Outcome.CORRECT, "72")
    assert normal_form(final_answer(boxed_reference(problem(ground_truth)))) == "72"


async def test_endless_comparison_is_wrong_at_the_deadline_and_does_not_block_the_event_loop(monkeypatch):
    monkeypatch.setattr(math_answers, "_SHARE_SPENT", 0.001)
    verifier = MathAnswer(deadline_s=1.0)
    try:
        await verifier.start()
        ticks, ticking = 0, True

        async def tick():
            nonlocal ticks
            while ticking:
                ticks += 1
                await asyncio.sleep(0.02)

        ticker = asyncio.create_task(tick())
        began = time.monotonic()
        verdict = await verifier.verify(problem("x+1"), rf"\boxed{{{ENDLESS}}}")
        ticking = False
        await ticker
        assert verdict.outcome is Outcome.WRONG, verdict.reason
        assert time.monotonic() - began < SOON_S
        assert ticks > 1
        monkeypatch.setattr(math_answers, "_SHARE_SPENT", 10.0)
        verdict = await verifier.verify(problem("x+1"), rf"\boxed{{{ENDLESS}}}")
        assert verdict.outcome is Outcome.TIMEOUT, "a comparison that only waited for a processor is masked"
        assert (await verifier.verify(problem("x+1"), "\\boxed{1+x}")).outcome is Outcome.CORRECT
    finally:
        await verifier.close()


def test_answer_that_crashes_the_math_comparison_is_wrong(monkeypatch):
    def fails(gold, given, *_):
        if "41" in str(given):
            raise MemoryError
        return bool(gold == given)

    monkeypatch.setattr(expressions, "_equal", fails)
    monkeypatch.setattr(math_answers.resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(math_answers.logging, "disable", lambda *_: None)
    comparison = math_answers.open_comparison("")
    assert comparison(["x+1", "x+41"]) is False
    assert comparison(["x+1", "1+x"]) is True
    assert comparison([r"\foo{", "x"]) is None


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^{9}}}",
        "((7!)!)!",
        r"\binom{10^9}{10^8}",
        "(" * 900,
        "x" * 1900,
        "1" * 1999,
        "=" * 1900,
        r"\sqrt{2}" * 200,
    ],
    ids=["tower", "factorials", "binomial", "brackets", "letters", "digits", "equals", "roots"],
)
def test_expression_that_is_too_large_or_malformed_is_wrong_without_an_evaluation(answer):
    began = time.thread_time()
    assert not judged("42", rf"\boxed{{{answer}}}")
    assert time.thread_time() - began < 2.0


@pytest.mark.parametrize(
    "text",
    [
        "<answer>" * 120_000,
        "answer" + "\n" * 10**6,
        "answer " * 150_000,
        "answer is " * 100_000,
        "\\boxed{" + "{" * 10**6,
        "\\boxed{1}" * 110_000,
        "0" * 10**6 + "x",
        "$" * 10**6,
        "<think>" * 140_000,
        "#### " * 200_000,
    ],
    ids=["tags", "newlines", "answers", "stated", "braces", "boxes", "zeros", "dollars", "thoughts", "hashes"],
)
def test_parsing_an_answer_of_a_million_characters_is_fast(text):
    began = time.thread_time()
    MathAnswer().at_once(problem("42"), text)
    assert time.thread_time() - began < 2.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{1} then \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("answer: 3\nthe answer is 4", "4"),
        (" 5 ", "5"),
        ("\\boxed{1", ""),
        ("<think>\\boxed{1}</think>So it is 2.", "2"),
    ],
)
def test_math_verifier_takes_the_last_statement_in_a_text_as_the_final_answer(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("raw", "normal"),
    [
        (" $1,234$ ", "1234"),
        ("007", "7"),
        ("+3.50", "3.5"),
        ("-0.0", "0"),
        ("(1,234)", "(1,234)"),
        ("5 \\text{ cm}", "5 cm"),
        ("3 4", "3 4"),
        ("\\left( 1, \\dfrac12 \\right]", "(1,\\frac{1}{2}]"),
    ],
)
def test_normal_form_of_an_answer_keeps_every_character_with_a_meaning(raw, normal):
    assert normal_form(raw) == normal
