"""Kubernetes manifests of a run match the published schemas; in slow tests, pods run as processes of this machine."""

import os
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from launch.cluster import kubernetes
from launch.cluster.membership import Members
from launch.hosts import read_hosts
from pipelinerl.config.recipe import load
from pipelinerl.errors import UserError
from pipelinerl.system.machine import free_ports
from tests.fakes.bigram_recipe import bigram_recipe
from tests.fakes.kubelet import Kubelet
from tests.fakes.live_run import CLI
from tests.launch.config import config_of, events_of
from tests.patience import PATIENCE_S

RUN = Path("/runs/x")
ROOT = Path(__file__).resolve().parents[3]
TWO = ("head:gpus=1", "worker:gpus=8")


def _manifests(words=TWO, **sections):
    config = config_of(run={"name": "x"}, **sections)
    members = Members(hosts=read_hosts(config, words, count=None, gpus=None))
    return kubernetes.manifests(config, members, run_dir=RUN, image="registry/pipelinerl:1")


def _jobs(objects):
    return {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "Job"}


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"engine": {"count": 3}, "weights": {"transport": "pull"}, "parameter_server": {"replicas": 2}},
        {"streams": {"redis_url": "redis://:s3cret@db:6379/0"}},
        {"domains": [{"name": "d", "source": "s", "parameters": {"text": "a\u2028b\u0085c"}}]},
    ],
    ids=["plain", "pull", "own_redis", "ends_of_lines_that_are_none_in_toml"],
)
def test_kubernetes_manifests_match_the_published_schemas(sections):
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate holds the schemas (extra dev)")
    text = kubernetes.manifest_text(_manifests(**sections), ["a note"])
    objects = list(yaml.safe_load_all(text))
    assert objects == _manifests(**sections), "the text holds the same objects"
    for each in objects:
        validator.validate(each, "1.33", strict=True)
    assert "s3cret" not in text


def test_kubernetes_pod_has_time_to_save_and_only_exit_status_1_or_2_fails_its_job():
    jobs = _jobs(_manifests(launch={"save_s": 300.0}))
    assert sorted(jobs) == ["x-head", "x-worker"]
    pod = jobs["x-worker"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= 360
    assert pod["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    rules = jobs["x-head"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["FailJob", "Ignore"]
    assert rules[0]["onExitCodes"]["values"] == [1, 2], "exit statuses 130 and 137 are retried"


def test_each_process_that_listens_on_a_port_has_a_kubernetes_service():
    objects = _manifests(engine={"count": 2}, weights={"transport": "pull"})
    services = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "Service"}
    assert sorted(services) == ["x", "x-controller", "x-engine", "x-parameter-server", "x-redis"]
    assert services["x-controller"]["selector"] == {"pipelinerl.dev/run": "x", "pipelinerl.dev/host": "head"}
    assert [port["port"] for port in services["x-engine"]["ports"]] == [20001, 20002]


def test_redis_password_in_manifests_comes_from_a_kubernetes_secret():
    jobs = _jobs(_manifests(streams={"redis_url": "redis://:s3cret@db:6379/0"}))
    env = {each["name"]: each for each in jobs["x-head"]["template"]["spec"]["containers"][0]["env"]}
    assert env["PIPELINERL_REDIS_URL"]["valueFrom"] == {"secretKeyRef": {"name": "x-streams", "key": "url"}}


def test_recipe_with_a_password_outside_its_section_streams_is_rejected_for_kubernetes():
    places = {"path": "https://u:s3cret@data.lab/x"}
    with pytest.raises(UserError, match="a password, token or key outside streams") as refused:
        _manifests(domains=[{"name": "d", "source": "s", "parameters": places}])
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("words", [("Head:gpus=1", "b:gpus=1"), ("a.b:gpus=1", "c:gpus=1")])
def test_host_names_that_kubernetes_does_not_accept_are_rejected(words):
    with pytest.raises(UserError, match="lower-case letters, digits and dashes"):
        _manifests(words)


def test_kubernetes_manifests_are_kept_and_the_error_names_their_path_if_kubectl_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=rf"kubectl is not on PATH.*--filename {tmp_path}/x-kubernetes\.yaml"):
        kubernetes.apply("---\n", tmp_path, "x")


# --- pods as processes ------------------------------------------------------------------------------------------------


@contextmanager
def _pods(folder, *changes):
    runs = folder / "runs"
    runs.mkdir()
    recipe = bigram_recipe(folder / "bigram")
    config = load(recipe, [f"run.directory={runs}", "run.name=x", "engine.count=2", *changes])
    # Tests that run at the same time share this machine's addresses, so they need different ports.
    (port,) = free_ports(1)
    hosts = read_hosts(config, ["head", "worker:roles=engine"], count=None, gpus=None)
    members = Members(hosts=hosts, first_port=port)
    objects = kubernetes.manifests(config, members, run_dir=runs / "x", image="none")
    of_image = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    kubelet = Kubelet(kubernetes.manifest_text(objects), folder / "kubelet", of_image=of_image)
    try:
        yield kubelet, runs / "x"
    finally:
        kubelet.close()


def _until(kubelet, reached, what):
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        kubelet.follow()
        assert time.monotonic() < deadline, f"{what} did not come:\n{kubelet.story()}"
        time.sleep(0.05)


def _stop(kubelet, directory):
    subprocess.run([*CLI, "stop", str(directory)], check=True, timeout=PATIENCE_S)
    _until(kubelet, kubelet.follow, "the end of all jobs")
    assert [pod.ended for pod in kubelet.pods] == [0, 0], kubelet.story()
    assert events_of(directory, "run_finished")


@pytest.mark.slow
def test_dead_kubernetes_worker_pod_is_replaced_and_the_run_continues(tmp_path):
    with _pods(tmp_path, "run.steps=100000") as (kubelet, directory):
        head, worker = kubelet.pods
        _until(kubelet, lambda: len(events_of(directory, "engine_verified")) == 2, "both engines")
        assert head.is_ready() and worker.is_ready()
        hosts = {event["url"].split(":")[1] for event in events_of(directory, "engine_verified")}
        assert hosts == {"//127.0.1.1", "//127.0.1.2"}
        assert os.stat(directory / "tokens.json").st_mode & 0o077 == 0
        worker.kill()
        _until(kubelet, lambda: worker.failures == 1, "the end of the worker")
        _until(kubelet, lambda: len(events_of(directory, "engine_verified")) == 3, "an engine in its new pod")
        _stop(kubelet, directory)


@pytest.mark.slow
def test_dead_kubernetes_head_pod_is_replaced_and_the_run_resumes_from_its_checkpoint(tmp_path):
    with _pods(tmp_path, "run.steps=100000", "checkpoint.interval_steps=5") as (kubelet, directory):
        head, _ = kubelet.pods
        _until(kubelet, lambda: events_of(directory, "checkpoint"), "a checkpoint")
        head.kill()
        _until(kubelet, lambda: len(events_of(directory, "run_started")) == 2, "the run in a new pod")
        _until(kubelet, lambda: len(events_of(directory, "trainer_ready")) == 2, "a trainer in the new pod")
        assert events_of(directory, "trainer_ready")[-1]["model_version"] >= 5
        _stop(kubelet, directory)
        assert head.failures == 1
