// Light, dark, or as the system has it; kept in this browser.  Canvases and charts draw again when it changes.

import { useEffect, useState } from "preact/hooks";

export type Theme = "auto" | "light" | "dark";

const NAME = "megatron_rl.theme";
const listeners = new Set<() => void>();
const system = window.matchMedia("(prefers-color-scheme: dark)");
system.addEventListener("change", () => listeners.forEach((update) => update()));

export function storedTheme(): Theme {
  try {
    const found = localStorage.getItem(NAME);
    return found === "light" || found === "dark" ? found : "auto";
  } catch {
    return "auto"; // a browser without storage for files
  }
}

export function setTheme(theme: Theme): void {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem(NAME, theme);
  } catch {
    // then it lasts as long as the page
  }
  listeners.forEach((update) => update());
}

/** Grows by one whenever the colours change. */
export function useThemeCount(): number {
  const [count, setCount] = useState(0);
  useEffect(() => {
    const update = () => setCount((before) => before + 1);
    listeners.add(update);
    return () => void listeners.delete(update);
  }, []);
  return count;
}

/** The colour that the variable --NAME has now. */
export const color = (name: string): string =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** The nine colours of a scale: heat, sequential, diverging. */
export const scale = (name: string): string[] => Array.from({ length: 9 }, (_, step) => color(`${name}-${step}`));
