import type { Run } from "../types";

/** Which runs share the charts; settings are compared with those of the first. */
export function RunPicker({ shown, runs }: { shown: Run[]; runs: Run[] }) {
  const chosen = shown.map(({ id }) => id);
  const toggle = (id: number) => {
    const next = chosen.includes(id) ? chosen.filter((other) => other !== id) : [...chosen, id];
    if (next.length) location.hash = next.length === 1 ? `#/run/${next[0]}` : `#/compare?runs=${next.join(",")}`;
  };
  return (
    <fieldset class="picker">
      <legend>Runs in the charts</legend>
      {runs.map(({ id, name }) => (
        <label key={id} class="check">
          <input type="checkbox" checked={chosen.includes(id)} onChange={() => toggle(id)} />
          {chosen.includes(id) && <span class={`swatch series-${chosen.indexOf(id) % 6}`} />}
          {name}
        </label>
      ))}
    </fieldset>
  );
}
