// One job.
import { later as renewCurves, take as takePoints } from "./charts.js";
import { follow, keys, renew, show, together } from "./live.js";
import { NOTHING } from "./texts.js";

const head = document.getElementById("head"), id = head.dataset.job;
const path = `/jobs/${encodeURIComponent(id)}`;
const EVENTS = 300; // shown
let view = { workers: {} }, skew = 0; // of our clock, in milliseconds

const renewParts = together(() => renew("timeline", "pausing"), 500);
const renewRanks = together(() => renew("workers"), 200);

function showAges() {
  const now = Date.now() + skew;
  for (const cell of document.querySelectorAll("[data-seen]")) {
    const at = cell.dataset.seen, age = Math.max(0, now - Date.parse(at)) / 1000;
    const text = at ? `${age.toFixed(1)} s` : "–";
    if (cell.textContent !== text) cell.textContent = text;
  }
}

function take(changed) {
  const { workers = {}, left = [], now, ...rest } = changed;
  if (now) {
    skew = Date.parse(now) - Date.now();
    view.workers = {}; // the whole state follows
    renewCurves();
  }
  view = { ...view, ...rest };
  for (const [rank, fields] of Object.entries(workers)) {
    const worker = (view.workers[rank] = { ...view.workers[rank], ...fields });
    const row = document.querySelector(`[data-rank="${rank}"]`);
    if (!row) { renewRanks(); continue; }
    show(row, worker);
    row.querySelector("[data-seen]").dataset.seen = worker.seen_at ?? "";
  }
  for (const rank of left) delete view.workers[rank];
  if (left.length) renewRanks();
  show(head, view);
  showAges();
  head.dataset.live = "";
}

function add(event) {
  const item = document.createElement("li"), time = document.createElement("time");
  const text = document.createElement("bdi");
  time.dateTime = event.at;
  time.textContent = event.at.slice(11, 19);
  text.textContent = event.message;
  item.dataset.kind = event.kind;
  item.append(time, " ", text);
  const list = document.querySelector("#events ol");
  list.prepend(item);
  while (list.childElementCount > EVENTS) list.lastElementChild.remove();
  renewParts();
  renewCurves();
}

async function send(method, where, body) {
  const output = document.getElementById("command");
  const headers = { "content-type": "application/json", "x-muster-page": "1" };
  try {
    const answer = await fetch(`${path}${where}`, { method, headers, body: JSON.stringify(body) });
    if (!answer.ok) output.textContent = (await answer.json()).detail;
  } catch {
    output.textContent = "The service does not answer: muster status";
  }
}

head.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  const output = document.getElementById("command"), ranks = Number(document.getElementById("ranks")?.value);
  const { post, command } = button.dataset;
  output.textContent = "scale" in button.dataset ? `${command} ${ranks}` : command;
  if (post) send("POST", `/${post}`, {});
  else if ("scale" in button.dataset) send("PATCH", "", { world_size: ranks });
  else if ("fault" in button.dataset) {
    const rows = [...document.querySelectorAll("[data-rank]")];
    const alive = rows.filter((row) => row.querySelector("[data-text=pid]").textContent.trim() !== NOTHING);
    const victim = alive[Math.floor(Math.random() * alive.length)]?.dataset.rank;
    if (victim === undefined) { output.textContent = "no rank has a process now"; return; }
    output.textContent = `${command} --rank ${victim}`;
    send("POST", "/faults", { rank: Number(victim) });
  }
});

if (!("over" in head.dataset)) {
  const words = () => [...document.querySelectorAll(".differs")].map((word) => word.id);
  const timers = [setInterval(showAges, 1000), setInterval(() => document.hidden || renew("timeline", ...words()), 5000)];
  const end = () => {
    timers.forEach(clearInterval);
    renew("actions", "timeline", "workers");
    renewCurves();
  };
  follow(`${path}/watch?after=${head.dataset.after}`, { summary: take, event: add, point: takePoints, end });
}
keys("#workers tbody tr");
