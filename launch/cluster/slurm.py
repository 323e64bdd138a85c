"""A run under Slurm: a batch script that starts `pipelinerl node` on every host of its allocation, and its submission.

The same script runs each time the job is requeued:

- Each host has an `srun` step. A step whose node is killed is restarted up to `launch.restarts` times, while the
  others continue (`--no-kill`; `--kill-on-bad-exit` ends only the step of that host).
- The hosts are those of the allocation, with the addresses that Slurm reports (`NodeAddr`). The first is the head.
- Before the time limit, Slurm sends SIGTERM to the script, which suspends the run. The job is then requeued, and
  resumes from the checkpoint on whatever hosts it gets.
- The job's exit status is that of the head's node: 0 if the run completed, 1 if it failed.

Requirements: all hosts see the run's directory and the model on a shared file system, and have the same Python
environment as the submitting host, at the same path.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from launch.cluster.membership import Members
from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import UserError

#: Seconds for the suspend command and for stopping processes, in addition to `launch.save_s`.
_NOTICE_S: Final = 60
_SUBMIT_S: Final = 60.0

_SCRIPT: Final = """\
#!/bin/bash
{directives}

set -u
run={run_dir}
pipelinerl=({pipelinerl})

{names}
hosts=(--first-port {first_port})
for name in "${{names[@]}}"; do
    address=$(scontrol --oneliner show node "$name" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')
    hosts+=(--node "$name=${{address:-$name}}{options}")
done

# Slurm's notice: save the run, and end it.
suspended=
suspend() {{
    suspended=yes
    "${{pipelinerl[@]}}" stop "$run" --suspend
}}
trap suspend TERM

# Run the share of one host. A node that was killed (status above 128) is restarted.
serve() {{
    trap - TERM
    local status tries=0
    while :; do
        srun --nodes=1 --ntasks=1 --nodelist="$1" --cpu-bind=none --kill-on-bad-exit=1 --no-kill \\
            "${{pipelinerl[@]}}" node "$run" --name "$1" "${{hosts[@]}}"
        status=$?
        if (( status <= 128 || status == 130 || ++tries > {restarts} )); then return "$status"; fi
        echo "the node of $1 ended with status $status; restarting it ($tries of {restarts})"
        sleep 1
    done
}}

for name in "${{names[@]:1}}"; do serve "$name" & done
serve "${{names[0]}}" &
head=$!

wait "$head"
status=$?
while (( status > 128 )) && kill -0 "$head" 2> /dev/null; do  # a signal ended the wait, not the head
    wait "$head"
    status=$?
done
if (( status <= 1 )); then wait; fi  # the other nodes stop when the head tells them
if [ -n "$suspended" ]; then
    echo "suspended; the requeued job will resume"
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def slurm_script(config: RunConfig, members: Members, *, run_dir: Path, extra: Sequence[str] = ()) -> str:
    """Return the batch script of a run, with the user's options for sbatch, `extra`; submit nothing.

    Raises:
        UserError: the hosts have different numbers of GPUs and no names, so one sbatch request cannot describe them.
    """
    hosts = members.hosts
    named = not all(re.fullmatch(r"host-\d+", host.name) for host in hosts)
    if not named and len({len(host.devices) for host in hosts}) > 1:
        raise UserError("hosts with different numbers of GPUs need Slurm's names; pass --node NAME:gpus=8 for each")
    most = max(len(host.devices) for host in hosts)
    directives = [
        f"--job-name={config.run.name}",
        f"--nodes={len(hosts)}",
        "--ntasks-per-node=1",
        *(["--nodelist=" + ",".join(host.name for host in hosts)] if named else []),
        *([f"--gpus-per-node={most}"] if most else []),
        "--exclusive",
        "--requeue",
        "--no-kill",
        f"--signal=B:TERM@{round(config.launch.save_s) + _NOTICE_S}",
        "--open-mode=append",
        f"--output={run_dir / 'slurm-%j.out'}",
        *extra,
    ]
    names = 'mapfile -t names < <(scontrol show hostnames "$SLURM_JOB_NODELIST")'
    if named:
        own = [f"[{each.name}]=:gpus={len(each.devices)},roles={'+'.join(sorted(each.roles))}" for each in hosts]
        names = f"names=({' '.join(host.name for host in hosts)})\ndeclare -A more=({' '.join(own)})"
    return _SCRIPT.format(
        directives="\n".join(f"#SBATCH {directive}" for directive in directives),
        run_dir=shlex.quote(str(run_dir)),
        pipelinerl=shlex.join([sys.executable, "-P", "-m", "pipelinerl.cli"]),
        names=names,
        options="${more[$name]}" if named else f":gpus={most}",
        first_port=members.first_port,
        restarts=config.launch.restarts,
    )


def submit(script: str, run_dir: Path) -> str:
    """Write the script into the run's directory and submit it; return a sentence for the user, or raise `UserError`."""
    path = run_dir / "slurm.sh"
    path.write_text(script)
    if shutil.which("sbatch") is None:
        raise UserError(
            f"sbatch is not on PATH, so there is no Slurm to submit to; on a machine that has it: sbatch {path}"
        )
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(path)], capture_output=True, text=True, timeout=_SUBMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"sbatch did not answer within {_SUBMIT_S:g} s; is slurmctld up (scontrol ping)? Then: sbatch {path}"
        ) from None
    if done.returncode:
        raise UserError(
            f"sbatch refused {path}: {done.stderr.strip()}; change it with --slurm, such as --slurm=--partition=gpu"
        )
    job = done.stdout.strip().partition(";")[0]
    return f"submitted as job {job}; follow it with: tail -f {run_dir}/slurm-{job}.out, or pipelinerl status {run_dir}"
