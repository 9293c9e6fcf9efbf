// Curves as numbers: from columns of points to polylines in pixels. Pure: nothing here knows the document.
//
// A point sums up all values since the point before it: first, least, greatest and last (M4, Jugel et al., VLDB 2014),
// so no extreme is lost. The four are null where no value was finite.
const SHOWN = ["first", "least", "greatest", "last"];
const FIELDS = ["step", "seconds", ...SHOWN, "count", "not_finite"];
const FAR = 1e300; // the difference of two values within it is finite
const DAY = 86400, CLOCK = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, DAY];

// Where a value stands on its axis; null if nowhere, as NaN, or as 0 on a logarithmic axis.
export function level(value, isLog) {
  if (!Number.isFinite(value) || (isLog && value <= 0)) return null;
  return isLog ? Math.log10(value) : Math.min(Math.max(value, -FAR), FAR);
}

const levelsAt = (columns, at, isLog) =>
  SHOWN.map((name) => level(columns[name][at], isLog)).filter((it) => it !== null);

// The levels of the points in a part of the axis. The next point on either side counts: its line is seen as well.
export function visible(columns, axis, [low, high], isLog) {
  const xs = columns[axis], isSeen = (at) => (xs[at + 1] ?? xs[at]) >= low && (xs[at - 1] ?? xs[at]) <= high;
  return xs.flatMap((_, at) => (isSeen(at) ? levelsAt(columns, at, isLog) : []));
}

// The range of an axis with a margin, a part of the range. Equal levels, and none, have one too.
export function bounds(levels, margin = 0) {
  if (!levels.length) return [0, 1];
  const low = Math.min(...levels), high = Math.max(...levels);
  // Nearer numbers cannot be told apart in pixels: arithmetic has 16 digits.
  const isOne = high - low <= Math.max(Math.abs(low), Math.abs(high)) * 1e-12;
  const rest = isOne ? Math.abs(low) * 0.05 || 0.5 : (high - low) * margin;
  return [low - rest, high + rest];
}

// A function from levels to pixels, which count from `from` to `to`; `from` may be the greater one.
export const scale = ([low, high], from, to) => (it) => from + ((it - low) / (high - low)) * (to - from);

// Polylines [[x, y], …] through the last values. A gap ends one; so does a smaller step, or one of the moments
// `apart`, which rise: what two restarts have abandoned is not one line.
export function pieces(columns, axis, toX, toY, isLog, apart = []) {
  const found = [];
  let piece = null, next = 0;
  columns.step.forEach((step, at) => {
    const last = level(columns.last[at], isLog);
    while (apart[next] <= columns.seconds[at - 1]) next += 1;
    if (last === null || step < columns.step[at - 1] || apart[next] < columns.seconds[at]) piece = null;
    if (last === null) return;
    if (!piece) found.push(piece = []);
    piece.push([toX(columns[axis][at]), toY(last)]);
  });
  return found;
}

// Upright lines from the least to the greatest value of each point.
export function bars(columns, axis, toX, toY, isLog) {
  return columns[axis].flatMap((x, at) => {
    const ys = levelsAt(columns, at, isLog).map(toY), low = Math.min(...ys), high = Math.max(...ys);
    return high > low ? [[[toX(x), low], [toX(x), high]]] : [];
  });
}

// An exponential moving average that corrects the bias of its start at zero (Kingma & Ba, "Adam", ICLR 2015, section
// 3). TensorBoard smooths its curves in the same way.
export function smooth(columns, weight) {
  let mean = 0, share = 0; // share = 1 - weight ** n
  const last = columns.last.map((value) => {
    if (!Number.isFinite(value)) return null;
    [mean, share] = [weight * mean + (1 - weight) * value, weight * share + (1 - weight)];
    return mean / share;
  });
  return { ...columns, last };
}

// Round numbers in a range: 1, 2 or 5 times a power of ten (Heckbert, "Nice numbers for graph labels", 1990), or times
// that a clock shows.
export function ticks([low, high], most, isTime = false) {
  const rough = (high - low) / most, isLong = isTime && rough > DAY;
  const power = 10 ** Math.floor(Math.log10(isLong ? rough / DAY : rough)) * (isLong ? DAY : 1);
  const sizes = isTime && rough > 1 && !isLong ? CLOCK : [1, 2, 5, 10].map((digit) => digit * power);
  const size = sizes.find((it) => it >= rough), start = Math.ceil(low / size);
  // Counted, as beyond 2 ** 53 a number and the next one are equal.
  const found = Array.from({ length: most + 1 }, (_, n) => Number(((start + n) * size).toPrecision(12)));
  return found.filter((it) => it >= low && it <= high);
}

// The same for values, as [level, value]: powers of ten where a logarithmic axis has room for some.
export function valueTicks(range, most, isLog) {
  if (!isLog) return ticks(range, most).map((it) => [it, it]);
  if (range[1] - range[0] > 2) return ticks(range, most).filter(Number.isInteger).map((it) => [it, 10 ** it]);
  const values = ticks(range.map((it) => Math.min(10 ** it, Number.MAX_VALUE)), 2 * most);
  return values.filter((it) => it > 0).map((it) => [Math.log10(it), it]);
}

// The place of the number nearest to x; -1 if there are none.
export const nearest = (xs, x) =>
  xs.reduce((best, it, at) => (best < 0 || Math.abs(it - x) < Math.abs(xs[best] - x) ? at : best), -1);

// Takes a point that is new, or has grown since. False if training went back: the rest has changed as well.
export function add(columns, point) {
  const end = columns.step.length, last = columns.step[end - 1];
  if (point.step < last) return false;
  const at = point.step === last && point.seconds === columns.seconds[end - 1] ? end - 1 : end;
  for (const name of FIELDS) columns[name][at] = point[name];
  return true;
}

// First, least, greatest and last value of all, with what was abandoned; null if none is finite.
export function extremes({ live, abandoned }) {
  const pick = (it) => it.seconds.map((seconds, at) => [seconds, ...SHOWN.map((name) => it[name][at])]);
  const known = [...pick(live), ...pick(abandoned)].filter((it) => it.every(Number.isFinite));
  const not_finite = [...live.not_finite, ...abandoned.not_finite].reduce((sum, it) => sum + it, 0);
  if (!known.length) return { first: null, least: null, greatest: null, last: null, not_finite };
  const [, first, least, greatest, last] = known.sort(([one], [other]) => one - other).reduce(
    ([, ...sum], [, ...next]) => [0, sum[0], Math.min(sum[1], next[1]), Math.max(sum[2], next[2]), next[3]]);
  return { first, least, greatest, last, not_finite };
}
