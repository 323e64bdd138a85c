// Now: the run's current state. Rewards and accuracies with their intervals, staleness, waits, alarms, and every measure
// over the steps.
import { Bars, Chart, Smoothing, sharedWindow, smoothLines, zoomed } from "./charts.js";
import { clock, duration, measureOf, number, percent, words } from "./format.js";
import { useAnswer, useStream } from "./live.js";
import { settle } from "./route.js";
import { html, Table, useEffect, useMemo, useRef, useState } from "./view.js";

// Maximum rows of a chart; in longer runs each row covers several steps.
const ROWS = 1000;
// Number of newer steps that are appended before all rows are requested again.
const NEWER = 250;

const CHARTS = [
  ["Staleness, 1 = on policy", ["staleness_mean", "staleness_max"]],
  ["Entropy", ["entropy"], "nats per token"],
  ["Gradient norm", ["grad_norm"]],
  ["Loss", ["loss"]],
  ["Step time", ["step_s", "wait_s"]],
  ["Tokens per step", ["sampled_tokens", "tokens"], ""],
  ["Share of tokens clipped", ["clip_fraction"]],
  ["Effective sample size", ["ess"], "of the batch"],
  [
    "Trainer − sampler, P95 |Δ log-prob|",
    ["mismatch_numerics_p95", "mismatch_staleness_p95", "mismatch_cache_p95", "mismatch_truncation_p95"],
  ],
  ["Learning rate", ["learning_rate"]],
];

const DOMAIN_NUMBERS = ["rollouts", "length", "truncated", "all correct", "all wrong", "stale", "verifier"];
const DOMAIN_HEAD = ["domain", "rollouts", "reward", "accuracy", ...DOMAIN_NUMBERS.slice(1)];

export function Now({ run, facts, query, refresh }) {
  const wide = query.window ?? "20";
  const shown = shownFigures(facts, query);
  const now = useNow(run, wide, shown.metrics);
  const state = now.value ?? now.old;
  const figures = state?.steps?.figures ?? facts.metrics.length;
  useEffect(() => {
    if (figures !== facts.metrics.length) refresh(); // the run has a new measure
  }, [figures]);
  if (!state)
    return html`<p class=${now.error ? "note bad" : "none"}>${now.error?.message ?? "Loading…"}</p>`;
  return html`<div class="stack">
    <h2 class="said">Now</h2>
    <${Alarms} alarms=${state.alarms} />
    ${
      !state.step &&
      html`<p class="note">${
        facts.state === "live" || facts.state === "starting"
          ? `No step has been taken yet.${state.waiting_for ? ` The run is waiting for ${state.waiting_for}.` : ""}`
          : "The run ended before its first step."
      }</p>`
    }
    <${Tiles} state=${state} wide=${wide} />
    <${Shares} state=${state} />
    <${Charts} run=${run} facts=${facts} coarse=${state.steps} smooth=${Number(query.smooth) || 0} ...${shown} />
    <${Domains} state=${state} wide=${wide} />
    <${Environments} state=${state} wide=${wide} />
    <${Incidents} incidents=${state.incidents ?? []} />
  </div>`;
}

function Alarms({ alarms }) {
  return html`<div role="alert">${(alarms ?? []).map(
    (each) => html`<p class="note warn" key=${`${each.alarm}/${each.domain}`}>
    <b>${words(each.alarm)}${each.domain ? `, ${each.domain}` : ""}</b> since step ${number(each.step)}: ${each.what}</p>`,
  )}</div>`;
}

function interval(value, format = number) {
  return Number.isFinite(value?.low) && Number.isFinite(value?.high)
    ? `${format(value.low)} to ${format(value.high)}`
    : "";
}

function Tiles({ state, wide }) {
  const { overall = {}, fleet = {}, step_time: time = {}, ledger = {} } = state;
  const tiles = [
    [
      "reward",
      number(overall.reward?.mean),
      interval(overall.reward) + (overall.unjudged > 0 ? `, ${percent(overall.unjudged)} unjudged` : ""),
    ],
    ["training accuracy", percent(overall.accuracy?.mean), interval(overall.accuracy, percent)],
    ...(state.held_out ?? []).map((each) => [
      words(each.name),
      percent(each.accuracy),
      `${interval(each, percent)}, version ${number(each.version)}`,
    ]),
    [
      "tokens/s",
      number(fleet.tokens_per_s ?? overall.tokens_per_s),
      Number.isFinite(fleet.occupancy) ? `engines ${percent(fleet.occupancy, 0)} busy` : "",
    ],
    ["step time", duration(time.step_s), `plus ${duration(time.wait_s)} waiting`],
    ["update pause", duration(time.pause_s ?? fleet.update_pause_s), "median"],
    ["answer length", number(overall.length), `${percent(overall.truncated)} truncated`],
    ["groups in flight", number(ledger.in_flight), `${number(ledger.trained)} of ${number(ledger.issued)} trained`],
  ];
  return html`<dl class="tiles" aria-label=${`Means over the last ${wide} steps`}>${tiles.map(
    ([name, value, note]) => html`<div key=${name}><dt>${name}</dt><dd>${value}<small>${note}</small></dd></div>`,
  )}</dl>`;
}

// The charts to draw: names of metrics, of domains, and of additional choices.
function shownFigures(facts, query) {
  const known = new Set(facts.metrics);
  const extra = (query.charts ?? "").split(",").filter(Boolean);
  const domains = facts.domains.slice(0, 8);
  const metrics = [
    "reward",
    "accuracy",
    ...CHARTS.flatMap(([, names]) => names),
    ...domains.flatMap((name) => [`domain/${name}/accuracy`, `domain/${name}/reward`]),
    ...extra,
  ].filter((name, index, all) => known.has(name) && all.indexOf(name) === index);
  return { metrics, domains, extra };
}

// The state of the run and its steps in one request; of steps and marks only those that are newer than the rows held.
// `held` keeps the rows between requests.
function useNow(run, wide, metrics) {
  const of = `${run}?${metrics.join(",")}`;
  const held = useRef({ of: "", rows: null, turn: 0, rowsTurn: -1, askedTurn: 0 }).current;
  useStream((kind) => {
    if (["hello", "rewound", "behind", "loaded"].includes(kind)) held.turn += 1; // the rows may have changed
  });
  return useAnswer(
    "now",
    { run, window: wide, metrics: metrics.join(",") || "reward", points: ROWS },
    {
      matters: (kind) => ["step", "behind", "state", "event"].includes(kind),
      pauseMs: 1500,
      more: () => {
        held.askedTurn = held.turn;
        const { rows } = held;
        const fits = held.of === of && held.rowsTurn === held.turn && rows.count > 0;
        return fits && rows.x.step.length < ROWS + NEWER ? { since: rows.last, marked: rows.marked } : {};
      },
      taken: (answer, added) => {
        const rows = added.since === undefined ? answer.steps : joined(held.rows, answer.steps);
        if (rows) Object.assign(held, { of, rows, rowsTurn: held.askedTurn });
        else held.turn += 1;
        return { ...answer, steps: held.rows };
      },
    },
  );
}

// Appends newer rows; null if they do not follow.
function joined(rows, newer) {
  if (newer.each > 1 || newer.last < rows.last) return null;
  const lengths = [rows.x.step.length, newer.x.step.length];
  const column = (values, which) => values ?? Array(lengths[which]).fill(null);
  const y = {};
  for (const name of new Set([...Object.keys(rows.y), ...Object.keys(newer.y)])) {
    const more = column(newer.y[name]?.mean, 1);
    const parts = rows.each > 1 ? ["mean", "low", "high"] : ["mean"];
    y[name] = Object.fromEntries(parts.map((part) => [part, [...column(rows.y[name]?.[part], 0), ...more]]));
  }
  const x = Object.fromEntries(Object.entries(rows.x).map(([name, values]) => [name, [...values, ...newer.x[name]]]));
  return { ...newer, each: rows.each, x, y, marks: [...rows.marks, ...newer.marks] };
}

// The rows over all steps, or finer ones of the zoomed range.
function useSteps(run, metrics, shared, all) {
  const [range, setRange] = useState(shared.range);
  useEffect(() => {
    let timer = 0;
    const leave = shared.subscribe((what) => {
      if (what !== "window") return;
      clearTimeout(timer);
      timer = setTimeout(() => setRange(shared.range), 150);
    });
    return () => {
      leave();
      clearTimeout(timer);
    };
  }, [shared]);
  const merged = (all?.each ?? 1) > 1;
  const span = range ? range[1] - range[0] : 0;
  const fine = useAnswer(
    range && merged ? "steps" : null,
    range && {
      run,
      metrics: metrics.join(","),
      points: 1500,
      from: Math.floor(range[0] - span / 2),
      to: Math.ceil(range[1] + span / 2),
    },
  );
  return range && merged && fine.value ? fine.value : all;
}

function lineOf(rows, metric, label, colour, more) {
  const column = rows.y[metric];
  if (!column || !column.mean.some((value) => value !== null)) return null;
  return { label, values: column.mean, low: column.low, high: column.high, colour, ...more };
}

function Charts({ run, facts, coarse, metrics, domains, extra, smooth }) {
  const shared = useMemo(sharedWindow, [run]);
  const rows = useSteps(run, metrics, shared, coarse);
  const figures = useMemo(
    () =>
      rows
        ? figuresOf(rows, domains, extra).map((each) => ({ ...each, lines: smoothLines(each.lines, smooth / rows.each) }))
        : [],
    [rows, extra.join(), smooth],
  );
  if (!rows || rows.count === 0) return html`<p class="none">No steps yet.</p>`;
  const all = [rows.first, rows.last];
  const changed = (rows.marks ?? []).filter((mark) => mark.kind === "knobs");
  const marks = changed.map((mark) => ({ x: mark.step, text: mark.what }));
  return html`<section aria-label="Over the steps">
    <div class="row"><h2>Over the steps</h2>
      <${ZoomButtons} shared=${shared} all=${all} />
      <${Smoothing} span=${smooth} of="steps" />
      <label>add a chart <select onChange=${(event) => {
        settle({ charts: [...extra, event.target.value].join(",") });
        event.target.value = "";
      }}>
        <option value="">choose a measure</option>${facts.metrics.filter((name) => !extra.includes(name)).map((name) => html`<option key=${name} value=${name}>${words(name)}</option>`)}
      </select></label>
      ${extra.length > 0 && html`<button type="button" class="quiet"
        onClick=${() => settle({ charts: "" })}>remove added charts</button>`}
      ${rows.each > 1 && html`<span class="soft">each point is ${number(rows.each)} steps; zoom in for more</span>`}
    </div>
    <div class="grid">${figures.map((figure) => html`<${Chart} key=${figure.title} x=${rows.x.step}
      window=${shared} marks=${marks} ...${figure} />`)}</div>
  </section>`;
}

function figuresOf(rows, domains, extra) {
  const figures = [];
  const add = (title, lines, measure) => {
    const known = lines.filter(Boolean);
    if (known.length) figures.push({ title, lines: known, ...measure });
  };
  // Rewards stand at the version that sampled the answers, not at the step that trained on them.
  const sampled = { x: rows.x.sampled_version, label: "model version" };
  add("Reward", [lineOf(rows, "reward", "reward", 1), ...evaluationsOf(rows)], sampled);
  add(
    "Accuracy by domain",
    domains.length
      ? domains.map((name, index) => lineOf(rows, `domain/${name}/accuracy`, name, 1 + (index % 8)))
      : [lineOf(rows, "accuracy", "accuracy", 1)],
    { ...measureOf("accuracy"), ...sampled },
  );
  add(
    "Reward by domain",
    domains.length > 1
      ? domains.map((name, index) => lineOf(rows, `domain/${name}/reward`, name, 1 + (index % 8)))
      : [],
    sampled,
  );
  for (const [title, names, unit] of CHARTS)
    add(
      title,
      names.map((name, index) => lineOf(rows, name, shortOf(name, names), 1 + index)),
      { ...measureOf(names[0]), ...(unit !== undefined && { unit }) },
    );
  for (const name of extra) add(words(name), [lineOf(rows, name, words(name), 6)], measureOf(name));
  return figures;
}

function shortOf(name, names) {
  const short = name.replace(/_s$/, "");
  if (names.length === 1) return words(short);
  return words(short.replace("mismatch_", "").replace("_p95", "").replace("staleness_m", "m"));
}

// Held-out accuracies as points at the row of their step.
function evaluationsOf(rows) {
  const versions = rows.x.sampled_version;
  const sets = new Map();
  for (const mark of rows.marks ?? []) {
    if (mark.kind !== "evaluation" || !Number.isFinite(mark.accuracy)) continue;
    let at = versions.findIndex((version) => version >= mark.step);
    if (at < 0) at = versions.length - 1;
    if (!sets.has(mark.set))
      sets.set(
        mark.set,
        versions.map(() => null),
      );
    sets.get(mark.set)[at] = mark.accuracy;
  }
  return [...sets].map(([name, values], index) => ({
    label: `${words(name)} accuracy`,
    values,
    colour: 2 + (index % 7),
    dots: true,
  }));
}

function ZoomButtons({ shared, all }) {
  const press = (factor) => {
    const now = shared.range ?? all;
    const [low, high] = [Math.max(all[0], now[0]), Math.min(all[1], now[1])];
    shared.set(zoomed([low, high], factor, (low + high) / 2, all));
  };
  return html`<span class="row" role="group" aria-label="Zoom">
    <button type="button" aria-label="Zoom in" onClick=${() => press(0.5)}>+</button>
    <button type="button" aria-label="Zoom out" onClick=${() => press(2)}>−</button>
    <button type="button" onClick=${() => shared.set(null)}>all steps</button></span>`;
}

// Figures of the domains whose rollouts are episodes; nothing if there are none.
function Environments({ state, wide }) {
  const rows = (state.domains ?? []).filter((each) => Number.isFinite(each.turns));
  const figures = [
    ["turns", (row) => number(row.turns)],
    ["segments", (row) => number(row.segments)],
    ["seconds outside the model", (row) => duration(row.environment_s)],
    ["calls", (row) => number(row.calls_parsed)],
    ["failed calls", (row) => number(row.tool_errors)],
    ["malformed calls", (row) => number(row.calls_malformed)],
  ];
  const names = figures.map(([name]) => name);
  return (
    rows.length > 0 &&
    html`<section class="card"><h2>Environments</h2>
      <p class="soft">Per episode, and calls in all, of the last ${wide} steps.</p>
      <${Table} label="Environments" head=${["domain", ...names]} numbers=${names}>${rows.map(
        (row) => html`<tr key=${row.name}><td>${row.name}</td>${figures.map(
          ([name, shown]) => html`<td class="number" key=${name}>${shown(row)}</td>`,
        )}</tr>`,
      )}</></section>`
  );
}

function Domains({ state, wide }) {
  const rows = [...(state.domains ?? []), ...(state.tags ?? []).map((each) => ({ ...each, tag: true }))];
  return html`<section class="card"><div class="row"><h2>Domains</h2>
      <label>means over the last <input class="short" type="number" min="1" max="1000" value=${wide}
        onChange=${(event) => settle({ window: event.target.value })} /> steps</label></div>
    ${
      rows.length
        ? html`<${Table} label="Domains and tags" head=${DOMAIN_HEAD} numbers=${DOMAIN_NUMBERS}>${rows.map(
        (
          row,
        ) => html`<tr key=${`${row.tag}/${row.name}`}><td>${row.tag ? html`<span
          class="tag">${row.name}</span>` : row.name}
          ${row.resting !== null && row.resting !== undefined && html` <span
            class="soft">resting until ${number(row.resting)}</span>`}</td>
        <td class="number">${number(row.rollouts)}</td>
        <td class="figure">${number(row.reward?.mean)} <span class="soft">${interval(row.reward)}</span></td>
          <td class="figure">${percent(row.accuracy?.mean)} <span class="soft">${interval(row.accuracy, percent)}</span></td>
        <td class="number">${number(row.length_mean)}</td><td class="number">${percent(row.truncated)}</td>
          <td class="number">${percent(row.all_right)}</td>
        <td class="number">${percent(row.all_wrong)}</td><td class="number">${percent(row.stale)}</td>
          <td class="number">${duration(row.verifier_s)}</td></tr>`,
      )}</>`
        : html`<p class="none">Nothing has been trained yet.</p>`
    }</section>`;
}

function Shares({ state }) {
  const { staleness = [], lag = "", stale = {}, waits = [], mismatch = [] } = state;
  const causes = stale.by_cause ?? [];
  const most = Math.max(1, ...causes.map((each) => each.groups));
  const rated = (state.domains ?? []).filter((each) => Number.isFinite(each.accuracy?.mean));
  return html`<div class="grid">
    ${
      rated.length > 0 &&
      html`<section class="card"><h2>Accuracy by domain, 95 %</h2><${Bars}
        label="Accuracy by domain, with its interval" rows=${rated.map(
        (each) => ({
          name: each.name,
          share: each.accuracy.mean,
          low: each.accuracy.low,
          high: each.accuracy.high,
          text: percent(each.accuracy.mean),
        }),
      )} /></section>`
    }
    <section class="card"><h2>Staleness of trained tokens, 1 = on policy</h2>${lag && html`<p class="soft">${lag}</p>`}${
      staleness.length
        ? html`<${Bars} label="Share of tokens by staleness in versions"
          rows=${staleness.map((each) => ({ name: String(each.age).replace("_", "–"), share: each.share, text: percent(each.share) }))} />`
        : html`<p class="none">Not measured yet.</p>`
    }</section>
    <section class="card"><h2>Stale groups, by cause</h2><p
      class="soft">${number(stale.groups)} groups, ${percent(stale.share)} of the sampled groups</p>
      <${Bars} label="Stale groups by cause"
        rows=${causes.map((each) => ({ name: each.cause, share: each.groups / most, text: number(each.groups), much: true }))} /></section>
    <section class="card"><h2>Waits by cause</h2>${state.waiting_for && html`<p>Now: ${state.waiting_for}</p>`}${
      waits.length
        ? html`<${Bars} label="Share of time by cause of waiting"
          rows=${waits.map((each) => ({ name: each.culprit, share: each.share, text: `${percent(each.share)} · ${duration(each.seconds)}`, much: each.share > 0.5 }))} />`
        : html`<p class="none">No waits yet.</p>`
    }</section>
    <section class="card"><h2>Trainer − sampler, by cause</h2>${
      mismatch.length
        ? html`<${Table} label="Mismatch by cause" head=${["cause", "tokens", "P95", "max"]} numbers=${["tokens", "P95", "max"]}>${mismatch.map(
            (each) => html`<tr key=${each.cause}><td>${each.cause}</td>
      <td class="number">${percent(each.share)}</td><td class="number">${number(each.p95)}</td><td class="number">${number(each.max)}</td></tr>`,
          )}</>`
        : html`<p class="none">Not measured yet.</p>`
    }</section></div>`;
}

function Incidents({ incidents }) {
  return html`<section class="card"><h2>Incidents</h2>${
    incidents.length
      ? html`<${Table} label="Incidents" look="scroll long" head=${["last at", "event", "times", "lasted", "details"]}>${incidents.map(
          (each, index) => html`<tr key=${index}><td class="figure">${clock(each.time)}</td>
      <td class="figure">${words(each.kind)}</td><td class="number">${each.count}</td>
      <td class="figure">${each.seconds ? duration(each.seconds) : ""}</td><td>${each.what}</td></tr>`,
        )}</>`
      : html`<p class="none">No incidents yet.</p>`
  }</section>`;
}
