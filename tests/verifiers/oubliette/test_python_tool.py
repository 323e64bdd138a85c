"""The python tool in the real sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from pipelinerl.verifiers.oubliette.python_tool import PythonTool
from pipelinerl.verifiers.oubliette.rules import CodeRules
from pipelinerl.verifiers.oubliette.runs import SandboxMissing
from pipelinerl.verifiers.oubliette.sandbox import Sandbox


@pytest.fixture
async def tool(sandbox: Sandbox) -> AsyncIterator[PythonTool]:
    made = PythonTool(CodeRules(time_limit_s=1.0), workers=1)
    yield made
    await made.close()


async def test_tool_calls_share_no_state(tool: PythonTool) -> None:
    assert await tool.call("x = 6\nopen('kept', 'w').write('x')\nprint(x * 7)") == ("42", False)
    shown, has_failed = await tool.call("print(x)")
    assert "NameError: name 'x' is not defined" in shown and has_failed
    assert "No such file" in (await tool.call("open('kept')"))[0]
    assert await tool.call("pass") == ("(the program printed nothing)", False)
    shown, _ = await tool.call("print('a' * 9000)")
    assert len(shown) < 4100 and "[5000 characters left out]" in shown


async def test_limits_of_the_domain_apply_to_tool_calls(tool: PythonTool) -> None:
    assert "processor time" in (await tool.call("while True: pass"))[0]


async def test_missing_sandbox_is_an_error_at_start_that_names_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxMissing, match=r"python tool needs a sandbox: .*bubblewrap, which is not installed"):
        await PythonTool(CodeRules()).start()
