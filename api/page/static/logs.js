// The lines of a job, as they come.
import { parts } from "./ansi.js";
import { follow } from "./live.js";

const LINES = 2000, CHARACTERS = 20000; // shown; the rest is in the download
const lines = document.getElementById("lines");

function paint(element, text) {
  const short = text.length > CHARACTERS ? `${text.slice(0, CHARACTERS)} …` : text;
  element.replaceChildren(...parts(short).map(([piece, classes]) => {
    const span = document.createElement("span");
    span.textContent = piece;
    if (classes) span.className = classes;
    return span;
  }));
}

for (const line of lines.querySelectorAll("bdi")) paint(line, line.textContent);

const isAtEnd = () => lines.scrollHeight - lines.scrollTop - lines.clientHeight < 40;
lines.scrollTop = lines.scrollHeight;

let waiting = [];
function write() {
  const follows = isAtEnd(), added = document.createDocumentFragment();
  for (const text of waiting.slice(-LINES)) {
    const item = document.createElement("li"), line = document.createElement("bdi");
    paint(line, text);
    item.append(line);
    added.append(item);
  }
  waiting = [];
  lines.append(added);
  while (lines.childElementCount > LINES) lines.firstElementChild.remove();
  if (follows) lines.scrollTop = lines.scrollHeight;
}

if (lines.dataset.stream) {
  let isFirst = true; // it begins with what the server has rendered
  const message = (data) => {
    if (!data) return;
    if (isFirst) lines.replaceChildren();
    isFirst = false;
    if (!waiting.length) requestAnimationFrame(write);
    waiting.push(...data.split("\n"));
  };
  follow(lines.dataset.stream, { message, end() {} });
}

document.getElementById("first-error").addEventListener("click", () => {
  const first = [...lines.children].find((line) => /\b(error|exception|traceback|fatal)/i.test(line.textContent));
  first?.scrollIntoView({ block: "center" });
  for (const line of lines.children) line.toggleAttribute("aria-selected", line === first);
});
