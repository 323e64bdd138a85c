// Lines over steps, drawn by uPlot. Charts of one screen share a window: what is zoomed in one is zoomed in all.
// Drag, Ctrl and wheel, or the keys + − ← → 0 on a focused chart; a double click shows everything.
import uPlot from "./uplot.js";
import { number } from "./format.js";
import { onTheme } from "./theme.js";
import { html, useEffect, useRef, useState } from "./view.js";

const LEAST_SPAN = 4;

// A window over the steps; null stands for all of them. `subscribe` is told after each change.
export function sharedWindow() {
  const listeners = new Set();
  return {
    range: null,
    set(range) {
      if (range === this.range || (range && this.range && range[0] === this.range[0] && range[1] === this.range[1]))
        return;
      this.range = range;
      for (const listener of [...listeners]) listener(range);
    },
    subscribe(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
}

// The window after a zoom by `factor` around `centre`, inside [first, last]; null when it shows everything.
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

// What a key asks of a window; undefined when it is no key of ours.
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

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function optionsOf(props, box, state) {
  const { lines, label, format = number, top, bottom, window: shared } = props;
  const soft = colour("--soft");
  const grid = { stroke: colour("--line"), width: 1 };
  const font = "11px system-ui, sans-serif";
  const series = [{ label }];
  const bands = [];
  for (const line of lines) {
    const stroke = colour(`--c${line.colour}`);
    series.push({
      label: line.label,
      stroke,
      width: line.faint ? 0.8 : 1.6,
      alpha: line.faint ? 0.45 : 1,
      spanGaps: true,
      dash: line.dash ? [5, 4] : undefined,
      points: { show: Boolean(line.dots), size: 6, fill: stroke },
    });
    if (line.low) {
      series.push(
        { stroke: "transparent", points: { show: false } },
        { stroke: "transparent", points: { show: false } },
      );
      bands.push({ series: [series.length - 1, series.length - 2], fill: `${stroke}33` });
    }
  }
  return {
    width: box.clientWidth || 300,
    height: box.clientHeight || 170,
    series,
    bands,
    legend: { show: false },
    padding: [8, 10, 0, 0],
    cursor: { sync: { key: "steps" }, drag: { x: true, y: false }, points: { size: 7 }, focus: { prox: -1 } },
    scales: {
      x: {
        time: false,
        range: (_, low, high) => shared?.range ?? (low === high ? [low - 1, high + 1] : [low, high]),
      },
      y: { range: (_, low, high) => limits(low, high, bottom, top) },
    },
    axes: [
      {
        stroke: soft,
        grid,
        ticks: grid,
        font,
        size: 26,
        space: 60,
        values: (_, ticks) => ticks.map((each) => number(each)),
      },
      {
        stroke: soft,
        grid,
        ticks: { show: false },
        font,
        size: 52,
        space: 34,
        values: (_, ticks) => ticks.map((each) => format(each)),
      },
    ],
    hooks: {
      setCursor: [(plot) => state.told?.(plot)],
      setSelect: [
        (plot) => {
          if (plot.select.width < 4) return;
          const low = plot.posToVal(plot.select.left, "x");
          shared?.set([low, plot.posToVal(plot.select.left + plot.select.width, "x")]);
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        },
      ],
    },
  };
}

function limits(low, high, bottom, top) {
  if (low === null || low === undefined) return [bottom ?? 0, top ?? 1];
  const from = bottom ?? low;
  const to = top ?? high;
  const room = (to - from || Math.abs(to) || 1) * 0.06;
  return [bottom ?? from - room, top ?? to + room];
}

function columnsOf(x, lines) {
  const columns = [x];
  for (const line of lines) {
    columns.push(line.values);
    if (line.low) columns.push(line.low, line.high);
  }
  return columns;
}

function lastOf(values) {
  for (let at = values.length - 1; at >= 0; at -= 1) if (Number.isFinite(values[at])) return values[at];
  return undefined;
}

// A figure with its lines. `lines`: {label, values, colour 1-8, low, high, dash, dots, faint}; all of x's length.
export function Chart(props) {
  const { title, x, lines, format = number, label = "step", tall = false, window: shared } = props;
  const box = useRef(null);
  const keys = useRef(null);
  const plot = useRef(null);
  const latest = useRef(props);
  latest.current = props;
  const [theme, setTheme] = useState(0);
  const shape = lines.map((line) => `${line.label}/${line.colour}/${Boolean(line.low)}`).join("|");
  useEffect(() => onTheme(() => setTheme((count) => count + 1)), []);
  useEffect(() => {
    const state = { told: null };
    const place = box.current;
    const made = new uPlot(
      optionsOf(latest.current, place, state),
      columnsOf(latest.current.x, latest.current.lines),
      place,
    );
    plot.current = made;
    state.told = () => tellCursor(made, keys.current, latest.current);
    const sized = new ResizeObserver(() => {
      const { clientWidth: width, clientHeight: height } = place;
      if (width && height && (width !== made.width || height !== made.height)) made.setSize({ width, height });
    });
    sized.observe(place);
    const leave = shared?.subscribe(() => made.setData(made.data, true));
    const all = () => [made.data[0][0], made.data[0][made.data[0].length - 1]];
    const wheel = (event) => {
      if (!(event.ctrlKey || event.metaKey) || !shared || made.data[0].length < 2) return;
      event.preventDefault();
      const centre = made.posToVal(event.clientX - made.over.getBoundingClientRect().left, "x");
      shared.set(zoomed(shared.range ?? all(), Math.exp(event.deltaY * 0.002), centre, all()));
    };
    const again = () => shared?.set(null);
    made.over.addEventListener("wheel", wheel, { passive: false });
    made.over.addEventListener("dblclick", again);
    return () => {
      leave?.();
      sized.disconnect();
      made.destroy();
    };
  }, [shape, theme, shared]);
  useEffect(() => {
    plot.current?.setData(columnsOf(x, lines), true);
    tellCursor(plot.current, keys.current, latest.current);
  }, [x, lines, shape, theme]);
  const key = (event) => {
    if (!shared || x.length < 2) return;
    const range = byKey(event.key, shared.range, [x[0], x[x.length - 1]], LEAST_SPAN);
    if (range === undefined) return;
    event.preventDefault();
    shared.set(range);
  };
  const named = lines.filter((line) => line.label);
  const said = named.map((line) => `${line.label} ${format(lastOf(line.values))}`).join(", ");
  return html`<figure>
    <figcaption><span>${title}</span>
      <span class="legend" ref=${keys}>${named.map(
        (line) => html`<span key=${line.label}><i class=${`b${line.colour}`}></i>${line.label} <b></b></span>`,
      )}</span>
    </figcaption>
    <div class=${tall ? "chart tall" : "chart"} ref=${box} role="img" tabindex="0" onKeyDown=${key}
      aria-label=${`${title} over ${label}; newest: ${said || "nothing yet"}`}></div>
  </figure>`;
}

// Beside each name its value at the cursor, or the newest.
function tellCursor(plot, keys, { lines, format = number, label = "step" }) {
  if (!plot || !keys) return;
  const at = plot.cursor.idx;
  const places = keys.querySelectorAll("b");
  lines
    .filter((line) => line.label)
    .forEach((line, index) => {
      const value = at === null || at === undefined ? lastOf(line.values) : line.values[at];
      const where = at === null || at === undefined || index > 0 ? "" : ` at ${label} ${number(plot.data[0][at])}`;
      if (places[index]) places[index].textContent = format(value) + where;
    });
}

// Shares as bars: rows of {name, share, text, low, high, much}; a whisker from low to high where they are known.
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
