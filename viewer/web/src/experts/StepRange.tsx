import { setQuery } from "../route";

interface Props {
  last: number;
  /** Null: the last step with tensors. */
  range: [number, number] | null;
  counted: number[];
}

/** Which steps are counted; arrows move through the run, one window after the other. */
export function StepRange({ last, range, counted }: Props) {
  const [from, to] = range ?? [counted[0] ?? last, counted.at(-1) ?? last];
  const choose = (first: number, final: number) => {
    const low = Math.max(1, Math.min(first, last));
    setQuery({ step: `${low}:${Math.max(low, Math.min(final, last))}` });
  };
  const width = to - from + 1;
  return (
    <>
      <label>
        Steps{" "}
        <input
          type="number"
          min="1"
          max={last}
          value={from}
          aria-label="First step"
          onChange={(event) => choose(Number(event.currentTarget.value) || 1, to)}
        />
      </label>
      <label>
        to{" "}
        <input
          type="number"
          min="1"
          max={last}
          value={to}
          aria-label="Last step"
          onChange={(event) => choose(from, Number(event.currentTarget.value) || last)}
        />
      </label>
      <button
        type="button"
        disabled={from <= 1}
        onClick={() => choose(from - width, Math.max(width, to - width))}
        aria-label="Earlier steps"
      >
        {"\u2190"}
      </button>
      <button
        type="button"
        disabled={to >= last}
        onClick={() => choose(Math.min(from + width, last - width + 1), to + width)}
        aria-label="Later steps"
      >
        {"\u2192"}
      </button>
      <button type="button" onClick={() => choose(1, last)}>
        All steps
      </button>
      {counted.length > 1 && <span class="note">{counted.length} steps with tensors are counted</span>}
    </>
  );
}
