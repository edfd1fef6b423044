"""The manifest of docs/clusters/kubernetes.md, as a reader copies it."""

import yaml

from support import pages

PAGE = pages.ROOT / "docs" / "clusters" / "kubernetes.md"


def manifest():
    """Return the manifest of the page, parsed."""
    (block,) = (block for block in pages.read(PAGE).blocks if block.language == "yaml")
    return yaml.safe_load(block.code)


def container(job, kind):
    """Return the container of the pods of this kind, "Launcher" or "Worker"."""
    (found,) = job["spec"]["mpiReplicaSpecs"][kind]["template"]["spec"]["containers"]
    return found
