// Light or dark colours: the system's setting until the user chooses in this browser.
const KEY = "pipelinerl-theme";
const listeners = new Set();
const system = matchMedia("(prefers-color-scheme: dark)");

function kept() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // storage is disabled
  }
}

export function theme() {
  const chosen = kept();
  return chosen === "dark" || chosen === "light" ? chosen : system.matches ? "dark" : "light";
}

function show() {
  document.documentElement.dataset.theme = theme();
  for (const listener of [...listeners]) listener(theme());
}

export function toggleTheme() {
  const next = theme() === "dark" ? "light" : "dark";
  try {
    localStorage.setItem(KEY, next);
  } catch {
    // The choice is lost with the page.
  }
  show();
}

export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

system.addEventListener("change", show);
show();
