import { useMemo } from "preact/hooks";
import { isExport } from "../client";
import { number, count } from "../format";
import { setQuery } from "../route";
import { Notes } from "../shared/Notes";
import { NumberTable } from "../shared/NumberTable";
import { Problem } from "../shared/Problem";
import { Warnings } from "../shared/Warnings";
import type { Experts, Num, Run } from "../types";
import { useData } from "../useData";
import { HeatMap } from "./HeatMap";
import { Histogram } from "./Histogram";
import { LayerBars } from "./LayerBars";
import { LoadCurve } from "./LoadCurve";
import { StepRange } from "./StepRange";
import { Swaps } from "./Swaps";

const MAPS = { server: "server", trainer: "trainer", difference: "trainer - server" } as const;
type MapName = keyof typeof MAPS;

/** Load per layer and expert, server against trainer; flips, margins, swaps; over a range of steps. */
export function ExpertsPage({ run, query }: { run: Run; query: URLSearchParams }) {
  const isGrowing = run.live || typeof run.indexing === "number" || !run.has_tensors; // they may not be read yet
  const range = /^(\d+):(\d+)$/.exec(query.get("step") ?? "");
  const { data, error } = useData<Experts>(`runs/${run.id}/experts${range ? `?step=${range[0]}` : ""}`, isGrowing);
  const chosen = /^(\d+)\.(\d+)$/.exec(query.get("expert") ?? "");
  const wanted = query.get("map") as MapName;
  const shown: MapName = wanted in MAPS ? wanted : "server";
  const load = useMemo(() => data && mapOf(data, shown), [data, shown]);
  return (
    <div class="experts">
      <div class="controls">
        <h1>Experts</h1>
        <StepRange
          last={Math.max(run.steps, 1)}
          range={range ? [Number(range[1]), Number(range[2])] : null}
          counted={data?.steps ?? []}
        />
      </div>
      <Warnings texts={[...run.warnings, ...(data?.missing ?? [])]} />
      <Notes texts={data?.notes} />
      {error && <Problem text={error} />}
      {!data && !error && <p class="note">Loading ...</p>}
      {data && (
        <>
          <section aria-labelledby="load">
            <h2 id="load">Load per layer and expert</h2>
            <div class="tabs" role="group" aria-label="Load of">
              {Object.entries(MAPS).map(([name, label]) => (
                <button key={name} type="button" aria-pressed={name === shown} onClick={() => setQuery({ map: name })}>
                  {label}
                </button>
              ))}
            </div>
            {load?.length ? (
              <HeatMap
                values={load}
                isDiverging={shown === "difference"}
                rowName="layer"
                columnName="expert"
                format={shareOf(data.experts)}
                onChoose={isExport() ? undefined : (layer, expert) => setQuery({ expert: `${layer}.${expert}` })}
              />
            ) : (
              <p class="note">Not recorded for these steps.</p>
            )}
            {chosen && !isExport() ? (
              <LoadCurve run={run} isGrowing={isGrowing} layer={Number(chosen[1])} expert={Number(chosen[2])} />
            ) : (
              !!load?.length && !isExport() && <p class="note">A click on an expert shows its load over the steps.</p>
            )}
          </section>
          <div class="pair">
            <section aria-labelledby="by-layer">
              <h2 id="by-layer">Flips by layer</h2>
              {data.flips_by_layer?.length ? (
                <LayerBars values={data.flips_by_layer} />
              ) : (
                <p class="note">Not recorded.</p>
              )}
            </section>
            <section aria-labelledby="margins">
              <h2 id="margins">Margins</h2>
              {data.margin_histogram ? <Histogram {...data.margin_histogram} /> : <p class="note">Not recorded.</p>}
            </section>
          </div>
          <section aria-labelledby="over-time">
            <h2 id="over-time">Flips over the steps</h2>
            {data.flips_by_layer_over_steps?.steps.length ? (
              <FlipsOverSteps {...data.flips_by_layer_over_steps} />
            ) : (
              <p class="note">Not recorded.</p>
            )}
          </section>
          <section aria-labelledby="swaps">
            <h2 id="swaps">Which experts swap</h2>
            <Swaps swaps={data.swaps} />
          </section>
          {data.layers > 0 && (
            <p class="note">
              {count(data.layers, "MoE layer")}, {data.experts} experts each.
            </p>
          )}
        </>
      )}
    </div>
  );
}

/** Shares of each layer's routes: rows add up to 1 (differences to 0). */
function mapOf(data: Experts, name: MapName): Num[][] | null {
  const shares = (load: Num[][] | null) =>
    load &&
    load.map((row) => {
      const sum = row.reduce<number>((total, value) => total + (value ?? 0), 0);
      return row.map((value) => (value === null || !sum ? null : value / sum));
    });
  const [server, trainer] = [shares(data.server_load), shares(data.trainer_load)];
  if (name !== "difference") return (name === "server" ? server : trainer) ?? null;
  if (!server || !trainer) return null;
  return trainer.map((row, layer) =>
    row.map((value, expert) => {
      const other = server[layer]?.[expert] ?? null;
      return value === null || other === null ? null : value - other;
    }),
  );
}

const shareOf = (experts: number) => (value: number | null) =>
  value === null
    ? "no routes"
    : `${number(100 * value, 3)} % of the layer's routes (uniform: ${number(100 / experts, 3)} %)`;

function FlipsOverSteps({ steps, values }: { steps: number[]; values: Num[][] }) {
  const byLayer = (values[0] ?? []).map((_, layer) => values.map((row) => row[layer] ?? null));
  return (
    <>
      <HeatMap
        values={byLayer}
        rowName="layer"
        columnName="step"
        columnLabels={steps}
        format={(value) => `flips ${number(value, 3)}`}
      />
      <NumberTable
        title="numbers"
        head={["step", ...byLayer.map((_, layer) => `layer ${layer}`)]}
        rows={() => steps.map((step, place) => [step, ...values[place]])}
      />
    </>
  );
}
