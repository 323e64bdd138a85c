"""Tests of each instruction with answers that follow or violate it, of metadata layouts, and of error messages."""

import json
import time

import pytest

from pipelinerl.errors import RecipeError
from pipelinerl.plugins.instructions.catalogue import (
    _FUNCTIONS,
    CATALOGUE,
    Matching,
    followed,
    instructions_of,
    make_instruction,
)
from pipelinerl.plugins.instructions.instruction import id_of, stated

#: For each case: an instruction's id and parameters, answers that follow it, and answers that violate it.
CASES = [
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, ["a b c", "don't go"], ["a b", "-"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ["a b"], ["a b c"]),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"},
     ["One. Two!", "He said 3.5 is it. “Yes.”", "One\n\nTwo", "これは文です。二つ目です。", "Is it? So."],
     ["One", "Dr. Who came to No. 5 St. James", "It is 3.14 or so.", "J. R. R. Tolkien wrote", "Wait ...", "..."]),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, ["One, e.g. this."],
     ["A. B? C"]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, ["a\n***\nb", "***\na *** b ***", "a\n* * *\nb"],
     ["a\n\nb", "a ***\n***\nb", "a***b***c"]),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "weekend"},
     ["a\n\nWeekend, at last", 'a\n\n\n\n"weekend" b'],
     ["a\n\nWeekends", "weekend\n\na", "a\n\nb\n\nweekend", "weekend"]),
    ("keywords:existence", {"keywords": ["sea", "c++"]}, ["SEA and C++", "seaside c++"], ["sea c+", "cpp"]),
    ("keywords:frequency", {"keyword": "a.b", "frequency": 2, "relation": "at least"}, ["a.b A.B"], ["a.b axb"]),
    ("keywords:frequency", {"keyword": "x", "frequency": 2, "relation": "less than"}, ["x"], ["x x"]),
    ("keywords:forbidden_words", {"forbidden_words": ["rock", "c++"]}, ["rocket, C+"], ["A Rock.", "use C++!"]),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": "at least"}, ["## a"], ["#"]),
    ("keywords:letter_frequency", {"letter": "E", "let_frequency": 2, "let_relation": "less than"}, ["e"], ["eE"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, ["* a\n - b", "*a\n*b"],
     ["* a", "**a**\n* b", "*\n* b"]),
    ("detectable_format:multiple_sections", {"section_spliter": "SECTION", "num_sections": 2},
     ["SECTION 1\na\nSECTION 2 b", "SECTION1 SECTION 2 SECTION 3"],
     ["SECTION 1", "Section 1 Section 2", "SECTION a SECTION b"]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, ["*a* **b**"],
     ["*a* ** *\n*", "* a\n* b"]),
    ("detectable_format:title", {}, ["<<a>>", "x\n  <<<b>>> y"], ["<<>>", "<< >>", "<a>", ">>a<<", "<<a\n>>"]),
    ("detectable_format:json_format", {}, ['{"a": 1}', "```json\n[1]\n```", "```\n{}```"],
     ["1", '"a"', "{", "{} so", "NaN"]),
    ("detectable_format:constrained_response", {}, ["I say: My answer is no."], ["My answer is perhaps.", "no"]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[a] [b c]"], ["[a]", "[] [a]", "[a\n] [b]"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["a\nP.S. b", "p. s. b"], ["PS b", "P.S"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["P.P.S b", "p. p.s"], ["P.S. b"]),
    ("change_case:english_capital", {}, ["SO, 1!", "É"], ["So", "123", "ЭТО"]),
    ("change_case:english_lowercase", {}, ["so, 1!"], ["So", "123", "это"]),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, ["I GO"],
     ["MADE-UP x"]),
    ("punctuation:no_comma", {}, ["a; b"], ["a, b"]),
    ("startend:end_checker", {"end_phrase": "The End."}, ['so "the end."', "THE END. \n"], ["The end", "The end. So."]),
    ("startend:quotation", {}, ['"a"', ' "a b"\n'], ['"', '""', 'a "b"', "'a'"]),
    ("combination:two_responses", {}, ["a ****** b", "******a\n******\nb"],
     ["a", "a****** a", "a******b******c", "a************b"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it. "}, ["say it. It."], ["It. Say it."]),
    ("language:response_language", {"language": "ko"}, ["안녕하세요 hi"], ["hello", "12", "これは"]),
    ("language:response_language", {"language": "ja"}, ["これは文です"], ["这是一个短句", "안녕"]),
    ("language:response_language", {"language": "zh"}, ["这是一个短句"], ["これは文です"]),
    ("language:response_language", {"language": "kn"}, ["ನಮಸ್ಕಾರ ಹೇಗಿದ್ದೀರಿ"], ["नमस्ते"]),
]  # fmt: skip


@pytest.mark.parametrize(("id", "parameters", "follow", "do_not"), CASES, ids=[case[0] for case in CASES])
def test_instruction_accepts_only_answers_that_follow_it(id, parameters, follow, do_not):
    instruction = make_instruction(id, parameters)
    assert [text for text in follow if not instruction.follows(text)] == []
    assert [text for text in do_not if instruction.follows(text)] == []
    assert stated(instruction)[0].isupper() and "{" not in stated(instruction)


def test_every_instruction_in_the_catalogue_has_a_test_case():
    assert {case[0] for case in CASES} == CATALOGUE.keys()


@pytest.mark.parametrize("piece", ["[", "*", "<<", " ", "\n", "a.", "A. ", '"', "a-", "{", "P.", "Day "])
def test_instruction_check_takes_linear_time(piece):
    """The slowest linear check takes 0.1 s of CPU time; a check of quadratic time would take a minute."""
    text = piece * (200_000 // len(piece))
    for id, parameters in {case[0]: case[1] for case in CASES}.items():
        began = time.thread_time()
        make_instruction(id, parameters).follows(text)
        assert time.thread_time() - began < 5.0, id


@pytest.mark.parametrize(
    ("text", "code", "other"),
    [
        ("Das ist ein kurzer Satz über das Wetter in den Bergen.", "de", "nl"),
        ("Это короткое предложение о погоде в горах.", "ru", "uk"),
        ("यह पहाड़ों के मौसम के बारे में एक छोटा वाक्य है।", "hi", "mr"),
        ("این یک جمله کوتاه درباره آب و هوا است.", "fa", "ar"),
    ],
)
def test_answer_languages_of_the_same_script_are_distinguished(text, code, other):
    pytest.importorskip("py3langid", reason="pip install -e '.[languages]'")
    wanted, unwanted = [make_instruction("language:response_language", {"language": each}) for each in (code, other)]
    assert wanted.follows(text) and not unwanted.follows(text)


@pytest.mark.parametrize(
    ("relation", "counts"),
    [
        ("at least", [10, 11, 12]), ("less than", [8, 9]), ("at most", [8, 9, 10]), ("around", [9, 10, 11]),
        ("exactly", [10]),
    ],
)  # fmt: skip
def test_word_count_is_compared_by_the_relation_in_the_instruction(relation, counts):
    instruction = make_instruction(IDS[1], {"num_words": 10, "relation": relation})
    assert [count for count in range(8, 13) if instruction.follows("a " * count)] == counts


def test_every_rlvr_ifeval_function_maps_to_an_instruction():
    arguments = {
        "N": 3, "quantifier": "at most", "i": 2, "first_word": "a", "keyword_list": ["a"], "word": "a",
        "forbidden_words": ["b"], "letter": "a", "language": "ko", "postscript_marker": "P.S.", "options": ["a"],
        "section_splitter": "Day", "original_prompt": "a", "end_phrase": "a",
    }  # fmt: skip
    made_of = {id_of(instructions_of({}, json.dumps({"func_name": name, **arguments}))[0]) for name in _FUNCTIONS}
    assert made_of == CATALOGUE.keys()


@pytest.mark.parametrize(
    ("id", "parameters", "sentence"),
    [
        ("keyword:existence", {}, "there is no instruction 'keyword:existence'; the nearest is keywords:existence"),
        ("keywords:existence", {}, "missing required field `keywords`"),
        ("keywords:existence", {"keywords": []}, "length >= 1"),
        ("keywords:existence", {"keywords": "sea"}, "Expected `array`"),
        ("length_constraints:number_words", {"num_words": "9", "relation": "at least"},
         r"Expected `int`.*\$.num_words"),
        ("length_constraints:number_words", {"num_words": 0, "relation": "at least"}, ">= 1"),
        ("length_constraints:number_words", {"num_words": 9, "relation": "about"}, "Invalid enum value 'about'"),
        ("length_constraints:number_words", {"num_words": 9, "relation": "at least", "n": 1}, "unknown field `n`"),
        ("keywords:letter_frequency", {"letter": "ab", "let_frequency": 1, "let_relation": "at least"}, "length <= 1"),
        ("language:response_language", {"language": "xx"}, "language must be one of .*, got 'xx'"),
        ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "a"},
         "nth_paragraph must be at most num_paragraphs, 2"),
    ],
)  # fmt: skip
def test_error_names_the_invalid_part_of_an_instruction(id, parameters, sentence):
    with pytest.raises(RecipeError, match=sentence):
        make_instruction(id, parameters)


IDS = ["punctuation:no_comma", "length_constraints:number_words"]
KWARGS = [{}, {"num_words": 9.0, "relation": "at least", "num_bullets": None}]


@pytest.mark.parametrize(
    ("metadata", "ground_truth"),
    [
        ({"instructions": [{"id": IDS[0]}, {"id": IDS[1], "num_words": 9, "relation": "at least"}]}, ""),
        ({"instruction_id_list": IDS, "kwargs": KWARGS}, "1000"),
        ({"instruction_id_list": json.dumps(IDS), "kwargs": json.dumps(KWARGS)}, ""),
        ({}, json.dumps([{"instruction_id": IDS, "kwargs": [None, KWARGS[1]]}])),
        (
            {},
            json.dumps(
                [
                    {"func_name": "validate_no_commas", "N": None},
                    {"func_name": "validate_word_constraint", "N": 9, "quantifier": "at least", "i": None},
                ]
            ),
        ),
    ],
)
def test_instructions_are_read_from_every_metadata_layout(metadata, ground_truth):
    parsed = instructions_of(metadata, ground_truth)
    assert list(map(id_of, parsed)) == IDS
    assert parsed[1].follows("a " * 9) and not parsed[1].follows("a " * 8)


@pytest.mark.parametrize(
    ("metadata", "ground_truth", "sentence"),
    [
        ({}, "", "the problem names no instructions; its metadata must hold"),
        ({}, "[" * 100_000, "names no instructions"),
        ({"instructions": []}, "", "names no instructions"),
        ({}, '{"func_name": "rm_rf"}', "func_name must be one of verify_keywords, .*, got 'rm_rf'"),
        ({}, '{"func_name": "validate_word_constraint", "N": 9, "quantifier": null}',
         "missing required field `relation`"),
        ({"instructions": ["punctuation:no_comma"]}, "", "must be a list of objects with an id"),
        ({"instruction_id_list": IDS, "kwargs": [{}]}, "", "each of 2 instructions must have an object of kwargs"),
        ({"instruction_id_list": "no", "kwargs": None}, "", "must be lists, got 'no'"),
    ],
)  # fmt: skip
def test_malformed_instruction_metadata_is_rejected(metadata, ground_truth, sentence):
    with pytest.raises(RecipeError, match=sentence):
        instructions_of(metadata, ground_truth)


NO_COMMA = make_instruction("punctuation:no_comma", {})
LOWERCASE = make_instruction("change_case:english_lowercase", {})
JSON = make_instruction("detectable_format:json_format", {})


def test_loose_matching_ignores_first_line_last_line_and_asterisks():
    answer = "Sure, here it is:\n**so it is**\nAnything else, Sir?"
    assert followed([NO_COMMA, LOWERCASE], answer) == [False, False]
    assert followed([NO_COMMA, LOWERCASE], answer, Matching.LOOSE) == [True, True]
    assert followed([JSON], "*{}*", Matching.LOOSE) == [True]
    assert followed([LOWERCASE], "a\nB\nc", Matching.LOOSE) == [False]
    assert followed([NO_COMMA], "a, b", Matching.LOOSE) == [False], "without its only line, the answer is empty"
    for blank in ("", " \n\t"):
        assert followed([NO_COMMA], blank) == followed([NO_COMMA], blank, Matching.LOOSE) == [False]
