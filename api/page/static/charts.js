// The curves of a page, of one job or of several. The rows of its table say which.
import { Plot } from "./canvas.js";
import { add, extremes, nearest } from "./curves.js";
import { renew, together } from "./live.js";
import { short } from "./texts.js";

const POINTS = 500; // of a curve, at most; a point is a bar, so one for two pixels is all that can be seen
const ALL = 2048, PAUSE = 2000; // milliseconds between two requests
const REST = matchMedia("(prefers-reduced-motion: reduce)").matches ? 1000 : 100; // and between two pictures
const section = document.getElementById("curves"), controls = document.getElementById("controls");
const job = section.dataset.job; // undefined: several are compared
const view = { zoom: null }, answers = new Map(); // by job
let plots = [], arrived = 0, loads = 0; // how often points came, and how often they were asked for

const rows = () => [...section.querySelectorAll("tr[data-series]")];
const isShown = (row) => row.querySelector("input").checked;
function pointsOf({ dataset }) {
  const { series = {} } = answers.get(dataset.job) ?? {};
  return Object.hasOwn(series, dataset.series) ? series[dataset.series] : undefined;
}
const redraw = together(show, REST);
// For what is not sent: before the stream began, in its gaps, and what a restart has abandoned.
export const later = together(load, PAUSE);

function lineOf(row) {
  const points = pointsOf(row), { color: colour, strokeDasharray } = getComputedStyle(row.querySelector(".swatch"));
  const dash = strokeDasharray.split(",").map(parseFloat).filter(Number.isFinite); // it may be "none"
  return points ? [{ ...points, colour, dash, label: job ? "" : `${row.querySelector("bdi").textContent}: ` }] : [];
}

// What happened to the job: the legend names the kinds, the list of events has them.
function marksOn({ live }) {
  const began = Date.parse(answers.get(job)?.began_at);
  return [...section.querySelectorAll("[data-kind]")].flatMap((legend) => {
    const colour = getComputedStyle(legend).borderBottomColor;
    const times = [...document.querySelectorAll(`#events [data-kind=${legend.dataset.kind}] time`)];
    const moments = times.map((time) => (Date.parse(time.dateTime) - began) / 1000);
    return moments.filter((it) => it >= live.seconds[0] && it <= live.seconds.at(-1)).map((seconds) => (
      { seconds, step: live.step[nearest(live.seconds, seconds)], colour }
    ));
  });
}

function show() {
  for (const row of rows()) {
    const found = Object.entries(pointsOf(row) ? extremes(pointsOf(row)) : {});
    for (const [name, value] of found) row.querySelector(`[data-value=${name}]`).textContent = short(value);
  }
  for (const { plot, figure } of plots) {
    const shown = rows().filter((row) => row.dataset.series === figure.dataset.series && isShown(row));
    plot.lines = shown.flatMap(lineOf);
    plot.marks = plot.lines.flatMap(marksOn);
    figure.hidden = !shown.length;
    plot.draw();
  }
}

function zoomTo(range) {
  view.zoom = range;
  show();
  load();
}

function choose() {
  const { axis, log, smoothing } = controls.elements;
  if (axis.value !== view.axis) view.zoom = null;
  Object.assign(view, { axis: axis.value, isLog: log.checked, weight: Number(smoothing.value) });
  show();
}

function attach() {
  plots = [...section.querySelectorAll("figure")].map((figure) => {
    const canvas = figure.querySelector("canvas");
    canvas.hidden = false; // without scripts it would be an empty box
    return { figure, plot: new Plot(canvas, figure.querySelector("output"), view, zoomTo) };
  });
  controls.hidden = !plots.length;
  choose();
}

// Asks for the curves that are shown.
export async function load() {
  const before = arrived, number = (loads += 1);
  const shown = rows().filter(isShown), width = plots[0]?.plot.canvas.clientWidth || section.clientWidth;
  await Promise.all((job ? [job] : shown.map((row) => row.dataset.job)).map(async (id) => {
    const names = shown.filter((row) => row.dataset.job === id).map((row) => ["names", row.dataset.series]);
    const points = view.zoom ? ALL : Math.min(POINTS, Math.ceil(width / 2));
    const query = new URLSearchParams([["points", points], ...names]);
    const answer = await fetch(`/jobs/${encodeURIComponent(id)}/series?${query}`).catch(() => null); // until it is back
    const found = answer?.ok && await answer.json();
    if (found && number === loads) answers.set(id, found); // a later one has asked for more
  }));
  if (arrived !== before) later(); // the answers may not have what has come meanwhile
  if (job && answers.get(job)?.names.length > rows().length) await renew("series"); // a row for each new name
  if (section.querySelector("figure") !== (plots[0]?.figure ?? null)) {
    attach();
    later();
  }
  show();
}

// Takes the points that the service sends while the job runs.
export function take(points) {
  arrived += 1;
  for (const [name, point] of Object.entries(points)) {
    const row = rows().find((it) => it.dataset.series === name), live = row && pointsOf(row)?.live;
    if (!row || (live && (!add(live, point) || live.step.length > 2 * (view.zoom ? ALL : POINTS)))) later();
  }
  redraw();
}

controls.addEventListener("input", choose);
section.addEventListener("change", ({ target }) => {
  const row = target.closest("tr[data-series]");
  if (row && !pointsOf(row)) load(); else show();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
attach();
load();
