import { count, number } from "../format";
import { NumberTable } from "../shared/NumberTable";

interface Props {
  edges: number[];
  flipped: number[];
  kept: number[];
}

const [WIDTH, HEIGHT, BASE] = [480, 190, 22];

/** k-th chosen score minus the best one not chosen, where the engines differ and where not; each adds up to 1. */
export function Histogram(all: Props) {
  const { edges, flipped, kept } = withoutEmptyEnds(all);
  const shares = (counts: number[]) => {
    const sum = counts.reduce((total, value) => total + value, 0);
    return counts.map((value) => (sum ? value / sum : 0));
  };
  const [flips, same] = [shares(flipped), shares(kept)];
  const most = Math.max(...flips, ...same) || 1;
  const bin = WIDTH / Math.max(1, kept.length);
  const x = (place: number) => (place * bin).toFixed(1);
  const steps = (values: number[]) =>
    values
      .map((value, place) => `${place ? "L" : "M"}${x(place)} ${y(value / most)}L${x(place + 1)} ${y(value / most)}`)
      .join("");
  const sum = (values: number[]) => values.reduce((total, value) => total + value, 0);
  const text =
    `${count(sum(flipped), "flip")}, half below a margin of ${number(medianOf(edges, flipped), 3)}; ` +
    `${sum(kept).toLocaleString("en-US")} kept, half below ${number(medianOf(edges, kept), 3)}`;
  return (
    <figure class="histogram">
      <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={`Histogram of margins: ${text}`}>
        <path class="kept" d={`${steps(same)}L${WIDTH} ${y(0)}L0 ${y(0)}Z`} />
        <path class="flips" d={steps(flips)} />
        <line x1="0" x2={WIDTH} y1={y(0)} y2={y(0)} class="axis" />
        {[0, 0.25, 0.5, 0.75, 1].map((share) => {
          const edge = edges[Math.round(share * (edges.length - 1))];
          const anchor = share === 0 ? "start" : share === 1 ? "end" : "middle";
          return (
            <text key={share} x={share * WIDTH} y={HEIGHT - 5} text-anchor={anchor}>
              {number(edge, 2)}
            </text>
          );
        })}
      </svg>
      <figcaption class="note">
        <span class="swatch flip-line" /> flipped <span class="swatch kept" /> kept. {text}.
      </figcaption>
      <NumberTable
        title="numbers"
        head={["from", "to", "flipped", "kept"]}
        rows={() => kept.map((value, place) => [edges[place], edges[place + 1], flipped[place], value])}
      />
    </figure>
  );
}

function withoutEmptyEnds({ edges, flipped, kept }: Props): Props {
  const isUsed = kept.map((count, place) => count + flipped[place] > 0);
  const [first, last] = [Math.max(0, isUsed.indexOf(true)), isUsed.lastIndexOf(true) + 1 || kept.length];
  return { edges: edges.slice(first, last + 1), flipped: flipped.slice(first, last), kept: kept.slice(first, last) };
}

const y = (share: number): string => (HEIGHT - BASE - share * (HEIGHT - BASE - 8)).toFixed(1);

/** Upper edge of the bin that holds the median. */
function medianOf(edges: number[], counts: number[]): number | null {
  const half = counts.reduce((total, value) => total + value, 0) / 2;
  let seen = 0;
  for (let place = 0; place < counts.length; place++) {
    seen += counts[place];
    if (half && seen >= half) return edges[place + 1];
  }
  return null;
}
