// Data of the screens, kept up to date by one stream per page. A response is requested again when its inputs have
// changed, at a limited rate, and not while the page is hidden.
import { get } from "./api.js";
import { useEffect, useRef, useState } from "./view.js";

const listeners = new Set();

export function notify(kind, data) {
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

// Requests are triggered by stream events rather than by a timer, so that several pages request at the same moment and
// the server computes once. A request may therefore come slightly early, or wait slightly longer.
const SLACK_MS = 250;
// Events within this time cause one request.
const TOGETHER_MS = 30;
// Delay after an event that changes everything, however long the usual pause is.
const SOON_MS = 1000;
const CHANGES_ALL = ["hello", "rewound", "loaded", "state"];
// Timeout of a request, and delay before a failed request is retried, with or without a stream.
const ANSWER_MS = 30000;
const LOST_MS = 4000;

// {value, error, again}: the response of a path, requested again if `matters(kind, data)` holds for an event, at most every
// `pauseMs`. `path` null sends no request. The old response stays until a new one arrives. `more()` returns parameters
// in addition to `query` for each request; `taken(answer, added)` converts a response to a value.
export function useAnswer(path, query, { matters = () => false, pauseMs = 1000, more, taken } = {}) {
  const [state, setState] = useState({ value: null, error: null, of: "" });
  const key =
    path === null
      ? ""
      : `${path}?${new URLSearchParams(Object.entries(query ?? {}).filter(([, each]) => each !== undefined && each !== null))}`;
  const requests = useRef({ now: () => {} });
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
      const added = more?.() ?? {};
      let lost = false;
      try {
        const signal = AbortSignal.any([stop.signal, AbortSignal.timeout(ANSWER_MS)]);
        const value = await get(path, { ...query, ...added }, signal);
        setState({ value: taken ? taken(value, added) : value, error: null, of: key });
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
    requests.current = {
      now: () => hasten(0),
      onEvent: (kind) => (CHANGES_ALL.includes(kind) ? hasten(SOON_MS) : wanted()),
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
      requests.current.onEvent?.(kind);
  });
  const mine = state.of === key;
  return {
    value: mine ? state.value : null,
    old: state.value,
    error: mine ? state.error : null,
    again: () => requests.current.now(),
  };
}
