// Kinds of events: their words, and how the charts mark them.

export const EVENT_WORDS: Record<string, string> = {
  weight_sync: "weight sync",
  server_restart: "server restart",
  skipped_update: "skipped update",
  checkpoint: "checkpoint",
  anomaly: "anomaly",
  evaluation: "evaluation",
  start: "start",
  resume: "resume",
  stop: "stop",
};

const TROUBLE = new Set(["server_restart", "skipped_update", "anomaly"]);

/** Weight syncs come every step: the charts leave them out. */
export const isMarked = (kind: string): boolean => kind !== "weight_sync";

export const eventClass = (kind: string): "bad" | "muted" | "accent" =>
  TROUBLE.has(kind) ? "bad" : kind === "weight_sync" ? "muted" : "accent";
