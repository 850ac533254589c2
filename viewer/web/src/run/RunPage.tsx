import { useMemo, useState } from "preact/hooks";
import { CommonPrompts } from "../prompt/CommonPrompts";
import { setQuery } from "../route";
import { Problem } from "../shared/Problem";
import { Warnings } from "../shared/Warnings";
import type { Run } from "../types";
import { Chart } from "./Chart";
import { ChartControls } from "./ChartControls";
import { chartsOf, type Zoom } from "./charts";
import { ConfigPanel } from "./ConfigPanel";
import { EventList } from "./EventList";
import { Health } from "./Health";
import { Lazy } from "../shared/Lazy";
import { RunPicker } from "./RunPicker";
import { Story } from "./Story";
import { useEvents } from "./useEvents";
import { useMetrics } from "./useMetrics";

/** The story, health and events in words, curves of one or several runs, settings. */
export function RunPage({ shown, runs, query }: { shown: Run[]; runs: Run[]; query: URLSearchParams }) {
  const { metrics, error } = useMetrics(shown);
  const events = useEvents(shown);
  const [zoom, setZoom] = useState<Zoom>(null);
  const smoothing = Math.min(0.99, Math.max(0, Number(query.get("smooth")) || 0));
  const search = query.get("q") ?? "";
  const isAll = query.get("all") === "1";
  const charts = useMemo(() => chartsOf(metrics, search, isAll), [metrics, search, isAll]);
  const isLoaded = shown.some(({ id }) => metrics[id]);
  const hasSteps = shown.some(({ id }) => metrics[id]?.steps.length);
  return (
    <>
      <h1>{shown.length > 1 ? "Compare runs" : shown[0].name}</h1>
      <Warnings texts={shown.flatMap(({ warnings }) => warnings)} />
      {shown.map((run) => (
        <div key={run.id}>
          <Story run={run} hasName={shown.length > 1} />
          <Health run={run} name={shown.length > 1 ? run.name : ""} />
        </div>
      ))}
      <EventList events={events.events} error={events.error} runs={shown} />
      {error && <Problem text={error} />}
      <section aria-labelledby="curves">
        <h2 id="curves">Curves</h2>
        <ChartControls smoothing={smoothing} search={search} isAll={isAll} zoom={zoom} onReset={() => setZoom(null)} />
        {runs.length > 1 && <RunPicker shown={shown} runs={runs} />}
        {isLoaded && !hasSteps && <p class="note">No step is finished yet.</p>}
        {hasSteps && !charts.length && <p class="note">No metric has these words: {search}</p>}
        <div class="charts">
          {charts.map((chart) => (
            <Lazy key={`${chart.source} ${chart.name}`} height={252}>
              <Chart
                chart={chart}
                runs={shown}
                metrics={metrics}
                events={events.events}
                smoothing={smoothing}
                zoom={zoom}
                onZoom={setZoom}
              />
            </Lazy>
          ))}
        </div>
        {hasSteps && !search && !isAll && (
          <button type="button" onClick={() => setQuery({ all: "1" })}>
            Show every metric
          </button>
        )}
      </section>
      {shown.length > 1 && <CommonPrompts shown={shown} />}
      <ConfigPanel shown={shown} />
    </>
  );
}
