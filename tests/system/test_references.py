"""Loading user code by a reference such as `path.py:name`: the right code is loaded, once, from the right folder."""

import sys

import pytest

from pipelinerl.errors import RecipeError, ReferenceFailed, UserError
from pipelinerl.system.references import is_reference, last_line, load_reference, place_of, users_errors


@pytest.fixture(autouse=True)
def same_path():
    """Restore `sys.path` after the test."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.mark.parametrize("text", ["a.b:c", "x.py:y", "/a b/x.py:y", "../x.py:y", "reasoning_gym:spell_backward"])
def test_valid_references_to_user_code_are_recognised(text):
    assert is_reference(text)


@pytest.mark.parametrize("text", ["torch", "x.py", "x.py:", ":y", "a/b:c", "x.py:a b", ""])
def test_text_that_is_not_a_reference_to_user_code_is_rejected(text):
    assert not is_reference(text)
    with pytest.raises(ReferenceFailed, match=r"expected package.module:attribute or path.py:attribute, got"):
        load_reference(text)


def test_user_code_file_is_loaded_once_and_files_of_the_same_name_do_not_collide(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "r.py").write_text(f"import sibling_{folder}\ndef where(): return sibling_{folder}.HERE\n")
        (tmp_path / folder / f"sibling_{folder}.py").write_text(f"HERE = '{folder}'\n")
    a, b = (load_reference(f"{tmp_path / folder / 'r.py'}:where") for folder in ("a", "b"))
    assert (a(), b()) == ("a", "b")
    assert load_reference(f"{tmp_path}/a/../a/r.py:where") is a
    assert place_of(a) == f"where, {tmp_path}/a/r.py:2"


def test_folder_of_user_code_is_first_in_sys_path_during_its_import_and_last_afterwards(tmp_path):
    (tmp_path / "r.py").write_text(
        "import sys\nFIRST = sys.path[0]\ndef later():\n    import late_one\n    return late_one"
    )
    (tmp_path / "late_one.py").write_text("")
    assert load_reference(f"{tmp_path}/r.py:FIRST") == str(tmp_path)
    assert sys.path[-1] == str(tmp_path) and sys.path[0] != str(tmp_path)
    assert load_reference(f"{tmp_path}/r.py:later")().__file__ == f"{tmp_path}/late_one.py"


def test_user_code_that_failed_to_load_is_read_again_at_the_next_attempt(tmp_path):
    file = tmp_path / "r.py"
    file.write_text("x = 1 +\n")
    with pytest.raises(ReferenceFailed, match=r"r.py cannot be imported: .*r.py:1: SyntaxError: invalid syntax"):
        load_reference(f"{file}:x")
    file.write_text("x = 1 + 10\n")
    assert load_reference(f"{file}:x") == 11


@pytest.mark.parametrize("raised", ["ValueError('no')", "SystemExit(3)", "KeyboardInterrupt"])
def test_whatever_user_code_raises_becomes_one_sentence_that_names_its_line(tmp_path, raised):
    file = tmp_path / "r.py"
    file.write_text(f"raise {raised}\n")
    with pytest.raises(ReferenceFailed, match=r"r.py cannot be imported: .*r.py:1: \w+"):
        load_reference(f"{file}:f")
    file.write_text(f"def f():\n    raise {raised}\n")
    f = load_reference(f"{file}:f")
    with pytest.raises(RecipeError, match=r"^domains\.a\.source: .*r\.py:2: \w+"), users_errors("domains.a.source", f):
        f()
    with pytest.raises(UserError, match=r"^as it is$"), users_errors("domains.a.source", f):
        raise UserError("as it is")


def test_error_in_user_code_names_the_line_in_the_users_file_and_not_in_the_library_it_called(tmp_path):
    (tmp_path / "r.py").write_text("import json\ndef f():\n    return json.loads('{')\n")
    f = load_reference(f"{tmp_path}/r.py:f")
    with pytest.raises(ValueError) as raised:
        f()
    assert last_line(raised.value).startswith(f"{tmp_path}/r.py:3: json.decoder.JSONDecodeError: Expecting property")
