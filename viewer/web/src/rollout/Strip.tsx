import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { color, scale, useThemeCount } from "../theme";
import { count, quantile } from "../format";
import type { RouteView } from "./routes";

interface Props {
  routes: RouteView;
  length: number;
  cursor: number | null;
  onHover: (place: number) => void;
  onPick: (place: number) => void;
}

/** Layers x tokens: flips, and behind them how close the choice was.  Only what is in view is drawn. */
export function Strip({ routes, length, cursor, onHover, onPick }: Props) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const box = useRef<HTMLDivElement>(null);
  const [view, setView] = useState({ left: 0, width: 0 });
  const theme = useThemeCount();
  const cell = Math.max(3, Math.min(14, Math.floor(view.width / Math.max(1, length)) || 3));
  const row = Math.max(4, Math.min(12, Math.floor(220 / routes.layers)));
  const [flipped, worst] = useMemo(() => totals(routes, length), [routes, length]);

  useEffect(() => {
    const element = box.current;
    if (!element) return;
    const update = () => setView({ left: element.scrollLeft, width: element.clientWidth });
    const observer = new ResizeObserver(update);
    observer.observe(element);
    element.addEventListener("scroll", update, { passive: true });
    return () => {
      observer.disconnect();
      element.removeEventListener("scroll", update);
    };
  }, []);
  useEffect(() => {
    if (canvas.current && view.width) draw(canvas.current, routes, length, view, cell, row, cursor);
  }, [routes, length, view, cell, row, cursor, theme]);
  useEffect(() => {
    const element = box.current;
    if (!element || cursor === null) return;
    const x = cursor * cell;
    if (x < element.scrollLeft || x + cell > element.scrollLeft + element.clientWidth)
      element.scrollLeft = x - element.clientWidth / 2;
  }, [cursor, cell]);

  const placeOf = (event: MouseEvent) => {
    const left = canvas.current?.getBoundingClientRect().left ?? 0;
    return Math.max(0, Math.min(length - 1, Math.floor((event.clientX - left + view.left) / cell)));
  };
  const most = worst === null ? "" : `; most flips in layer ${worst}`;
  const text = `${count(flipped, "token")} of ${length} flipped in some layer${most}`;
  return (
    <figure class="strip">
      <figcaption>
        <span>Layers by tokens: {text}</span>
        <span class="note">
          <span class="swatch flip" /> flip <span class="swatch sequential-8" /> small margin{" "}
          <span class="swatch sequential-0" /> large margin
        </span>
      </figcaption>
      <div class="strip-scroll" ref={box} tabIndex={0} role="region" aria-label="Layers by tokens">
        <div style={{ width: `${length * cell}px`, height: `${routes.layers * row}px` }}>
          <canvas
            ref={canvas}
            role="img"
            aria-label={text}
            style={{ height: `${routes.layers * row}px` }}
            onMouseMove={(event) => onHover(placeOf(event))}
            onClick={(event) => onPick(placeOf(event))}
          />
        </div>
      </div>
    </figure>
  );
}

/** Tokens with a flip, and the layer with the most flips (null without flips). */
function totals(routes: RouteView, length: number): [number, number | null] {
  const perLayer = new Array<number>(routes.layers).fill(0);
  let tokens = 0;
  for (let token = 1; token < length; token++) {
    let hasFlip = false;
    for (let layer = 0; layer < routes.layers; layer++) {
      if (!routes.isFlipped(token, layer)) continue;
      perLayer[layer]++;
      hasFlip = true;
    }
    tokens += Number(hasFlip);
  }
  return [tokens, tokens ? perLayer.indexOf(Math.max(...perLayer)) : null];
}

function draw(
  canvas: HTMLCanvasElement,
  routes: RouteView,
  length: number,
  view: { left: number; width: number },
  cell: number,
  row: number,
  cursor: number | null,
): void {
  const density = devicePixelRatio || 1;
  canvas.width = view.width * density;
  canvas.height = routes.layers * row * density;
  canvas.style.width = `${view.width}px`;
  const context = canvas.getContext("2d");
  if (!context) return;
  context.scale(density, density);
  const shades = scale("sequential");
  const flip = color("flip");
  const first = Math.max(1, Math.floor(view.left / cell));
  const last = Math.min(length - 1, Math.ceil((view.left + view.width) / cell));
  const wide = typicalMargin(routes, first, last);
  for (let token = first; token <= last; token++) {
    const x = token * cell - view.left;
    for (let layer = 0; layer < routes.layers; layer++) {
      const margin = routes.marginOf(token, layer);
      if (routes.isFlipped(token, layer)) context.fillStyle = flip;
      else if (margin !== null) context.fillStyle = shades[Math.round(8 * (1 - Math.min(1, margin / wide)))];
      else continue;
      context.fillRect(x, layer * row, cell - (cell > 4 ? 1 : 0), row - 1);
    }
  }
  if (cursor !== null) {
    context.strokeStyle = color("text");
    context.lineWidth = 1.5;
    context.strokeRect(cursor * cell - view.left - 0.5, 0.75, cell, routes.layers * row - 1.5);
  }
}

/** Median margin of what is in view: the pale end of the scale is twice this. */
function typicalMargin(routes: RouteView, first: number, last: number): number {
  const margins: (number | null)[] = [];
  const stride = Math.max(1, Math.floor((last - first) / 100));
  for (let token = first; token <= last; token += stride) {
    for (let layer = 0; layer < routes.layers; layer++) margins.push(routes.marginOf(token, layer));
  }
  return 2 * (quantile(margins, 0.5) ?? 0) || 1;
}
