"""`Kubelet`: a fake of Kubernetes that runs the pods of rendered YAML manifests as processes of this machine.

It rejects what a cluster would reject: an undeclared volume, a missing volume claim or config map, a pod name without a
headless service. For each Job it starts the container's command with the container's environment variables, and with
PATH of this process. Bubblewrap gives each pod its mounted maps and an address in 127.0.0.0/8, which other pods find in
their /etc/hosts by `hostname.subdomain`. Images, memory limits and networks are not covered.

When a pod dies, the Job's `podFailurePolicy` may fail the Job or ignore the death; other deaths count towards
`backoffLimit`. Unless the Job has failed, a new pod replaces the dead one.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, final
from urllib.request import ProxyHandler, build_opener

import pytest
import yaml

from pipelinerl.system.supervised_process import tied
from tests.patience import PATIENCE_S, SOON_S


@final
class Pod:
    """The current pod of one Job."""

    def __init__(self, kubelet, job, address):
        self.kubelet = kubelet
        self.name: str = job["metadata"]["name"]
        self.spec = job["spec"]["template"]["spec"]
        self.address = address
        self.output = kubelet.folder / f"{self.name}.out"
        self._limit: int = job["spec"]["backoffLimit"]
        self._rules: list[dict[str, Any]] = job["spec"].get("podFailurePolicy", {}).get("rules", [])
        self.failures = 0
        self.ended: int | None = None
        self.process = self._start()

    def _start(self):
        (container,) = self.spec["containers"]
        environment = {each["name"]: each["value"] for each in container["env"]}
        environment["PATH"] = os.environ["PATH"]
        environment |= self.kubelet.of_image
        words = ["bwrap", "--dev-bind", "/", "/", "--ro-bind", str(self.kubelet.hosts_file), "/etc/hosts"]
        words += ["--tmpfs", "/mnt"]
        volumes = {each["name"]: each for each in self.spec["volumes"]}
        for mount in container["volumeMounts"]:
            volume = volumes[mount["name"]]
            if "configMap" in volume:
                words += ["--ro-bind", str(self.kubelet.maps[volume["configMap"]["name"]]), mount["mountPath"]]
            elif "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in self.kubelet.claims
                assert Path(mount["mountPath"]).is_dir(), "a claim's directory is the test's own"
        command = [sys.executable if word == "python3" else word for word in container["command"]]
        with self.output.open("ab") as out:
            return subprocess.Popen(
                tied([*words, "--die-with-parent", "--", *command]), env=environment, stdout=out, stderr=out
            )

    def node(self):
        """Return the process id of the container's command, a child of bubblewrap."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            for path in Path(f"/proc/{self.process.pid}/task/{self.process.pid}").glob("children"):
                children = path.read_text().split()
                if children:
                    return int(children[0])
            assert time.monotonic() < deadline and self.process.poll() is None, self.output.read_text()
            time.sleep(0.02)

    def kill(self):
        os.kill(self.node(), signal.SIGKILL)

    def follow(self):
        """Replace the pod if it died and the Job's rules allow it."""
        status = self.process.poll()
        if status is None or self.ended is not None:
            return
        status = 128 - status if status < 0 else status
        if status == 0 or self._action(status) == "FailJob":
            self.ended = status
            return
        self.failures += 1
        if self.failures > self._limit:
            self.ended = status
        else:
            self.process = self._start()

    def _action(self, status):
        for rule in self._rules:
            codes = rule.get("onExitCodes")
            if codes and codes["operator"] == "In" and status in codes["values"]:
                return str(rule["action"])
        return "Count"

    def is_ready(self):
        probe = self.spec["containers"][0]["readinessProbe"]["httpGet"]
        opener = build_opener(ProxyHandler({}))
        try:
            with opener.open(f"http://{self.address}:{probe['port']}{probe['path']}", timeout=SOON_S) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@final
class Kubelet:
    """Runs the pods of the manifests in `text`; `of_image` has the environment variables of the container image."""

    def __init__(self, text, folder, *, of_image):
        if shutil.which("bwrap") is None:
            pytest.skip("pods need bubblewrap for their mounts (Debian's bubblewrap)")
        folder.mkdir()
        self.folder, self.of_image = folder, dict(of_image)
        objects = list(yaml.safe_load_all(text))
        self.claims = {each["metadata"]["name"] for each in objects if each["kind"] == "PersistentVolumeClaim"}
        self.maps = {each["metadata"]["name"]: self._mapped(each) for each in objects if each["kind"] == "ConfigMap"}
        services = [each for each in objects if each["kind"] == "Service"]
        headless = {each["metadata"]["name"]: each["spec"] for each in services if each["spec"]["clusterIP"] == "None"}
        jobs = [each for each in objects if each["kind"] == "Job"]
        addresses: dict[str, str] = {}
        for number, job in enumerate(jobs):
            pod, labels = job["spec"]["template"]["spec"], job["spec"]["template"]["metadata"]["labels"]
            service = headless[pod["subdomain"]]
            assert service["publishNotReadyAddresses"] and service["selector"].items() <= labels.items()
            addresses[f"{pod['hostname']}.{pod['subdomain']}"] = f"127.0.1.{number + 1}"
        self.hosts_file = folder / "hosts"
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
        self.hosts_file.write_text("\n".join(lines) + "\n")
        self.pods = [Pod(self, job, address) for job, address in zip(jobs, addresses.values(), strict=True)]

    def _mapped(self, each):
        folder = self.folder / str(each["metadata"]["name"])
        folder.mkdir()
        for name, text in each["data"].items():
            (folder / name).write_text(text)
        return folder

    def follow(self):
        """Update all pods; return whether every Job has ended."""
        for pod in self.pods:
            pod.follow()
        return all(pod.ended is not None for pod in self.pods)

    def story(self):
        return "\n".join(f"--- {pod.name}\n{pod.output.read_text()[-3000:]}" for pod in self.pods)

    def close(self):
        for pod in self.pods:
            pod.process.kill()
            pod.process.wait(PATIENCE_S)
