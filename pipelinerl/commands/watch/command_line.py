"""The command `pipelinerl watch`: serve the live page of one run, or of several to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def watch(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs, such as runs/tiny; several are compared.")],
    port: Annotated[int, typer.Option(help="Port to serve on; 0 takes a free one.")] = 0,
    host: Annotated[str, typer.Option(help="Address to serve on; others than loopback let the network in.")] = (
        "127.0.0.1"
    ),
    read_only: Annotated[bool, typer.Option("--read-only", help="A link that cannot steer.")] = False,
) -> None:
    """Show runs in the browser, live, finished or crashed, and steer those that live. Ctrl-C ends it."""
    from pipelinerl.commands.watch.access import PageLinks, new_token
    from pipelinerl.commands.watch.server import create_page
    from pipelinerl.commands.watch.watched_run import watched_runs
    from pipelinerl.system.http_service import listen, serve, url_of

    watched = watched_runs(runs)
    with listen(host, port) as bound:
        taken = bound.getsockname()[1]
        address = url_of(host, taken)
        links = PageLinks(lambda key: typer.echo(f"watch at {address}/?key={key}"))
        # Cookies know hosts and no ports: a name for each lets several pages of one machine be open at once.
        app = create_page(watched, token=new_token(), links=links, cookie=f"pipelinerl_{taken}", read_only=read_only)
        links.offer()
        serve(app, bound)
