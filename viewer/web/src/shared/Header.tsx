import { isExport } from "../client";
import { percent } from "../format";
import type { Route } from "../route";
import type { Run } from "../types";
import { ThemeSwitch } from "./ThemeSwitch";

/** Name and state of the run, the pages, the switch between runs. */
export function Header({ route, run, runs }: { route: Route; run: Run; runs: Run[] }) {
  const pages = [
    { name: "Run", link: `#/run/${run.id}`, isHere: route.page === "run" || route.page === "compare" },
    {
      name: "Rollouts",
      link: `#/run/${run.id}/rollouts`,
      isHere: route.page === "rollouts" || route.page === "rollout",
    },
    { name: "Experts", link: `#/run/${run.id}/experts`, isHere: route.page === "experts" },
  ];
  const page = route.page === "rollouts" || route.page === "experts" ? `/${route.page}` : "";
  return (
    <header class="top">
      <div class="top-run">
        {runs.length > 1 ? (
          <select
            aria-label="Run"
            value={run.id}
            onChange={(event) => {
              location.hash = `#/run/${event.currentTarget.value}${page}`;
            }}
          >
            {runs.map(({ id, name }) => (
              <option key={id} value={id}>
                {name}
              </option>
            ))}
          </select>
        ) : (
          <strong title={run.path}>{run.name}</strong>
        )}
        <span class="note">
          step {run.steps}
          {run.num_steps ? ` of ${run.num_steps}` : ""}
          {run.live && <span class="live">live</span>}
          {isExport() && <span class="live">export</span>}
          {typeof run.indexing === "number" && <span role="status"> indexing: {percent(run.indexing)}</span>}
        </span>
      </div>
      <nav aria-label="Pages">
        {pages.map(({ name, link, isHere }) => (
          <a key={name} href={link} aria-current={isHere ? "page" : undefined}>
            {name}
          </a>
        ))}
      </nav>
      <ThemeSwitch />
    </header>
  );
}
