// Where the page is: `#/samples?sort=reward` is a screen, its rest of the path and its settings. Every state that a
// reader may want to send to somebody is in it.
import { useEffect, useState } from "./view.js";

export function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?", 2);
  const [screen, ...rest] = path.split("/").map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part; // a link that somebody cut
    }
  });
  return { screen: screen || "now", rest, query: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

export function link(screen, query, ...rest) {
  const known = Object.entries(query ?? {}).filter(
    ([, value]) => value !== undefined && value !== null && value !== "",
  );
  const asked = new URLSearchParams(known).toString();
  return `#/${[screen, ...rest].map(encodeURIComponent).join("/")}${asked ? `?${asked}` : ""}`;
}

// Changes the settings of the screen that is shown; the way back does not lead through each of them.
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
    changed(); // a link may have been followed between the first drawing and this
    return () => removeEventListener("hashchange", changed);
  }, []);
  return now;
}
