// What the page shows of a job and of a rank, as text; api/page/texts.py says the same.
export const NOTHING = "–";
const SHAPES = {
  QUEUED: "○", STARTING: "◔", RUNNING: "▶", RECOVERING: "↻", PAUSED: "⏸",
  STOPPING: "◼", COMPLETED: "✓", FAILED: "✗", STOPPED: "■",
};
const OVER = new Set(["COMPLETED", "FAILED", "STOPPED"]);

export function duration(seconds) {
  // Python rounds halves to even.
  const floor = Math.floor(seconds), isHalf = seconds - floor === 0.5;
  let rest = Math.max(0, isHalf ? floor + (floor % 2) : Math.round(seconds));
  const days = Math.floor(rest / 86400), hours = Math.floor(rest / 3600) % 24;
  const minutes = Math.floor(rest / 60) % 60;
  rest %= 60;
  if (days) return `${days}d${hours}h`;
  if (hours) return `${hours}h${minutes}m`;
  return minutes ? `${minutes}m${rest}s` : `${rest}s`;
}

const known = (value, show) => (value === null || value === undefined ? NOTHING : show(value));

export const TEXTS = {
  status: (view) => `${SHAPES[view.status] ?? "?"} ${view.status}`,
  message: (view) => view.message ?? "",
  step: (view) => `${view.step}${view.total_steps === null ? "" : `/${view.total_steps}`}`,
  loss: (view) => known(view.loss, (loss) => loss.toFixed(4)),
  bits: (view) => view.bits,
  rate: (view) => (view.throughput_steps_per_sec ? `${view.throughput_steps_per_sec.toFixed(1)}/s` : NOTHING),
  eta: (view) => (OVER.has(view.status) ? NOTHING : known(view.eta_seconds, duration)),
  ranks: (view) => (OVER.has(view.status) ? `${view.world_size}` : `${view.living}/${view.world_size}`),
  restarts: (view) => `${view.restarts}`,
  checkpoint: (view) => known(view.last_checkpoint_step, (step) => `step ${step}`),
  process: (view) => view.process,
  pid: (view) => known(view.pid, String),
  node: (view) => view.node || NOTHING,
};

export function progress(view) {
  if (view.status === "COMPLETED") return 100;
  return view.total_steps ? Math.floor((100 * view.step) / view.total_steps) : 0;
}

// A number of any size with six digits, as "%.6g" in Python.
export function short(value) {
  if (value === null) return NOTHING;
  const [digits, exponent] = value.toExponential(5).split("e");
  if (exponent >= -4 && exponent < 6) return `${Number(value.toPrecision(6))}`;
  return `${Number(digits)}e${exponent[0]}${exponent.slice(1).padStart(2, "0")}`;
}
