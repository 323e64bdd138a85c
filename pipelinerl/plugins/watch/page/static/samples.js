// Samples: the model's answers, sorted and filtered; each row links to its group.
import { get } from "./api.js";
import { number, signed, words } from "./format.js";
import { useAnswer } from "./live.js";
import { link, settle } from "./route.js";
import { html, useColumnNames, useEffect, useState } from "./view.js";

const COLUMNS = [
  ["step", "step"],
  ["reward", "reward"],
  ["advantage", "advantage"],
  ["length", "length"],
  ["staleness", "staleness"],
];
const FILTERS = ["kind", "sort", "order", "domain", "tag", "set", "signal", "outcome", "finish", "step", "step_to"];

export function Samples({ run, facts, query }) {
  const wanted = { run, kind: "trained", sort: "time", order: "desc", limit: 50 };
  for (const name of FILTERS) if (query[name]) wanted[name] = query[name];
  const response = useAnswer("samples", wanted, { matters: (kind) => kind === "samples", pauseMs: 3000 });
  const [more, setMore] = useState({ rows: [], after: undefined });
  const [failure, setFailure] = useState("");
  const key = JSON.stringify(wanted);
  useEffect(() => setMore({ rows: [], after: undefined }), [key]);
  const state = response.value ?? response.old;
  const after = more.after === undefined ? state?.after : more.after;
  const next = async () => {
    try {
      const answer = await get("samples", { ...wanted, after });
      setMore((before) => ({ rows: [...before.rows, ...answer.samples], after: answer.after }));
    } catch (error) {
      setFailure(error.message);
    }
  };
  const shown = new Set();
  const rows = [...(state?.samples ?? []), ...more.rows].filter((row) => {
    const id = `${row.group}/${row.sample}`;
    return shown.has(id) ? false : shown.add(id);
  });
  return html`<div class="stack"><h2 class="said">Samples</h2>
    <${Filters} facts=${facts} query=${query} />
    ${(response.error || failure) && html`<p class="note bad" role="alert">${response.error?.message ?? failure}</p>`}
    ${
      state &&
      html`<p class="soft" role="status">${number(state.matched)} samples${state.complete ? "" : " so far; the files are still being read"}.
      Shaded groups have equal rewards and so no signal. Staleness: 1 = on policy.</p>`
    }
    ${
      rows.length > 0
        ? html`<${Table} rows=${rows} wanted=${wanted} run=${run} />`
        : state &&
          html`<p class="none">${
            facts.samples === 0 ? "No samples have been stored yet." : "No samples match."
          }</p>`
    }
    ${after && html`<p><button type="button" onClick=${next}>Show more</button></p>`}</div>`;
}

function choice(name, title, options, query, fallback = "") {
  return html`<label>${title} <select value=${query[name] ?? fallback}
    onChange=${(event) => settle({ [name]: event.target.value === fallback ? "" : event.target.value })}>
    ${options.map(([value, text]) => html`<option key=${value} value=${value}>${text}</option>`)}</select></label>`;
}

function Filters({ facts, query }) {
  const of = (names) => [["", "any"], ...names.map((name) => [name, name])];
  return html`<form class="card row" aria-label="Filters" onSubmit=${(event) => event.preventDefault()}>
    ${choice("kind", "kind", [...facts.kinds.map((name) => [name, words(name)]), ["any", "any"]], query, "trained")}
    ${choice("sort", "by", [["time", "time"], ...COLUMNS], query, "time")}
    ${choice(
      "order",
      "order",
      [
        ["desc", "highest first"],
        ["asc", "lowest first"],
      ],
      query,
      "desc",
    )}
    ${choice("domain", "domain", of(facts.domains), query)}
    ${facts.tags.length > 0 && choice("tag", "tag", of(facts.tags), query)}
    ${facts.evaluation_sets.length > 0 && choice("set", "set", of(facts.evaluation_sets), query)}
    ${choice(
      "signal",
      "groups",
      [
        ["", "any"],
        ["with", "with signal"],
        ["without", "without signal"],
      ],
      query,
    )}
    ${choice("finish", "ended by", of(["stop", "length"]), query)}
    <label>steps <input class="short" type="number" min="0" value=${query.step ?? ""} aria-label="From step"
      onChange=${(event) => settle({ step: event.target.value })} />
      to <input class="short" type="number" min="0" value=${query.step_to ?? ""} aria-label="To step"
        onChange=${(event) => settle({ step_to: event.target.value })} /></label>
    <button type="button" onClick=${() => settle(Object.fromEntries(FILTERS.map((name) => [name, ""])))}>Reset</button></form>`;
}

function Head({ name, title, wanted }) {
  const mine = wanted.sort === name;
  const next = mine && wanted.order === "desc" ? "asc" : "";
  return html`<th class="number" scope="col"
    aria-sort=${mine ? (wanted.order === "asc" ? "ascending" : "descending") : "none"}>
    <button type="button" onClick=${() => settle({ sort: name, order: next })}>${title}${mine ? (wanted.order === "asc" ? " ↑" : " ↓") : ""}</button></th>`;
}

function Table({ rows, wanted, run }) {
  const keep = run === "0" ? {} : { run };
  return html`<div class="card scroll samples" ref=${useColumnNames()} tabindex="0" role="region" aria-label="Samples"><table><thead><tr>
    <th scope="col">answer</th>
    ${COLUMNS.map(([name, title]) => html`<${Head} key=${name} name=${name} title=${title} wanted=${wanted} />`)}
    <th scope="col">outcome</th><th scope="col">domain</th><th scope="col">versions</th><th scope="col">prompt</th>
      </tr></thead>
    <tbody>${rows.map(
      (row) => html`<tr key=${`${row.group}/${row.sample}`} class=${row.signal ? "" : "nosignal"}>
      <td><a class="preview mono" href=${link("group", keep, row.group)}
        aria-label=${`Group of the answer ${row.text.slice(0, 60)}`}>${row.text || "(empty)"}</a></td>
      <td class="number">${number(row.step)}</td><td class="number">${number(row.reward)}</td>
        <td class="number">${signed(row.advantage)}</td><td class="number">${number(row.length)}</td>
      <td class="number">${number(row.staleness)}</td><td>${row.outcome}${!row.signal && html` <span
        class="soft">no signal</span>`}${row.finish_reason === "length" && html` <span
        class="soft">truncated</span>`}</td>
      <td>${row.domain} ${row.tags.map((tag) => html`<span class="tag" key=${tag}>${tag}</span>`)}</td>
      <td>${row.versions.map(([version]) => version).join(", ")}</td><td>
        <span class="preview wide mono soft">${row.prompt_part}</span></td></tr>`,
    )}</tbody></table></div>`;
}
