// What a token can be coloured by: name, scale, and what it means.

export interface Quantity {
  key: string;
  label: string;
  about: string;
  scale: "sequential" | "diverging" | "category" | "none";
  /** Of a diverging scale: the value in its middle. */
  center?: number;
  names?: string[];
}

export const QUANTITIES: Quantity[] = [
  {
    key: "log_ratio",
    label: "log pi_old - log mu",
    scale: "diverging",
    center: 0,
    about: "training-inference discrepancy: what the trainer thinks of a token that the server sampled",
  },
  { key: "log_mu", label: "log mu", scale: "sequential", about: "log-probability by the inference engine" },
  { key: "log_pi_old", label: "log pi_old", scale: "sequential", about: "by the trainer, before the step's updates" },
  { key: "log_pi", label: "log pi", scale: "sequential", about: "by the trainer, at the token's update" },
  {
    key: "teacher_gap",
    label: "log pi_T - log mu",
    scale: "diverging",
    center: 0,
    about: "the teacher's opinion: above 0 where it finds the token more probable than the server did",
  },
  { key: "log_teacher", label: "log pi_T", scale: "sequential", about: "log-probability by the teacher" },
  { key: "ratio", label: "ratio pi / pi_old", scale: "diverging", center: 1, about: "policy staleness" },
  { key: "weight", label: "weight", scale: "diverging", center: 1, about: "importance weight as used; 0 where masked" },
  {
    key: "clipped",
    label: "clipped",
    scale: "category",
    names: ["not clipped", "clipped at the upper bound", "clipped at the lower bound", "masked"],
    about: "tokens that clipping or a mask drops from the loss",
  },
  { key: "advantage", label: "advantage", scale: "diverging", center: 0, about: "reward minus the group's baseline" },
  { key: "entropy", label: "entropy", scale: "sequential", about: "of the trainer's distribution, in nats" },
  { key: "version", label: "version", scale: "category", about: "weights that sampled the token" },
  {
    key: "flips",
    label: "flips",
    scale: "sequential",
    about: "layers in which the trainer's own choice of experts differs from the server's",
  },
  { key: "loss", label: "loss", scale: "diverging", center: 0, about: "the token's share of the minimised loss" },
  {
    key: "rank",
    label: "rank",
    scale: "sequential",
    about: "of the sampled token among all logits; 0 is the most likely",
  },
  { key: "none", label: "no colour", scale: "none", about: "plain text" },
];

export const quantity = (key: string | null): Quantity => QUANTITIES.find((one) => one.key === key) ?? QUANTITIES[0];
