"""The cluster file: from text to a `Cluster` and back. Errors name the line."""

import io
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from muster.cluster.description import Cluster, ClusterNode, Gpu, check_description
from muster.host.yaml_files import YamlFile, safe_yaml


def read_cluster(path: Path) -> Cluster:
    """Return the cluster that a file describes; raises `InvalidDescription`."""
    return _cluster_of(YamlFile.read(path))


def parse_cluster(text: str, name: str = "cluster.yaml") -> Cluster:
    """Return the cluster that a text describes; `name` is that of the text in errors."""
    return _cluster_of(YamlFile.parse(text, name))


def dump_cluster(cluster: Cluster) -> str:
    """Return the YAML of a cluster without defaults; ``parse_cluster`` returns the same cluster."""
    nodes = [
        _shown(node) | ({"gpus": [_shown(gpu) for gpu in node.gpus]} if node.gpus else {})
        for node in cluster.nodes
    ]
    text = io.StringIO()
    yaml: Any = safe_yaml()
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    yaml.dump({"nodes": nodes}, text)
    return text.getvalue()


def _cluster_of(file: YamlFile) -> Cluster:
    check_description(file.content, file.name, lambda location: file.position(location)[0])
    nodes = (
        ClusterNode(**node | {"gpus": tuple(Gpu(**gpu) for gpu in node.get("gpus", ()))})
        for node in file.content["nodes"]
    )
    return Cluster(nodes=tuple(nodes))


def _shown(value: ClusterNode | Gpu) -> dict[str, Any]:
    defaults = {field.name: field.default for field in fields(value)}
    return {name: part for name, part in asdict(value).items() if part != defaults[name]}
