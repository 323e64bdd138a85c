"""A run under Kubernetes: manifests in which each host's pod runs `pipelinerl node`. Pure; no API server is contacted.

| object | purpose |
|---|---|
| ConfigMap `NAME-recipe` | the recipe, resolved, without secrets |
| PersistentVolumeClaim `NAME-runs` | the run's directory, for all pods: checkpoints, logs, streams, token (0600) |
| Service `NAME`, headless | a name for each pod, `host-0.NAME`, before it is ready |
| Services `NAME-controller`, `NAME-redis`, … | a name for each role that accepts connections, whatever its host |
| Job `NAME-HOST`, one for each host | a pod that is replaced after an eviction or the loss of its node |

A pod that is asked to end has `launch.save_s` to save, then `launch.grace_s` plus a minute to stop its processes; the
pod that replaces it resumes. Exit status 1 or 2 ends its Job: the run failed, and a retry would fail the same way.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import tomli_w

from launch.cluster.membership import Members
from launch.hosts import Host
from launch.plan import Plan, ProcessSpec, processes_of
from pipelinerl.config.recipe import RunConfig, to_table
from pipelinerl.errors import UserError
from pipelinerl.observability.logs import table_without_secrets

#: Path of the recipe in a pod.
RECIPE_FOLDER: Final = "/mnt/recipe"
#: Seconds that a pod has to stop its processes, in addition to the `launch.save_s` seconds for saving.
_GRACE_S: Final = 60
#: Number of failed pods of one host that are replaced. One more failure fails the host's Job, and with it the run.
_RETRIES: Final = 6
_APPLY_S: Final = 120.0
_LABEL: Final = "pipelinerl.dev/run"
_HOST_LABEL: Final = "pipelinerl.dev/host"


def manifests(config: RunConfig, members: Members, *, run_dir: Path, image: str) -> list[dict[str, Any]]:
    """Return the Kubernetes objects of a run. Raises `UserError` for an invalid name, or a password in the recipe."""
    name = config.run.name
    for word in (name, *(host.name for host in members.hosts)):
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", word):
            raise UserError(
                f"Kubernetes names are up to 40 lower-case letters, digits and dashes, got {word!r}; change run.name "
                "or --node"
            )
    # A pod's address is its name at the headless service.
    hosts = tuple(replace(host, address=f"{host.name}.{name}") for host in members.hosts)
    plan = processes_of(replace(members, hosts=hosts).launch(config, run_dir))
    labels = {_LABEL: name}
    table = to_table(config)
    recipe = tomli_w.dumps(table)
    if recipe != tomli_w.dumps(table_without_secrets(table)):
        raise UserError(
            "the recipe holds a password, token or key outside streams.redis_url, and a ConfigMap would show it to "
            "every reader of this namespace; remove it, and pass it to the pods in another way"
        )
    claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "100Gi"}}}
    roles: dict[str, list[ProcessSpec]] = {}
    for spec in plan.specs:
        if spec.health is not None:
            roles.setdefault(re.sub(r"-\d+$", "", spec.name), []).append(spec)
    services = []
    for role, specs in roles.items():
        # The service selects the one host that runs the role, or all hosts if several do.
        on = {spec.host for spec in specs}
        selector = labels | ({_HOST_LABEL: next(iter(on))} if len(on) == 1 else {})
        service = {"selector": selector, "ports": [_port(each) for each in specs], "clusterIP": "None"}
        services.append(_object("v1", "Service", f"{name}-{role}", labels, spec=service))
    return [
        _object("v1", "ConfigMap", f"{name}-recipe", labels, data={"recipe.toml": recipe}),
        _object("v1", "PersistentVolumeClaim", f"{name}-runs", labels, spec=claim),
        _object("v1", "Service", name, labels, spec={
            "clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels,
            "ports": [_port(spec) for spec in plan.specs if spec.health is not None],
        }),
        *services,
        *(
            _object("batch/v1", "Job", f"{name}-{host.name}", labels | {_HOST_LABEL: host.name}, spec=_job(
                config, host, hosts, plan.of_host(host.name), members.first_port, run_dir, image
            ))
            for host in hosts
        ),
    ]  # fmt: skip


def manifest_text(objects: Sequence[Mapping[str, Any]], notes: Sequence[str] = ()) -> str:
    """Return YAML text: the notes as comments, then the objects."""
    comments = "".join(f"# {note}\n" for note in notes)
    return comments + "".join("---\n" + "\n".join(_yaml(each)) + "\n" for each in objects)


def notes_for(config: RunConfig) -> list[str]:
    """Return notes for the user on what the manifests expect in the cluster."""
    name, url = config.run.name, config.streams.redis_url
    notes = [
        f"kubectl apply --filename this file; kubectl logs --follow job/{name}-HOST; kubectl delete --selector "
        f"{_LABEL}={name} job,service,configmap ends it",
        f"The image must hold this project; the model, {config.model.path}, must be in it or on the volume.",
    ]
    if url is not None:
        notes.append(f"kubectl create secret generic {name}-streams --from-literal=url=redis://:PASSWORD@HOST:PORT/0")
    return notes


def apply(text: str, folder: Path, name: str) -> str:
    """Write the manifests and pass them to kubectl; return a sentence for the user, or raise `UserError`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-kubernetes.yaml"
    path.write_text(text)
    command = ["kubectl", "apply", "--filename", str(path)]
    if shutil.which(command[0]) is None:
        raise UserError(f"kubectl is not on PATH; on a machine that has it: {shlex.join(command)}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_APPLY_S, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"kubectl did not answer within {_APPLY_S:g} s; then: {shlex.join(command)}") from None
    if done.returncode:
        raise UserError(f"kubectl refused {path}: {done.stderr.strip()}")
    return f"{done.stdout.strip()}\nfollow it with: kubectl logs --follow job/{name}-HOST"


def _object(api: str, kind: str, name: str, labels: Mapping[str, str], **rest: object) -> dict[str, Any]:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, "labels": dict(labels)}, **rest}


def _port(spec: ProcessSpec) -> dict[str, Any]:
    # Pods limit port names to 15 characters, so `parameter-server` becomes `weights`.
    name = spec.name.replace("parameter-server", "weights")
    return {"name": name, "port": urlsplit(spec.health or "").port}


def _job(
    config: RunConfig, host: Host, hosts: Sequence[Host], share: Plan, first_port: int, run_dir: Path, image: str
) -> dict[str, Any]:
    run, labels = config.run.name, {_LABEL: config.run.name, _HOST_LABEL: host.name}
    words = [each for other in hosts for each in ("--node", other.word)]
    command = ["python3", "-P", "-m", "pipelinerl.cli", "node", str(run_dir), "--name", host.name, "--first-port"]
    command += [str(first_port), *words, "--recipe", f"{RECIPE_FOLDER}/recipe.toml"]
    environment: list[dict[str, Any]] = [{"name": "PYTHONUNBUFFERED", "value": "1"}]
    if config.streams.redis_url is not None:  # the URL may hold a password, so pods read it from a Kubernetes secret
        key = {"name": f"{run}-streams", "key": "url"}
        environment.append({"name": "PIPELINERL_REDIS_URL", "valueFrom": {"secretKeyRef": key}})
    container: dict[str, Any] = {
        "name": "node",
        "image": image,
        "command": command,
        "env": environment,
        "volumeMounts": [
            {"name": "runs", "mountPath": str(run_dir.parent)},
            {"name": "recipe", "mountPath": RECIPE_FOLDER, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    if len(host.devices):
        container["resources"] = {"limits": {"nvidia.com/gpu": len(host.devices)}}
    served = [spec for spec in share.specs if (spec.health or "").startswith("http")]
    if served:  # only a readiness probe: the supervisor in the pod restarts processes, so no probe may kill the pod
        probe = {"httpGet": {"path": "/health", "port": urlsplit(served[0].health or "").port}, "periodSeconds": 5}
        container["ports"] = [
            {"name": _port(spec)["name"][:15].rstrip("-"), "containerPort": _port(spec)["port"]} for spec in served
        ]
        container["readinessProbe"] = {**probe, "failureThreshold": 3}
    pod = {
        "hostname": host.name,
        "subdomain": run,
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": round(config.launch.save_s + config.launch.grace_s) + _GRACE_S,
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": f"{run}-runs"}},
            {"name": "recipe", "configMap": {"name": f"{run}-recipe"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    ends = {"action": "FailJob", "onExitCodes": {"containerName": "node", "operator": "In", "values": [1, 2]}}
    evicted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {
        "backoffLimit": _RETRIES,
        "podFailurePolicy": {"rules": [ends, evicted]},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }


def _yaml(value: Any) -> Iterator[str]:
    # Scalars are written as JSON, which is valid YAML.
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _entry(f"{key}:", item)
    elif isinstance(value, list) and value:
        for item in value:
            first, *rest = _yaml(item)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    else:
        yield json.dumps(value)


def _entry(key: str, item: Any) -> Iterator[str]:
    # A YAML block keeps only "\n" as a line end, so text with other line separators is written as a JSON string.
    if isinstance(item, str) and "\n" in item and [*item.splitlines(), ""] == item.split("\n"):
        yield f"{key} |"
        yield from (f"  {line}" if line else "" for line in item.splitlines())
    elif isinstance(item, Mapping | list) and item:
        yield key
        yield from (f"  {line}" for line in _yaml(item))
    else:
        yield f"{key} {json.dumps(item)}"
