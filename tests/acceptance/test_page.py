"""The web page in a real browser."""

import json
import re

import pytest

from muster.checkpoints.listing import checkpoint_dirs, examine
from muster.client.progress import duration
from muster.contracts.job.status import JobId
from muster.contracts.settings.paths import checkpoints_of_job, size_text
from tests.support.chromium import Browser, Page
from tests.support.installation import SLOTS, TOGETHER, Installation, Seen, is_running

playwright = pytest.importorskip("playwright.sync_api", reason="needs: pip install playwright")
pytestmark = pytest.mark.timeout(300)

HOSTILE = "<img src=x onerror=document.title='broken'>\u202e\x1b[31m"
COUNTING = """
import time
for number in range(10**6):
    print(f"\\x1b[31mline {number}", flush=True)
    time.sleep(0.05)
"""
CURVE = """
import time
import muster

run = muster.join()
run.restore()
while run.steps_done < STEPS and not run.should_stop:
    time.sleep(0.005)
    step = run.steps_done + 1
    run.step(loss=float("nan") if step == 100 else 2 / step, accuracy=1 - 1 / step)
    if step % 1000 == 0:
        run.checkpoint({"step": step})
"""


def number(page: Page, name: str) -> str:
    found: str = page.locator(f"#head [data-text={name}]").inner_text()
    return found


def test_a_rank_is_killed_on_the_page(page: Page, installation: Installation) -> None:
    job_id = installation.submit(world_size=2, **TOGETHER)
    installation.wait_until(job_id, is_running)
    page.goto("/")
    page.get_by_role("link", name=job_id).click()
    page.wait_for_selector("#head[data-live]")
    page.get_by_role("button", name="kill a rank").click()
    events = page.locator("#events")
    playwright.expect(events).to_contain_text("was ended by signal 9 (SIGKILL)")
    playwright.expect(page.locator("#head [data-text=restarts]")).to_have_text("1")
    playwright.expect(page.locator("#timeline rect.lost")).to_have_count(1)
    step = int(number(page, "step").split("/")[0])
    page.wait_for_function(
        "step => parseInt(document.querySelector('#head [data-text=step]').textContent) > step",
        arg=step,
    )
    _see_how_a_process_ended(page)
    page.get_by_role("button", name="stop").click()
    playwright.expect(page.locator("#head [data-text=status]")).to_have_text("■ STOPPED")
    playwright.expect(page.locator("#actions")).to_have_count(0)


def _see_how_a_process_ended(page: Page) -> None:
    """Go along the bars of the rank that was lost, by keys alone."""
    lost = page.locator("#timeline rect.lost")
    rank = lost.get_attribute("data-of").partition(".")[0]
    page.locator(f"rect[data-key='{rank}-1']").focus()
    phases = []
    while "lost" not in phases:  # the others may notice it first, and wait before
        phases.append(page.evaluate("document.activeElement.className.baseVal"))
        page.keyboard.press("Enter" if phases[-1] == "lost" else "ArrowRight")
    playwright.expect(page.locator("#attempt")).to_contain_text("killed; signal 9")
    page.keyboard.press("ArrowRight")
    assert phases[:2] == ["starting", "training"]
    assert page.evaluate("document.activeElement.className.baseVal") == "gone"
    playwright.expect(page.locator("#attempt h2")).to_have_text(f"rank {rank}, attempt 0")
    assert "loss" in page.locator("#attempt .lines").inner_text()


def test_numbers_are_those_of_the_service(page: Page, installation: Installation) -> None:
    job_id = installation.submit(world_size=2, epochs=2)
    seen: Seen = installation.complete(job_id)
    page.goto(f"/ui/jobs/{job_id}")
    assert number(page, "step") == f"{seen['step']}/{seen['total_steps']}"
    assert number(page, "loss") == f"{seen['loss']:.4f}"
    rows = page.locator("#workers tbody tr")
    assert rows.count() == len(seen["workers"])
    for worker in seen["workers"]:
        row = page.locator(f"[data-rank='{worker['rank']}']")
        assert (
            row.locator("[data-text=step]").inner_text()
            == f"{worker['step']}/{worker['total_steps']}"
        )


def test_hostile_texts_are_shown_as_text(page: Page, installation: Installation) -> None:
    script = f"import sys; print({HOSTILE!r}); sys.exit(64)"
    job_id = installation.submit(
        name=HOSTILE[:60].replace("\x1b", ""), world_size=1, command=["python", "-c", script]
    )
    installation.fail(job_id)
    for path in ("/ui/", f"/ui/jobs/{job_id}", f"/ui/jobs/{job_id}/logs"):
        page.goto(path)
        for bar in page.locator("#timeline rect").all()[:1]:
            bar.click()
            playwright.expect(page.locator("#attempt .lines")).to_contain_text("onerror")
        page.wait_for_timeout(300)
        assert page.title() != "broken"
        assert page.locator("img").count() == 0
    assert "onerror" in page.locator("#lines").inner_text()


def test_lines_come_as_they_are_printed(page: Page, installation: Installation) -> None:
    job_id = installation.submit(world_size=1, command=["python", "-c", COUNTING])
    installation.wait_until(job_id, is_running)
    page.goto(f"/ui/jobs/{job_id}/logs")
    playwright.expect(page.locator("#lines")).to_contain_text("line 40")
    assert page.locator("#lines .c1").count() > 0
    texts = page.locator("#lines li").all_inner_texts()
    numbers = [int(text.rpartition(" ")[2]) for text in texts if text]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    page.get_by_label("contains").fill("line 11")
    page.get_by_role("button", name="show").click()
    playwright.expect(page.locator("#lines li").first).to_contain_text("line 11")


def test_jobs_are_filtered_by_the_form(page: Page, installation: Installation) -> None:
    job_id = installation.submit(world_size=1, epochs=1, name="the one with a name")
    installation.complete(job_id)
    page.goto("/ui/")
    page.get_by_role("textbox", name="name").fill("the one with a name")
    page.get_by_role("button", name="filter").click()
    playwright.expect(page.locator("#jobs tbody tr")).to_have_count(1)
    assert page.url.endswith("/ui/?name=the+one+with+a+name")
    page.get_by_label("status").select_option("QUEUED")
    page.get_by_role("button", name="filter").click()
    playwright.expect(page.locator("#jobs .empty")).to_be_visible()


def curve(installation: Installation, steps: int, **fields: object) -> str:
    program = CURVE.replace("STEPS", str(steps))
    return installation.submit(world_size=1, command=["python", "-c", program], **fields)


def series(installation: Installation, job_id: str, name: str) -> Seen:
    found: Seen = installation.request("GET", f"/jobs/{job_id}/series").json()["series"][name]
    return found


def drawn(page: Page, name: str) -> str:
    page.wait_for_selector(f"figure[data-series={name}] canvas[data-points]:not([data-points=''])")
    found: str = page.locator(f"figure[data-series={name}] canvas").get_attribute("data-points")
    return found


def test_curves_are_those_of_the_service(page: Page, installation: Installation) -> None:
    job_id = curve(installation, 500)
    installation.wait_until(job_id, lambda seen: seen["step"] > 200)
    installation.kill(job_id, 0)
    installation.complete(job_id)
    page.goto(f"/ui/jobs/{job_id}")
    loss = series(installation, job_id, "loss")
    live, abandoned = loss["live"], loss["abandoned"]
    assert abandoned["step"]
    assert drawn(page, "loss") == str(len(live["step"]))
    figure = page.locator("figure[data-series=loss]")
    assert figure.locator("canvas").get_attribute("data-abandoned") == str(len(abandoned["step"]))
    assert [it.get_attribute("data-series") for it in page.locator("figure").all()] == [
        "loss", "throughput_steps_per_sec", "accuracy"
    ]  # fmt: skip
    figure.locator("canvas").press("ArrowRight")
    assert f"step {live['step'][0]} · " in figure.inner_text()
    figure.locator("canvas").press("ArrowRight")
    assert f"step {live['step'][1]} · " in figure.inner_text()
    assert f" · {live['last'][1]:.6g}" in figure.inner_text()
    figure.locator("canvas").press("Escape")
    cells = page.locator("tr[data-series=loss] td.n").all_inner_texts()
    ends = [points[name] for points in (live, abandoned) for name in ("least", "greatest")]
    known = [it for column in ends for it in column if it is not None]
    assert cells[1:4] == [f"{it:.6g}" for it in (min(known), max(known), live["last"][-1])]
    page.get_by_role("checkbox", name="accuracy").uncheck()
    playwright.expect(page.locator("figure[data-series=accuracy]")).to_be_hidden()


def test_the_list_has_a_small_curve_of_the_loss(page: Page, installation: Installation) -> None:
    program = CURVE.replace("STEPS", "200")
    job_id = installation.submit(world_size=1, command=["python", "-c", program])
    installation.complete(job_id)
    page.goto("/ui/")
    line = page.locator(f"[data-job='{job_id}'] .spark polyline")
    playwright.expect(line).to_have_attribute("points", re.compile(r"\d.* .*\d"))
    xs = [float(point.split(",")[0]) for point in line.get_attribute("points").split(" ")]
    assert (xs[0], xs[-1]) == (1, 79)
    assert xs == sorted(xs)


def test_curves_grow_while_the_job_trains(page: Page, installation: Installation) -> None:
    job_id = curve(installation, 10**6)
    installation.wait_until(job_id, is_running)
    page.goto(f"/ui/jobs/{job_id}")
    before = int(drawn(page, "loss"))
    page.wait_for_function(
        "before => document.querySelector('canvas').dataset.points > before + 3", arg=before
    )


def test_jobs_are_compared(page: Page, installation: Installation) -> None:
    jobs = [curve(installation, steps, env={"SEED": f"{steps}"}) for steps in (60, 80)]
    for job_id in jobs:
        installation.complete(job_id)
    page.goto("/ui/")
    for job_id in jobs:
        page.get_by_label(f"compare {job_id}").check()
    page.get_by_role("button", name="compare").click()
    lengths = [len(series(installation, it, "loss")["live"]["step"]) for it in reversed(jobs)]
    assert drawn(page, "loss") == ",".join(map(str, lengths))
    assert "env.SEED" in page.locator("#differences").inner_text()
    for job_id in jobs:
        last = series(installation, job_id, "loss")["live"]["last"][-1]
        row = page.locator(f"tr[data-job='{job_id}']")
        assert row.locator("[data-value=last]").inner_text() == f"{last:.6g}"
    page.get_by_role("combobox", name="curve").select_option("accuracy")
    page.get_by_role("button", name="show").click()
    drawn(page, "accuracy")
    page.locator("figure[data-series=accuracy] canvas").press("ArrowLeft")
    assert f"{jobs[0]}: step 60 · " in page.locator("figure").inner_text()


@pytest.mark.parametrize(
    ("jobs", "sentence"),
    [
        ("a", "choose two to 6 jobs"),
        ("abcdefg", "choose two to 6 jobs"),
        ("ab", "there is no job a"),
    ],
)
def test_a_comparison_is_refused_in_a_sentence(
    installation: Installation, jobs: str, sentence: str
) -> None:
    query = "&".join(f"job={job}" for job in jobs)
    answer = installation.request("GET", f"/ui/compare?{query}", headers={"accept": "text/html"})
    assert answer.is_client_error
    assert sentence in answer.text


def test_without_scripts_everything_can_be_read(
    browser: Browser, installation: Installation
) -> None:
    job_id = installation.submit(world_size=2, epochs=1)
    installation.complete(job_id)
    context = browser.new_context(java_script_enabled=False, base_url=installation.url)
    tab = context.new_page()
    tab.goto(f"/ui/jobs/{job_id}")
    assert "COMPLETED" in tab.locator("#head").inner_text()
    assert "the job is COMPLETED" in tab.locator("#events").inner_text()
    assert "loss" in tab.locator("#curves table").inner_text()
    tab.locator("#checkpoints a").click()
    assert "current" in tab.locator("#checkpoints").inner_text()
    tab.goto("/ui/submit")
    assert "muster submit job.yaml" in tab.locator("noscript").inner_text()
    context.close()


def test_a_job_goes_on_from_a_checkpoint(page: Page, installation: Installation) -> None:
    earlier = installation.submit(mode="synchronous", world_size=2, epochs=2, checkpoint_every=3)
    step = installation.complete(earlier)["step"]
    (place,) = checkpoint_dirs(checkpoints_of_job(installation.checkpoint_dir, JobId(earlier)))
    files = [(it.name.step, it.manifest.files) for it in examine(place) if it.manifest]
    saved = [(f"{step}", size_text(sum(it.size_bytes for it in of.values()))) for step, of in files]
    page.goto(f"/ui/jobs/{earlier}")
    section = page.locator("#checkpoints")
    playwright.expect(section.locator("tbody tr")).to_have_count(len(saved))
    shown = [row.split("\t") for row in section.locator("tbody tr").all_inner_texts()]
    assert [(row[1], row[3]) for row in shown] == saved
    section.get_by_role("link", name="resume from here").first.click()  # the newest
    playwright.expect(page.locator("#verdict")).to_contain_text("valid")
    page.get_by_label("epochs").fill("3")
    playwright.expect(page.locator("#text")).to_have_value(re.compile("^epochs: 3$", re.MULTILINE))
    playwright.expect(page.locator("#verdict")).to_contain_text("valid")
    page.get_by_role("button", name="submit").click()
    page.wait_for_url(lambda url: "/ui/jobs/" in url)
    later = page.url.rpartition("/")[2]
    installation.note(installation.job(later))
    assert installation.complete(later)["step"] == step // 2 * 3
    attempts = installation.request("GET", f"/jobs/{later}/attempts").json()["attempts"]
    assert {it["step_at_start"] for it in attempts} == {step}


def test_a_job_is_submitted_by_its_form(page: Page, installation: Installation) -> None:
    page.goto("/ui/submit")
    page.get_by_label("world_size").fill("0")
    error = page.locator("#world_size-wrong")
    playwright.expect(error).to_have_text("0 is not between 1 and 4096")
    page.locator("#text").fill("world_size: 2\nname: [\n")
    playwright.expect(page.locator("#verdict")).to_contain_text("line:3:1")
    page.locator("#text").fill("# twice\nepochs: 2  # two\nenv:\n  A: x\nworld_size: 2\nbogus: 1")
    playwright.expect(page.get_by_label("epochs")).to_have_value("2")
    playwright.expect(page.locator("#verdict")).to_contain_text("bogus: there is no such field")
    name = HOSTILE[:60].replace("\x1b", "")
    page.get_by_label("name", exact=True).fill(name)
    assert "\u202e" not in page.locator("#text").input_value(), "what is submitted can be seen"
    page.get_by_label("world_size").fill("1")
    text = page.locator("#text").input_value()
    assert "# twice\nepochs: 2  # two\nenv:\n  A: x\nworld_size: 1\nbogus: 1" in text
    page.locator("#text").fill(text.replace("bogus: 1", ""))
    page.get_by_role("button", name="submit").click()
    page.wait_for_url(lambda url: "/ui/jobs/" in url)
    job_id = page.url.rpartition("/")[2]
    installation.note(installation.job(job_id))
    spec = installation.job(job_id)["spec"]
    assert (spec["name"], spec["epochs"], spec["env"], spec["world_size"]) == (
        name,
        2,
        {"A": "x"},
        1,
    )
    assert page.locator("img").count() == 0
    installation.complete(job_id)


def test_the_service_view_says_what_waits(page: Page, narrow: Installation) -> None:
    running = narrow.submit(world_size=SLOTS, **TOGETHER)
    narrow.wait_until(running, is_running)
    waiting = narrow.submit(world_size=1, name=HOSTILE[:60].replace("\x1b", ""), **TOGETHER)
    told = narrow.wait_until(waiting, lambda seen: "waits for" in seen["message"])
    page.goto(f"{narrow.url}/ui/service")
    assert page.locator("#holding tbody tr").get_attribute("data-job") == running
    assert told["message"] in page.locator(f"#queue [data-job={waiting}]").inner_text()
    assert page.locator("img").count() == 0
    (host,) = narrow.request("GET", "/hosts").json()["hosts"]
    assert host["slots_in_use"] == SLOTS
    assert f"{SLOTS}/{SLOTS}" in page.locator("[data-host=local]").inner_text()
    health = narrow.request("GET", "/health").json()
    assert health["checks"]["coordinator"]["detail"] in page.locator("#checks").inner_text()
    narrow.stop(running)
    playwright.expect(page.locator("#queue")).to_contain_text("muster submit")


def test_scripts_and_templates_say_the_same(page: Page) -> None:
    seconds = [0, 0.4, 0.5, 1.5, 59.5, 60, 3599, 3600, 86399.5, 90061, 1e7]
    page.goto("/ui/")
    source = page.locator("script[type=module]").get_attribute("src").rpartition("/")[0]
    found = page.evaluate(
        "async ([at, all]) => { const it = await import(at); return all.map(it.duration); }",
        [f"{source}/texts.js", seconds],
    )
    assert found == [duration(it) for it in seconds], json.dumps(found)
