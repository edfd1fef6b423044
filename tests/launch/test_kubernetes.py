"""The manifest of docs/clusters/kubernetes.md is an MPIJob, and `run` accepts its command.

tests/clusters/test_ssh.py runs the command.
"""

import re

import yaml
from support.kubernetes import PAGE, container, manifest

from bagua_comm import __main__ as cli

CONTAINER = {
    "name": str,
    "image": str,
    "command": [str],
    "resources?": {"requests": {"cpu": int}},
    "volumeMounts?": [{"name": str, "mountPath": str}],
}
REPLICAS = {
    "replicas": int,
    "template": {"spec": {"containers": [CONTAINER], "volumes?": [{"name": str, "emptyDir": {"medium": str}}]}},
}
MPIJOB = {
    "apiVersion": {"kubeflow.org/v2beta1"},
    "kind": {"MPIJob"},
    "metadata": {"name": str},
    "spec": {
        "slotsPerWorker": int,
        "mpiImplementation": {"OpenMPI", "Intel", "MPICH"},
        "launcherCreationPolicy": {"AtStartup", "WaitForWorkersReady"},
        "runPolicy": {"cleanPodPolicy": {"None", "Running", "All"}},
        "mpiReplicaSpecs": {"Launcher": REPLICAS, "Worker": REPLICAS},
    },
}
"""Fields of an MPIJob with their types, or the values that are allowed; those with "?" may be missing.

From the schema of the MPI Operator's custom resource (kubeflow.org/v2beta1), as far as it is used here.
"""


def check(value, schema, path="MPIJob"):
    """Raise unless `value` has these fields and no other, with these types."""
    if isinstance(schema, dict):
        known = {name.rstrip("?"): inner for name, inner in schema.items()}
        needed = {name for name in schema if not name.endswith("?")}
        assert needed <= value.keys() <= known.keys(), path
        for name, inner in value.items():
            check(inner, known[name], f"{path}.{name}")
    elif isinstance(schema, list):
        assert isinstance(value, list), path
        for each in value:
            check(each, schema[0], f"{path}[]")
    elif isinstance(schema, set):
        assert value in schema, path
    else:
        assert type(value) is schema, path


def test_the_manifest_fits_the_schema_of_the_operator():
    check(manifest(), MPIJOB)


def test_the_numbers_and_images_of_the_manifest_agree():
    job = manifest()
    launcher, worker = container(job, "Launcher"), container(job, "Worker")
    slots, workers = job["spec"]["slotsPerWorker"], job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
    words = launcher["command"]
    assert int(words[words.index("-n") + 1]) == slots * workers
    assert worker["resources"]["requests"]["cpu"] == slots
    assert launcher["image"] == worker["image"]
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])  # a DNS label as of RFC 1035


def test_the_workers_run_sshd_with_shared_memory():
    worker = container(manifest(), "Worker")
    spec = manifest()["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]
    assert worker["command"] == ["/usr/sbin/sshd", "-De"]
    (mount,) = worker["volumeMounts"]
    assert mount["mountPath"] == "/dev/shm"
    assert spec["volumes"] == [{"name": mount["name"], "emptyDir": {"medium": "Memory"}}]


def test_run_accepts_the_command_of_the_manifest(tmp_path, monkeypatch, capsys):
    words = container(manifest(), "Launcher")["command"]
    assert words[:3] == ["python", "-m", "bagua_comm"]
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"train-worker-{n}.train.default.svc slots=4\n" for n in range(2)))
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    words = [str(hostfile) if word == "/etc/mpi/hostfile" else word for word in words]
    assert cli.main([*words[3:4], "--dry-run", *words[4:]]) == 0
    assert "train.py" in capsys.readouterr().out


def test_the_lines_to_adapt_with_gpus_are_yaml_too():
    text = PAGE.read_text()
    limits = re.findall(r"^ *# (limits:\n) *# ( +nvidia.com/gpu: 4) ", text, re.MULTILINE)
    assert [yaml.safe_load("".join(found)) for found in limits] == [{"limits": {"nvidia.com/gpu": 4}}]
