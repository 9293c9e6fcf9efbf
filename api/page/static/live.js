// A stream of changes, and what it does to the document.
import { TEXTS, progress } from "./texts.js";

const stale = document.getElementById("stale");

// Calls `on[kind](content)` for each message; shows since when there is none.
export function follow(url, on) {
  let source = null, last = "", isOver = false;
  const open = () => {
    const where = new URL(url, location);
    if (last) where.searchParams.set("after", last);
    source = new EventSource(where);
    source.onopen = () => { stale.hidden = true; };
    source.onerror = () => {
      if (stale.hidden) stale.textContent = `stale since ${new Date().toISOString().slice(11, 19)} UTC`;
      stale.hidden = false;
    };
    for (const [kind, handle] of Object.entries(on)) {
      source.addEventListener(kind, ({ data, lastEventId }) => {
        last = lastEventId;
        if (kind === "end") { isOver = true; source.close(); }
        handle(kind === "message" ? data : JSON.parse(data));
      });
    }
  };
  // A browser has six connections for all its tabs: a tab that is not seen needs none.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) source?.close(); else if (!isOver) open();
  });
  if (!document.hidden) open();
}

// Writes the texts of a view into the elements that name them.
export function show(root, view) {
  for (const element of root.querySelectorAll("[data-text]")) {
    const name = element.dataset.text, text = TEXTS[name](view);
    if (element.textContent !== text) element.textContent = text;
    if (name === "status") element.className = `status ${view.status}`;
    if (name === "process") element.className = `process ${view.process}`;
  }
  const bar = root.querySelector("progress");
  if (bar) bar.value = progress(view);
}

// Replaces parts of the document by what the server renders now.
export const renew = (...ids) => renewFrom(location.href, ids);

export async function renewFrom(url, ids) {
  const answer = await fetch(url, { headers: { accept: "text/html" } }).catch(() => null);
  if (answer?.redirected) return location.assign(answer.url); // the token has ended
  if (answer?.status === 404) Object.assign(stale, { textContent: "deleted", hidden: false });
  if (!answer?.ok) return; // if the service is away, the stream says so
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const id of ids) {
    const now = document.getElementById(id), next = fresh.getElementById(id);
    const key = now?.contains(document.activeElement) && document.activeElement.dataset.key;
    if (now && next) now.replaceWith(document.adoptNode(next));
    else now?.remove();
    if (key) document.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus();
  }
}

// Calls `act` once for all calls within a moment, and not again before it is done.
export function together(act, milliseconds) {
  let timer = null, done = Promise.resolve();
  return () => {
    timer ??= setTimeout(async () => {
      await done;
      timer = null;
      done = Promise.resolve(act()).catch(() => {});
    }, milliseconds);
  };
}

export function keys(rows) {
  let at = -1;
  const select = (step) => {
    const all = [...document.querySelectorAll(rows)];
    all[at]?.removeAttribute("aria-selected");
    at = Math.min(Math.max(at + step, 0), all.length - 1);
    all[at]?.setAttribute("aria-selected", "true");
    all[at]?.querySelector("a")?.focus();
  };
  document.addEventListener("keydown", (event) => {
    if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey) return;
    if (event.key === "j") select(1);
    else if (event.key === "k") select(-1);
    else if (event.key === "?") document.getElementById("keys").showModal();
    else if (event.key === "/") document.getElementById("filter")?.focus();
    else return;
    event.preventDefault();
  });
}
