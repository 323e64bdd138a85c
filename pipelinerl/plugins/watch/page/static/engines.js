// The engines of the run: their state, and how to add, drain, swap and remove one. Removals need confirmation.
import { send } from "./api.js";
import { duration, number, percent } from "./format.js";
import { useAnswer } from "./live.js";
import { html, Table, useState } from "./view.js";

const NUMBERS = ["version", "running", "waiting", "tokens/s"];

const LOOKS = {
  healthy: "good",
  serving: "good",
  suspect: "warn",
  draining: "warn",
  joining: "live",
  expelled: "bad",
  dead: "bad",
  lost: "bad",
  left: "plain",
};

export function Engines({ run, facts }) {
  const response = useAnswer(
    "engines",
    { run },
    {
      matters: (kind, data) =>
        kind === "step" || kind === "state" || (kind === "event" && String(data.kind).startsWith("engine")),
      pauseMs: 1500,
    },
  );
  const [message, setMessage] = useState(null);
  const state = response.value;
  if (!state)
    return html`<section class="card"><h2>Engines</h2><p
      class=${response.error ? "note bad" : "none"}>${response.error?.message ?? "Loading the engines…"}</p></section>`;
  const order = async (path, body, done) => {
    setMessage({ look: "", text: "sending…" });
    try {
      const answer = await send("POST", `engines/${path}`, body, { run });
      setMessage({ look: "good", text: `${done}${answer.names?.length ? `: ${answer.names.join(", ")}` : ""}.` });
      response.again();
    } catch (error) {
      setMessage({ look: "bad", text: error.message });
    }
  };
  const here = new Set(state.engines.filter((each) => !isOut(each)).map((each) => each.name));
  const usual = state.engines.find((each) => !isOut(each) && state.types.includes(each.type))?.type;
  const presentFirst = [...state.engines].sort((a, b) => isOut(a) - isOut(b));
  const starting = state.requested.filter((each) => !here.has(each.name));
  return html`<section class="card"><h2>Engines</h2>
    <p class="soft">${summaryOf(state, facts)}</p>
    ${
      state.engines.length > 0
        ? html`<${Table} label="Engines" head=${["engine", "type", "state", ...NUMBERS, "actions"]}
          numbers=${NUMBERS}>${presentFirst.map((engine) => html`<${Engine} key=${engine.url} engine=${engine}
          types=${state.types} able=${state.may_steer} order=${order} />`)}</>`
        : html`<p class="none">No engine has joined.</p>`
    }
    ${starting.length > 0 && html`<p>Starting: ${starting.map((each) => `${each.name} (${each.type})`).join(", ")}</p>`}
    ${state.may_steer && html`<${Add} types=${state.types} usual=${usual} order=${order} />`}
    <div role="status">${message && html`<p class=${`note ${message.look}`}>${message.text}</p>`}</div></section>`;
}

function isOut(engine) {
  return ["expelled", "left", "lost"].includes(engine.state);
}

function summaryOf(state, facts) {
  const alive = state.engines.filter((each) => !isOut(each) && each.state !== "dead").length;
  const parts = [`${number(alive)} ${alive === 1 ? "engine" : "engines"}`];
  if (Number.isFinite(state.tokens_per_s)) parts.push(`${number(state.tokens_per_s)} tokens/s`);
  if (Number.isFinite(state.occupancy)) parts.push(`${percent(state.occupancy, 0)} busy`);
  if (Number.isFinite(state.update_pause_s)) parts.push(`${duration(state.update_pause_s)} pause for an update`);
  return parts.join(" · ") + (state.source === "events" && facts.state !== "live" ? ", as last reported" : "");
}

// Version, running, waiting, tokens/s; dashes for an engine that left.
function figuresOf(engine) {
  const { version, running, waiting, tokens_per_s: rate, slots } = isOut(engine) ? {} : engine;
  return [version === null ? "no weights yet" : number(version), number(running) + (slots > 0 ? ` of ${number(slots)}` : ""), number(waiting), number(rate)];
}

function Engine({ engine, types, able, order }) {
  const [sure, setSure] = useState("");
  const [type, setType] = useState(engine.type || types[0]);
  const name = engine.name || engine.url;
  const actions = {
    drain: [
      "Drain",
      `Finish the requests of ${name}, then remove it?`,
      () => order("drain", { engine: name }, `${name} is draining`),
    ],
    swap: [
      "Swap",
      `Replace ${name} by an engine of type ${type}?`,
      () => order("swap", { engine: name, type }, `Replacing ${name}`),
    ],
    remove: ["Remove", `Remove ${name} at once?`, () => order("remove", { engine: name }, `${name} was removed`)],
  };
  const yes = () => {
    actions[sure][2]();
    setSure("");
  };
  return html`<tr class=${isOut(engine) ? "out" : ""}><td>${name}<div class="soft">${engine.name ? engine.url : ""}</div>${engine.last_error && html`<div
    class="soft">${engine.last_error}</div>`}</td><td>${engine.type}</td>
    <td><span class=${`pill ${LOOKS[engine.state] ?? "plain"}`}>${engine.state}</span></td>
      ${figuresOf(engine).map((text, at) => html`<td key=${at} class="number">${text}</td>`)}
    <td>${
      !able || isOut(engine)
        ? null
        : sure
        ? html`<span class="row" role="group" aria-label=${actions[sure][1]}><span>${actions[sure][1]}</span>
        ${sure === "swap" && html`<select aria-label="Type of the new engine" value=${type}
          onChange=${(event) => setType(event.target.value)}>${types.map((each) => html`<option key=${each}
          value=${each}>${each}</option>`)}</select>`}
        <button type="button" class="primary" onClick=${yes}>Yes, ${sure}</button>
          <button type="button" onClick=${() => setSure("")}>No</button></span>`
        : html`<span class="row">${Object.entries(actions).map(([id, [title]]) => html`<button type="button" key=${id}
          aria-label=${`${title} ${name}`} onClick=${() => setSure(id)}>${title}</button>`)}</span>`
    }</td></tr>`;
}

function Add({ types, usual, order }) {
  const [type, setType] = useState(usual ?? types[0]);
  const [count, setCount] = useState("1");
  const [url, setUrl] = useState("");
  const start = (event) => {
    event.preventDefault();
    order("add", { type, count: Number(count) }, "Requested");
  };
  const join = (event) => {
    event.preventDefault();
    order("add", { url: url.trim() }, "Joining");
  };
  const bad = url.trim() !== "" && !/^https?:\/\/[^\s/?#@]+\/?$/.test(url.trim());
  return html`<div class="row"><form class="row" onSubmit=${start} aria-label="Start engines">
    <label>Start <input type="number" min="1" max="64" value=${count}
    onInput=${(event) => setCount(event.target.value)} /></label>
      <label>of type <select value=${type}
        onChange=${(event) => setType(event.target.value)}>${types.map((each) => html`<option key=${each}
        value=${each}>${each}</option>`)}</select></label><button type="submit">Add</button></form>
    <form class="row" onSubmit=${join} aria-label="Add a running engine">
      <label>or a running engine at <input type="text" inputmode="url" size="28" value=${url}
      aria-invalid=${bad ? "true" : undefined} placeholder="URL with port"
      onInput=${(event) => setUrl(event.target.value)} /></label>
      <button type="submit" disabled=${!url.trim() || bad}>Join</button>${bad && html`<span role="alert"
        class="pill bad">an engine's URL has a scheme, a host and a port, and no path</span>`}</form></div>`;
}
