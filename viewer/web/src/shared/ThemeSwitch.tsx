import { useState } from "preact/hooks";
import { setTheme, storedTheme, type Theme } from "../theme";

const NAMES: Record<Theme, string> = { auto: "System", light: "Light", dark: "Dark" };

export function ThemeSwitch() {
  const [theme, choose] = useState(storedTheme());
  return (
    <select
      class="theme"
      aria-label="Colours"
      value={theme}
      onChange={(event) => {
        const chosen = event.currentTarget.value as Theme;
        choose(chosen);
        setTheme(chosen);
      }}
    >
      {Object.entries(NAMES).map(([value, name]) => (
        <option key={value} value={value}>
          {name}
        </option>
      ))}
    </select>
  );
}
