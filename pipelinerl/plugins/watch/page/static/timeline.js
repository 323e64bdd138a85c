// Timeline: a lane per engine, coloured by the model version that it serves, the trainer's steps and waits,
// evaluations, checkpoints, and rollouts as rows whose colour changes with the version. The server returns the visible
// window in one piece per pixel, so hours cost as much as minutes.
import { byKey, moved, zoomed } from "./charts.js";
import { duration, number, percent, words } from "./format.js";
import { useAnswer } from "./live.js";
import { draw, heightOf, partAt } from "./timeline_canvas.js";
import { onTheme } from "./theme.js";
import { html, Table, useEffect, useMemo, useRef, useState } from "./view.js";

const LEAST_S = 0.02;
const ASK_AFTER_MS = 120;
const HOW = "Scroll to zoom, drag to move; keys: + − ← → 0.";
const SPANS = [
  ["last minute", 60],
  ["last 10 minutes", 600],
  ["last hour", 3600],
];

export function Timeline({ run, facts }) {
  const [request, setRequest] = useState({ from: null, to: null, points: 1500 });
  const live = facts.state === "live" || facts.state === "starting";
  const answer = useAnswer(
    "timeline",
    { run, from: request.from, to: request.to, points: request.points },
    { matters: (kind) => live && ["step", "behind", "event", "state"].includes(kind), pauseMs: 2000 },
  );
  const data = answer.value ?? answer.old;
  if (!data)
    return html`<p class=${answer.error ? "note bad" : "none"}>${answer.error?.message ?? "Loading the timeline…"}</p>`;
  if (!data.lanes.length || !data.end)
    return html`<p class="none">No events yet: the lanes appear with the first event.</p>`;
  return html`<div class="stack"><h2 class="said">Timeline</h2><${Lanes} data=${data} live=${live} ask=${setRequest} />
    <${WindowTables} data=${data} /></div>`;
}

function Lanes({ data, live, ask }) {
  const canvas = useRef(null);
  const tip = useRef(null);
  // State that changes with every wheel event, without a redraw of the components.
  const view = useMemo(() => ({ range: null, data: null, frame: 0, following: true }), []);
  const [following, setFollowing] = useState(true);
  const all = [0, Math.max(data.end, LEAST_S)];
  const paint = () => {
    if (view.frame) return;
    view.frame = requestAnimationFrame(() => {
      view.frame = 0;
      if (canvas.current) draw(canvas.current, view.data, view.range ?? [0, Math.max(view.data.end, LEAST_S)]);
    });
  };
  const show = (range, follow = view.following) => {
    view.range = range;
    view.following = follow;
    setFollowing(follow);
    paint();
    clearTimeout(view.timer);
    view.timer = setTimeout(() => {
      const points = Math.min(4000, Math.max(300, Math.round(canvas.current?.clientWidth ?? 1500)));
      if (!range) return ask({ from: null, to: null, points });
      const margin = (range[1] - range[0]) / 2;
      return ask({ from: Math.max(0, range[0] - margin), to: range[1] + margin, points: 2 * points });
    }, ASK_AFTER_MS);
  };
  useEffect(() => {
    const grown = view.data && live && view.following && view.range ? data.end - view.data.end : 0;
    view.data = data;
    if (grown > 0) show([view.range[0] + grown, view.range[1] + grown]);
    paint();
  }, [data]);
  useEffect(() => {
    const element = canvas.current;
    tip.current.textContent = HOW;
    const sized = new ResizeObserver(paint);
    sized.observe(element);
    const leave = onTheme(paint);
    const forget = handle(element, view, show, (text) => {
      tip.current.textContent = text;
    });
    return () => {
      sized.disconnect();
      leave();
      forget();
      clearTimeout(view.timer);
      cancelAnimationFrame(view.frame);
    };
  }, []);
  const key = (event) => {
    const range =
      event.key === "Home" && view.range
        ? moved(view.range, -1e9, all)
        : event.key === "End" && view.range
          ? moved(view.range, 1e9, all)
          : byKey(event.key, view.range, all, LEAST_S);
    if (range === undefined) return;
    event.preventDefault();
    show(range, range === null || range[1] >= all[1]);
  };
  const zoom = (factor) => {
    const now = view.range ?? all;
    show(zoomed(now, factor, (now[0] + now[1]) / 2, all, LEAST_S), false);
  };
  const style = { height: `${heightOf(data)}px` };
  return html`<section class="card lanes"><div class="row" role="group" aria-label="Zoom">
      <button type="button" aria-label="Zoom in" onClick=${() => zoom(0.5)}>+</button>
        <button type="button" aria-label="Zoom out" onClick=${() => zoom(2)}>−</button>
      <button type="button" onClick=${() => show(null, true)}>all</button>
      ${SPANS.filter(([, span]) => span < data.end).map(([title, span]) => html`<button type="button" key=${span}
        onClick=${() => show([data.end - span, data.end], true)}>${title}</button>`)}
      ${live && html`<span class="soft">${following ? "following live" : "paused; “all” resumes"}</span>`}</div>
    <p class="tip" ref=${tip}></p>
    <canvas ref=${canvas} style=${style} tabindex="0" role="img" onKeyDown=${key}
      aria-label=${`Timeline of ${data.lanes.length} lanes over ${duration(data.end)}; the tables below have its contents`}></canvas></section>`;
}

// Installs wheel, drag and pointer handlers; returns a function that removes them.
function handle(element, view, show, showTip) {
  const all = () => [0, Math.max(view.data.end, LEAST_S)];
  const timeAt = (event) => {
    const box = element.getBoundingClientRect();
    const { left, width } = element.plotted ?? { left: 0, width: box.width };
    const [low, high] = view.range ?? all();
    return low + ((event.clientX - box.left - left) / width) * (high - low);
  };
  const wheel = (event) => {
    event.preventDefault();
    const now = view.range ?? all();
    const aside = event.shiftKey ? event.deltaY : event.deltaX;
    const next =
      Math.abs(aside) > Math.abs(event.deltaY) || event.shiftKey
        ? moved(now, aside * 0.001, all())
        : zoomed(now, Math.exp(event.deltaY * 0.0018), timeAt(event), all(), LEAST_S);
    show(next, next === null || next[1] >= all()[1]);
  };
  let grabbed = null;
  const down = (event) => {
    grabbed = { x: event.clientX, range: view.range ?? all() };
    element.setPointerCapture(event.pointerId);
  };
  const move = (event) => {
    if (grabbed) {
      const width = element.plotted?.width ?? element.clientWidth;
      const next = moved(grabbed.range, (grabbed.x - event.clientX) / width, all());
      if (view.range) show(next, next[1] >= all()[1]);
    }
    const box = element.getBoundingClientRect();
    const part = partAt(
      view.data,
      timeAt(event),
      event.clientY - box.top,
      (view.range ?? all())[1] - (view.range ?? all())[0],
    );
    showTip(part || `at ${duration(timeAt(event))}`);
  };
  const up = () => {
    grabbed = null;
  };
  const pairs = [
    ["wheel", wheel, { passive: false }],
    ["pointerdown", down],
    ["pointermove", move],
    ["pointerup", up],
    ["pointercancel", up],
  ];
  for (const [name, listener, options] of pairs) element.addEventListener(name, listener, options);
  return () => pairs.forEach(([name, listener]) => element.removeEventListener(name, listener));
}

// The same as tables: the share of the window that each track fills, and the events in it.
function WindowTables({ data }) {
  const rows = data.lanes.flatMap((lane) =>
    lane.tracks.map((track) => {
      const busy = track.busy.reduce((sum, each) => sum + each, 0);
      return {
        lane: lane.lane,
        kind: track.kind,
        count: track.count.reduce((sum, each) => sum + each, 0),
        busy,
        share: busy / Math.max(data.to - data.from, 1e-9),
      };
    }),
  );
  return html`<div class="grid two"><section class="card"><h2>In this window <span
    class="soft">${duration(data.from)} to ${duration(data.to)}</span></h2>
    <${Table} label="Lanes" head=${["lane", "track", "count", "total", "share"]} numbers=${["count", "total", "share"]}>${rows.map(
      (
        row,
      ) => html`<tr key=${`${row.lane}/${row.kind}`}><td>${row.lane}</td><td>${words(row.kind)}</td>
        <td class="number">${number(row.count)}</td><td class="number">${duration(row.busy)}</td>
      <td class="number">${percent(row.share)}</td></tr>`,
    )}</></section>
    <section class="card"><h2>Events</h2>${
      data.marks.length
        ? html`<${Table} label="Marks" look="scroll long" head=${["time", "event", "details"]} numbers=${["time"]}>${data.marks
        .slice(-60)
        .reverse()
        .map(
          ([at, kind, text], index) =>
            html`<tr key=${index}><td class="number">${duration(at)}</td><td class="figure">${words(kind)}</td><td>${text}</td>
              </tr>`,
        )}</>`
        : html`<p class="none">No events in this window.</p>`
    }</section></div>`;
}
