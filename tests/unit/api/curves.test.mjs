// The arithmetic of curves; test_curves.py runs it where node is.
import assert from "node:assert/strict";
import test from "node:test";
import * as curves from "../../../api/page/static/curves.js";

const same = (it) => it;

// Columns of points of one value each; null is one that is not finite.
function columns(values, steps = values.map((_, at) => at + 1)) {
  return {
    step: [...steps], seconds: steps.map((_, at) => at / 2), first: [...values], least: [...values],
    greatest: [...values], last: [...values], count: values.map((it) => (it === null ? 0 : 1)),
    not_finite: values.map((it) => (it === null ? 1 : 0)),
  };
}

test("a point is a bar that reaches to its extremes", () => {
  const it = columns([1, 2]);
  Object.assign(it, { first: [1, 2], least: [1, -5], greatest: [1, 9], last: [1, 3] });
  assert.deepEqual(curves.bars(it, "step", same, same, false), [[[2, -5], [2, 9]]]);
  assert.deepEqual(curves.bars(it, "step", same, same, true), [[[2, Math.log10(2)], [2, Math.log10(9)]]]);
  assert.deepEqual(curves.pieces(it, "step", same, same, false), [[[1, 1], [2, 3]]]);
});

test("a value that is not finite is a gap", () => {
  const values = [1, null, 3, 4, NaN, Infinity, 7];
  const found = curves.pieces(columns(values), "step", same, same, false);
  assert.deepEqual(found, [[[1, 1]], [[3, 3], [4, 4]], [[7, 7]]]);
});

test("no points are no pieces", () => {
  assert.deepEqual(curves.pieces(columns([]), "step", same, same, false), []);
  assert.deepEqual(curves.bounds([]), [0, 1]);
  const none = { live: columns([]), abandoned: columns([null]) };
  assert.deepEqual(curves.extremes(none), { first: null, least: null, greatest: null, last: null, not_finite: 1 });
  assert.equal(curves.nearest([], 3), -1);
});

test("a smaller step begins a new piece", () => {
  const found = curves.pieces(columns([1, 2, 3, 4], [8, 9, 5, 6]), "step", same, same, false);
  assert.deepEqual(found, [[[8, 1], [9, 2]], [[5, 3], [6, 4]]]);
});

test("what two restarts abandoned is two pieces", () => {
  const found = curves.pieces(columns([1, 2, 3], [5, 6, 9]), "step", same, same, false, [0.7]);
  assert.deepEqual(found, [[[5, 1], [6, 2]], [[9, 3]]]);
});

test("a logarithmic axis leaves out what is not above zero", () => {
  const found = curves.pieces(columns([100, 0, -1, 10]), "step", same, same, true);
  assert.deepEqual(found, [[[1, 2]], [[4, 1]]]);
});

test("the time can be the axis", () => {
  assert.deepEqual(curves.pieces(columns([5, 6]), "seconds", same, same, false), [[[0, 5], [0.5, 6]]]);
});

test("every range has a width that is finite", () => {
  for (const levels of [[0], [3], [-3], [1e30, 1], [5, 5], [1, 1 + 2e-16], [1e300, -1e300], [5e-324, 0]]) {
    const [low, high] = curves.bounds(levels, 0.05);
    assert.ok(high > low && Number.isFinite(high - low), `${levels}: ${low} ${high}`);
    const pixel = curves.scale([low, high], 200, 0)(levels[0]);
    assert.ok(pixel >= 0 && pixel <= 200, `${levels}: ${pixel}`);
  }
});

test("a jump by 1e30 and infinity stay in the picture", () => {
  const it = columns([1, 1e30, -Infinity, 1.7e308]);
  const levels = curves.visible(it, "step", [0, 10], false);
  const toY = curves.scale(curves.bounds(levels), 100, 0);
  for (const piece of curves.pieces(it, "step", same, toY, false)) {
    for (const [, y] of piece) assert.ok(y >= 0 && y <= 100);
  }
});

test("what is zoomed in on decides the range", () => {
  const it = columns([9, 1, 2, 3, 9]);
  assert.deepEqual(curves.bounds(curves.visible(it, "step", [3, 3], false)), [1, 3]);
  assert.deepEqual(curves.bounds(curves.visible(it, "step", [3.2, 3.4], false)), [2, 3]);
});

test("smoothing corrects the bias of its start", () => {
  assert.deepEqual(curves.smooth(columns([4, 4, 4]), 0.9).last.map((it) => Math.round(it * 1e9) / 1e9), [4, 4, 4]);
  const [one, two, three] = curves.smooth(columns([1, null, 3]), 0.5).last;
  assert.equal(one, 1);
  assert.equal(two, null);
  assert.ok(Math.abs(three - (0.25 * 1 + 0.5 * 3) / 0.75) < 1e-12);
  assert.deepEqual(curves.smooth(columns([1, 7]), 0).last, [1, 7]);
});

test("ticks are round and within their range", () => {
  assert.deepEqual(curves.ticks([0, 1], 5), [0, 0.2, 0.4, 0.6, 0.8, 1]);
  assert.deepEqual(curves.ticks([-7, 13], 4), [-5, 0, 5, 10]);
  assert.deepEqual(curves.ticks([0, 95], 5, true), [0, 30, 60, 90]);
  assert.deepEqual(curves.ticks([0, 10 * 86400], 5, true), [0, 2, 4, 6, 8, 10].map((it) => it * 86400));
  for (const range of [[0, 1e30], [1e16, 1e16 + 4], [-1e300, 1e300], [0, 1e-300]]) {
    const found = curves.ticks(range, 5);
    assert.ok(found.length && found.every((it) => it >= range[0] && it <= range[1]), `${range}: ${found}`);
  }
});

test("ticks of a logarithmic axis are powers of ten", () => {
  assert.deepEqual(curves.valueTicks([-3, 3], 6, true).map(([, value]) => value), [0.001, 0.01, 0.1, 1, 10, 100, 1000]);
  assert.deepEqual(curves.valueTicks([0, Math.log10(5)], 4, true).map(([, value]) => value), [1, 2, 3, 4, 5]);
  assert.deepEqual(curves.valueTicks([0.47, 0.71], 4, true).map(([, value]) => value), [3, 3.5, 4, 4.5, 5]);
  assert.ok(curves.valueTicks([307, 308.9], 4, true).length);
});

test("the nearest point is found", () => {
  assert.deepEqual([-5, 1, 5.4, 5.6, 99].map((x) => curves.nearest([1, 5, 6, 10], x)), [0, 0, 1, 2, 3]);
  assert.equal(curves.nearest([7], 0), 0);
});

test("a point is new, has grown, or shows that training went back", () => {
  const it = columns([3, 2]);
  const point = { step: 2, seconds: it.seconds[1], first: 2, least: 1, greatest: 2, last: 1, count: 2, not_finite: 0 };
  assert.ok(curves.add(it, point));
  assert.deepEqual(it.last, [3, 1]);
  assert.ok(curves.add(it, { ...point, seconds: 50 }), "further values of the same step");
  assert.ok(curves.add(it, { ...point, step: 5 }));
  assert.deepEqual(it.step, [1, 2, 2, 5]);
  assert.ok(!curves.add(it, { ...point, step: 4 }));
  const empty = columns([]);
  assert.ok(curves.add(empty, point));
  assert.deepEqual(empty.count, [2]);
});

test("the table sums up all values, also those abandoned", () => {
  const live = columns([null, 3, -2, 8, 5, null]), abandoned = { ...columns([9, 1]), seconds: [1.6, 1.7] };
  assert.deepEqual(curves.extremes({ live, abandoned }), { first: 3, least: -2, greatest: 9, last: 5, not_finite: 2 });
});
