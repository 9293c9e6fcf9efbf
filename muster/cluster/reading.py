"""The cluster file: from text to a `Cluster`. Errors name the line."""

from pathlib import Path

from muster.cluster.description import Cluster, ClusterNode, Gpu, check_description
from muster.contracts.errors import InvalidDescription
from muster.host.yaml_files import YamlFile


def read_cluster(path: Path) -> Cluster:
    """Return the cluster that a file describes; raises `InvalidDescription`."""
    return cluster_of(YamlFile.read(path))


def cluster_of(file: YamlFile) -> Cluster:
    """Return the cluster that a parsed file describes; raises `InvalidDescription`."""
    check_description(file.content, file.name, lambda location: file.position(location)[0])
    for index, node in enumerate(file.content["nodes"]):
        if node.get("transport") == "mesh":
            line, _ = file.position(("nodes", index, "transport"))
            raise InvalidDescription(
                f"{file.name}:{line}: mesh is for machines with muster node: write local or ssh"
            )
    nodes = (
        ClusterNode(**node | {"gpus": tuple(Gpu(**gpu) for gpu in node.get("gpus", ()))})
        for node in file.content["nodes"]
    )
    return Cluster(nodes=tuple(nodes))
