"""Secrets in environment variables are read by a role, and not inherited by the programs that it starts."""

import subprocess
import sys

from pipelinerl.config.recipe import load, parse, save, to_table
from pipelinerl.roles import catalogue
from pipelinerl.roles.process import TOKEN_VARIABLE, read_token
from pipelinerl.roles.role import REDIS_VARIABLE, RoleOptions
from pipelinerl.system import secret_variables
from pipelinerl.system.secret_variables import read_secret


def test_role_keeps_its_secrets_from_the_programs_that_it_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(secret_variables, "_withheld", {})
    secrets = {
        TOKEN_VARIABLE: "hunter2-1",
        REDIS_VARIABLE: "redis://:hunter2-2@h",
        "PIPELINERL_PROXY": "http://u:hunter2-3@p",
        "JUDGE_KEY": "hunter2-4",
    }
    for name, value in {**secrets, "SEARCH_KEY": "the agent's own"}.items():
        monkeypatch.setenv(name, value)
    judge = {"url": "http://127.0.0.1:9", "model": "m", "key_variable": "JUDGE_KEY"}
    domain = {"name": "d", "source": "s", "verifier": "judge", "judge": judge}
    save(parse(to_table(load("tiny")) | {"domains": [domain]}), tmp_path / "recipe.toml")
    seen = []

    async def main(identity):
        seen.append(subprocess.run([sys.executable, "-c", "import os; print(os.environ)"], stdout=-1, text=True).stdout)
        assert identity.token == "hunter2-1" == read_token(None)
        assert identity.config.domains[0].judge.token == "hunter2-4"
        assert {name: read_secret(name) for name in secrets} == secrets

    monkeypatch.setattr("pipelinerl.roles.process.Identity.log", lambda self: None)
    options = RoleOptions(name="actor-0", recipe=str(tmp_path / "recipe.toml"), run_dir=tmp_path)
    catalogue.run_role("actor", options, main)
    assert "hunter2" not in seen[0]
    assert "SEARCH_KEY" in seen[0], "users name the keys of their own agents as they like"
