// Tokens: one recorded sequence with its ids, coloured by a selected column, or as a table.
import { anything, number, signed, words } from "./format.js";
import { useAnswer } from "./live.js";
import { link, settle } from "./route.js";
import { html, Table, useMemo, useState } from "./view.js";

const SHADES = { numerics: "plus", staleness: "minus", cache: "other" };
const DELTAS = [1e-5, 1e-3, 1e-2, 1e-1];
const NATS = [0.05, 0.5, 1, 2];

function binOf(value, edges) {
  return edges.filter((edge) => Math.abs(value) >= edge).length;
}

const SHOWS = {
  version: {
    title: "model version",
    look: (all, at) => ((all.version?.[at] ?? null) === null ? "" : `v${all.version[at] % 8}`),
    keys: (all) =>
      [...new Set((all.version ?? []).filter((each) => each !== null))]
        .slice(-16)
        .map((each) => [`v${each % 8}`, `version ${each}`]),
  },
  delta: {
    title: "|Δ log-prob| by cause",
    look: (all, at) => {
      const size = (all.delta?.[at] ?? null) === null ? 0 : binOf(all.delta[at], DELTAS);
      return size ? `${SHADES[all.cause?.[at]] ?? "plus"}${size}` : "";
    },
    keys: () =>
      Object.keys(SHADES).flatMap((cause) =>
        DELTAS.map((edge, index) => [
          `${SHADES[cause]}${index + 1}`,
          index ? `≥ ${edge}` : `${cause} ≥ ${number(edge, 1)}`,
        ]),
      ),
  },
  advantage: {
    title: "advantage",
    look: (all, at, most) => {
      const value = all.advantage?.[at] ?? null;
      if (value === null || value === 0) return "";
      return `${value > 0 ? "plus" : "minus"}${Math.max(1, Math.ceil((4 * Math.abs(value)) / most))}`;
    },
    most: (all) => Math.max(1e-9, ...(all.advantage ?? []).map((each) => Math.abs(each ?? 0))),
    keys: (all, most) =>
      [-4, -2, 2, 4].map((each) => [
        `${each > 0 ? "plus" : "minus"}${Math.abs(each)}`,
        `to ${signed((most * each) / 4)}`,
      ]),
  },
  entropy: {
    title: "entropy",
    look: (all, at) => {
      const size = (all.entropy?.[at] ?? null) === null ? 0 : binOf(all.entropy[at], NATS);
      return size ? `other${size}` : "";
    },
    keys: () => NATS.map((edge, index) => [`other${index + 1}`, `≥ ${edge} nats`]),
  },
  mask: {
    title: "mask",
    look: (all, at) => (all.mask?.[at] ? "plus2" : "m1"),
    keys: () => [
      ["plus2", "has a gradient"],
      ["m1", "has none"],
    ],
  },
};

export function Tokens({ run, rest, query }) {
  const [id, sample] = rest;
  const { value: all, error } = useAnswer(
    `tokens/${encodeURIComponent(id ?? "")}/${encodeURIComponent(sample ?? "0")}`,
    { run },
  );
  const keep = run === "0" ? {} : { run };
  const by = query.by in SHOWS ? query.by : "version";
  const table = query.as === "table";
  const back = html`<p><a href=${link("group", keep, id)}>← group</a></p>`;
  if (error)
    return html`${back}<p class="note warn">${error.code === "no_tokens" ? "This record has no tokens." : error.message}</p>`;
  if (!all) return html`${back}<p class="none">Loading the tokens…</p>`;
  return html`<div class="stack">${back}<section class="card">
    <h2>Tokens of answer ${number(all.sample)} <span
      class="soft">step ${number(all.step)}, ${number(all.count)} tokens${all.left_out ? `, ${number(all.left_out)} of them omitted after token ${number(all.left_out_at)}` : ""}</span></h2>
    <div class="row" role="group" aria-label="Coloured by">${Object.entries(SHOWS).map(
      ([name, show]) => html`<button type="button" key=${name} aria-pressed=${name === by ? "true" : "false"}
        disabled=${all[name] === null || all[name] === undefined}
          onClick=${() => settle({ by: name })}>${show.title}</button>`,
    )}
      <button type="button" aria-pressed=${table ? "true" : "false"}
        onClick=${() => settle({ as: table ? "" : "table" })}>table</button></div>
    ${all.entropy ? "" : html`<p class="soft">Entropy was not measured here: it covers some answers of every figures.exact_entropy_interval-th step.</p>`}
    <${Sequence} all=${all} by=${by} table=${table} /></section></div>`;
}

function special(all, at) {
  return all.special ? all.special[at] : /^<[|\/]?[^<>\s]{1,40}[|]?>$/.test(all.text[at]);
}

function Sequence({ all, by, table }) {
  const show = SHOWS[by];
  const most = useMemo(() => show.most?.(all), [all, by]);
  const [at, setAt] = useState(null);
  const keys = show.keys(all, most);
  const drawn = useMemo(
    () =>
      all.text.map((text, index) => {
        const look = [
          show.look(all, index, most),
          all.sampled[index] ? "" : "prompt",
          special(all, index) ? "special" : "",
        ]
          .filter(Boolean)
          .join(" ");
        return html`<span key=${index} class=${look} data-at=${index}>${text}</span>`;
      }),
    [all, by],
  );
  const point = (event) => {
    const index = event.target.dataset?.at;
    if (index !== undefined) setAt(Number(index));
  };
  const key = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    setAt((before) =>
      Math.min(all.text.length - 1, Math.max(0, (before ?? (step > 0 ? -1 : all.text.length)) + step)),
    );
  };
  return html`<p>${keys.map(([look, text]) => html`<span key=${look + text}
    class=${`swatch ${look}`}>${text}</span>`)}<span
    class="soft">grey text was not sampled; framed tokens are special</span></p>
    <p class="tip" role="status" aria-live="polite">${at === null ? "Point at a token, or use ← and →." : describe(all, at)}</p>
    ${
      table
        ? html`<${TokenTable} all=${all} />`
        : html`<div class="tokens mono" tabindex="0" role="group"
          aria-label="Tokens; use the arrow keys" onMouseOver=${point} onClick=${point}
          onKeyDown=${key}>${drawn.map(
            (span, index) =>
              index === at
                ? html`<span key=${index} class=${`${span.props.class} at`}
                  data-at=${index}>${all.text[index]}</span>`
                : span,
          )}</div>`
    }`;
}

function describe(all, at) {
  const parts = [
    `token ${at}: id ${all.id[at]}`,
    JSON.stringify(all.text[at]),
    all.sampled[at] ? "sampled" : "not sampled",
  ];
  for (const name of ["version", "logprob", "trainer_logprob", "delta", "cause", "advantage", "entropy"]) {
    const value = all[name]?.[at];
    const shown = name === "version" || name === "entropy" ? number : signed;
    if (value !== null && value !== undefined)
      parts.push(`${words(name)} ${typeof value === "number" ? shown(value, 4) : value}`);
  }
  if (all.mask && all.sampled[at] && !all.mask[at]) parts.push("without gradient");
  return parts.join(" · ");
}

function TokenTable({ all }) {
  const names = ["version", "logprob", "trainer_logprob", "delta", "cause", "advantage", "entropy", "mask"].filter(
    (name) => all[name],
  );
  const head = ["at", "id", "text", "sampled", ...names.map(words)];
  const numbers = head.filter((title) => !["text", "sampled", "cause"].includes(title));
  return html`<${Table} label="Tokens" head=${head} numbers=${numbers}>${all.text.map(
      (
        text,
        at,
      ) => html`<tr key=${at}><td class="number">${at}</td><td class="number">${all.id[at]}</td>
        <td class="mono">${JSON.stringify(text)}</td><td>${all.sampled[at] ? "yes" : "no"}</td>
      ${names.map((name) => html`<td key=${name}
        class=${name === "cause" ? "" : "number"}>${name === "mask" ? (all.mask[at] ? "yes" : "no") : anything(all[name][at])}</td>`)}</tr>`,
    )}</>`;
}
