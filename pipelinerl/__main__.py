"""The command `pipelinerl`, and `python -m pipelinerl`: what is typed there, before anything is imported.

Promises that Ctrl-C ends it without a word while the command line is being imported, which takes a second.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # of a shell's background job the signal is ignored, and stays so
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from pipelinerl import cli
    from pipelinerl.system.process_end import run_process

    signal.signal(signal.SIGINT, handler)
    run_process(cli.main)


if __name__ == "__main__":
    main()
