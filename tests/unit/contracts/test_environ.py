from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from muster.contracts.errors import InvalidEnvironment
from muster.contracts.job.field_types import RandomCompression
from muster.contracts.job.spec import JobSpec
from muster.contracts.location import Location, S3Location
from muster.contracts.settings.environ import (
    Assignment,
    HostPlace,
    RankSettings,
    process_tag,
    rank_environment,
    spec_from_environment,
)
from muster.contracts.settings.names import PROCESS_TAG
from muster.contracts.settings.services import (
    AccessSettings,
    ServiceSettings,
    api_url,
    is_issued_token,
)
from muster.contracts.token import sha256_of

SPEC = JobSpec(
    world_size=3,
    checkpoint_every=7,
    keep_last=2,
    sleep_sec=0.1,
    epochs=2,
    batch_size=8,
    seed=2**63 - 1,
    heartbeat_timeout=12.5,
    max_restarts=4,
    command=("python", "a b.py", 'quo"te', "ü", ""),
    resume_from="other-job:7",
    env={"A": "b", "OMP_NUM_THREADS": "2", "RANK": "99", "PYTHONUNBUFFERED": ""},
)
SYNCHRONOUS = JobSpec(
    mode="synchronous",
    program="my dir/ü.py:Net",
    virtual_shards=8,
    batch_size=24,
    backend="tcp",
    replay_every=16,
    compression="random:0.1",
    compression_groups=2,
)
ASSIGNMENT = Assignment(
    job_id="job",
    job_uid="uid",
    rank=2,
    attempt=5,
    checkpoint_dir=Path("/check points"),
    dataset_dir=Path("/data"),
    master_port=29400,
    generation=5,
)


def read_rank(environ: Mapping[str, str], world_size: int = 4) -> RankSettings:
    return RankSettings.read(environ, world_size=world_size)


# What is written is what is read


@pytest.mark.parametrize("spec", [JobSpec(), JobSpec(mode="synchronous"), SPEC, SYNCHRONOUS])
def test_rank_settings_round_trip(spec: JobSpec) -> None:
    settings = read_rank(rank_environment(spec, ASSIGNMENT))
    of_job = set(JobSpec.__struct_fields__) & set(RankSettings.__struct_fields__)
    for field in of_job - {"dataset_dir", "checkpoint_dir"}:
        of_spec = "effective_batch_size" if field == "batch_size" else field
        assert getattr(settings, field) == getattr(spec, of_spec)
    assert (settings.job_id, settings.job_uid, settings.rank) == ("job", "uid", 2)
    assert (settings.restart_count, settings.generation) == (5, 5)
    assert settings.checkpoint_dir == Path("/check points")
    assert settings.dataset_dir == Path("/data")
    assert (settings.agent_fd, settings.agent_socket) == (None, None)
    assert settings.orphan_timeout_seconds == 120


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({}, 16),
        ({"MUSTER_MODE": "synchronous"}, 64),
        ({"MUSTER_MODE": "synchronous", "MUSTER_VIRTUAL_SHARDS": "8"}, 64),
        ({"MUSTER_MODE": "synchronous", "MUSTER_VIRTUAL_SHARDS": "64"}, 128),
        ({"MUSTER_MODE": "synchronous", "MUSTER_BATCH_SIZE": "96"}, 96),
        ({"MUSTER_MODE": "independent", "MUSTER_BATCH_SIZE": "7"}, 7),
    ],
)
def test_default_batch_size_depends_on_mode(environ: dict[str, str], size: int) -> None:
    assert read_rank(environ).batch_size == size
    told = {"MUSTER_MODE": "independent"} | environ
    assert spec_from_environment(told).effective_batch_size == size


@pytest.mark.parametrize(("timeout", "seconds"), [(1.0, 0.2), (5.0, 1.0), (10.0, 2.0), (1e6, 2.0)])
def test_heartbeat_interval_follows_the_timeout(timeout: float, seconds: float) -> None:
    spec = JobSpec(heartbeat_timeout=timeout)
    assert read_rank(rank_environment(spec, ASSIGNMENT)).heartbeat_seconds == seconds


def test_torchrun_variables_are_set() -> None:
    environ = rank_environment(SPEC, ASSIGNMENT)
    wanted = {
        "RANK": "2",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "NODE_RANK": "0",
        "ROLE_NAME": "default",
        "ROLE_RANK": "2",
        "ROLE_WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29400",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_RESTART_COUNT": "5",
        "TORCHELASTIC_MAX_RESTARTS": "4",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    assert {name: environ[name] for name in wanted} == wanted


def test_place_among_hosts_is_set() -> None:
    place = HostPlace(
        local_rank=1,
        local_world_size=2,
        group_rank=1,
        group_world_size=2,
        host_count=3,
        master_address="10.0.0.1",
    )
    environ = rank_environment(SPEC, replace(ASSIGNMENT, place=place))
    wanted = {
        "RANK": "2",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
    }
    assert {name: environ[name] for name in wanted} == wanted
    assert "GLOO_SOCKET_IFNAME" not in environ, "lo reaches no other host"
    assert (read_rank(environ).host_count, read_rank(wanted).host_count) == (3, 1)


@pytest.mark.parametrize(
    ("text", "ports"), [("29600-29601", [29600, 29601]), ("7-7", [7]), ("", None)]
)
def test_range_of_ports_is_read(text: str, ports: list[int] | None) -> None:
    found = read_rank({"MUSTER_RANK_PORTS": text}).rank_ports
    assert (found and list(found)) == ports


@pytest.mark.parametrize("text", ["29600", "2-1", "0-5", "1-65536", "a-b", "1-2-3"])
def test_bad_range_of_ports_is_refused(text: str) -> None:
    with pytest.raises(InvalidEnvironment, match="two ports, such as 29600-29999"):
        read_rank({"MUSTER_RANK_PORTS": text})


@pytest.mark.parametrize(
    ("place", "kept"), [(Path("/disk"), (3, 5)), (S3Location("bucket"), (4, 5))]
)
def test_gang_keeps_what_its_ranks_may_have_in_common(
    place: Location, kept: tuple[int, int]
) -> None:
    gang = JobSpec(command=("x",), restart_scope="gang")
    assignment = replace(ASSIGNMENT, checkpoint_dir=place, restore_from="none")
    settings = [
        read_rank(rank_environment(replace(gang, keep_last=wanted), assignment))
        for wanted in (1, 5)
    ]
    assert tuple(it.keep_last for it in settings) == kept
    assert {it.restore_from for it in settings} == {"none"}


def test_job_env_cannot_replace_our_variables() -> None:
    environ = rank_environment(SPEC, ASSIGNMENT)
    assert environ["A"] == "b"
    assert environ["RANK"] == "2"
    assert environ["OMP_NUM_THREADS"] == "2", "the job's env wins over a default"
    assert environ["OPENBLAS_NUM_THREADS"] == environ["MKL_NUM_THREADS"] == "1"
    assert environ["PYTHONHASHSEED"] == "0"
    assert environ["PYTHONUNBUFFERED"] == ""
    assert environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert environ[PROCESS_TAG] == process_tag("uid", 2, 5) == "uid/2/5"


def test_unset_fields_hide_the_services_variables() -> None:
    environ = rank_environment(JobSpec(), ASSIGNMENT)
    unsaid = ("MUSTER_COMMAND", "MUSTER_RESUME_FROM", "MUSTER_PROGRAM", "MUSTER_REPLAY_EVERY")
    assert [environ[name] for name in unsaid] == ["", "", "", ""]
    settings = read_rank(dict.fromkeys(unsaid, "evil") | environ)
    assert (settings.command, settings.resume_from) == (None, None)
    assert (settings.program, settings.replay_every) == (None, None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("JOB_ID", "../../elsewhere"),
        ("MUSTER_RESUME_FROM", "../../elsewhere"),
        ("MUSTER_RESUME_FROM", "a/b:7"),
        ("MUSTER_RESUME_FROM", "points:bset"),
        ("MUSTER_RESUME_FROM", "points:"),
        ("MUSTER_KEEP_BEST", "val_loss"),
        ("MUSTER_KEEP_BEST", '{"metric": "val_loss", "step": 1}'),
    ],
)
def test_a_value_that_no_job_has_is_refused(name: str, text: str) -> None:
    with pytest.raises(InvalidEnvironment, match=name):
        read_rank({name: text})


USED = {"USE_S3": "true", "DATASET_DIR": "shards"}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({"USE_S3": "false"}, Path("checkpoints").absolute()),
        (USED, S3Location("training-data", "checkpoints")),
        ({**USED, "S3_BUCKET": "mine"}, S3Location("mine", "checkpoints")),
        ({**USED, "CHECKPOINT_DIR": "kept"}, Path("kept").absolute()),
        ({"CHECKPOINT_DIR": "s3://mine/a/b"}, S3Location("mine", "a/b")),
    ],
)
def test_checkpoints_are_sought_elsewhere(environ: dict[str, str], place: Location) -> None:
    assert read_rank(environ).checkpoint_dir == place


def test_home_is_expanded_in_every_path() -> None:
    environ = {"MUSTER_DATA_DIR": "~/d", "CHECKPOINT_DIR": "~/c", "MUSTER_TLS_CERTFILE": "~/t"}
    settings = ServiceSettings.read(environ, cores=4)
    assert settings.data_dir == Path.home() / "d"
    assert settings.database == Path.home() / "d/muster.db"
    assert settings.checkpoint_dir == read_rank(environ).checkpoint_dir == Path.home() / "c"
    assert AccessSettings.read(environ).tls_certfile == Path.home() / "t"
    for name in ("MUSTER_DATA_DIR", "CHECKPOINT_DIR"):
        with pytest.raises(InvalidEnvironment, match=f"{name}='~no-one/d' is not a path"):
            ServiceSettings.read({name: "~no-one/d"}, cores=4)


def test_place_in_no_store_is_accepted() -> None:
    with pytest.raises(InvalidEnvironment, match=r"CHECKPOINT_DIR.* is not a path, or s3://"):
        read_rank({"CHECKPOINT_DIR": "gs://bucket/a"})


# Defaults


@pytest.mark.parametrize("environ", [{}, {"RANK": "", "WORLD_SIZE": "", "JOB_ID": ""}])
def test_defaults_of_a_rank_started_by_hand(environ: dict[str, str]) -> None:
    settings = read_rank(environ)
    assert (settings.job_id, settings.rank, settings.world_size) == ("local", 0, 4)
    assert (settings.checkpoint_every, settings.sleep_sec) == (5, 0.0)
    assert settings.checkpoint_dir == Path.cwd() / "checkpoints"
    assert settings.dataset_dir == Path.cwd() / "data" / "shards"
    assert (settings.job_uid, settings.generation, settings.agent_fd) == (None, None, None)
    assert (settings.command, settings.resume_from) == (None, None)


PUBLIC = [
    ("WORLD_SIZE", "2", "world_size", 2),
    ("CHECKPOINT_DIR", "/c", "checkpoint_dir", "/c"),
    ("CHECKPOINT_EVERY", "9", "checkpoint_every", 9),
    ("CHECKPOINT_EVERY", "auto", "checkpoint_every", "auto"),
    ("SLEEP_SEC", "0.5", "sleep_sec", 0.5),
    ("DATASET_DIR", "d", "dataset_dir", "d"),
    ("HEARTBEAT_TIMEOUT", "20", "heartbeat_timeout", 20),
    ("MAX_RESTARTS", "0", "max_restarts", 0),
    ("MUSTER_COMMAND", '["python", "train.py"]', "command", ("python", "train.py")),
    ("MUSTER_BATCH_SIZE", "128", "batch_size", 128),
    ("MUSTER_MODE", "synchronous", "mode", "synchronous"),
    ("MUSTER_PROGRAM", "train.py:Net", "program", "train.py:Net"),
    ("MUSTER_VIRTUAL_SHARDS", "64", "virtual_shards", 64),
    ("MUSTER_COMPRESSION", "random:0.1", "compression", "random:0.1"),
    ("MUSTER_COMPRESSION_GROUPS", "4", "compression_groups", 4),
    ("MUSTER_BACKEND", "shared_memory", "backend", "shared_memory"),
    ("MUSTER_REPLAY_EVERY", "4", "replay_every", 4),
]


def test_public_names_describe_a_job() -> None:
    environ = {name: text for name, text, _, _ in PUBLIC}
    fields = {field: value for _, _, field, value in PUBLIC}
    assert spec_from_environment(environ) == JobSpec(**fields)


def test_empty_environment_is_a_default_job() -> None:
    assert spec_from_environment({}) == JobSpec(mode="synchronous")
    told = {"MUSTER_COMMAND": '["true"]', "MUSTER_RESTART_SCOPE": "gang"}
    commanded = spec_from_environment(told)
    assert commanded == JobSpec(mode="independent", command=("true",), restart_scope="gang")


def test_service_defaults() -> None:
    settings = ServiceSettings.read({"HOME": "/home/ada"}, cores=4)
    assert settings.data_dir == Path("/home/ada/.local/share/muster")
    assert settings.database == Path("/home/ada/.local/share/muster/muster.db")
    assert (settings.host, settings.port, settings.slots) == ("127.0.0.1", 8000, 8)
    assert settings.orphan_timeout_seconds == 120


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, Path("/d/checkpoints")),
        ({"CHECKPOINT_DIR": "kept"}, Path("kept").absolute()),
        (USED, S3Location("training-data", "checkpoints")),
    ],
)
def test_services_save_below_their_data(environ: dict[str, str], place: Location) -> None:
    settings = ServiceSettings.read({"MUSTER_DATA_DIR": "/d", **environ}, cores=4)
    assert settings.checkpoint_dir == place


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("", None),
        ("10.0.0.1:7000", ("10.0.0.1", 7000)),
        ("[::1]:7000", ("::1", 7000)),
    ],
)
def test_the_address_for_agents_is_read(text: str, endpoint: tuple[str, int] | None) -> None:
    assert read_service({"MUSTER_AGENT_ADDRESS": text}).agent_endpoint == endpoint


def test_service_refuses_unusable_store_settings() -> None:
    with pytest.raises(InvalidEnvironment, match=r"MUSTER_CACHE_BYTES.*1048576 or more"):
        ServiceSettings.read({"MUSTER_CACHE_BYTES": "1000"}, cores=4)


def test_service_settings_are_read() -> None:
    names = ("MUSTER_DATA_DIR", "MUSTER_DATABASE_URL", "MUSTER_HOST", "MUSTER_PORT", "MUSTER_SLOTS")
    environ = dict(zip(names, ("here", "postgresql://x", "::1", "0", "3"), strict=True))
    environ |= {"CHECKPOINT_DIR": "c", "DATASET_DIR": "/d", "MUSTER_ORPHAN_TIMEOUT": "1.5"}
    assert ServiceSettings.read(environ, cores=4) == ServiceSettings(
        data_dir=Path.cwd() / "here",
        database_url="postgresql://x",
        host="::1",
        port=0,
        slots=3,
        checkpoint_dir=Path.cwd() / "c",
        dataset_dir=Path("/d"),
        orphan_timeout_seconds=1.5,
    )


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"MUSTER_PORT": "9000"}, "http://127.0.0.1:9000"),
        ({"MUSTER_HOST": "::1", "MUSTER_PORT": "1"}, "http://[::1]:1"),
        ({"MUSTER_HOST": "192.0.2.7"}, "http://192.0.2.7:8000"),
        ({"MUSTER_HOST": "0.0.0.0"}, "http://127.0.0.1:8000"),  # noqa: S104  no listener
        ({"MUSTER_HOST": "0"}, "http://127.0.0.1:8000"),
        ({"MUSTER_HOST": "::"}, "http://[::1]:8000"),
        ({"MUSTER_URL": "https://a.example/b/", "MUSTER_PORT": "9"}, "https://a.example/b"),
        ({"MUSTER_URL": "", "MUSTER_PORT": "9"}, "http://127.0.0.1:9"),
        ({"MUSTER_TLS_CERTFILE": "c.pem", "MUSTER_HOST": "::1"}, "https://[::1]:8000"),
    ],
)
def test_api_url(environ: dict[str, str], url: str) -> None:
    assert api_url(environ) == url


def test_access_defaults() -> None:
    door = AccessSettings.read({"MUSTER_TOKEN": "", "MUSTER_ALLOWED_HOSTS": ""})
    assert (door.token_sha256, door.require_token, door.allow_plain_http) == (None, False, False)
    assert (door.allowed_hosts, door.tls_certfile, door.tls_keyfile) == (frozenset(), None, None)
    assert (door.requests_per_second, door.requests_at_once) == (100, 64)


def test_access_settings_are_read_without_the_token() -> None:
    token = "x1" * 16
    door = AccessSettings.read(
        {
            "MUSTER_TOKEN": token,
            "MUSTER_REQUIRE_TOKEN": "yes",
            "MUSTER_ALLOWED_HOSTS": "A.example, ,b.example",
            "MUSTER_TLS_CERTFILE": "c.pem",
            "MUSTER_TLS_KEYFILE": "/k.pem",
            "MUSTER_ALLOW_PLAIN_HTTP": "TRUE",
            "MUSTER_REQUESTS_PER_SECOND": "1",
            "MUSTER_REQUESTS_AT_ONCE": "2",
        }
    )
    assert door == AccessSettings(
        token_sha256=sha256_of(token),
        require_token=True,
        allowed_hosts=frozenset({"a.example", "b.example"}),
        tls_certfile=Path.cwd() / "c.pem",
        tls_keyfile=Path("/k.pem"),
        allow_plain_http=True,
        requests_per_second=1,
        requests_at_once=2,
    )
    assert token not in repr(door)


@pytest.mark.parametrize("token", ["short", "with spaces, though it is long enough", "ü" * 40])
def test_weak_token_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(InvalidEnvironment, match="32 or more letters and digits") as caught:
        AccessSettings.read({"MUSTER_TOKEN": token})
    assert token not in str(caught.value)


def test_issued_token_is_not_accepted_as_admin_token() -> None:
    environ = {"MUSTER_TOKEN": f"mst_{'a' * 12}_{'b' * 64}"}
    assert AccessSettings.read(environ).token_sha256 is None
    assert is_issued_token(environ)
    assert not is_issued_token({})
    assert not is_issued_token({"MUSTER_TOKEN": "x1" * 16})


# Values that cannot be meant


def read_service(environ: Mapping[str, str]) -> ServiceSettings:
    return ServiceSettings.read(environ, cores=2)


WRONG = [
    (read_rank, "RANK", ["-1", "4", "one"]),
    (read_rank, "WORLD_SIZE", ["0", "9" * 5000]),
    (read_rank, "SLEEP_SEC", ["-1", "nan", "inf", "1e999", "a while"]),
    (read_rank, "MUSTER_GENERATION", ["-1"]),
    (read_rank, "MUSTER_AGENT_FD", ["x"]),
    (read_rank, "MUSTER_SEED", ["-1", str(2**63)]),
    (read_rank, "MUSTER_HEARTBEAT_SECONDS", ["-2", "0"]),
    (read_rank, "MUSTER_COMMAND", ["python train.py", '"python"', '["python", 1]', "[]"]),
    # What Python makes of bytes that are no text, and endless nesting.
    (read_rank, "MUSTER_COMMAND", ['["\udcff"]', "[" * 100_000]),
    (read_rank, "MUSTER_MODE", ["SYNCHRONOUS"]),
    (read_rank, "MUSTER_PROGRAM", ["train.py"]),
    (read_rank, "MUSTER_VIRTUAL_SHARDS", ["0", "48", "8192"]),
    (read_rank, "MUSTER_BACKEND", ["carrier pigeon"]),
    (read_rank, "CHECKPOINT_EVERY", ["0", "often", "1.5", "AUTO"]),
    (spec_from_environment, "MUSTER_MODE", ["both"]),
    (spec_from_environment, "WORLD_SIZE", ["many"]),
    (spec_from_environment, "HEARTBEAT_TIMEOUT", ["nan"]),
    (spec_from_environment, "MUSTER_COMMAND", ["{}"]),
    (spec_from_environment, "MUSTER_RESTART_SCOPE", ["all"]),
    (AccessSettings.read, "MUSTER_REQUIRE_TOKEN", ["perhaps"]),
    (AccessSettings.read, "MUSTER_ALLOW_PLAIN_HTTP", ["2"]),
    (AccessSettings.read, "MUSTER_TLS_KEYFILE", ["k.pem"]),
    (AccessSettings.read, "MUSTER_REQUESTS_PER_SECOND", ["0"]),
    (api_url, "MUSTER_PORT", ["0"]),
    (read_service, "MUSTER_PORT", ["65536", "http"]),
    (read_service, "MUSTER_SLOTS", ["0"]),
    (
        read_service,
        "MUSTER_AGENT_ADDRESS",
        ["7000", "host:7000", "0.0.0.0:7000", "10.0.0.1:0", "10.0.0.1:65536", "a@b:1", ":1"],
    ),
    (read_service, "MUSTER_ORPHAN_TIMEOUT", ["-1"]),
]


@pytest.mark.parametrize(("read", "name", "values"), WRONG)
def test_invalid_value_is_refused_by_name(
    read: Callable[[Mapping[str, str]], object], name: str, values: list[str]
) -> None:
    for value in values:
        with pytest.raises(InvalidEnvironment) as caught:
            read({name: value})
        assert caught.value.name == name
        assert str(caught.value).startswith(f"{name}={value!r} is not ")
        assert str(caught.value).endswith(": correct it in the environment or unset it")


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://me:hunter2@localhost",
        "http://",
        "http://[::1",
        "http://localhost:99999",
        "http://local\nhost",
        "http://me:hunter2@localhost:8000",
        "http://hunter2@localhost:8000",
        "http://localhost:8000/?token=hunter2",
        "http://localhost:8000/#hunter2",
    ],
)
def test_invalid_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(InvalidEnvironment, match="is not a URL such as http://host:8000") as caught:
        api_url({"MUSTER_URL": url})
    assert caught.value.name == "MUSTER_URL"
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"COMPRESSION": "sign"}, "is not int8, bf16, fp16 or"),
        ({"COMPRESSION": "random:nan"}, "is not int8, bf16, fp16 or"),
        ({"COMPRESSION": "int8", "COMPRESSION_GROUPS": "64"}, "a power of two up to 32"),
        ({"COMPRESSION": "int8", "COMPRESSION_GROUPS": "6"}, "a power of two up to 32"),
    ],
)
def test_compression_that_there_is_not_is_refused(variables: dict[str, str], wanted: str) -> None:
    environ = {f"MUSTER_{name}": text for name, text in variables.items()}
    with pytest.raises(InvalidEnvironment, match=wanted):
        read_rank({"MUSTER_MODE": "synchronous", **environ})


def test_random_compression_is_given_to_ranks_as_text() -> None:
    spec = replace(SYNCHRONOUS, compression=RandomCompression("random", 0.01))
    assert read_rank(rank_environment(spec, ASSIGNMENT)).compression == "random:0.01"


@pytest.mark.parametrize(("shards", "groups"), [("4", 4), ("64", 8)])
def test_compression_has_eight_groups_if_there_are_as_many_shards(shards: str, groups: int) -> None:
    environ = {"MUSTER_MODE": "synchronous", "MUSTER_VIRTUAL_SHARDS": shards}
    assert read_rank(environ).compression_groups is None
    environ["MUSTER_COMPRESSION"] = "bf16"
    assert read_rank(environ).compression_groups == groups


@pytest.mark.parametrize("size", ["32", "65", "1000"])
def test_batch_size_must_fit_virtual_shards(size: str) -> None:
    environ = {"MUSTER_MODE": "synchronous", "MUSTER_BATCH_SIZE": size}
    with pytest.raises(InvalidEnvironment, match="is not a multiple of 32, 64 or more: correct"):
        read_rank(environ)
    assert read_rank(environ | {"MUSTER_MODE": "independent"}).batch_size == int(size)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("RANK", "an integer from 0 to 4095"),
        ("SLEEP_SEC", "a number from 0 to 3600"),
        ("TORCHELASTIC_RESTART_COUNT", "an integer, 0 or more"),
        ("MUSTER_BACKEND", "one of auto, shared_memory, tcp"),
        ("MUSTER_COMMAND", "a JSON list of words"),
    ],
)
def test_refusal_says_what_is_expected(name: str, wanted: str) -> None:
    with pytest.raises(InvalidEnvironment, match=f"{name}='x' is not {wanted}"):
        read_rank({name: "x"})
