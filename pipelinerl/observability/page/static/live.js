// What the screens know of the run, kept up to date by the stream: one stream for the page, and each answer asked again
// when what it is made of has changed, at most so often, and not while nobody looks.
import { get } from "./api.js";
import { useEffect, useRef, useState } from "./view.js";

const listeners = new Set();

export function tell(kind, data) {
  for (const listener of [...listeners]) listener(kind, data);
}

// Calls `listener(kind, data)` for each event of the stream.
export function useStream(listener) {
  const latest = useRef(listener);
  latest.current = listener;
  useEffect(() => {
    const mine = (kind, data) => latest.current(kind, data);
    listeners.add(mine);
    return () => listeners.delete(mine);
  }, []);
}

// An answer is asked again when the stream tells of something, rather than by the clock: what several pages ask is asked
// at one moment then, and worked out once. So a question may come a little before its time, and else waits a little.
const SLACK_MS = 250;
// What is told in one go is one reason to ask.
const TOGETHER_MS = 30;
// At what changes everything: asked again after so long, however long the pause is otherwise.
const SOON_MS = 1000;
const CHANGES_ALL = ["hello", "rewound", "loaded", "state"];
// An answer that has not come by then is not coming, and one that was lost is asked for again, stream or none.
const ANSWER_MS = 30000;
const LOST_MS = 4000;

// {value, error, again}: the answer of a path, asked again when `matters(kind, data)` holds for an event, at most every
// `pauseMs`. `path` null asks nothing. While a new answer is on its way the old one stands. `more()` has what a question
// says beside `query` each time; `taken(answer, said)` makes the value of its answer.
export function useAnswer(path, query, { matters = () => false, pauseMs = 1000, more, taken } = {}) {
  const [state, setState] = useState({ value: null, error: null, of: "" });
  const key =
    path === null
      ? ""
      : `${path}?${new URLSearchParams(Object.entries(query ?? {}).filter(([, each]) => each !== undefined && each !== null))}`;
  const asking = useRef({ now: () => {} });
  const pause = useRef(pauseMs);
  pause.current = pauseMs;
  useEffect(() => {
    if (path === null) return undefined;
    const stop = new AbortController();
    let timer = 0;
    let near = false;
    let busy = false;
    let dirty = false;
    let last = 0;
    const load = async () => {
      timer = 0;
      busy = true;
      dirty = false;
      last = performance.now();
      const said = more?.() ?? {};
      let lost = false;
      try {
        const signal = AbortSignal.any([stop.signal, AbortSignal.timeout(ANSWER_MS)]);
        const value = await get(path, { ...query, ...said }, signal);
        setState({ value: taken ? taken(value, said) : value, error: null, of: key });
      } catch (error) {
        if (stop.signal.aborted) return;
        lost = !(error.status >= 400 && error.status < 500);
        setState((before) => ({ value: before.of === key ? before.value : null, error, of: key }));
      }
      busy = false;
      if (lost) afterwards();
      else if (dirty) wanted();
    };
    const afterwards = () => {
      dirty = true;
      near = false;
      if (!document.hidden) timer = setTimeout(load, LOST_MS);
    };
    const wanted = () => {
      dirty = true;
      const due = last + pause.current - performance.now();
      if (busy || document.hidden || (timer && (near || due > SLACK_MS))) return;
      clearTimeout(timer);
      near = due <= SLACK_MS;
      timer = setTimeout(load, near ? TOGETHER_MS : due + SLACK_MS);
    };
    const hasten = (afterMs) => {
      last = Math.min(last, performance.now() - pause.current + afterMs);
      clearTimeout(timer);
      timer = 0;
      wanted();
    };
    const shown = () => {
      if (document.hidden) {
        clearTimeout(timer);
        timer = 0;
      } else if (dirty) wanted();
    };
    asking.current = {
      now: () => hasten(0),
      heard: (kind) => (CHANGES_ALL.includes(kind) ? hasten(SOON_MS) : wanted()),
    };
    document.addEventListener("visibilitychange", shown);
    load();
    return () => {
      stop.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", shown);
    };
  }, [key]);
  useStream((kind, data) => {
    if (kind === "hello" || kind === "rewound" || kind === "loaded" || matters(kind, data))
      asking.current.heard?.(kind);
  });
  const mine = state.of === key;
  return {
    value: mine ? state.value : null,
    old: state.value,
    error: mine ? state.error : null,
    again: () => asking.current.now(),
  };
}
