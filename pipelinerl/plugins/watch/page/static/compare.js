// Compare: several runs on one axis of steps, samples or seconds, and the differences of their recipes.
import { Chart, Smoothing, sharedWindow, smoothLines } from "./charts.js";
import { anything, clock, duration, measureOf, number, percent, runName, words } from "./format.js";
import { useAnswer } from "./live.js";
import { settle } from "./route.js";
import { html, Table, useMemo } from "./view.js";

// Rewards stand where the version that sampled them was the newest, not at the step that trained on them.
const AXES = [
  ["step", "steps"],
  ["samples", "samples"],
  ["seconds", "seconds"],
];

export function Compare({ facts, query }) {
  const runs = (query.runs ?? facts.runs.map((each) => each.run).join(",")).split(",").filter(Boolean);
  const metrics = (query.metrics ?? (facts.metrics.includes("accuracy") ? "reward,accuracy" : "reward"))
    .split(",")
    .filter(Boolean);
  const x = AXES.some(([name]) => name === query.x) ? query.x : "step";
  const { value, old, error } = useAnswer(
    runs.length && metrics.length ? "compare" : null,
    { runs: runs.join(","), metrics: metrics.join(","), x, points: 500 },
    { matters: (kind) => kind === "step" || kind === "behind", pauseMs: 4000 },
  );
  const state = value ?? old;
  const smooth = Number(query.smooth) || 0;
  const toggle = (id) =>
    settle({
      runs:
        (runs.includes(id) ? runs.filter((each) => each !== id) : [...runs, id].sort((a, b) => a - b)).join(",") ||
        undefined,
    });
  return html`<div class="stack"><h2 class="said">Compare</h2>
    <div class="card row"><fieldset class="row"><legend class="said">Runs</legend>${facts.runs.map(
      (each) => html`<label key=${each.run}><input type="checkbox" checked=${runs.includes(String(each.run))}
        onChange=${() => toggle(String(each.run))} />${runName(each, facts.runs)} <span class="soft">${each.state}</span></label>`,
    )}</fieldset>
      <label>over <select value=${x} onChange=${(event) => settle({ x: event.target.value })}>${AXES.map(([name, title]) => html`<option key=${name} value=${name}>${title}</option>`)}</select></label>
      <${Smoothing} span=${smooth} of="points" />
      <label>measure <select value=""
        onChange=${(event) => settle({ metrics: [...metrics.filter((name) => name !== event.target.value), event.target.value].join(",") })}>
        <option value="">add…</option>${facts.metrics.filter((name) => !metrics.includes(name)).map((name) => html`<option key=${name} value=${name}>${words(name)}</option>`)}</select></label>
      ${metrics.map((name) => html`<button type="button" key=${name} aria-label=${`Remove ${words(name)}`}
        onClick=${() => settle({ metrics: metrics.filter((each) => each !== name).join(",") || undefined })}>${words(name)} ×</button>`)}</div>
    ${facts.runs.length < 2 && html`<p
      class="note">One run is open. To compare, open several: <code>pipelinerl watch RUN RUN</code>.</p>`}
    ${error && html`<p class="note bad" role="alert">${error.message}</p>`}
    ${state && html`<${Lines} state=${state} metrics=${metrics} label=${x} smooth=${smooth} />
      <${List} state=${state} />
      <${Differences} state=${state} />`}</div>`;
}

const heldOut = (state) => [...new Set(state.runs.flatMap((each) => Object.keys(each.held_out)))];

// The chosen runs as a table: when each began, how far it is, what it reached and what it used.
function List({ state }) {
  const sets = heldOut(state);
  const roles = [...new Set(state.runs.flatMap((each) => Object.keys(each.usage)))];
  const numbers = ["steps", "duration", "reward", ...sets.map(words)];
  const names = state.runs.map((each) => runName(each, state.runs));
  const used = ({ cpu_s: cpu, gpu_s: gpu } = {}) => duration(cpu) + (gpu > 0 ? ` / ${duration(gpu)}` : "");
  return html`<section class="card"><h2>Runs</h2><${Table} label="Runs" head=${["run", "state", "began", ...numbers]}
    numbers=${numbers}>${state.runs.map(
      (each) => html`<tr key=${each.run}><td>${runName(each, state.runs)}</td><td>${each.state}</td>
      <td class="figure">${clock(each.started)}</td><td class="number">${number(each.step)}</td>
      <td class="number">${duration(each.elapsed_s)}</td><td class="number">${number(each.reward)}</td>
      ${sets.map((set) => html`<td class="number" key=${set}>${percent(each.accuracies[set])}</td>`)}</tr>`,
    )}</></section>
    ${
      roles.length > 0 &&
      html`<section class="card"><h2>Processor time, and GPU time, by role</h2><${Table} label="Time by role"
      head=${["role", ...names]} numbers=${names}>${roles.map(
        (role) => html`<tr key=${role}><td>${role}</td>${state.runs.map(
          (each) => html`<td class="number" key=${each.run}>${used(each.usage[role])}</td>`,
        )}</tr>`,
      )}</></section>`
    }`;
}

function Lines({ state, metrics, label, smooth }) {
  const shared = useMemo(sharedWindow, [label]);
  const figures = useMemo(
    () =>
      metrics.map((metric) => {
        const known = state.runs.filter((each) => each.y[metric]?.some((value) => value !== null));
        if (!known.length) return null;
        const { x, columns } = overlaid(known.map((each) => [each.x_of[metric] ?? each.x, each.y[metric]]));
        return {
          title: words(metric),
          ...measureOf(metric),
          formatX: label === "seconds" ? duration : number,
          x,
          lines: smoothLines(
            known.map((each, index) => ({
              label: runName(each, state.runs),
              values: columns[index],
              colour: 1 + (each.run % 8),
            })),
            smooth,
          ),
        };
      }),
    [state, metrics.join(), label, smooth],
  );
  const sets = useMemo(
    () =>
      heldOut(state).map((set) => {
        const known = state.runs.filter((each) => each.held_out[set]);
        const { x, columns } = overlaid(known.map((each) => [each.held_out[set].x, each.held_out[set].y]));
        const lines = known.map((each, index) => ({
          label: runName(each, state.runs),
          values: columns[index],
          colour: 1 + (each.run % 8),
          dots: true,
        }));
        const title = `${words(set)} accuracy`;
        return { title, format: percent, formatX: label === "seconds" ? duration : number, x, lines };
      }),
    [state, label],
  );
  return html`<div class="grid two">${sets.map(
    (figure) => html`<${Chart} key=${figure.title} ...${figure} label=${label} window=${shared} tall=${true} />`,
  )}${figures.map((figure, index) =>
    figure
      ? html`<${Chart} key=${metrics[index]} ...${figure} label=${label} window=${shared} tall=${true} />`
      : html`<p class="none" key=${metrics[index]}>No run has measured ${words(metrics[index])}.</p>`,
  )}</div>`;
}

// Aligns tables of [x, values] over the union of their x; null for missing values.
function overlaid(tables) {
  const x = [...new Set(tables.flatMap(([each]) => each))].sort((a, b) => a - b);
  const rows = new Map(x.map((value, at) => [value, at]));
  const columns = tables.map(([places, values]) => {
    const column = x.map(() => null);
    places.forEach((value, at) => {
      column[rows.get(value)] = values[at];
    });
    return column;
  });
  return { x, columns };
}

function Differences({ state }) {
  return html`<section class="card"><h2>Recipe differences <span class="soft">defaults are left out</span></h2>${
    state.differences.length
      ? html`<${Table} label="Differences of the recipes"
          head=${["setting", ...state.runs.map((each) => runName(each, state.runs))]}>${state.differences.map((each) => html`<tr key=${each.path}>
      <td class="mono">${each.path}</td>${each.values.map((value, index) => html`<td
      key=${index}>${anything(value)}</td>`)}</tr>`)}</>`
      : html`<p class="none">${state.runs.length > 1 ? "No differences." : "Open several runs to see differences."}</p>`
  }</section>`;
}
