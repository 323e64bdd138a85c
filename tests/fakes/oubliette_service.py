"""A real Oubliette service without a sandbox: it compares outputs, but rejects requests to run programs."""

from pipelinerl.plugins.oubliette.remote.service import OublietteService, create_app
from pipelinerl.plugins.oubliette.repository import PersistentRepository, TransientRepository
from pipelinerl.plugins.oubliette.runner import LocalRunner
from pipelinerl.plugins.oubliette.runs import Tier
from pipelinerl.plugins.oubliette.sandbox import Isolation, Sandbox


def application(folder, *, token):
    persistent, transient = PersistentRepository(folder), TransientRepository(1 << 20)
    sandbox = Sandbox(_no_walls, at_once=1)
    sandbox.close()
    runner = LocalRunner(sandbox, tier="default", at_once=1, repository=persistent, outputs=transient)
    return create_app(
        OublietteService(runner, tier=Tier.DEFAULT, persistent=persistent, transient=transient), token=token
    )


def _no_walls(_):
    return Isolation(tier=Tier.DEFAULT, command=(), namespaces=True, outer_id=0, filter=b"")
