"""Descriptions of clusters: what is refused, in which order, and what a valid one says."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.cluster.description import Cluster, ClusterNode, Gpu
from muster.cluster.reading import cluster_of, read_cluster
from muster.contracts.errors import InvalidDescription
from muster.host.yaml_files import YamlFile

TEXT = """\
nodes:
- name: laptop
  host: localhost
  cpu_cores: 8
  ram_mb: 16000
- name: gpu-box
  host: 10.0.0.2
  transport: ssh
  user: me
  gpus:
  - {uuid: GPU-1, type: RTX 4090, vram_mb: 24564}
  - {uuid: GPU-2, type: RTX 3080, vram_mb: 24000}
  max_adapters: 3
- name: board
  host: board.local
  gpus: [{uuid: "0", type: Jetson Orin, vram_mb: 8192, memory_type: unified}]
  slots: 2
"""


def parse_cluster(text: str, name: str = "cluster.yaml") -> Cluster:
    return cluster_of(YamlFile.parse(text, name))


def test_text_form_has_a_line_per_node() -> None:
    assert str(parse_cluster(TEXT)) == (
        "nodes: 3, adapter slots: 5\n"
        "  laptop: localhost, local, CPU-only, slots: 16\n"
        "  gpu-box: me@10.0.0.2, ssh, RTX 4090 (20879 of 24564 MB usable) + "
        "RTX 3080 (20400 of 24000 MB usable), slots: auto\n"
        "  board: board.local, local, Jetson Orin (4915 of 8192 MB usable), slots: 2"
    )


def test_nodes_are_found_by_name() -> None:
    cluster = parse_cluster(TEXT)
    assert cluster.capacity == 5
    assert cluster.node("board").gpus[0].memory_type == "unified"
    with pytest.raises(InvalidDescription, match="no node 'box': use one of laptop, gpu-box, bo"):
        cluster.node("box")


ALL_WRONG = """\
nodes:
- name: a
  host: here
  colour: red
- name: a
  host: there
  max_adapters: 0
- name: c
  host: LocalHost
  transport: ssh
- name: d
  host: d.local
  gpus:
  - {uuid: U, type: T, vram_mb: 8000}
  - {uuid: U, type: T, vram_mb: 0}
"""

NODE_KEYS = (
    "(the keys are name, host, transport, user, gpus, max_adapters, slots, cpu_cores, ram_mb)"
)

# In the order in which they are reported: each mistake is corrected before the next is found.
MISTAKES = [
    (
        "x.yaml:5: node a: an earlier node has this name: choose another",
        "a\n  host: t",
        "b\n  host: t",
    ),
    (
        "x.yaml:7: node b: max_adapters is 0: write how many jobs may run there, or leave ",
        "max_adapters: 0",
        "max_adapters: 1",
    ),
    (
        "x.yaml:9: node c: host LocalHost is this machine: write another's address, or ",
        "ssh",
        "local",
    ),
    (
        "x.yaml:15: node d: GPU U has vram_mb 0: write the MB that nvidia-smi shows",
        "vram_mb: 0",
        "vram_mb: 1",
    ),
    (
        "x.yaml:15: node d: GPU U is listed twice: write each once (nvidia-smi -L)",
        "- {uuid: U, type: T, vram_mb: 1}",
        "- {uuid: V, type: T, vram_mb: 1}",
    ),
    (
        f"x.yaml:4: node a: colour: there is no such field {NODE_KEYS}",
        "  colour: red\n",
        "",
    ),
]


def test_first_mistake_in_the_order_is_reported() -> None:
    text = ALL_WRONG
    for sentence, wrong, right in MISTAKES:
        with pytest.raises(InvalidDescription) as refused:
            parse_cluster(text, "x.yaml")
        assert str(refused.value).startswith(sentence)
        assert wrong in text
        text = text.replace(wrong, right, 1)
    assert [node.name for node in parse_cluster(text).nodes] == ["a", "b", "c", "d"]


NO_NODES = "there are no nodes: list them under nodes:, each with a name and a host"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", f"x.yaml:1: {NO_NODES}"),
        ("just words", f"x.yaml:1: {NO_NODES}"),
        ("nodes: []", f"x.yaml:1: {NO_NODES}"),
        ("node: [{name: a, host: b}]", f"x.yaml:1: {NO_NODES}"),
        ("nodes: 5", "x.yaml:1: nodes: expected a list, got 5"),
        ("nodes: [a]", "x.yaml:1: node 0: expected a mapping, got 'a'"),
        (
            "nodes: [{name: a, host: b}]\nnode: 1",
            "x.yaml:2: node: there is no such field (did you mean 'nodes'?)",
        ),
        ("nodes:\n- host: b", f"x.yaml:2: node 0: name: is required {NODE_KEYS}"),
        ("nodes: [{name: 5, host: b}]", 'x.yaml:1: node 5: name: expected text, got 5: write "5"'),
        (
            "nodes: [{name: a, host: -oProxyCommand=x}]",
            "x.yaml:1: node a: host: use a host name or an address",
        ),
        (
            "nodes: [{name: a, host: b, transport: rsh}]",
            "x.yaml:1: node a: transport: expected local or mesh or ssh, got 'rsh'",
        ),
        (
            "nodes: [{name: a, host: b, max_adapters: -1}]",
            "x.yaml:1: node a: max_adapters: -1 is not between 1 and 4096",
        ),
        (
            "nodes: [{name: a, host: b, max_adapters: many}]",
            "x.yaml:1: node a: max_adapters: expected an integer, got 'many'",
        ),
        (
            "nodes:\n- name: a\n  host: b\n  gpus:\n  - uuid: U\n    type: T\n    vram_mb: 1.5",
            "x.yaml:7: node a: gpus.0.vram_mb: expected an integer, got 1.5",
        ),
        (
            "nodes: [{name: a, host: b, gpus: }]",
            "x.yaml:1: node a: gpus: expected a list, got null",
        ),
        *(
            (
                f"nodes: [{{name: a, host: '{host}', transport: ssh}}]",
                f"x.yaml:1: node a: host {said}",
            )
            for host, said in (
                ("localhost.", "localhost. is this machine: write another's address, or "),
                ("0.0.0.0", "0.0.0.0 is this machine: write another's address, or "),  # noqa: S104
                ("127.0.0.2", "127.0.0.2 is this machine: write another's address, or "),
                ("b:22", "b:22 has a port: leave it out, and write it as Port into "),
            )
        ),
        (
            "nodes:\n- {name: a, host: B.}\n- {name: b, host: b, transport: ssh}",
            "x.yaml:3: node b: host b is that of another node, too: list each machine once",
        ),
        ("nodes: [\nb: 2", "x.yaml:2:5: "),
        ("nodes: 1\nnodes: 2", "x.yaml:2:1: found duplicate key"),
    ],
)
def test_refusal_names_the_line_and_what_to_write(text: str, sentence: str) -> None:
    with pytest.raises(InvalidDescription) as refused:
        parse_cluster(text, "x.yaml")
    assert str(refused.value).startswith(sentence)
    assert sentence.endswith((" ", "key")) or str(refused.value) == sentence


def test_cluster_that_a_program_builds_is_checked() -> None:
    with pytest.raises(InvalidDescription, match=r"^there are no nodes: "):
        Cluster(nodes=())
    gpu = Gpu(uuid="U", type="T", vram_mb=0)
    with pytest.raises(InvalidDescription, match=r"^node a: GPU U has vram_mb 0: "):
        Cluster(nodes=(ClusterNode(name="a", host="b", gpus=(gpu,)),))


def test_missing_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidDescription, match=r"cluster\.yaml cannot be read: No such file"):
        read_cluster(tmp_path / "cluster.yaml")


def text(pattern: str) -> st.SearchStrategy[str]:
    return st.from_regex(rf"\A{pattern}\Z")


MEGABYTES = st.integers(1, 1 << 30)
COUNTS = st.integers(1, 4096)
GPUS = st.builds(
    Gpu,
    uuid=text("[A-Za-z0-9_][A-Za-z0-9_./:-]{0,20}"),
    type=text("[A-Za-z0-9_][ -~]{0,20}"),
    vram_mb=MEGABYTES,
    memory_type=st.sampled_from(["discrete", "unified"]),
)
NODES = st.builds(
    ClusterNode,
    name=text("[A-Za-z0-9][A-Za-z0-9_.-]{0,20}"),
    host=text("[A-Za-z1-9_][A-Za-z0-9_.:%-]{0,20}").filter(
        lambda host: "local" not in host.lower() and host[:4] != "127." and host.count(":") != 1
    ),
    transport=st.sampled_from(["local", "ssh"]),
    user=st.none() | text("[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}"),
    gpus=st.lists(GPUS, max_size=3, unique_by=lambda gpu: gpu.uuid).map(tuple),
    max_adapters=COUNTS,
    slots=st.none() | COUNTS,
    cpu_cores=st.none() | COUNTS,
    ram_mb=st.none() | MEGABYTES,
)


@pytest.mark.slow
@given(
    st.lists(
        NODES,
        min_size=1,
        max_size=4,
        unique_by=(lambda node: node.name, lambda node: node.host.lower().rstrip(".")),
    ).map(tuple)
)
def test_written_cluster_is_parsed_as_the_same(nodes: tuple[ClusterNode, ...]) -> None:
    given = [
        {name: value for name, value in asdict(node).items() if value is not None} for node in nodes
    ]
    assert parse_cluster(json.dumps({"nodes": given})) == Cluster(nodes=nodes)


@pytest.mark.parametrize(
    ("vram_mb", "memory_type", "usable"),
    [(24_564, "discrete", 20_879), (8_192, "unified", 4_915), (24_000, "discrete", 20_400)],
)
def test_usable_vram_is_rounded_down(vram_mb: int, memory_type: object, usable: int) -> None:
    gpu = Gpu(uuid="U", type="T", vram_mb=vram_mb, memory_type=memory_type)
    assert gpu.usable_vram_mb == usable


@pytest.mark.parametrize(
    ("given", "slots"), [({}, None), ({"cpu_cores": 8}, 16), ({"cpu_cores": 8, "slots": 3}, 3)]
)
def test_slots_are_twice_the_cores_unless_given(given: dict[str, int], slots: int | None) -> None:
    assert ClusterNode(name="a", host="b", **given).rank_slots == slots
