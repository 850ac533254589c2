// Experts, margins and flips of a rollout's tokens.  Token i has row i - 1, the forward pass that predicted it.

import type { Routes } from "../types";
import { decode, type Numbers } from "./packed";

export interface LayerRoute {
  layer: number;
  server: number[];
  trainer: number[];
  margin: number | null;
  isFlipped: boolean;
}

export class RouteView {
  readonly layers: number;
  readonly topK: number;
  private server: Numbers | null;
  private trainer: Numbers | null;
  private margin: Numbers | null;
  private flips: Numbers | null;
  private missing: Set<number>;

  constructor(
    routes: Routes,
    private length: number,
  ) {
    this.layers = routes.layers;
    this.topK = routes.top_k;
    this.server = decode(routes.server);
    this.trainer = decode(routes.trainer);
    this.margin = decode(routes.margin);
    this.flips = decode(routes.flips);
    this.missing = new Set(routes.missing);
  }

  get hasFlips(): boolean {
    return this.flips !== null;
  }

  isFlipped(token: number, layer: number): boolean {
    if (!this.flips || !this.hasRow(token)) return false;
    const byte = (token - 1) * Math.ceil(this.layers / 8) + (layer >> 3);
    return ((this.flips[byte] >> (layer & 7)) & 1) === 1;
  }

  numFlips(token: number): number | null {
    if (!this.flips || !this.hasRow(token)) return null;
    let flipped = 0;
    for (let layer = 0; layer < this.layers; layer++) flipped += Number(this.isFlipped(token, layer));
    return flipped;
  }

  marginOf(token: number, layer: number): number | null {
    const value = this.hasRow(token) ? this.margin?.[(token - 1) * this.layers + layer] : undefined;
    return value === undefined || Number.isNaN(value) ? null : value;
  }

  layersOf(token: number): LayerRoute[] {
    if (!this.hasRow(token)) return [];
    return Array.from({ length: this.layers }, (_, layer) => ({
      layer,
      server: this.experts(this.server, token, layer),
      trainer: this.experts(this.trainer, token, layer),
      margin: this.marginOf(token, layer),
      isFlipped: this.isFlipped(token, layer),
    }));
  }

  private experts(array: Numbers | null, token: number, layer: number): number[] {
    if (!array) return [];
    const start = ((token - 1) * this.layers + layer) * this.topK;
    return Array.from({ length: this.topK }, (_, place) => array[start + place])
      .filter((expert) => expert >= 0)
      .sort((a, b) => a - b);
  }

  private hasRow(token: number): boolean {
    return token >= 1 && token < this.length && !this.missing.has(token - 1);
  }
}
