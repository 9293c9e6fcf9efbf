// A job that is to be submitted. Its text is what counts: a field changes one entry of it.
const form = document.getElementById("submit"), text = document.getElementById("text");
const button = form.querySelector("button"), fields = [...form.querySelectorAll("[data-kind]")];
let last = 0, waiting = null; // the last check that was begun; its timer
let key = null; // of one submission: a second click, after an answer that was lost, makes no second job

function send(path, body, more = {}) {
  const headers = { "content-type": "application/json", "x-muster-page": "1", ...more };
  const away = () => new Response(JSON.stringify({ detail: "the service does not answer" }), { status: 503 });
  return fetch(path, { method: "POST", headers, body }).catch(away);
}

// Words as a shell reads them, without backslashes and variables.
const split = (line) => (line.match(/('[^']*'|"[^"]*"|[^\s'"])+/g) ?? []).map(
  (word) => word.replace(/'([^']*)'|"([^"]*)"/g, (_, one, two) => one ?? two));
const quote = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);
const shown = (value) => {
  if (value?.job) return [value.job, value.step].filter((it) => it != null).join(":"); // of resume_from
  return Array.isArray(value) ? value.map((it) => quote(`${it}`)).join(" ") : `${value ?? ""}`;
};

const visible = (json) => json.replace(/\p{Cf}/gu, (it) => `\\U${it.codePointAt(0).toString(16).padStart(8, "0")}`);

function valueOf({ value, dataset }) {
  const typed = value.trim();
  if (dataset.kind === "words") return split(typed);
  return dataset.kind === "number" && /^-?\d+(\.\d+)?$/.test(typed) ? Number(typed) : typed;
}

// Keeps the digits of a number of 64 bits.
const exact = (_, it, source) => (typeof it === "number" && source ? JSON.rawJSON(source.source) : it);

// Replaces the entry of a field, with the lines that belong to it; all other lines stay.
function write(name, value) {
  const isJson = text.value.trimStart().startsWith("{"), as = (key, it) => `${key}: ${visible(JSON.stringify(it))}`;
  if (isJson) text.value = Object.entries(JSON.parse(text.value, exact)).map((it) => `${as(...it)}\n`).join("");
  const lines = text.value.split("\n"), entry = value.length === 0 ? [] : [as(name, value)];
  const first = lines.findIndex((line) => line.match(/^["']?([\w-]+)["']?\s*:(\s|$)/)?.[1] === name);
  let after = first + 1;
  while (/^(\s+\S|- |-$|[\]}])/.test(lines[after] ?? "")) after += 1;
  if (first >= 0) lines.splice(first, after - first, ...entry);
  else lines.splice(lines.at(-1) === "" ? -1 : lines.length, 0, ...entry);
  text.value = lines.join("\n");
}

function tell(className, found) {
  document.getElementById("verdict").replaceChildren(...found.filter(([, it]) => it).map(([name, it]) => {
    const line = document.createElement("p"), content = document.createElement("bdi");
    content.textContent = it;
    line.className = className;
    line.append(name ? `${name}: ` : "", content);
    return line;
  }));
}

function mark(field, sentence) {
  document.getElementById(`${field.id}-wrong`).textContent = sentence;
  field.setAttribute("aria-invalid", sentence !== "");
}

async function refuse(answer) {
  const { detail, errors = [] } = await answer.json();
  const found = errors.map(({ loc, msg, hint }) => [loc.slice(1).join("."), hint ? `${msg} (${hint})` : msg]);
  const at = ([name]) => fields.find((field) => name.split(".")[0] === field.id);
  for (const one of found.filter(at)) mark(at(one), one[1]);
  const other = found.filter((one) => !at(one));
  tell("bad", other.length ? other : [["", errors.length ? "not valid: see the fields" : detail]]);
}

function plan({ job_id, world_size, command, program, message, shards_per_rank: shards, spec }) {
  tell("", [["", "valid: nothing is submitted yet"], ["job", job_id], ["ranks", `${world_size}, ${spec.mode}`],
    ["runs", shown(command) || program || "the built-in classifier"], ["python", spec.python],
    ["working in", spec.working_dir], ["dataset in", command ? "" : spec.dataset_dir],
    ["checkpoints in", spec.checkpoint_dir], ["shards of each rank", [...new Set(shards)].join(" or ")],
    ["note", message]]);
}

// Returns the fields as JSON text, which numbers of 64 bits survive; null if they are refused.
async function check() {
  const number = (last += 1);
  clearTimeout(waiting);
  const read = await send("/ui/submit/fields", JSON.stringify({ text: text.value }));
  const body = read.ok ? await read.text() : null, answer = read.ok ? await send("/jobs?dry_run=true", body) : read;
  if (number !== last) return null;
  const job = JSON.parse(body);
  for (const field of fields) {
    mark(field, "");
    if (job && field !== document.activeElement) field.value = shown(job[field.id]);
  }
  if (!answer.ok) { await refuse(answer); return null; }
  plan(await answer.json());
  return body;
}

form.addEventListener("input", ({ target }) => {
  key = null;
  clearTimeout(waiting);
  waiting = setTimeout(check, 400);
  if (target === text) return;
  try { write(target.id, valueOf(target)); } catch { /* the check says what is wrong */ }
});
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  button.disabled = true; // one job for one click
  key ??= crypto.getRandomValues(new Uint32Array(4)).join("-");
  const body = await check(), answer = body === null ? null : await send("/jobs", body, { "idempotency-key": key });
  if (answer?.ok) location.href = `/ui/jobs/${encodeURIComponent((await answer.json()).job_id)}`;
  else if (answer) await refuse(answer);
  button.disabled = false;
});
check();
