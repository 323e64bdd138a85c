// Numbers, times and names for display. Unknown values are a dash, never zero.

const NONE = "–";

export function number(value, digits = 3) {
  if (typeof value !== "number" || !Number.isFinite(value)) return NONE;
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1e6) return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: digits });
  if (size !== 0 && size < 1e-3) return value.toExponential(Math.max(0, digits - 1));
  return value.toLocaleString("en", { maximumSignificantDigits: Math.max(digits, Math.ceil(Math.log10(size + 1))) });
}

export function signed(value, digits = 3) {
  const text = number(value, digits);
  return typeof value === "number" && value > 0 ? `+${text}` : text.replace("-", "−");
}

export function percent(value, digits = 1) {
  return typeof value === "number" && Number.isFinite(value) ? `${(100 * value).toFixed(digits)} %` : NONE;
}

export function duration(seconds) {
  if (typeof seconds !== "number" || !Number.isFinite(seconds)) return NONE;
  if (seconds < 0) return `−${duration(-seconds)}`;
  if (seconds === 0) return "0 s";
  if (seconds < 1e-3) return `${number(seconds * 1e6, 3)} µs`;
  if (seconds < 1) return `${number(seconds * 1e3, 3)} ms`;
  if (seconds < 60) return `${number(seconds, 3)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

// The format and the unit of a measure: {unit, format}. The unit is empty if the format includes it.
export function measureOf(name) {
  const last = String(name).split("/").pop();
  if (/_s$/.test(last)) return { unit: "", format: duration };
  if (/^(accuracy|truncated|all_right|all_wrong|unjudged|stale|ess|occupancy)$|_share$|fraction$/.test(last)) {
    return { unit: "", format: percent };
  }
  if (/tokens$|^length/.test(last)) return { unit: "tokens", format: number };
  if (/entropy|logprob|^kl|_kl|mismatch_.*_(mean|p50|p95|max)$/.test(last)) return { unit: "nats", format: number };
  if (/^staleness/.test(last)) return { unit: "versions", format: number };
  return { unit: "", format: number };
}

// Shortens the text of a tick: 60 % instead of 60.0 %.
export function tick(text) {
  return text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");
}

export function clock(unixSeconds) {
  if (typeof unixSeconds !== "number" || !Number.isFinite(unixSeconds)) return NONE;
  return new Date(unixSeconds * 1e3).toLocaleString("sv");
}

export function words(name) {
  return String(name).replaceAll("_", " ");
}

// Flattens nested objects: {a: {b: 1}} becomes [["a.b", 1]].
function pairs(value) {
  return Object.entries(value).flatMap(([name, each]) =>
    each !== null && typeof each === "object"
      ? pairs(each).map(([inner, one]) => [`${name}.${inner}`, one])
      : [[name, each]],
  );
}

export function anything(value) {
  if (value === null || value === undefined || value === "") return NONE;
  if (typeof value === "number") return number(value, 4);
  if (typeof value === "object")
    return (
      pairs(value)
        .map(([name, each]) => `${name} = ${anything(each)}`)
        .join(", ") || NONE
    );
  return String(value);
}

// A run's name, with its number if another run has the same name.
export function runName(run, runs) {
  return runs.some((each) => each.run !== run.run && each.name === run.name) ? `${run.name} (${run.run})` : run.name;
}
