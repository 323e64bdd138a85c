// Line charts over steps. Charts of one screen share a window, so they zoom together.
// Drag, Ctrl and wheel, or the keys + − ← → 0 on a focused chart; a double click shows everything.
import { number } from "./format.js";
import { Plot } from "./plot.js";
import { settle } from "./route.js";
import { html, useEffect, useRef, visible } from "./view.js";

const LEAST_SPAN = 4;
const SPANS = [5, 20, 50, 200];

// The visible range of steps (null: all) and the step under the pointer (null: none). Subscribers are called
// after each change with "window" or "cursor".
export function sharedWindow() {
  const listeners = new Set();
  const notify = (what) => {
    for (const listener of [...listeners]) listener(what);
  };
  return {
    range: null,
    cursor: null,
    set(range) {
      if (range === this.range || (range && this.range && range[0] === this.range[0] && range[1] === this.range[1]))
        return;
      this.range = range;
      notify("window");
    },
    point(value) {
      if (value === this.cursor) return;
      this.cursor = value;
      notify("cursor");
    },
    subscribe(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
}

// Returns the window after a zoom by `factor` around `centre`, inside [first, last]; null if it shows everything.
export function zoomed([low, high], factor, centre, [first, last], least = LEAST_SPAN) {
  const span = Math.max(least, (high - low) * factor);
  if (span >= last - first) return null;
  const share = (centre - low) / Math.max(high - low, 1e-9);
  const start = Math.min(Math.max(first, centre - span * share), last - span);
  return [start, start + span];
}

export function moved([low, high], share, [first, last]) {
  const span = high - low;
  const start = Math.min(Math.max(first, low + span * share), last - span);
  return [start, start + span];
}

// Returns the window after a key; undefined for other keys.
export function byKey(key, range, all, least) {
  const now = range ?? all;
  const middle = (now[0] + now[1]) / 2;
  if (key === "+" || key === "=") return zoomed(now, 0.7, middle, all, least);
  if (key === "-") return zoomed(now, 1 / 0.7, middle, all, least);
  if (key === "ArrowLeft" && range) return moved(now, -0.15, all);
  if (key === "ArrowRight" && range) return moved(now, 0.15, all);
  if (key === "0") return null;
  return undefined;
}

function lastOf(values) {
  for (let at = values.length - 1; at >= 0; at -= 1) if (Number.isFinite(values[at])) return values[at];
  return undefined;
}

// A figure with its lines. `lines`: {label, values, colour 1-8, low, high, dots, faint}; arrays as long as x.
// `marks`: {x, text}, vertical lines such as changes of knobs.
export function Chart(props) {
  const { title, unit, x, lines, format = number, label = "step", tall = false, window: shared } = props;
  const box = useRef(null);
  const keys = useRef(null);
  const plot = useRef(null);
  const latest = useRef(props);
  latest.current = props;
  useEffect(() => {
    const made = new Plot(box.current, shared, (at) => showCursorValues(keys.current, latest.current, at));
    plot.current = made;
    const wheel = (event) => {
      if (!(event.ctrlKey || event.metaKey) || latest.current.x.length < 2) return;
      event.preventDefault();
      const all = made.whole();
      shared.set(zoomed(shared.range ?? all, Math.exp(event.deltaY * 0.002), made.valueAt(event.clientX), all));
    };
    made.canvas.addEventListener("wheel", wheel, { passive: false });
    made.canvas.addEventListener("dblclick", () => shared.set(null));
    return () => made.close();
  }, [shared]);
  useEffect(() => plot.current.show(latest.current), [x, lines, props.marks, shared]);
  const key = (event) => {
    if (x.length < 2) return;
    const range = byKey(event.key, shared.range, [x[0], x[x.length - 1]], LEAST_SPAN);
    if (range === undefined) return;
    event.preventDefault();
    shared.set(range);
  };
  const named = lines.filter((line) => line.label);
  const values = named.map((line) => `${line.label} ${format(lastOf(line.values))}`).join(", ");
  return html`<figure>
    <figcaption><span>${title}${unit && html` <span class="unit">${unit}</span>`}</span>
      <span class="legend" ref=${keys}>${named.map(
        (line) => html`<span key=${line.label}><i class=${`b${line.colour}`}></i>${line.label} <b></b></span>`,
      )}</span>
    </figcaption>
    <div class=${tall ? "chart tall" : "chart"} ref=${box} role="img" tabindex="0" onKeyDown=${key}
      aria-label=${`${title} over ${label}; newest: ${values || "nothing yet"}`}></div>
  </figure>`;
}

// Writes next to each name its value at the cursor, or the newest.
function showCursorValues(keys, { x, lines, marks = [], format = number, formatX = number, label = "step" }, at) {
  const places = keys.querySelectorAll("b");
  const passed = at === null ? [] : marks.filter((mark) => mark.x > (x[at - 1] ?? -Infinity) && mark.x <= x[at]);
  const marked = passed.map((mark) => ` · ${mark.text}`).join("");
  lines
    .filter((line) => line.label)
    .forEach((line, index) => {
      const value = at === null ? lastOf(line.values) : line.values[at];
      const where = at === null || index > 0 ? "" : ` at ${label} ${formatX(x[at])}`;
      if (places[index]) places[index].textContent = visible(format(value) + where + (index ? "" : marked));
    });
}

// The selection of the smoothing window in rows, kept in the page's address.
export function Smoothing({ span, of }) {
  return html`<label>smoothing <select value=${span || ""}
    onChange=${(event) => settle({ smooth: event.target.value })}><option value="">none</option>
    ${SPANS.map((each) => html`<option key=${each} value=${each}>${each} ${of}</option>`)}</select></label>`;
}

// Returns smoothed lines in front of the faint originals; dots are unchanged.
export function smoothLines(lines, span) {
  if (span <= 1) return lines;
  const behind = lines.filter((line) => !line.dots).map((line) => ({ ...line, label: "", faint: true, low: undefined }));
  const front = lines.map((line) =>
    line.dots ? line : { ...line, values: smoothed(line.values, span), low: undefined },
  );
  return [...behind, ...front];
}

// Returns the exponential mean over about `span` values; null for missing values.
function smoothed(values, span) {
  const share = 2 / (span + 1);
  let [sum, weight] = [0, 0];
  return values.map((value) => {
    if (!Number.isFinite(value)) return null;
    sum = (1 - share) * sum + share * value;
    weight = (1 - share) * weight + share;
    return sum / weight;
  });
}

// Shares as bars: rows of {name, share, text, low, high, much}, with a whisker from low to high if known.
export function Bars({ rows, label }) {
  return html`<dl class="bars" aria-label=${label}>${rows.map(
    (row) => html`
    <dt>${row.name}</dt>
    <dd class=${row.much ? "track much" : "track"}><span class="fill"
      style=${{ width: `${100 * Math.min(1, Math.max(0, row.share || 0))}%` }}></span>
      ${
        Number.isFinite(row.low) &&
        Number.isFinite(row.high) &&
        html`<span class="whisker"
        style=${{ left: `${100 * row.low}%`, width: `${Math.max(0.5, 100 * (row.high - row.low))}%` }}></span>`
      }</dd>
    <dd class="number">${row.text}</dd>`,
  )}</dl>`;
}
