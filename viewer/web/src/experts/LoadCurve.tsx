import { useMemo, useState } from "preact/hooks";
import { setQuery } from "../route";
import { Chart } from "../run/Chart";
import type { Zoom } from "../run/charts";
import type { MetricsOf } from "../run/useMetrics";
import { Problem } from "../shared/Problem";
import type { ExpertLoad, Metrics, Run } from "../types";
import { useData } from "../useData";

const ENGINES = [
  { id: 0, name: "server" },
  { id: 1, name: "trainer" },
];

interface Props {
  run: Run;
  isGrowing: boolean;
  layer: number;
  expert: number;
}

/** The load of one expert over the steps that have tensors, in both engines. */
export function LoadCurve({ run, isGrowing, layer, expert }: Props) {
  const { data, error } = useData<ExpertLoad>(`runs/${run.id}/expert?layer=${layer}&expert=${expert}`, isGrowing);
  const [zoom, setZoom] = useState<Zoom>(null);
  const name = `load of expert ${expert} in layer ${layer}`;
  const metrics = useMemo(
    (): MetricsOf =>
      data ? { 0: table(name, data.steps, data.server), 1: table(name, data.steps, data.trainer) } : {},
    [data, name],
  );
  return (
    <div class="load-curve">
      <button type="button" onClick={() => setQuery({ expert: null })}>
        Close the curve
      </button>
      {error && <Problem text={error} />}
      {data && (
        <Chart
          chart={{ name, label: `Expert ${expert} of layer ${layer}: share of the layer's routes`, source: "metrics" }}
          runs={ENGINES}
          metrics={metrics}
          events={[]}
          smoothing={0}
          zoom={zoom}
          onZoom={setZoom}
        />
      )}
    </div>
  );
}

const table = (name: string, steps: number[], values: (number | null)[]): Metrics => ({
  steps,
  metrics: { [name]: values },
  per_layer: {},
  evaluations: { steps: [], metrics: {} },
  labels: {},
});
