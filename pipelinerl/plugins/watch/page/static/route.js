// The page's address: `#/samples?sort=reward` is a screen, the rest of its path and its settings. It holds every state
// that a reader may want to share.
import { useEffect, useState } from "./view.js";

export function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?", 2);
  const [screen, ...rest] = path.split("/").map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part; // a truncated link
    }
  });
  return { screen: screen || "now", rest, query: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

export function link(screen, query, ...rest) {
  const known = Object.entries(query ?? {}).filter(
    ([, value]) => value !== undefined && value !== null && value !== "",
  );
  const search = new URLSearchParams(known).toString();
  return `#/${[screen, ...rest].map(encodeURIComponent).join("/")}${search ? `?${search}` : ""}`;
}

// Changes the settings of the current screen without adding entries to the browser's history.
export function settle(changes) {
  const { screen, rest, query } = route();
  history.replaceState(null, "", link(screen, { ...query, ...changes }, ...rest));
  dispatchEvent(new HashChangeEvent("hashchange"));
}

export function useRoute() {
  const [now, setNow] = useState(route);
  useEffect(() => {
    const changed = () => setNow(route());
    addEventListener("hashchange", changed);
    changed(); // a link may have been followed since the first drawing
    return () => removeEventListener("hashchange", changed);
  }, []);
  return now;
}
