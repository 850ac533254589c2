import { useEffect, useRef, useState } from "preact/hooks";
import { number } from "../format";
import { color, scale, useThemeCount } from "../theme";
import type { Num } from "../types";

interface Props {
  values: Num[][]; // [rows, columns]
  rowName: string;
  columnName: string;
  columnLabels?: number[];
  isDiverging?: boolean;
  format: (value: Num) => string;
  /** A cell is clicked, or Enter is pressed on it. */
  onChoose?: (row: number, column: number) => void;
}

const CHOOSE = " Enter shows one over the steps.";
const LEFT = 30; // pixels for the row numbers
const BOTTOM = 18;

/** A heat map that is read with the mouse or, focused, with the arrow keys. */
export function HeatMap({ values, rowName, columnName, columnLabels, isDiverging = false, format, onChoose }: Props) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const box = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(0);
  const [at, setAt] = useState<[number, number] | null>(null);
  const theme = useThemeCount();
  const columns = Math.max(1, ...values.map((row) => row.length));
  const cell = Math.max(1, Math.min(56, (width - LEFT) / columns));
  const rowHeight = Math.max(6, Math.min(26, Math.round(300 / Math.max(1, values.length)), Math.max(6, cell * 1.4)));
  const height = values.length * rowHeight + BOTTOM;
  const bounds = extent(values, isDiverging);

  useEffect(() => {
    const observer = new ResizeObserver(() => {
      if (box.current) setWidth(box.current.clientWidth);
    });
    if (box.current) observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    if (canvas.current && width)
      draw(canvas.current, values, { width, height, cell, rowHeight, bounds, isDiverging, at, columnLabels });
  }, [values, width, height, at, theme, isDiverging]);

  const onMouseMove = (event: MouseEvent) => {
    const { left, top } = (event.currentTarget as HTMLElement).getBoundingClientRect();
    const place: [number, number] = [
      Math.floor((event.clientY - top) / rowHeight),
      Math.floor((event.clientX - left - LEFT) / cell),
    ];
    setAt(values[place[0]]?.[place[1]] === undefined ? null : place);
  };
  const choose = () => at && onChoose?.(...at);
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key === "Enter") choose();
    const moves: Record<string, [number, number]> = {
      ArrowUp: [-1, 0],
      ArrowDown: [1, 0],
      ArrowLeft: [0, -1],
      ArrowRight: [0, 1],
    };
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    const [row, column] = at ?? [0, -move[1]];
    setAt([clamp(row + move[0], values.length), clamp(column + move[1], columns)]);
  };
  const name = (column: number) => columnLabels?.[column] ?? column;
  const steps = scale(isDiverging ? "diverging" : "heat");
  return (
    <div class="heat" ref={box}>
      <canvas
        ref={canvas}
        role="img"
        tabIndex={0}
        aria-label={`${summary(values, rowName, columnName, name, format)}${onChoose ? CHOOSE : ""}`}
        style={{ height: `${height}px` }}
        onMouseMove={onMouseMove}
        onMouseLeave={() => setAt(null)}
        onClick={choose}
        onKeyDown={onKeyDown}
        onBlur={() => setAt(null)}
      />
      <div class="heat-foot">
        <span class="bar" aria-hidden="true">
          {number(bounds[0], 3)}
          {steps.map((_, step) => (
            <span key={step} class={`bar-step ${isDiverging ? "diverging" : "heat"}-${step}`} />
          ))}
          {number(bounds[1], 3)}
        </span>
        <span role="status">
          {at
            ? `${rowName} ${at[0]}, ${columnName} ${name(at[1])}: ${format(values[at[0]]?.[at[1]] ?? null)}`
            : `rows: ${rowName}s, columns: ${columnName}s`}
        </span>
      </div>
    </div>
  );
}

const clamp = (value: number, length: number) => Math.max(0, Math.min(length - 1, value));

/** Bounds of the scale: 0 to the largest value, or the same distance to both sides. */
function extent(values: Num[][], isDiverging: boolean): [number, number] {
  let reach = 0;
  for (const row of values) for (const value of row) reach = Math.max(reach, Math.abs(value ?? 0));
  return [isDiverging ? -(reach || 1) : 0, reach || 1];
}

function summary(
  values: Num[][],
  rowName: string,
  columnName: string,
  name: (column: number) => number,
  format: (value: Num) => string,
): string {
  let best: [number, number, number] | null = null;
  values.forEach((row, place) =>
    row.forEach((value, column) => {
      if (value !== null && (!best || Math.abs(value) > Math.abs(best[2]))) best = [place, column, value];
    }),
  );
  const size = `Heat map, ${values.length} ${rowName}s by ${values[0]?.length ?? 0} ${columnName}s.`;
  if (!best) return `${size} No values.`;
  const [row, column, value] = best as [number, number, number];
  return `${size} Largest: ${rowName} ${row}, ${columnName} ${name(column)}, ${format(value)}. Arrow keys read it.`;
}

interface Drawing {
  width: number;
  height: number;
  cell: number;
  rowHeight: number;
  bounds: [number, number];
  isDiverging: boolean;
  at: [number, number] | null;
  columnLabels?: number[];
}

function draw(
  canvas: HTMLCanvasElement,
  values: Num[][],
  { width, height, cell, rowHeight, bounds, isDiverging, at, columnLabels }: Drawing,
): void {
  const density = devicePixelRatio || 1;
  canvas.width = width * density;
  canvas.height = height * density;
  const context = canvas.getContext("2d");
  if (!context) return;
  context.scale(density, density);
  const shades = scale(isDiverging ? "diverging" : "heat");
  const space = cell > 4 ? 1 : 0;
  values.forEach((row, place) =>
    row.forEach((value, column) => {
      if (value === null) return;
      const share = (value - bounds[0]) / (bounds[1] - bounds[0]);
      context.fillStyle = shades[Math.round(8 * Math.max(0, Math.min(1, share)))];
      context.fillRect(
        LEFT + column * cell,
        place * rowHeight,
        Math.max(cell - space, 1),
        rowHeight - (rowHeight > 5 ? 1 : 0),
      );
    }),
  );
  context.fillStyle = color("muted");
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "right";
  const everyRow = Math.ceil(14 / rowHeight);
  values.forEach((_, place) => {
    if (place % everyRow === 0) context.fillText(`${place}`, LEFT - 6, (place + 0.5) * rowHeight + 4);
  });
  context.textAlign = "center";
  const columns = values[0]?.length ?? 0;
  const everyColumn =
    [1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128, 200, 500, 1000].find((every) => every * cell > 34) ?? columns;
  for (let column = 0; column < columns; column += everyColumn) {
    context.fillText(`${columnLabels?.[column] ?? column}`, LEFT + (column + 0.5) * cell, height - 4);
  }
  if (!at) return;
  context.strokeStyle = color("text");
  context.lineWidth = 2;
  context.strokeRect(LEFT + at[1] * cell, at[0] * rowHeight, Math.max(cell - space, 2), rowHeight - 1);
}
