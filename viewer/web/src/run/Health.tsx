import { Problem } from "../shared/Problem";
import type { Finding, Run } from "../types";
import { useData } from "../useData";

const WORDS = { ok: "fine", watch: "watch", bad: "wrong" };

/** What is wrong with the run, since when, and what to try. */
export function Health({ run, name }: { run: Run; name: string }) {
  const { data, error } = useData<Finding[]>(`runs/${run.id}/health`, run.live);
  if (error) return <Problem text={`health: ${error}`} />;
  if (!data) return null;
  return (
    <section class="health" aria-label={`Health${name ? ` of ${name}` : ""}`}>
      {data.map((finding) => (
        <Item key={finding.title} finding={finding} />
      ))}
      {!data.length && <p class="note">Nothing to report yet.</p>}
    </section>
  );
}

function Item({ finding }: { finding: Finding }) {
  const { level, title, since_step: since, text, guide, metric } = finding;
  return (
    <article class={`finding ${level}`}>
      <h3>
        <span class="level">{WORDS[level]}</span> {title}
        {since != null && <span class="note"> since step {since}</span>}
      </h3>
      <p>
        {text}
        {finding.try && (
          <>
            {" "}
            <b>Try:</b> {finding.try}
          </>
        )}
      </p>
      <p class="note">
        {metric && <code>{metric}</code>}{" "}
        {guide && (/^https?:\/\//.test(guide) ? <a href={guide}>guide</a> : <code>{guide}</code>)}
      </p>
    </article>
  );
}
