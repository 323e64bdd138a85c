"""Build any server of the project as an ASGI application, with or without an authentication token.

Each server's modules are imported on demand, so that a process that serves one server starts quickly.
"""

TOKEN = "run-token"
#: Servers that can run without authentication (`--no-token`), and then serve every user of the machine.
OPEN_SERVERS = ("engine", "controller", "parameter server", "verifier", "oubliette")
SERVERS = (*OPEN_SERVERS, "page")
#: The servers that are fuzzed: all of `SERVERS`, and the batching engine, which is not in `SERVERS` because it has the
#: same routes as the scripted engine.
FUZZED = (*SERVERS, "batching engine")


def application(server, directory, *, token=TOKEN):
    """Return the application of the named server, one of `FUZZED`."""
    if server == "engine":
        from tests.fakes import scripted_engine

        return scripted_engine.application(token=token)
    if server == "batching engine":
        from tests.fakes import version_engine

        return version_engine.application(token=token)
    if server == "verifier":
        from pipelinerl.plugins.verifier_service.server import create_app
        from tests.fakes.verifier_service import service as verifier_service

        return create_app(verifier_service(), token=token)
    if server == "oubliette":
        from tests.fakes import oubliette_service

        return oubliette_service.application(directory / "repository", token=token)
    if server == "parameter server":
        from tests.fakes import parameter_server

        return parameter_server.application(token=token)
    if server == "page":
        from pipelinerl.plugins.watch.access import PageLinks
        from pipelinerl.plugins.watch.server import create_page
        from pipelinerl.plugins.watch.watched_run import watched_runs
        from tests.plugins.watch.run_files import written_run

        run_dir = written_run(directory / "watched")
        return create_page(watched_runs([run_dir]), token=token or TOKEN, links=PageLinks(lambda _: None))
    from pipelinerl.controller.service.api import create_api
    from pipelinerl.controller.service.service import ControllerService
    from pipelinerl.observability.events import EventLog
    from pipelinerl.streams.memory_stream import MemoryStream
    from tests.controller.service.test_service import Probe
    from tests.controller.world import controller

    service = ControllerService(
        controller(), name="test", stream=MemoryStream(), probe=Probe(), events=EventLog(directory / "events.jsonl")
    )
    return create_api(service, token=token)
