// The frame: the run, its state, the connection to its stream, and the screen in the address.
import { listen } from "./api.js";
import { Compare } from "./compare.js";
import { clock, duration, number, runName } from "./format.js";
import { Group } from "./group.js";
import { notify, useAnswer, useStream } from "./live.js";
import { Now } from "./now.js";
import { Recipe } from "./recipe.js";
import { link, useRoute } from "./route.js";
import { Samples } from "./samples.js";
import { Steer } from "./steer.js";
import { theme, toggleTheme } from "./theme.js";
import { Timeline } from "./timeline.js";
import { Tokens } from "./tokens.js";
import { html, render, useEffect, useRef, useState } from "./view.js";

const SCREENS = [
  ["now", "Now", Now],
  ["steer", "Steer", Steer],
  ["timeline", "Timeline", Timeline],
  ["samples", "Samples", Samples],
  ["compare", "Compare", Compare],
  ["recipe", "Recipe", Recipe],
];
const PARTS = { group: ["samples", Group, "Group"], tokens: ["samples", Tokens, "Tokens"] };
// Domains and metrics mostly appear in these first steps; afterwards they are requested less often.
const YOUNG = 20;
const STATES = {
  starting: ["live", "starting"],
  live: ["live", "live"],
  finished: ["good", "finished"],
  suspended: ["warn", "suspended"],
  failed: ["bad", "failed"],
  crashed: ["bad", "crashed: it ended unexpectedly"],
  copy: ["plain", "files only"],
};

function Page() {
  const { screen, rest, query } = useRoute();
  const run = query.run ?? "0";
  const [connection, setConnection] = useState("opening");
  const [greeting, setGreeting] = useState(null);
  const [, redraw] = useState(0);
  const main = useRef(null);
  const known = useRef(0);
  const about = useAnswer(
    "run",
    { run },
    {
      matters: (kind) => ["state", "step", "behind", "samples"].includes(kind),
      pauseMs: known.current < YOUNG || screen === "compare" ? 2000 : 15000, // the stream covers only this run
    },
  );
  useEffect(() => {
    let before = false;
    return listen(
      run,
      (kind, data) => {
        if (kind === "hello" && !before) {
          before = true;
          setGreeting(data); // the page has just loaded this state
        } else notify(kind, data);
      },
      setConnection,
    );
  }, [run]);
  const [, name, Screen] = SCREENS.find(([id]) => id === screen) ?? [
    "",
    ...(PARTS[screen] ? [PARTS[screen][2], PARTS[screen][1]] : ["Now", Now]),
  ];
  const facts = about.value ?? about.old;
  known.current = facts?.step ?? 0;
  useEffect(() => {
    if (!greeting || !about.value) return;
    const { state, loading } = about.value;
    // A change between that response and the opening of the stream causes no event.
    if (state !== greeting.state || (greeting.loaded && Math.min(loading.events, loading.samples) < 1))
      notify("hello", greeting);
    setGreeting(null);
  }, [greeting, about.value]);
  useEffect(() => {
    document.title = `${name} · ${facts?.name ?? "pipelinerl"}`;
  }, [name, facts?.name]);
  const place = `${screen}/${rest.join("/")}`;
  const before = useRef(place);
  useEffect(() => {
    if (before.current !== place) {
      before.current = place;
      scrollTo(0, 0);
      main.current.focus({ preventScroll: true });
    }
  }, [place]);
  const keep = run === "0" ? {} : { run };
  const skip = (event) => {
    event.preventDefault();
    main.current.focus();
  };
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to the main content</a>
    <header class="bar"><div class="inner">
      <div class="head">
        <h1>${facts?.name ?? "…"}</h1><${State} facts=${facts} />
        <div class="right"><${Connection} state=${connection} />
          <button type="button" onClick=${() => {
            toggleTheme();
            redraw((count) => count + 1);
          }}
            aria-label=${theme() === "dark" ? "Use light colours" : "Use dark colours"}>${theme() === "dark" ? "☀ light" : "☾ dark"}</button></div>
      </div>
      <nav aria-label="Screens"><ul class="tabs">${SCREENS.map(
        ([id, title]) => html`<li key=${id}><a href=${link(id, keep)}
        aria-current=${id === screen || PARTS[screen]?.[0] === id ? "page" : undefined}>${title}</a></li>`,
      )}</ul></nav>
    </div></header>
    <main id="main" class="inner" tabindex="-1" ref=${main} aria-label=${name}>
      ${connection === "no_key" && html`<p class="note bad"
        role="alert">This browser has no key: open the link that <code>pipelinerl watch</code> printed.</p>`}
      ${about.error && connection !== "no_key" && html`<p class="note bad" role="alert">${about.error.message}</p>`}
      ${
        facts &&
        html`<${Ended} facts=${facts} />
        ${facts.runs.length > 1 && screen !== "compare" && html`<${Runs} facts=${facts} screen=${screen} />`}
        <${Screen} key=${`${run}/${place}`} run=${run} facts=${facts} query=${query} rest=${rest} refresh=${about.again} />`
      }
      ${!facts && !about.error && html`<p class="none">Reading the run…</p>`}
    </main>`;
}

function State({ facts }) {
  if (!facts) return null;
  const [look, words] = STATES[facts.state] ?? ["plain", facts.state];
  return html`<span class=${`pill ${look}`}>${words}</span><${Progress} key=${facts.run} facts=${facts} />`;
}

// Updated by the stream alone, without requests.
function Progress({ facts }) {
  const [newest, setNewest] = useState(null);
  useStream((kind, data) => {
    if (kind === "step" && data.run === facts.run) setNewest(data);
    if (kind === "rewound" || kind === "behind") setNewest(null);
  });
  const { step, elapsed_s } = newest?.step > facts.step ? newest : facts;
  const of = facts.total_steps ? ` of ${number(facts.total_steps)}` : "";
  return html`<span class="facts">step ${number(step)}${of} · ${duration(elapsed_s)}</span>`;
}

function Connection({ state }) {
  const known = { open: "● connected", opening: "connecting…" };
  const text = known[state] ?? "connection lost: reconnecting";
  const look = state in known ? "plain" : "bad";
  return html`<span class=${`pill ${look}`} role="status" data-heard=${state}>${text}</span>`;
}

function Ended({ facts }) {
  const read = Math.min(facts.loading?.events ?? 1, facts.loading?.samples ?? 1);
  if (read < 1)
    return html`<p class="note" role="status">The run's files are being read, ${Math.floor(100 * read)} % so far: figures cover only this part.</p>`;
  if (facts.state === "crashed") {
    return html`<p class="note bad">The run ended unexpectedly: its last event was at ${clock(facts.last_event)}, at step ${number(facts.step)}. This page shows its files.</p>`;
  }
  if (facts.state === "failed" || facts.state === "suspended") {
    return html`<p class=${facts.state === "failed" ? "note bad" : "note warn"}>The run ${facts.state === "failed" ? "failed" : "was suspended"}${facts.reason && `: ${facts.reason}`}</p>`;
  }
  return null;
}

function Runs({ facts, screen }) {
  return html`<nav class="row" aria-label="Runs">${facts.runs.map(
    (each) => html`<a key=${each.run} href=${link(PARTS[screen]?.[0] ?? screen, { run: each.run || "" })}
    aria-current=${each.run === facts.run ? "true" : undefined}>${runName(each, facts.runs)}</a>`,
  )}</nav>`;
}

render(html`<${Page} />`, document.getElementById("page"));
