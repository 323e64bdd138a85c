// Recipe: the resolved recipe of the run by section; settings that differ from their default are bold.
import { anything } from "./format.js";
import { useAnswer } from "./live.js";
import { html, Table } from "./view.js";

export function Recipe({ run }) {
  const { value, error } = useAnswer("recipe", { run }, {});
  if (!value)
    return html`<p class=${error ? "note bad" : "none"}>${error?.message ?? "Loading the recipe…"}</p>`;
  const sections = new Map();
  for (const row of value.rows) {
    const [name] = row.path.split(".");
    if (!sections.has(name)) sections.set(name, []);
    sections.get(name).push(row);
  }
  if (!sections.size) return html`<p class="none">The run's directory has no readable recipe.toml.</p>`;
  return html`<div class="stack"><h2 class="said">Recipe</h2>
    <p class="soft">The resolved recipe; what differs from the defaults is bold.</p>
    ${[...sections].map(
      ([name, rows]) => html`<section class="card" key=${name}><h2>${name}</h2>
      <${Table} label=${`Settings of ${name}`} head=${["setting", "value"]}>${rows.map(
        (row) => html`<tr key=${row.path}><td class="mono">${row.made ? html`<b>${row.path}</b>` : row.path}</td>
        <td class="mono">${row.made ? html`<b>${anything(row.value)}</b>` : anything(row.value)}</td></tr>`,
      )}</></section>`,
    )}</div>`;
}
