import { useEffect } from "preact/hooks";
import { isExport } from "./client";
import { ExpertsPage } from "./experts/ExpertsPage";
import { RolloutPage } from "./rollout/RolloutPage";
import { PromptPage } from "./prompt/PromptPage";
import { useRoute } from "./route";
import { RunPage } from "./run/RunPage";
import { Guard } from "./shared/Guard";
import { Header } from "./shared/Header";
import { Problem } from "./shared/Problem";
import { RolloutsPage } from "./table/RolloutsPage";
import type { Run } from "./types";
import { useData } from "./useData";

const TITLES = { run: "Run", compare: "Compare", rollouts: "Rollouts", rollout: "Rollout", experts: "Experts" };

export function App() {
  const route = useRoute();
  const { data: runs, error } = useData<Run[]>("runs", true);
  const run = runs?.find(({ id }) => id === route.run);
  useEffect(() => {
    document.title = `${TITLES[route.page]}${run ? ` - ${run.name}` : ""} - megatron_rl`;
  }, [route.page, run?.name]);
  if (!runs) return error ? <Problem text={error} /> : <p class="page note">Loading ...</p>;
  if (!run)
    return <Problem text={`there is no run ${route.run}; runs: ${runs.map(({ id }) => id).join(", ") || "none"}`} />;
  const others = route.query.get("runs")?.split(",").map(Number) ?? [];
  const shown = route.page === "compare" ? runs.filter(({ id }) => others.includes(id)) : [run];
  const prompt = route.page === "compare" ? route.query.get("prompt") : null;
  return (
    <>
      <a
        class="skip"
        href="#main"
        onClick={(event) => {
          event.preventDefault();
          document.getElementById("main")?.focus();
        }}
      >
        Skip to the page
      </a>
      <Header route={route} run={run} runs={runs} />
      <main id="main" tabIndex={-1} class="page">
        {error && <Problem text={isExport() ? error : `${error} (last known state is shown)`} />}
        <Guard key={`${route.page} ${route.run} ${route.key}`}>
          {prompt !== null && (
            <PromptPage shown={shown.length ? shown : [run]} promptKey={prompt} query={route.query} />
          )}
          {(route.page === "run" || route.page === "compare") && prompt === null && (
            <RunPage
              key={shown.map(({ id }) => id).join()}
              shown={shown.length ? shown : [run]}
              runs={runs}
              query={route.query}
            />
          )}
          {route.page === "rollouts" && <RolloutsPage key={run.id} run={run} runs={runs} query={route.query} />}
          {route.page === "rollout" && <RolloutPage run={run} runs={runs} rolloutKey={route.key} query={route.query} />}
          {route.page === "experts" && <ExpertsPage key={run.id} run={run} query={route.query} />}
        </Guard>
      </main>
    </>
  );
}
