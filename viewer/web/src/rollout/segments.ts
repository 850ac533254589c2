// A response as spans (prompt, model, environment), each in chunks that are drawn when they come near the screen.

import type { Span, Token } from "../types";

export interface Chunk {
  from: number;
  to: number;
}

export interface Segment {
  span: Span;
  from: number;
  to: number;
  chunks: Chunk[];
}

const CHUNK_TOKENS = 256;

export function segments(tokens: Token[]): Segment[] {
  const found: Segment[] = [];
  for (let from = 0; from < tokens.length;) {
    let to = from + 1;
    while (to < tokens.length && tokens[to].span === tokens[from].span) to++;
    const chunks: Chunk[] = [];
    for (let start = from; start < to; start += CHUNK_TOKENS)
      chunks.push({ from: start, to: Math.min(to, start + CHUNK_TOKENS) });
    found.push({ span: tokens[from].span, from, to, chunks });
    from = to;
  }
  return found;
}

/** Index of the first token after the prompt in which the two differ; null where one is the beginning of the other. */
export function partingPlace(a: Token[], b: Token[]): number | null {
  const start = Math.max(
    0,
    a.findIndex(({ span }) => span !== "prompt"),
  );
  for (let place = start; place < Math.min(a.length, b.length); place++) {
    if (a[place].id !== b[place].id) return place;
  }
  return null;
}
