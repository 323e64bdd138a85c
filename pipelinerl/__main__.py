"""Entry point of the command `pipelinerl` and of `python -m pipelinerl`.

Importing the command line takes a second, during which Ctrl-C ends the process without a traceback.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line."""
    handler = signal.getsignal(signal.SIGINT)
    # A background job has another handler, because it ignores Ctrl-C; it must continue to ignore it.
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from pipelinerl import cli
    from pipelinerl.system.process import run_process

    signal.signal(signal.SIGINT, handler)
    run_process(cli.main)


if __name__ == "__main__":
    main()
