// What the API returns, and an export holds.  S tokens of a sequence, L MoE layers, K top-k, E experts.

export type Num = number | null;
export type Value = string | number | boolean | null;

export interface Run {
  id: number;
  name: string;
  path: string;
  steps: number;
  num_steps: number | null;
  live: boolean;
  has_tensors: boolean;
  /** Share of the files that is read, while the index is built. */
  indexing?: number | null;
  /** Grows when what was sent before was written again. */
  revision?: number;
  warnings: string[];
}

export interface Metrics {
  steps: number[];
  metrics: Record<string, Num[]>;
  per_layer: Record<string, (Num[] | null)[]>;
  evaluations: { steps: number[]; metrics: Record<string, Num[]> };
  /** Metric -> what it is, in words. */
  labels: Record<string, string>;
}

export interface RunEvent {
  time: number | null;
  step: number | null;
  kind: string;
  text: string;
  seconds?: number | null;
  /** Place of its run among those that are shown. */
  run?: number;
}

export interface ExpertLoad {
  layer: number;
  expert: number;
  steps: number[];
  /** Shares of the layer's routes. */
  server: Num[];
  trainer: Num[];
}

export interface Config {
  text: string;
  values: Record<string, unknown>;
}

export interface SettingDiff {
  key: string;
  a: unknown;
  b: unknown;
}

export interface Finding {
  level: "ok" | "watch" | "bad";
  title: string;
  since_step?: number | null;
  text: string;
  try?: string | null;
  metric?: string | null;
  guide?: string | null;
}

/** A sentence of the run's story. */
export interface Sentence {
  title: string;
  text: string;
  level: "ok" | "watch" | "bad";
}

export interface Column {
  name: string;
  label: string;
  kind: "number" | "text" | "share";
  /** False: a long text, which is searched and neither filtered nor sorted. */
  filter?: boolean;
}

export type Row = Record<string, Value> & { key?: string };

export interface TablePage {
  total: number;
  columns: Column[];
  rows: Row[];
  /** Share of the files that is read, while the index is built. */
  indexing?: number | null;
}

/** The groups of one prompt in a run, some steps of them. */
export interface PromptSteps {
  prompt: string;
  groups: PromptGroup[];
  /** The last of these steps, where others follow. */
  next: number | null;
  missing: string[];
}

export interface PromptGroup {
  key: string;
  step: number;
  count: number;
  reward_mean: Num;
  responses: Row[];
}

/** Prompts that several runs have; `rewards` and `groups` have one value per run. */
export interface CommonPrompts {
  total: number;
  rows: { key: string; prompt: string; rewards: Num[]; groups: number[]; difference: Num }[];
}

export interface Filter {
  column: string;
  op: ">=" | "<=" | ">" | "<" | "=" | "!=" | "contains";
  value: string | number;
}

export interface TableQuery {
  sort: string;
  order: "asc" | "desc";
  q: string;
  filter: Filter[];
}

export type Span = "prompt" | "model" | "environment";

export interface Token {
  text: string;
  id: number;
  span: Span;
  place: number;
  /** Hexadecimal, where the token is no complete UTF-8 text. */
  bytes?: string;
}

export interface Packed {
  dtype: "uint8" | "int16" | "float32";
  shape: number[];
  data: string;
}

/** Row j is the forward pass that read token j and predicted token j + 1. */
export interface Routes {
  layers: number;
  top_k: number;
  server: Packed | null;
  trainer: Packed | null;
  flips: Packed | null;
  margin: Packed | null;
  /** Rows without a route. */
  missing?: number[];
}

/** A message, with its role in the chat format, "" where the text has no such format. */
export interface Said {
  role: string;
  text: string;
}

/** A turn of an episode; its texts, counts and place are there where the run saved its tokens. */
export interface Turn {
  /** Place of the turn before it; null: the prompt. */
  parent: number | null;
  key: string;
  id: string | null;
  number: number;
  reward: Num;
  finish: string | null;
  environment_seconds: Num;
  model_seconds: Num;
  place?: number;
  sampled?: number;
  masked?: number;
  before?: Said[];
  text?: string;
  /** name(arguments) of its tool calls. */
  calls?: string[];
}

export interface Episode {
  prompt: Said[];
  turns: Turn[];
}

export interface Rollout {
  key?: string;
  prompt_key?: string;
  meta: Record<string, unknown>;
  group: Row[];
  /** Null for a response of one turn. */
  episode?: Episode | null;
  tokens: Token[];
  values: Record<string, Num[]>;
  routes: Routes | null;
  missing: string[];
  /** What the run did not save, or the viewer has not read yet: no damage. */
  notes?: string[];
}

export interface Swap {
  layer: number;
  from: number;
  to: number;
  count: number;
}

export interface Experts {
  layers: number;
  experts: number;
  server_load: Num[][] | null;
  trainer_load: Num[][] | null;
  flips_by_layer: Num[] | null;
  flips_by_layer_over_steps: { steps: number[]; values: Num[][] } | null;
  margin_histogram: { edges: number[]; flipped: number[]; kept: number[] } | null;
  swaps: Swap[];
  /** Steps that were counted. */
  steps?: number[];
  missing?: string[];
  notes?: string[];
}
