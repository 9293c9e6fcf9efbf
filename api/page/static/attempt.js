// What became of the process of a bar in the time line.
const job = document.getElementById("head").dataset.job, panel = document.getElementById("attempt");
let chosen = ""; // the bar that was chosen last

function element(name, text, className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  made.className = className;
  return made;
}

async function ask(where) {
  const answer = await fetch(`/jobs/${encodeURIComponent(job)}${where}`, { headers: { accept: "application/json" } });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.detail);
  return body;
}

function describe(it) {
  const told = (value, text) => (value === null ? "" : text);
  const how = [`pid ${it.pid ?? "unknown"}`, it.ended_at ? it.retry_class : "runs",
    told(it.exit_code, `exit code ${it.exit_code}`), told(it.exit_signal, `signal ${it.exit_signal}`), it.message,
    told(it.step_at_start, `steps ${it.step_at_start} to ${it.step_at_end ?? "now"}`)];
  return how.filter(Boolean).join("; ");
}

async function choose(bar) {
  const of = (chosen = bar.dataset.of), [rank, attempt] = of.split(".").map(Number);
  const found = [element("h2", `rank ${rank}, attempt ${attempt}`)];
  try {
    const { attempts } = await ask("/attempts");
    const one = attempts.find((it) => it.rank === rank && it.attempt === attempt);
    found.push(element("p", one ? describe(one) : "It is not among the last 1000 attempts."));
    const { lines } = await ask(`/logs?rank=${rank}&attempt=${attempt}&tail=20`);
    found.push(element("ol", "", "lines"), element("code", `muster logs ${job} --rank ${rank}`));
    for (const { line } of lines) found[2].appendChild(element("li", "")).append(element("bdi", line));
  } catch (error) {
    found.push(element("p", error.message, "bad"));
  }
  if (chosen === of) panel.replaceChildren(...found);
}

for (const kind of ["click", "keydown"]) {
  document.addEventListener(kind, (event) => {
    const bar = event.target.closest?.("rect[data-of]"), step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!bar) return;
    const bars = [...bar.parentElement.querySelectorAll("rect")];
    if (step) bars[bars.indexOf(bar) + step]?.focus();
    else if (kind === "click" || event.key === "Enter" || event.key === " ") choose(bar);
    else return;
    event.preventDefault();
  });
}
