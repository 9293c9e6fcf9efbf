"""The manifests of Kubernetes, without a cluster: schemas, rights, and names that must agree."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from muster.cluster.requests import pod, pod_name
from muster.contracts.job.spec import JobSpec
from muster.contracts.messages.assignment import CoordinatorAddress
from muster.contracts.messages.attach import JoinOrder

ROOT = Path(__file__).parents[2]
FILES = ("01-namespace-config", "02-minio", "03-coordinator", "04-api")
COMPONENT = "app.kubernetes.io/component"
DOCUMENTS: list[dict[str, Any]] = [
    document
    for name in FILES
    for document in YAML(typ="safe").load_all(ROOT / f"k8s/{name}.yaml")
    if document is not None  # the comment at the top
]


def of_kind(*kinds: str) -> dict[str, dict[str, Any]]:
    return {it["metadata"]["name"]: it for it in DOCUMENTS if it["kind"] in kinds}


def agent_pod(options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the Pod of an agent, by default with every option."""
    options = options or {
        "image": "REGISTRY/muster-coordinator",
        "image_pull_secrets": ["registry"],
        "priority_class": "training",
        "mem": "8Gi",
        "mem_limit": "12Gi",
        "gpus": 2,
        "node_selector": {"kind": "gpu"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "claim": "muster-data",
    }
    address = CoordinatorAddress(host="10.0.0.1", port=7400)
    order = JoinOrder(
        job_uid="u",
        host="kubernetes-1",
        agent_number=1,
        token="t",  # noqa: S106
        coordinator=address,
    )
    spec = JobSpec(engine="kubernetes", engine_options=dict(options))
    return pod("muster-u-kubernetes-1-a1", order, spec)


def containers_of(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [*spec.get("initContainers", ()), *spec["containers"]]


TEMPLATES = {
    name: it["spec"]["template"] for name, it in of_kind("Deployment", "StatefulSet", "Job").items()
}
PODS: dict[str, dict[str, Any]] = {name: it["spec"] for name, it in TEMPLATES.items()}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return dict(YAML(typ="safe").load(ROOT / "docker-compose.yml"))


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.35", "1.36", "1.37"])
def test_manifests_match_the_schemas_of(version: str) -> None:
    schemas = pytest.importorskip(
        "kubernetes_validate", reason="needs: pip install kubernetes-validate (108 MB of schemas)"
    )
    for document in [*DOCUMENTS, agent_pod(), agent_pod({"image": "IMAGE"})]:
        schemas.validate(document, version, strict=True)


def test_an_agent_gets_what_its_options_ask_for() -> None:
    spec = agent_pod()["spec"]
    (container,) = spec["containers"]
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["priorityClassName"] == "training"
    assert container["resources"] == {
        "requests": {"cpu": "1", "memory": "8Gi"},
        "limits": {"nvidia.com/gpu": "2", "memory": "12Gi"},
    }
    image = (ROOT / "Dockerfile.coordinator").read_text()
    (cache,) = (word for word in image.split() if word.startswith("MUSTER_CACHE_DIR="))
    written = {it["mountPath"] for it in container["volumeMounts"]}
    assert any(cache.startswith(f"MUSTER_CACHE_DIR={path}/") for path in written)


def test_a_long_name_of_a_pod_is_cut_and_stays_unique() -> None:
    names = [pod_name(f"muster-{'u' * 60}-a{number}") for number in range(20)]
    assert len({*names}) == len(names)
    assert all(len(it) == 63 for it in names)
    assert pod_name("muster-u-kubernetes-1-a1") == "muster-u-kubernetes-1-a1"


def test_everything_is_in_one_namespace() -> None:
    namespaces = {it["metadata"].get("namespace") for it in DOCUMENTS if it["kind"] != "Namespace"}
    assert namespaces == set(of_kind("Namespace")) == {"training-system"}


@pytest.mark.parametrize("name", PODS)
def test_pod_has_no_rights_that_it_does_not_need(name: str) -> None:
    spec, context = PODS[name], PODS[name]["securityContext"]
    assert 0 < context["runAsUser"] == context["runAsGroup"] == context["fsGroup"]
    assert context["runAsNonRoot"] is True
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False, "S3_PORT=tcp://… would be among the settings"
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    for container in containers_of(spec):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        for bounds in (container["resources"]["requests"], container["resources"]["limits"]):
            assert set(bounds) == {"cpu", "memory"}


def test_coordinator_may_only_handle_pods() -> None:
    verbs = ["create", "get", "list", "watch", "delete"]
    assert of_kind("Role", "ClusterRole")["coordinator"]["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": verbs},
        {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
    ]
    (binding,) = of_kind("RoleBinding", "ClusterRoleBinding").values()
    assert [it["name"] for it in binding["subjects"]] == ["coordinator"]


def test_only_named_pods_reach_another() -> None:
    policies = of_kind("NetworkPolicy")
    assert policies.pop("deny-all")["spec"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    agent = {"podSelector": {"matchLabels": {COMPONENT: "agent"}}}
    wanted = {**agent, "policyTypes": ["Ingress"], "ingress": [{"from": [agent]}]}
    assert policies.pop("agent")["spec"] == wanted, "ranks train together, at any port"
    reached = {}
    for name, policy in policies.items():
        assert policy["spec"]["podSelector"] == {"matchLabels": {COMPONENT: name}}
        (rule,) = policy["spec"]["ingress"]
        (source,) = rule["from"]
        (port,) = PODS[name]["containers"][0]["ports"]
        assert rule["ports"] == [{"port": port["name"]}]
        match source:
            case {
                "podSelector": {"matchExpressions": [{"key": "app.kubernetes.io/component"} as it]}
            }:
                reached[name, port["containerPort"]] = it["values"]
            case {"podSelector": {"matchLabels": {"app.kubernetes.io/component": component}}}:
                reached[name, port["containerPort"]] = [component]
            case _:
                assert source == {"namespaceSelector": {}}
                reached[name, port["containerPort"]] = ["*"]
    assert reached == {
        ("api", 8000): ["*"],
        ("s3", 8333): ["api", "coordinator", "agent", "sample-data"],
        ("postgres", 5432): ["api", "coordinator"],
        ("coordinator", 7400): ["agent"],
    }


def test_services_and_workloads_select_their_pods() -> None:
    for name, template in TEMPLATES.items():
        assert template["metadata"]["labels"] == {COMPONENT: name}
    for name, it in of_kind("Deployment", "StatefulSet").items():
        assert it["spec"]["selector"] == {"matchLabels": {COMPONENT: name}}
    for name, it in of_kind("Service").items():
        assert it["spec"]["selector"] == {COMPONENT: name}
        ports = [port["containerPort"] for port in PODS[name]["containers"][0]["ports"]]
        assert ports == [port["port"] for port in it["spec"]["ports"]]


@pytest.mark.parametrize("name", PODS)
def test_pod_names_what_exists(name: str, compose: dict[str, Any]) -> None:
    spec = PODS[name]
    assert spec.get("serviceAccountName", "default") in {"default", *of_kind("ServiceAccount")}
    templates = of_kind("StatefulSet").get(name, {"spec": {}})["spec"]
    known = {it["metadata"]["name"] for it in templates.get("volumeClaimTemplates", ())}
    known |= {it["name"] for it in spec["volumes"]}
    mounts = [it for container in containers_of(spec) for it in container["volumeMounts"]]
    assert {it["name"] for it in mounts} == known
    for volume in spec["volumes"]:
        if claim := volume.get("persistentVolumeClaim"):
            assert claim["claimName"] in of_kind("PersistentVolumeClaim")
        for item in volume.get("secret", {}).get("items", ()):
            assert item["key"] == item["path"]
            assert item["key"] in compose["secrets"], "compose-env writes the files of the Secret"


@pytest.mark.parametrize("name", ["api", "coordinator", "postgres", "s3"])
def test_settings_and_image_are_those_of_compose(name: str, compose: dict[str, Any]) -> None:
    service, container = compose["services"][name], PODS[name]["containers"][0]
    assert container["image"].removeprefix("REGISTRY/") == service["image"]
    shared = of_kind("ConfigMap")["muster"]["data"] if "envFrom" in container else {}
    ours = shared | {it["name"]: it.get("value") for it in container["env"]}
    for variable, value in service["environment"].items():
        theirs = value.replace("/run/secrets/", "/etc/muster/")
        assert ours[variable] == theirs
    for variable in ours:
        if variable.startswith(("MUSTER_", "S3_")):
            documented = (ROOT / "docs/reference/configuration.md").read_text()
            assert f"| `{variable.removesuffix('_FILE')}` |" in documented
