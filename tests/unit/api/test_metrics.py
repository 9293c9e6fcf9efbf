"""What a scrape holds, as the real parser reads it, and the files that use its metrics."""

import itertools
import json
import re
from collections import Counter, defaultdict
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from ruamel.yaml import YAML

from api.dependencies import AppState
from api.metrics import METRICS, UNITS, Scrape, ScrapeCollector, read_scrape
from database.errors import DatabaseUnavailable
from muster.contracts.job.status import JobStatus
from muster.contracts.settings.paths import DataDir
from tests.support.database_samples import NOON
from tests.support.summaries import rank, summary

DOCS = Path(__file__).parents[3] / "docs"

SAVED: dict[str, Any] = {
    "rank": 1,
    "process": "finished",
    "last_checkpoint_step": 5,
    "last_checkpoint_bytes": 640,
    "last_checkpoint_at": (NOON - timedelta(seconds=90)).isoformat(),
}
LABELS = {"job_id", "name", "status", "state", "retry_class", "route", "code", "metric"}

AWAY = Scrape(now=NOON, requests={("/jobs/{job_id}", 404): 3})
WHOLE = Scrape(
    now=NOON,
    requests=AWAY.requests,
    disk_free_bytes=10,
    disk_size_bytes=20,
    is_database_up=True,
    is_coordinated=True,
    lease_age_seconds=0.5,
    statuses=dict.fromkeys(JobStatus, 1),
    slots=8,
    slots_taken=2,
    jobs=[
        summary(
            name="net",
            endings={"crash": 2, "hang": 0},
            workers=[rank(metrics={"acc": 0.5}), rank(**SAVED)],
        )
    ],
)


def scraped(scrape: Scrape) -> dict[str, list[Sample]]:
    """Return the samples of each metric, by its declared name."""
    registry = CollectorRegistry()
    registry.register(ScrapeCollector(lambda: scrape))
    text = generate_latest(registry).decode()
    families = list(text_string_to_metric_families(text))
    for family in families:
        last = family.name.rpartition("_")[2]
        assert family.unit == (last if last in UNITS else "")
    assert len(families) == len(METRICS)
    names = {one.name.removesuffix("_total"): one.name for one in METRICS}
    return {names[family.name]: family.samples for family in families}


def values(scrape: Scrape, name: str) -> dict[tuple[str, ...], float]:
    """Return the values of a metric by its labels but those of the job."""
    return {
        tuple(text for label, text in one.labels.items() if label not in {"job_id", "name"}): (
            one.value
        )
        for one in scraped(scrape)[name]
    }


def test_every_metric_has_a_sample_and_known_labels() -> None:
    found = scraped(WHOLE)
    assert [name for name, samples in found.items() if not samples] == []
    labels = {label for samples in found.values() for one in samples for label in one.labels}
    assert labels == LABELS


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("muster_job_steps", {(): 5.0}),
        ("muster_job_steps_per_second", {(): 2.5}),
        ("muster_job_loss", {(): 0.25}),
        ("muster_job_metric", {("acc",): 0.5}),
        ("muster_job_status", {("RUNNING",): 1.0}),
        ("muster_job_attempts_ended_total", {("crash",): 2.0, ("hang",): 0.0}),
        ("muster_job_checkpoint_age_seconds", {(): 90.0}),
        ("muster_job_checkpoint_bytes", {(): 640.0}),
        ("muster_queue_jobs", {(): 1.0}),
        ("muster_http_requests_total", {("404", "/jobs/{job_id}"): 3.0}),
    ],
)
def test_values_are_those_of_the_service(name: str, expected: dict[Any, float]) -> None:
    assert values(WHOLE, name) == expected


def test_ranks_of_every_state_are_counted() -> None:
    counted = values(WHOLE, "muster_job_ranks")
    assert (counted[("live",)], counted[("suspect",)], sum(counted.values())) == (1, 0, 2)


def test_without_a_database_the_rest_is_shown() -> None:
    shown = {name: samples[0].value for name, samples in scraped(AWAY).items() if samples}
    assert shown == {"muster_database_up": 0, "muster_http_requests_total": 3}


@pytest.mark.parametrize(
    "name",
    [
        'a"} 1\nmuster_jobs{status="QUEUED',
        "\\",
        '\\"',
        "\\n",
        "line\nend\r\n",
        "# EOF\n",
        '} 1 # {trace_id="x"} 1',
        "{{ $labels.x }}",
        "\u2028\x85\x00\x1b[2J",
        "añ \U0001f680",
        "",
    ],
)
def test_hostile_names_stay_in_their_label(name: str) -> None:
    scrape = Scrape(now=NOON, requests={}, jobs=[summary(name=name, job_id=name)])
    labels = [one.labels for samples in scraped(scrape).values() for one in samples]
    assert {(one["job_id"], one["name"]) for one in labels if "name" in one} == {(name, name)}


def test_the_page_has_the_table_of_all_metrics() -> None:
    rows = [f"| `{it.name}` | {', '.join(it.labels)} | {it.meaning} |" for it in METRICS]
    page = (DOCS / "metrics.md").read_text().splitlines()
    assert [line for line in page if line.startswith("| `muster_")] == rows


def expressions() -> dict[str, list[str]]:
    """Return the PromQL of the dashboard and of the alerts."""
    rules = YAML(typ="safe").load(DOCS / "alerts.yml")["groups"][0]["rules"]
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    variables = [
        it["query"]["query"] for it in dashboard["templating"]["list"] if it["name"] == "job"
    ]
    return {"alerts": [rule["expr"] for rule in rules], "dashboard": shown + variables}


@pytest.mark.parametrize("file", ["alerts", "dashboard"])
def test_files_use_metrics_and_labels_of_a_scrape(file: str) -> None:
    whole = replace(WHOLE, jobs=[*WHOLE.jobs, summary(status="FAILED")])
    samples: dict[str, list[dict[str, str]]] = defaultdict(list)
    for one in itertools.chain(*scraped(whole).values()):
        samples[one.name].append(one.labels)
    found = re.findall(r"(muster_\w+)(?:\{([^}]*)\})?", " ".join(expressions()[file]))
    assert len(found) >= 6
    for name, selector in found:
        labels = samples[name]
        assert labels, name
        for label, value in re.findall(r'(\w+)="(\w+)"', selector):
            assert value in {one[label] for one in labels}, (name, label)
        for label in re.findall(r"(\w+)=~", selector):
            assert all(label in one for one in labels), (name, label)


def test_a_scrape_while_everything_is_away(tmp_path: Path) -> None:
    def away(*_args: object) -> NoReturn:
        raise DatabaseUnavailable("away")

    requests = Counter({("/jobs", 200): 1})
    state = SimpleNamespace(
        clock=lambda: NOON,
        requests=requests,
        data_dir=DataDir(tmp_path / "gone"),
        jobs=SimpleNamespace(lately_active=away),
    )
    scrape = read_scrape(cast(AppState, state))
    requests["/jobs", 200] += 1
    assert scrape == Scrape(now=NOON, requests={("/jobs", 200): 1})
