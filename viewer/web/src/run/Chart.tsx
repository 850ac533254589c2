import { useEffect, useMemo, useRef } from "preact/hooks";
import uPlot from "uplot";
import { number } from "../format";
import { NumberTable } from "../shared/NumberTable";
import { color, useThemeCount } from "../theme";
import type { Metrics, Num, Run, RunEvent } from "../types";
import { EVENT_WORDS, eventClass, isMarked } from "./events";
import type { ChartSpec, Zoom } from "./charts";
import { smooth } from "./smooth";
import type { MetricsOf } from "./useMetrics";

/** What a chart needs of a run: other pages have curves without one. */
type Named = Pick<Run, "id" | "name">;

interface Props {
  chart: ChartSpec;
  runs: Named[];
  metrics: MetricsOf;
  events: RunEvent[];
  smoothing: number;
  zoom: Zoom;
  onZoom: (zoom: Zoom) => void;
}

const HEIGHT = 190;

/** One metric of every run over the steps: raw values faint where smoothed, events as ticks on the axis. */
export function Chart({ chart, runs, metrics, events, smoothing, zoom, onZoom }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const theme = useThemeCount();
  const marks = useMemo(() => events.filter(({ kind, step }) => step !== null && isMarked(kind)), [events]);
  const current = useRef({ marks, onZoom });
  current.current = { marks, onZoom };
  const data = useMemo(() => columns(chart, runs, metrics, smoothing), [chart, runs, metrics, smoothing]);

  useEffect(() => {
    if (!box.current) return;
    const made = new uPlot(
      options(chart, runs, smoothing > 0, box.current.clientWidth, current.current, () => current.current.marks),
      data,
      box.current,
    );
    plot.current = made;
    const resize = new ResizeObserver(() => {
      if (box.current) made.setSize({ width: box.current.clientWidth, height: HEIGHT });
    });
    resize.observe(box.current);
    return () => {
      resize.disconnect();
      made.destroy();
    };
  }, [theme, smoothing > 0, runs.map(({ id }) => id).join(), chart.name]);

  useEffect(() => {
    const made = plot.current;
    if (!made) return;
    made.setData(data, false);
    const [min, max] = zoom ?? [data[0][0] ?? 0, data[0].at(-1) ?? 1];
    made.setScale("x", { min, max: max > min ? max : min + 1 });
  }, [data, zoom, marks, theme, smoothing > 0]);

  return (
    <figure class="chart" data-metric={chart.name}>
      <figcaption>
        <span title={chart.name}>{chart.label}</span>
        <b class="latest">{number(last(chart, metrics[runs[0].id]))}</b>
      </figcaption>
      <div ref={box} role="img" aria-label={summary(chart, runs, metrics)} />
      <NumberTable
        title="numbers"
        head={["step", ...runs.map(({ name }) => name)]}
        rows={() => tableRows(chart, runs, metrics)}
      />
    </figure>
  );
}

function source(chart: ChartSpec, metrics: Metrics | undefined): { steps: number[]; values: Num[] } {
  const from = chart.source === "metrics" ? metrics : metrics?.evaluations;
  return { steps: from?.steps ?? [], values: from?.metrics[chart.name] ?? [] };
}

/** Steps of all runs, then per run the values (smoothed ones after the raw ones where smoothed). */
function columns(chart: ChartSpec, runs: Named[], metrics: MetricsOf, smoothing: number): uPlot.AlignedData {
  const tables = runs.map(({ id }) => {
    const { steps, values } = source(chart, metrics[id]);
    const padded = steps.map((_, place) => values[place] ?? null);
    return [steps, padded, ...(smoothing ? [smooth(padded, smoothing)] : [])] as uPlot.AlignedData;
  });
  return tables.length > 1 ? uPlot.join(tables) : tables[0];
}

function last(chart: ChartSpec, metrics: Metrics | undefined): Num {
  return source(chart, metrics).values.findLast((value) => value !== null) ?? null;
}

function summary(chart: ChartSpec, runs: Named[], metrics: MetricsOf): string {
  const parts = runs.map(({ id, name }) => {
    const values = source(chart, metrics[id]).values.filter((value): value is number => value !== null);
    if (!values.length) return `${name}: no values`;
    const extent = values.reduce(
      ([low, high], value) => [Math.min(low, value), Math.max(high, value)],
      [Infinity, -Infinity],
    );
    const extremes = `from ${number(extent[0])} to ${number(extent[1])}`;
    return `${name}: first ${number(values[0])}, last ${number(values.at(-1))}, ${extremes}`;
  });
  return `Chart of ${chart.label} (${chart.name}). ${parts.join("; ")}`;
}

function tableRows(chart: ChartSpec, runs: Named[], metrics: MetricsOf): Num[][] {
  const [steps, ...values] = columns(chart, runs, metrics, 0);
  return Array.from(steps, (step, place) => [
    step,
    ...values.map((column) => (column[place] as Num | undefined) ?? null),
  ]).reverse();
}

function options(
  chart: ChartSpec,
  runs: Named[],
  isSmoothed: boolean,
  width: number,
  current: { onZoom: (zoom: Zoom) => void },
  marks: () => RunEvent[],
): uPlot.Options {
  const axis = {
    stroke: color("muted"),
    grid: { stroke: color("line"), width: 1 },
    ticks: { stroke: color("line"), width: 1 },
  };
  const points = { show: chart.source === "evaluations" ? true : undefined, size: 5 };
  const series = runs.flatMap(({ name }, place): uPlot.Series[] => {
    const stroke = color(`series-${place % 6}`);
    const line = {
      label: name,
      stroke,
      width: 1.6,
      spanGaps: true,
      points,
      value: (_: uPlot, value: Num) => number(value),
    };
    return isSmoothed ? [{ ...line, alpha: 0.3, width: 1, label: `${name}, raw` }, line] : [line];
  });
  return {
    width,
    height: HEIGHT,
    scales: { x: { time: false }, y: { range: (_, low, high) => bounds(low, high) } },
    legend: { show: true, live: true },
    cursor: { sync: { key: "steps" }, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
    axes: [
      { ...axis, size: 30, values: (_, splits) => splits.map((split) => (Number.isInteger(split) ? `${split}` : "")) },
      { ...axis, size: 62, values: (_, splits) => splits.map((split) => number(split, 3)) },
    ],
    series: [{ label: "step", value: (_, value) => stepText(value, marks(), runs) }, ...series],
    hooks: {
      setSelect: [
        (plot) => {
          if (plot.select.width < 4) return;
          current.onZoom([
            plot.posToVal(plot.select.left, "x"),
            plot.posToVal(plot.select.left + plot.select.width, "x"),
          ]);
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        },
      ],
      ready: [(plot) => plot.over.addEventListener("dblclick", () => current.onZoom(null))],
      draw: [(plot) => drawMarks(plot, marks(), runs.length)],
    },
  };
}

/** Of the y axis; around a curve that is one value, a tenth of it. */
function bounds(low: number | null, high: number | null): [number, number] {
  if (low === null || high === null) return [0, 1];
  const space = (high - low || Math.abs(low) || 1) / 10;
  return [low - space, high + space];
}

function stepText(step: number | null, marks: RunEvent[], runs: Named[]): string {
  if (step === null) return "-";
  const words = marks
    .filter((mark) => mark.step === step)
    .map(({ kind, run }) => `${EVENT_WORDS[kind] ?? kind}${runs.length > 1 ? ` of ${runs[run ?? 0]?.name}` : ""}`);
  return [step, ...new Set(words)].join(", ");
}

/** A tick on the axis per event, in the colour of its run where there are several; across the chart where something went wrong. */
function drawMarks(plot: uPlot, marks: RunEvent[], numRuns: number): void {
  const { ctx, bbox } = plot;
  const { min, max } = plot.scales.x;
  ctx.save();
  for (const { step, kind, run } of marks) {
    if (step === null || step < (min ?? 0) || step > (max ?? 0)) continue;
    const isBad = eventClass(kind) === "bad";
    const x = Math.round(plot.valToPos(step, "x", true)) + 0.5;
    ctx.strokeStyle = color(numRuns > 1 ? `series-${(run ?? 0) % 6}` : isBad ? "bad" : "muted");
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash(isBad ? [4 * devicePixelRatio, 4 * devicePixelRatio] : []);
    ctx.beginPath();
    ctx.moveTo(x, isBad ? bbox.top : bbox.top + bbox.height - 7 * devicePixelRatio);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}
