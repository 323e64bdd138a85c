"""The quick check of a chat template, without a tokenizer, rejects exactly the chats that the tokenizer rejects."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from pipelinerl.config.recipe import MODELS
from pipelinerl.errors import ModelError
from pipelinerl.models.chat_template import refuse_unrenderable
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.types import Message
from tests.patience import PATIENCE_S

EACH = "{% for m in messages %}"
NO_SYSTEM = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + EACH
    + "{{ m.content | trim }}{% endfor %}"
)
ROLES = EACH + "{{ {'user': 'U', 'assistant': 'A'}[m.role] + m.content }}{% endfor %}"
RICH = (
    "{%- set now = namespace(role='') %}"
    + EACH
    + "{% if m.role == 'tool' %}{% continue %}{% endif %}{% set now.role = m.role %}"
    "{{ m | tojson(indent=1) }}{{ strftime_now('%Y') }}{{ dict(a=m.content).a.split('x')[-1] }}{% endfor %}"
    "{% if deep is defined and deep %}{{ 1 + none }}{% endif %}{{ add_generation_prompt }}"
)
MARKED = EACH + "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
USER, SYSTEM, TOOL = Message("user", "ab"), Message("system", "b"), Message("tool", "c")


def model_with(folder, template, file="tokenizer_config.json"):
    path = shutil.copytree(MODELS / "tiny_speller", folder / "model")
    settings = json.loads((path / "tokenizer_config.json").read_text())
    if file == "tokenizer_config.json":
        settings["chat_template"] = template
    else:
        (path / file).write_text(str(template))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize(
    "template", [NO_SYSTEM, ROLES, RICH, MARKED, "{{ unclosed", [{"name": "default", "template": ROLES}]]
)
@pytest.mark.parametrize("messages", [(USER,), (SYSTEM, USER), (USER, TOOL), ()], ids=["u", "su", "ut", "none"])
@pytest.mark.parametrize("given", [{}, {"deep": True}, {"messages": 1}], ids=["plain", "deep", "taken"])
def test_quick_check_of_a_chat_template_rejects_the_same_chats_as_the_tokenizer(template, messages, given, tmp_path):
    path = model_with(tmp_path, template)

    def error_of(path, quick):
        try:
            if quick:
                refuse_unrenderable(path, messages, given)
            else:
                ChatTokenizer.load(path).encode_chat(messages, given)
        except ModelError as error:
            return str(error)
        return ""

    assert error_of(path, quick=True) == error_of(path, quick=False)


def test_chat_template_in_a_separate_file_takes_precedence_over_the_one_in_the_tokenizer_config(tmp_path):
    path = model_with(tmp_path, NO_SYSTEM, "chat_template.jinja")
    refuse_unrenderable(path, [USER], {})
    with pytest.raises(ModelError, match="the chat template cannot render 2 messages: System role not supported"):
        refuse_unrenderable(path, [SYSTEM, USER], {})


def test_quick_check_of_a_chat_template_imports_no_heavy_library(tmp_path):
    program = (
        "import sys\nfrom pathlib import Path\nfrom pipelinerl.models.chat_template import refuse_unrenderable\n"
        "from pipelinerl.types import Message\n"
        "refuse_unrenderable(Path(sys.argv[1]), [Message('user', 'ab')], {'deep': False})\n"
        "print({'torch', 'transformers', 'tokenizers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(model_with(tmp_path, RICH))],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout == "set()\n", done.stderr
