// Steer: the knobs of the live run, the log of their changes, and its engines. Invalid values are explained before they
// are sent: the run checks them while the slider still moves.
import { send } from "./api.js";
import { Engines } from "./engines.js";
import { anything, clock, number, words } from "./format.js";
import { useAnswer } from "./live.js";
import { html, Table, useEffect, useState } from "./view.js";

const CHECK_AFTER_MS = 200;
const TICKS = 400;

export function Steer({ run, facts }) {
  const response = useAnswer(
    "knobs",
    { run },
    {
      matters: (kind, data) =>
        kind === "state" ||
        (kind === "event" && data.kind === "knobs") ||
        (kind === "step" && state?.may_steer !== facts.may_steer), // the controller missed one of the requests
      pauseMs: 1500,
    },
  );
  const state = response.value;
  return html`<div class="stack">
    <h2 class="said">Steer</h2>
    ${response.error && html`<p class="note bad" role="alert">${response.error.message}</p>`}
    ${state && !state.may_steer && html`<p
      class="note warn">This run cannot be changed${state.why_not && `: ${state.why_not}`}</p>`}
    ${state && html`<div class="grid two"><${Knobs} run=${run} state=${state} again=${response.again} />
      <${Log} log=${state.log} /></div>`}
    ${!state && !response.error && html`<p class="none">Loading the knobs…</p>`}
    <${Engines} run=${run} facts=${facts} />
  </div>`;
}

// Converts a knob's text to a number or `inf`; other text is sent unchanged, and the run explains what is wrong with it.
function sent(text) {
  const trimmed = String(text).trim();
  const value = Number(trimmed);
  return trimmed !== "" && Number.isFinite(value) ? value : trimmed;
}

function shown(value) {
  return typeof value === "number" ? String(value) : String(value ?? "");
}

function useDraft(run, state) {
  const [draft, setDraft] = useState({});
  const [verdict, setVerdict] = useState({ of: "", refused: [] });
  const changes = {};
  for (const knob of state.knobs) {
    if (knob.name in draft && String(sent(draft[knob.name])) !== shown(knob.value))
      changes[knob.name] = sent(draft[knob.name]);
  }
  if (draft.mode) changes.mode = draft.mode;
  const key = JSON.stringify(changes);
  useEffect(() => {
    if (key === "{}" || !state.may_steer) return undefined;
    let over = false;
    const timer = setTimeout(async () => {
      let refused;
      try {
        const answer = await send("POST", "knobs/check", JSON.parse(key), { run });
        refused = answer.ok ? [] : answer.refused;
      } catch (error) {
        refused = [{ knob: "", message: error.message }];
      }
      if (!over) setVerdict({ of: key, refused });
    }, CHECK_AFTER_MS);
    return () => {
      over = true;
      clearTimeout(timer);
    };
  }, [key, state.may_steer]);
  const checked = verdict.of === key;
  return { draft, setDraft, changes, key, checked, refused: checked && key !== "{}" ? verdict.refused : [] };
}

function Knobs({ run, state, again }) {
  const { draft, setDraft, changes, key, checked, refused } = useDraft(run, state);
  const [message, setMessage] = useState(null);
  const [busy, setBusy] = useState(false);
  const count = Object.keys(changes).length;
  const set = (name, text) => {
    setMessage(null);
    setDraft((before) => ({ ...before, [name]: text }));
  };
  const apply = async (event) => {
    event.preventDefault();
    if (!count || !checked || refused.length || busy) return;
    setBusy(true);
    try {
      const answer = await send("PATCH", "knobs", JSON.parse(key), { run });
      setDraft({});
      setMessage({
        look: "good",
        text: `Accepted: ${anything(changes)}; it takes effect ${answer.effective || "at the next step boundary"}.`,
      });
      again();
    } catch (error) {
      setMessage({ look: "bad", text: error.message });
    }
    setBusy(false);
  };
  const whole = refused.filter((each) => !state.knobs.some((knob) => knob.name === each.knob));
  return html`<form class="card" onSubmit=${apply} aria-label="Knobs"><h2>Knobs</h2>
    <div class="knobs">${state.knobs.map(
      (knob) => html`<${Knob} key=${knob.name} knob=${knob} text=${draft[knob.name]} able=${state.may_steer}
      why=${refused.find((each) => each.knob === knob.name)?.message} set=${(text) => set(knob.name, text)} />`,
    )}</div>
    ${
      state.modes?.length > 0 &&
      html`<p class="row"><label>Or a mode for j and k
      <select disabled=${!state.may_steer} value=${draft.mode ?? ""}
        onChange=${(event) => set("mode", event.target.value)}>
        <option value="">none</option>${state.modes.map((name) => html`<option key=${name}
          value=${name}>${words(name)}</option>`)}</select></label></p>`
    }
    ${state.may_steer && html`<div class="apply">
      <button class="primary" type="submit"
        disabled=${!count || !checked || refused.length > 0 || busy}>${count > 1 ? `Apply ${count} changes` : "Apply"}</button>
      <button type="button" disabled=${!count} onClick=${() => {
        setDraft({});
        setMessage(null);
      }}>Undo</button>
      <span role="status" class="soft">${count > 0 && !checked ? "checking…" : count > 0 && !refused.length ? "It takes effect at the next step boundary." : ""}</span>
    </div>`}
    <div role="alert">${whole.map((each) => html`<p class="note bad" key=${each.message}>${each.message}</p>`)}</div>
    <div role="status">${message && html`<p class=${`note ${message.look}`}>${message.text}</p>`}</div>
  </form>`;
}

// Maps a value to a slider position, 0 to TICKS, and back; logarithmic sliders span orders of magnitude. The position
// after the last means unbounded.
function scaleOf(knob) {
  const [low, high] = knob.slider;
  const logarithmic = knob.log && low > 0;
  const step = knob.step ?? (knob.whole ? 1 : (high - low) / TICKS);
  const places = logarithmic ? TICKS : Math.max(1, Math.round((high - low) / step));
  const most = knob.may_be_infinite ? places + 1 : places;
  const place = (value) => {
    if (value === "inf") return most;
    const share = logarithmic ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
    return Math.round(Math.min(1, Math.max(0, share || 0)) * places);
  };
  const value = (at) => {
    if (at > places) return "inf";
    const exact = logarithmic ? low * (high / low) ** (at / places) : low + (high - low) * (at / places);
    return knob.whole ? String(Math.round(exact)) : String(Number(exact.toPrecision(3)));
  };
  return { most, place, value };
}

function Knob({ knob, text, why, able, set }) {
  const [section, domain] = [knob.name.split(".")[0], knob.name.slice(knob.name.indexOf(".") + 1)];
  const title = section === "domain_weights" ? `weight of ${domain}` : words(knob.name);
  const now = shown(knob.value);
  const current = text ?? now;
  const changed = String(sent(current)) !== now;
  const scale = knob.slider ? scaleOf(knob) : null;
  const id = `knob-${knob.name}`;
  const spoken = current === "inf" ? "unbounded" : `${current} ${knob.unit ?? ""}`;
  return html`<div class=${changed ? "knob changed" : "knob"} title=${knob.what}>
    <label for=${id}>${title}${knob.unit && html`<small>${knob.unit}</small>`}</label>
    ${
      scale
        ? html`<input type="range" min="0" max=${scale.most} step="1" value=${scale.place(sent(current))}
          disabled=${!able}
      aria-label=${`${title}, slider`} aria-valuetext=${spoken} data-knob=${knob.name}
        onInput=${(event) => set(scale.value(Number(event.target.value)))} />`
        : html`<span></span>`
    }
    <div><input id=${id} type="text" inputmode="decimal" autocomplete="off" spellcheck="false" value=${current}
      disabled=${!able} aria-invalid=${why ? "true" : undefined}
      aria-describedby=${why ? `${id}-why` : undefined}
        onInput=${(event) => set(event.target.value)} />${changed && html`<span
        class="now">now ${now === "inf" ? "unbounded" : now}</span>`}</div>
    ${why && html`<p class="why" id=${`${id}-why`} role="alert">${why}</p>`}</div>`;
}

function Log({ log }) {
  return html`<section class="card"><h2>Knob changes</h2>${
    log.length
      ? html`<${Table} label="Changes of knobs" head=${["time", "step", "by", "change"]} numbers=${["step"]}>${[...log].reverse().map(
      (
        each,
        index,
      ) => html`<tr key=${log.length - index}><td>${clock(each.time)}</td><td class="number">${number(each.step)}</td>
      <td>${each.who}</td><td>${anything(each.changes)}${each.live === false && html` <span
        class="soft">(the recipe was edited)</span>`}</td></tr>`,
    )}</>`
      : html`<p class="none">No knobs were changed.</p>`
  }</section>`;
}
