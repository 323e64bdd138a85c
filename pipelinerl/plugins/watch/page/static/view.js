// The toolkit of every screen: `html`, which turns templates into elements, and the hooks of components. A value in a
// template becomes a text node or an attribute, never markup, so text of models, recipes and engines cannot become
// markup. Invisible characters, and those that reverse text, are shown as escapes: `visible`.
import { element, render, useEffect, useMemo, useRef, useState } from "./render.js";
import { templates } from "./template.js";

// Control, format, surrogate, private and unassigned characters, and line separators, except for ordinary layout.
// The same as `visible` in `pipelinerl.observability.samples.record`.
const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/gu;
const READ_ALOUD = ["title", "aria-label", "label", "placeholder"];

function escaped(character) {
  if (character === "\n" || character === "\t") return character;
  const code = character.codePointAt(0).toString(16);
  if (code.length < 3) return `\\x${code.padStart(2, "0")}`;
  return code.length < 5 ? `\\u${code.padStart(4, "0")}` : `\\U${code.padStart(8, "0")}`;
}

export function visible(text) {
  return text.replace(HIDDEN, escaped);
}

function seen(child) {
  if (Array.isArray(child)) return child.map(seen);
  return typeof child === "string" ? visible(child) : child;
}

function visibleElement(type, props, ...children) {
  if (typeof type === "string") {
    for (const name of READ_ALOUD) if (typeof props[name] === "string") props[name] = visible(props[name]);
  }
  return element(type, props, ...children.map(seen));
}

export const html = templates(visibleElement);

// Returns a reference for the box of a table. Each cell gets the title of its column, which narrow windows show beside it.
export function useColumnNames() {
  const box = useRef(null);
  useEffect(() => {
    const titles = [...box.current.querySelectorAll("th")].map((each) => each.textContent.replace(/ [↑↓]$/, ""));
    for (const row of box.current.querySelectorAll("tbody tr"))
      [...row.cells].forEach((cell, at) => {
        cell.dataset.title = titles[at] ?? "";
      });
  });
  return box;
}

// A table that scrolls in its box, with the column titles `head`, of which `numbers` align right; its children are the rows.
export function Table({ label, look = "scroll", head, numbers = [], children }) {
  return html`<div class=${look} ref=${useColumnNames()} tabindex="0" role="region" aria-label=${label}><table><thead><tr>
    ${head.map((title) => html`<th class=${numbers.includes(title) ? "number" : undefined} scope="col">${title}</th>`)}</tr></thead>
    <tbody>${children}</tbody></table></div>`;
}

export { render, useEffect, useMemo, useRef, useState };
