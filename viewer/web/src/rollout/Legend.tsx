import { setQuery } from "../route";
import type { Coloring } from "./coloring";
import { QUANTITIES, quantity } from "./quantities";

/** The choice of the quantity, what its colours mean, and how many tokens have no value. */
export function Legend({ chosen, available, coloring }: { chosen: string; available: string[]; coloring: Coloring }) {
  const { about, scale } = quantity(chosen);
  return (
    <div class="legend">
      <label>
        Colour
        <select
          aria-label="Colour by"
          value={chosen}
          onChange={(event) => setQuery({ color: event.currentTarget.value })}
        >
          {QUANTITIES.map(({ key, label }) => (
            <option key={key} value={key} disabled={key !== "none" && !available.includes(key)}>
              {label}
            </option>
          ))}
        </select>
      </label>
      <ul class={`swatches ${scale}`} aria-label="Legend">
        {coloring.legend.map(({ className, label }) => (
          <li key={className}>
            <span class={`swatch ${className}`} />
            {label && <span class="swatch-label">{label}</span>}
          </li>
        ))}
      </ul>
      <p class="note">
        {about}. Experts, margins and flips of a token are those of the forward pass that predicted it, which read the
        token before it.
        {coloring.without > 0 && ` ${coloring.without.toLocaleString("en-US")} sampled tokens have no value.`}
      </p>
    </div>
  );
}
