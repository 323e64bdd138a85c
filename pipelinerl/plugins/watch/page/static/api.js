// Requests to the page's server, and its event stream. A refusal becomes an error with the server's message.

const LOST = "the server of this page does not answer; retrying automatically";
const NO_KEY = "This browser has no key: open the link that `pipelinerl watch` printed.";

class Refused extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

function address(path, query) {
  const url = new URL(`api/${path}`, document.baseURI);
  for (const [name, value] of Object.entries(query ?? {})) {
    if (value !== undefined && value !== null && value !== "") url.searchParams.set(name, value);
  }
  return url;
}

async function answerOf(response) {
  const text = await response.text();
  let body = null;
  try {
    body = JSON.parse(text);
  } catch {
    // Other content has no message.
  }
  if (response.ok && body !== null) return body;
  if (response.status === 401) throw new Refused(401, NO_KEY, "no_key");
  throw new Refused(
    response.status,
    body?.error?.message ?? `${LOST} (status ${response.status})`,
    body?.error?.code,
  );
}

async function requested(url, options) {
  try {
    return await answerOf(await fetch(url, options));
  } catch (error) {
    if (error instanceof Refused || error.name === "AbortError") throw error;
    throw new Refused(0, LOST, "lost");
  }
}

export function get(path, query, signal) {
  return requested(address(path, query), { signal });
}

export function send(method, path, body, query) {
  return requested(address(path, query), {
    method,
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
  });
}

// Listens to the run's stream while the page is visible, and reopens it whenever it ends. `onEvent(kind, data)` receives
// every event; `link(state)` receives `opening`, `open`, `lost` or `no_key`.
export function listen(run, onEvent, link) {
  const kinds = ["hello", "step", "behind", "event", "samples", "state", "loaded", "rewound"];
  let source = null;
  let timer = 0;
  let pause = 500;
  let over = false;
  const again = async () => {
    if (over) return;
    try {
      await get("run", { run });
    } catch (error) {
      if (over || document.hidden) return;
      link(error.code === "no_key" ? "no_key" : "lost");
      pause = Math.min(8000, pause * 2);
      timer = setTimeout(again, pause);
      return;
    }
    open();
  };
  const open = () => {
    if (over || source || document.hidden) return;
    source = new EventSource(address("stream", { run }));
    source.onopen = () => {
      pause = 500;
      link("open");
    };
    source.onerror = () => {
      link("lost");
      close();
      timer = setTimeout(again, pause);
    };
    for (const kind of kinds) {
      source.addEventListener(kind, (event) => onEvent(kind, JSON.parse(event.data)));
    }
  };
  const close = () => {
    clearTimeout(timer);
    source?.close();
    source = null;
  };
  const visibilityChanged = () => {
    if (document.hidden) return close();
    link("opening");
    return open(); // its `hello` triggers requests for what was missed
  };
  document.addEventListener("visibilitychange", visibilityChanged);
  open();
  return () => {
    over = true;
    document.removeEventListener("visibilitychange", visibilityChanged);
    close();
  };
}
