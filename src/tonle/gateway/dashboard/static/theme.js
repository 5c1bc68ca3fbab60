// Light or dark: as the system says, until the reader chooses. The choice is kept in this browser.

const CHOICES = ["system", "light", "dark"];
const NAME = "tonle-theme";
const system = window.matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set();

export function chosenTheme() {
  try {
    const kept = localStorage.getItem(NAME);
    return CHOICES.includes(kept) ? kept : "system";
  } catch {
    return "system"; // storage is turned off
  }
}

export function chooseTheme(choice) {
  try {
    localStorage.setItem(NAME, choice);
  } catch {
    // it lasts as long as the page
  }
  apply(choice);
}

export const nextTheme = (choice) => CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];

// Calls `callback` after the colours changed. Returns the function that ends it.
export function onThemeChange(callback) {
  listeners.add(callback);
  return () => listeners.delete(callback);
}

// The style sheet knows one attribute only: <html data-theme="dark">.
function apply(choice) {
  const isDark = choice === "dark" || (choice === "system" && system.matches);
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  for (const callback of listeners) callback();
}

system.addEventListener("change", () => apply(chosenTheme()));
apply(chosenTheme());
