import { get } from "../client";
import { count, number } from "../format";
import { promptLink, rolloutLink } from "../route";
import { Mark, shareOf } from "../rollout/GroupList";
import { Problem } from "../shared/Problem";
import { Warnings } from "../shared/Warnings";
import type { PromptGroup, PromptSteps, Run } from "../types";
import { useLoaded } from "../useData";

type Share = ReturnType<typeof shareOf>;

/** One prompt: its text, and its groups in each of the runs, a row per step. */
export function PromptPage({ shown, promptKey, query }: { shown: Run[]; promptKey: string; query: URLSearchParams }) {
  const after = Number(query.get("after") ?? -1);
  const paths = shown.map(({ id }) => `runs/${id}/prompt?key=${encodeURIComponent(promptKey)}&after=${after}`);
  const { data, error } = useLoaded(
    paths.join(),
    (signal) => Promise.all(paths.map((path) => get<PromptSteps>(path, signal).catch((problem: Error) => problem))),
    shown.some(({ live }) => live),
  );
  if (error) return <Problem text={error} />;
  if (!data) return <p class="note">Loading ...</p>;
  const loaded = data.filter((answer): answer is PromptSteps => !(answer instanceof Error));
  // a run whose answer ends early ends the page for all: its later steps are not known yet
  const ends = loaded.map(({ next }) => next).filter((next) => next !== null);
  const last = ends.length ? Math.min(...ends) : Infinity;
  const groups = data.map((answer) =>
    answer instanceof Error ? [] : answer.groups.filter(({ step }) => step <= last),
  );
  const steps = [...new Set(groups.flat().map(({ step }) => step))].sort((a, b) => a - b);
  const share = shareOf(groups.flat().flatMap(({ responses }) => responses));
  const link = promptLink(shown, promptKey);
  return (
    <>
      <div class="controls">
        <h1>One prompt, step by step</h1>
        {shown.length > 1 && <a href={`#/compare?runs=${shown.map(({ id }) => id).join()}`}>compare these runs</a>}
      </div>
      <Warnings texts={loaded.flatMap(({ missing }) => missing)} />
      {loaded.length ? (
        <pre class="prompt" tabIndex={0} aria-label="Prompt">
          {loaded[0].prompt}
        </pre>
      ) : (
        <Problem text={data.map((answer) => (answer as unknown as Error).message).join("; ")} />
      )}
      {!!loaded.length && (
        <div class="scroll" tabIndex={0} role="region" aria-label="Steps of the prompt">
          <table class="prompt-steps" style={{ minWidth: `${52 + 140 * shown.length}px` }}>
            <thead>
              <tr>
                <th scope="col">Step</th>
                {shown.map(({ id, name }, place) => (
                  <th key={id} scope="col">
                    <span class={`swatch series-${place % 6}`} />
                    {name}
                    {data[place] instanceof Error && `: ${data[place].message}`}
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {steps.map((step) => (
                <tr key={step}>
                  <th scope="row">{step}</th>
                  {shown.map((run, place) => (
                    <td key={run.id}>
                      {groups[place]
                        .filter((group) => group.step === step)
                        .map((group) => (
                          <Group key={group.key} run={run} group={group} share={share} />
                        ))}
                    </td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {!!loaded.length && (
        <p class="controls">
          {after >= 0 && <a href={link}>first steps</a>}
          {Number.isFinite(last) && <a href={`${link}&after=${last}`}>steps after {last}</a>}
        </p>
      )}
    </>
  );
}

/** Mean reward, a mark per response, and the beginnings of their texts. */
function Group({ run, group, share }: { run: Run; group: PromptGroup; share: Share }) {
  return (
    <section aria-label={`${run.name}, step ${group.step}`}>
      <b class="latest">{number(group.reward_mean, 3)}</b>
      <nav class="group" aria-label="Responses of the group">
        {group.responses.map((row) => (
          <Mark key={row.key} row={row} share={share(row)} link={rolloutLink(run.id, `${row.key}`)} />
        ))}
      </nav>
      <details>
        <summary>{count(group.count, "response")}</summary>
        <ol>
          {group.responses.map((row) => (
            <li key={row.key}>
              <a href={rolloutLink(run.id, `${row.key}`)}>reward {number(row.reward, 3)}</a> {row.response}
            </li>
          ))}
        </ol>
      </details>
    </section>
  );
}
