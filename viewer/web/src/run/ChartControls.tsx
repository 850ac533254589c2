import { setQuery } from "../route";
import type { Zoom } from "./charts";

interface Props {
  smoothing: number;
  search: string;
  isAll: boolean;
  zoom: Zoom;
  onReset: () => void;
}

export function ChartControls({ smoothing, search, isAll, zoom, onReset }: Props) {
  return (
    <div class="controls">
      <label>
        Metrics
        <input
          type="search"
          value={search}
          placeholder="name contains ..."
          onInput={(event) => setQuery({ q: event.currentTarget.value })}
        />
      </label>
      <label>
        Smoothing
        <input
          type="range"
          min="0"
          max="0.98"
          step="0.02"
          value={smoothing}
          aria-valuetext={`${smoothing}`}
          onInput={(event) =>
            setQuery({ smooth: event.currentTarget.value === "0" ? null : event.currentTarget.value })
          }
        />
        <output>{smoothing}</output>
      </label>
      <label class="check">
        <input
          type="checkbox"
          checked={isAll}
          onChange={(event) => setQuery({ all: event.currentTarget.checked ? "1" : null })}
        />
        every metric
      </label>
      {zoom ? (
        <button type="button" onClick={onReset}>
          All steps (now {Math.ceil(zoom[0])} to {Math.floor(zoom[1])})
        </button>
      ) : (
        <span class="note hint">
          drag across a chart to zoom, double-click for all steps; dashed: something went wrong, tick: checkpoint,
          evaluation, start
        </span>
      )}
    </div>
  );
}
