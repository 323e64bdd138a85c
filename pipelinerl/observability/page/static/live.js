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

// {value, error, again}: the answer of a path, asked again when `matters(kind, data)` holds for an event, at most every
// `pauseMs`. `path` null asks nothing. While a new answer is on its way the old one stands.
export function useAnswer(path, query, { matters = () => false, pauseMs = 1000 } = {}) {
  const [state, setState] = useState({ value: null, error: null, of: "" });
  const key =
    path === null
      ? ""
      : `${path}?${new URLSearchParams(Object.entries(query ?? {}).filter(([, each]) => each !== undefined && each !== null))}`;
  const asking = useRef({ wanted: () => {} });
  useEffect(() => {
    if (path === null) return undefined;
    const stop = new AbortController();
    let timer = 0;
    let busy = false;
    let dirty = false;
    let last = 0;
    const load = async () => {
      busy = true;
      dirty = false;
      last = performance.now();
      try {
        const value = await get(path, query, stop.signal);
        setState({ value, error: null, of: key });
      } catch (error) {
        if (stop.signal.aborted) return;
        setState((before) => ({ value: before.of === key ? before.value : null, error, of: key }));
      }
      busy = false;
      if (dirty) wanted();
    };
    const wanted = () => {
      dirty = true;
      if (busy || timer || document.hidden) return;
      timer = setTimeout(
        () => {
          timer = 0;
          if (dirty && !busy) load();
        },
        Math.max(0, last + pauseMs - performance.now()),
      );
    };
    const shown = () => {
      if (!document.hidden && dirty) wanted();
    };
    asking.current = {
      wanted: () => {
        last = 0;
        clearTimeout(timer);
        timer = 0;
        wanted();
      },
      heard: wanted,
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
    if (kind === "hello" || kind === "rewound" || kind === "loaded" || matters(kind, data)) asking.current.heard?.();
  });
  const mine = state.of === key;
  return {
    value: mine ? state.value : null,
    old: state.value,
    error: mine ? state.error : null,
    again: () => asking.current.wanted(),
  };
}
