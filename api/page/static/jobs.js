// The list of jobs.
import { bounds, pieces, scale } from "./curves.js";
import { follow, keys, renew, show, together } from "./live.js";

const POINTS = 40, PAUSE = 10_000; // of a small curve; milliseconds until that of a job that runs is drawn again
const jobs = new Map();

// Only rows that are seen are asked for: there may be a thousand.
const seen = new IntersectionObserver((found) => {
  for (const { isIntersecting, target } of found) {
    if (!isIntersecting) continue;
    seen.unobserve(target);
    drawSpark(target);
  }
});

async function drawSpark(svg) {
  const id = encodeURIComponent(svg.closest("tr").dataset.job);
  const answer = await fetch(`/jobs/${id}/series?names=loss&points=${POINTS}`).catch(() => null);
  const live = answer?.ok && (await answer.json()).series.loss?.live;
  if (live) {
    const toX = scale(bounds(live.step), 1, svg.clientWidth - 1);
    const toY = scale(bounds(live.last.filter(Number.isFinite)), svg.clientHeight - 1, 1);
    svg.firstElementChild.setAttribute("points", pieces(live, "step", toX, toY, false).flat().join(" "));
  }
}

const sparks = (rows = "tr") => document.querySelectorAll(`#jobs ${rows} .spark`).forEach((it) => seen.observe(it));
setInterval(() => { if (!document.hidden) sparks("tr:has(.RUNNING)"); }, PAUSE);
sparks();

const renewList = together(async () => {
  const chosen = [...document.querySelectorAll("#jobs :checked")].map((box) => box.value); // to be compared
  await renew("jobs");
  for (const box of document.querySelectorAll("#jobs [name=job]")) box.checked = chosen.includes(box.value);
  sparks();
}, 300);

follow("/jobs/summaries/stream", {
  summary(content) {
    if (content.now) jobs.clear(); // the whole state follows
    for (const [id, changed] of Object.entries(content.jobs ?? {})) {
      const isNew = !jobs.has(id), view = { ...jobs.get(id), ...changed };
      jobs.set(id, view);
      const row = document.querySelector(`[data-job="${CSS.escape(id)}"]`);
      if (row) show(row, view);
      else if (isNew && !location.search) renewList(); // a filter may hide it
    }
    for (const id of content.left ?? []) jobs.delete(id); // it is over, and was shown as that
  },
});
keys("#jobs tbody tr");
