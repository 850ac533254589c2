import { isExport } from "../client";
import { promptLink } from "../route";
import type { Run, Value } from "../types";

/** Opens every step of a prompt in all runs; an export lacks them. */
export function PromptLink({ runs, promptKey }: { runs: Run[]; promptKey?: Value }) {
  if (typeof promptKey !== "string" || isExport()) return null;
  const names = runs.length > 2 ? `all ${runs.length} runs` : runs.map(({ name }) => name).join(" and ");
  return <a href={promptLink(runs, promptKey)}>this prompt in {runs.length > 1 ? names : "all steps"}</a>;
}
