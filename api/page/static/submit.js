// A job that is to be submitted. Its text is what counts: a field changes one entry of it.
import { keys } from "./live.js";

const text = document.getElementById("text"), verdict = document.getElementById("verdict");
const form = document.getElementById("submit"), button = form.querySelector("button");
const fields = [...form.querySelectorAll("[data-field]")];
const NUMBER = /^-?\d+(\.\d+)?$/;
let last = 0, waiting = null; // the last check that was begun; its timer

function send(path, body) {
  const headers = { "content-type": "application/json", "x-muster-page": "1" };
  const away = () => new Response(JSON.stringify({ detail: "the service does not answer" }), { status: 503 });
  return fetch(path, { method: "POST", headers, body }).catch(away);
}

// Words as a shell reads them, without backslashes and variables.
const PIECE = /'[^']*'|"[^"]*"|[^\s'"]+/g;
const split = (line) => (line.match(/(?:'[^']*'|"[^"]*"|[^\s'"])+/g) ?? []).map(
  (word) => word.match(PIECE).map((it) => (/^['"]/.test(it) ? it.slice(1, -1) : it)).join(""));
const quote = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);

function valueOf(field) {
  const { kind } = field.dataset, typed = field.value.trim();
  if (!typed) return undefined;
  if (kind === "words") return split(typed);
  return (kind === "number" || kind === "mixed") && NUMBER.test(typed) ? Number(typed) : typed;
}

// Replaces the entry of a field, with the lines that belong to it; all other lines stay.
function write(name, value) {
  if (text.value.trimStart().startsWith("{")) {
    const all = Object.entries(JSON.parse(text.value));
    text.value = all.map(([key, it]) => `${key}: ${JSON.stringify(it)}\n`).join("");
  }
  const lines = text.value.split("\n"), is = (line) => line.match(/^["']?([\w-]+)["']?\s*:(\s|$)/)?.[1] === name;
  const first = lines.findIndex(is), entry = value === undefined ? [] : [`${name}: ${JSON.stringify(value)}`];
  let after = first + 1;
  while (first >= 0 && after < lines.length && /^(\s+\S|- |-$|[\]}])/.test(lines[after])) after += 1;
  if (first >= 0) lines.splice(first, after - first, ...entry);
  else lines.splice(lines.at(-1) === "" ? -1 : lines.length, 0, ...entry);
  text.value = lines.join("\n");
}

function fill(job) {
  for (const field of fields) {
    if (field === document.activeElement) continue;
    const value = job[field.dataset.field] ?? "";
    field.value = Array.isArray(value) ? value.map((it) => quote(String(it))).join(" ") : String(value);
  }
}

function tell(className, ...lines) {
  verdict.replaceChildren(...lines.filter(([, it]) => it).map(([name, it]) => {
    const line = document.createElement("p"), content = document.createElement("bdi");
    content.textContent = it;
    line.className = className;
    line.append(name ? `${name}: ` : "", content);
    return line;
  }));
}

async function refuse(answer) {
  const { detail, errors = [] } = await answer.json(), other = [];
  for (const { loc, msg, hint } of errors) {
    const sentence = hint ? `${msg} (${hint})` : msg, place = mark(loc[1], sentence);
    if (!place) other.push([loc[1] === "text" ? "" : loc.slice(1).join("."), sentence]);
  }
  if (errors.length && !other.length) other.push(["", "not valid: see the fields"]);
  tell("bad", ...(errors.length ? other : [["", detail]]));
}

function mark(name, sentence) {
  const place = form.querySelector(`[data-error="${CSS.escape(name)}"]`);
  if (!place) return false;
  place.textContent = sentence;
  document.getElementById(`f-${name}`).setAttribute("aria-invalid", "true");
  return true;
}

function plan(found) {
  const { spec, shards_per_rank: parts } = found, each = parts && [Math.min(...parts), Math.max(...parts)];
  tell("", ["", "valid: nothing is submitted yet"], ["job", found.job_id],
    ["ranks", `${found.world_size}, ${spec.mode}`],
    ["runs", found.command?.map(quote).join(" ") ?? found.program ?? "the built-in classifier"],
    ["python", spec.python], ["working in", spec.working_dir], ["dataset in", found.command ? null : spec.dataset_dir],
    ["checkpoints in", spec.checkpoint_dir],
    ["shards", each && `${found.shards}: ${each[0] === each[1] ? each[0] : each.join(" to ")} for each rank`],
    ["note", found.message]);
}

// Returns the fields as JSON text, which numbers of 64 bits survive; null if they are refused.
async function check() {
  const number = (last += 1), isOld = () => number !== last;
  clearTimeout(waiting);
  const read = await send("/ui/submit/fields", JSON.stringify({ text: text.value }));
  const body = read.ok ? await read.text() : null, answer = body === null ? read : await send("/jobs?dry_run=true", body);
  if (isOld()) return null;
  for (const field of fields) mark(field.dataset.field, ""), field.removeAttribute("aria-invalid");
  if (body !== null) fill(JSON.parse(body));
  if (!answer.ok) { await refuse(answer); return null; }
  plan(await answer.json());
  return body;
}

form.addEventListener("input", (event) => {
  clearTimeout(waiting);
  waiting = setTimeout(check, 400);
  if (event.target === text) return;
  try { write(event.target.dataset.field, valueOf(event.target)); } catch { /* the check says what is wrong */ }
});
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  button.disabled = true; // one job for one click
  const body = await check(), answer = body === null ? null : await send("/jobs", body);
  if (answer?.ok) location.href = `/ui/jobs/${encodeURIComponent((await answer.json()).job_id)}`;
  else if (answer) await refuse(answer);
  button.disabled = false;
});
form.noValidate = true; // the service's own words are better
keys("#none");
check();
