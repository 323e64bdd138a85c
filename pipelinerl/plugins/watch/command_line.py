"""The commands that show a run's progress: `watch` serves a web page, `top` draws in the terminal, even over ssh."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

import typer

from pipelinerl.errors import AddressError, UserError
from pipelinerl.plugins.watch.compare import expanded
from pipelinerl.roles.role import LISTEN_HELP, Run


def watch(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs, or a folder of runs; several are compared.")],
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 0,
    host: Annotated[str, typer.Option(help=LISTEN_HELP)] = ("127.0.0.1"),
    read_only: Annotated[bool, typer.Option("--read-only", help="No link can change the run.")] = False,
    share: Annotated[
        bool, typer.Option("--share", help="Also print a permanent read-only link for any number of browsers.")
    ] = False,
) -> None:
    """Show live, finished or crashed runs in the browser, and change live ones. Ctrl-C ends the server, not the run."""
    from pipelinerl.plugins.watch.access import PageLinks, SharedLink, keep_link, lasting_link, new_token
    from pipelinerl.plugins.watch.server import create_page
    from pipelinerl.plugins.watch.watched_run import watched_runs
    from pipelinerl.system.http_service import listen, serve, url_of
    from pipelinerl.system.machine import outward_address

    runs = expanded(runs)
    watched = watched_runs(runs, read_only=read_only)
    shared = lasting_link(runs[0]) if share else SharedLink("")
    try:  # with port 0, the port of the last permanent link comes first
        listening = listen(host, port or shared.port)
    except AddressError:
        if port or not shared.port:
            raise
        listening = listen(host, 0)
    with listening as bound:
        bound_host, taken = bound.getsockname()[:2]
        address = url_of(outward_address() if ip_address(bound_host).is_unspecified else host, taken)
        links = PageLinks(lambda key: typer.echo(f"watch at {address}/?key={key}"))
        # Browsers send a cookie to all ports of its host. With the port in its name, each server has its own cookie.
        cookie = f"pipelinerl_{taken}"
        app = create_page(watched, token=new_token(), links=links, cookie=cookie, share_key=shared.key)
        links.offer()
        if share:
            typer.echo(f"share at {address}/?share={shared.key}")
            if keep_link(runs[0], SharedLink(shared.key, taken)):
                removed = runs[0] / "share.json"
                typer.echo(f"  read-only, and the same next time; remove {removed} to invalidate it")
            else:
                typer.echo(f"  read-only, until Ctrl-C: {runs[0]} cannot be written to")
            if ip_address(bound_host).is_loopback:
                typer.echo("  only this machine can open it; add --host 0.0.0.0 for your network, or use a tunnel")
        serve(app, bound)


def top(run: Run) -> None:
    """Show a run in the terminal and change its knobs while it is live; q quits."""
    if find_spec("textual") is None:
        raise UserError("pipelinerl top needs textual, which is not installed; pip install -e '.[top]'")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError(f"pipelinerl top needs a terminal; try pipelinerl status {run}")
    from pipelinerl.plugins.watch.top.run_follower import RunFollower
    from pipelinerl.plugins.watch.top.textual_app import TopApp

    follower = RunFollower(run)
    try:
        TopApp(follower).run(mouse=False)
    finally:
        follower.close()
