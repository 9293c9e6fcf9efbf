// Draws curves on a canvas, and lets a person look closer: hover, drag to zoom, arrow keys.
import { bars, bounds, level, nearest, pieces, scale, smooth, ticks, valueTicks, visible } from "./curves.js";
import { duration, short } from "./texts.js";

const LEFT = 58, RIGHT = 18, TOP = 8, BOTTOM = 22; // pixels, with room for the numbers of the axes
const DRAG = 6, LABEL = 80; // pixels: less is a click; of two numbers of an axis, at least

const ofStep = (it) => (it < 1e4 ? `${it}` : it < 1e6 ? `${it / 1e3}k` : `${it / 1e6}M`);
const ofTime = (it) => (it % 1 ? `${it}s` : duration(it).replace(/(?<=\D)0.$/, "")); // 5m, not 5m0s

function describe(points, at) {
  const broken = points.not_finite[at] ? ` · ${points.not_finite[at]} not finite` : "";
  const range = points.count[at] > 1 ? ` (${short(points.least[at])} … ${short(points.greatest[at])})` : "";
  return `step ${points.step[at]} · ${duration(points.seconds[at])} · ${short(points.last[at])}${range}${broken}`;
}

export class Plot {
  lines = []; // { label, live, abandoned, colour, dash }: columns of points, and how to draw them
  marks = []; // { step, seconds, colour }: moments, drawn from top to bottom
  #hover = null; // a place on the axis
  #drag = null; // [from, to], in pixels

  // Plots share their `view`: axis ("step" or "seconds"), isLog, weight of the smoothing, and zoom, a range or null.
  constructor(canvas, output, view, zoomTo) {
    Object.assign(this, { canvas, output, view, pen: canvas.getContext("2d") });
    const on = (kind, act) => canvas.addEventListener(kind, (event) => {
      act(event);
      this.draw();
    });
    on("pointerdown", (event) => {
      this.#drag = [event.offsetX, event.offsetX];
      canvas.setPointerCapture(event.pointerId); // it may end outside
    });
    on("pointermove", ({ offsetX }) => {
      if (this.#drag) this.#drag[1] = offsetX;
      this.#hover = this.#valueAt(offsetX);
    });
    on("pointerup", () => {
      const [from, to] = (this.#drag ?? [0, 0]).sort((one, other) => one - other);
      this.#drag = null;
      if (to - from >= DRAG) zoomTo([this.#valueAt(from), this.#valueAt(to)]);
    });
    for (const kind of ["pointercancel", "pointerleave", "blur"]) on(kind, () => { this.#hover = this.#drag = null; });
    on("dblclick", () => zoomTo(null));
    on("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], xs = this.lines[0]?.live[view.axis] ?? [];
      if (event.key === "Escape") zoomTo(null);
      if (!step || !xs.length) return;
      event.preventDefault(); // no scrolling
      const next = this.#hover === null ? (step > 0 ? 0 : xs.length - 1) : nearest(xs, this.#hover) + step;
      this.#hover = xs[Math.min(Math.max(next, 0), xs.length - 1)];
    });
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  #valueAt(pixel) {
    const [low, high] = this.range, value = scale([LEFT, this.canvas.clientWidth - RIGHT], low, high)(pixel);
    return Math.min(Math.max(value, low), high);
  }

  draw() {
    const { canvas, lines, pen } = this, { axis, isLog, weight, zoom } = this.view;
    const width = canvas.clientWidth, height = canvas.clientHeight, end = height - BOTTOM;
    if (!width) return; // it is hidden
    [canvas.width, canvas.height] = [width * devicePixelRatio, height * devicePixelRatio]; // this clears it
    pen.scale(devicePixelRatio, devicePixelRatio);
    const style = (this.style = getComputedStyle(canvas)); // with the colours of the scheme, dark or light
    const all = lines.flatMap((line) => [line.live, line.abandoned]);
    this.range = zoom ?? bounds(all.flatMap((it) => it[axis]));
    const values = bounds(all.flatMap((it) => visible(it, axis, this.range, isLog)), 0.05);
    const toX = scale(this.range, LEFT, width - RIGHT), toY = scale(values, end, TOP);
    const upright = (x) => [[x, TOP], [x, end]];
    this.#axes(toX, toY, valueTicks(values, Math.max(2, height / 45), isLog));
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, TOP, width - LEFT - RIGHT, end - TOP);
    pen.clip();
    for (const mark of this.marks) this.#stroke([upright(toX(mark[axis]))], mark.colour, 0.8, [2, 3]);
    for (const { live, abandoned, colour, dash } of lines) {
      const place = [axis, toX, toY, isLog];
      this.#stroke(pieces(abandoned, ...place, live.seconds), colour, 0.6, [3, 3]);
      this.#stroke(pieces(live, ...place), colour, weight ? 0.3 : 1, dash, weight ? 1 : 1.5);
      if (weight) this.#stroke(pieces(smooth(live, weight), ...place), colour, 1, dash, 2);
      for (const columns of [live, abandoned]) {
        this.#stroke(bars(columns, ...place), colour, 0.4, []);
        const broken = columns[axis].filter((_, at) => columns.not_finite[at]);
        for (const x of broken) this.#text("✕", toX(x), TOP + 10, "center", style.accentColor);
      }
    }
    if (this.#drag) this.#stroke([[[this.#drag[0], end / 2], [this.#drag[1], end / 2]]], style.color, 0.2, [], height);
    this.#point(upright, toX, toY);
    pen.restore();
    canvas.dataset.points = lines.map((line) => line.live.step.length);
    canvas.dataset.abandoned = lines.map((line) => line.abandoned.step.length);
  }

  // The points under the pointer, as dots and in words.
  #point(upright, toX, toY) {
    const { axis, isLog } = this.view, x = this.#hover;
    const found = this.lines.map((it) => [it, nearest(it.live[axis], x)]).filter(([, at]) => x !== null && at >= 0);
    if (found.length) this.#stroke([upright(toX(x))], this.style.color, 0.6, []);
    for (const [{ live, colour }, at] of found) {
      const y = level(live.last[at], isLog);
      if (y !== null) this.#stroke([[[toX(live[axis][at]), toY(y)]]], colour, 1, [], 5);
    }
    const text = found.map(([{ label, live }, at]) => `${label}${describe(live, at)}`).join("\n");
    if (this.output.textContent !== text) this.output.textContent = text;
  }

  #axes(toX, toY, values) {
    const { style, view } = this, { clientWidth: width, clientHeight: height } = this.canvas;
    const isTime = view.axis === "seconds";
    this.#stroke(values.map(([at]) => [[LEFT, toY(at)], [width - RIGHT, toY(at)]]), style.borderColor, 1, []);
    for (const [at, value] of values) this.#text(short(value), LEFT - 6, toY(at) + 4, "right", style.color);
    const places = ticks(this.range, Math.max(1, (width - LEFT) / LABEL), isTime);
    for (const it of places.filter((it) => isTime || Number.isInteger(it))) {
      this.#text(isTime ? ofTime(it) : ofStep(it), toX(it), height - 6, "center", style.color);
    }
  }

  #text(words, x, y, textAlign, fillStyle) {
    Object.assign(this.pen, { textAlign, fillStyle, font: `11px ${this.style.fontFamily}` });
    this.pen.fillText(words, x, y);
  }

  #stroke(found, strokeStyle, globalAlpha, dash, lineWidth = 1) {
    const { pen } = this;
    Object.assign(pen, { strokeStyle, globalAlpha, lineWidth });
    pen.setLineDash(dash);
    for (const piece of found) {
      pen.beginPath();
      piece.forEach((point) => pen.lineTo(...point));
      if (piece.length === 1) pen.arc(...piece[0], 1, 0, 7); // a line to itself is not drawn
      pen.stroke();
    }
    pen.globalAlpha = 1;
  }
}
