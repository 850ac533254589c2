import { Problem } from "../shared/Problem";
import type { Run, Sentence } from "../types";
import { useData } from "../useData";

/** What happened with the run, in one sentence each: progress, reward, held-out sets, health. */
export function Story({ run, hasName }: { run: Run; hasName: boolean }) {
  const { data, error } = useData<Sentence[]>(`runs/${run.id}/story`, run.live);
  if (error) return <Problem text={`story: ${error}`} />;
  if (!data) return null;
  return (
    <section class="story" aria-label={`Story${hasName ? ` of ${run.name}` : ""}`}>
      {hasName && <h2>{run.name}</h2>}
      <dl>
        {data.map(({ title, text, level }) => (
          <div key={title} class={level}>
            <dt>{title}</dt>
            <dd>{text}</dd>
          </div>
        ))}
      </dl>
    </section>
  );
}
