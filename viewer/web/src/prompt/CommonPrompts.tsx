import { useState } from "preact/hooks";
import { isExport } from "../client";
import { count, number } from "../format";
import { promptLink } from "../route";
import { Problem } from "../shared/Problem";
import type { CommonPrompts as Prompts, Run } from "../types";
import { useData } from "../useData";

const PAGE = 20;

/** The prompts that all shown runs have; those whose mean rewards differ most come first. */
export function CommonPrompts({ shown }: { shown: Run[] }) {
  const [offset, setOffset] = useState(0);
  const runs = shown.map(({ id }) => `run=${id}`).join("&");
  // read once: the server looks at every group of the runs
  const { data, error } = useData<Prompts>(isExport() ? null : `prompts?${runs}&offset=${offset}&limit=${PAGE}`);
  if (isExport()) return null;
  return (
    <section aria-labelledby="prompts">
      <h2 id="prompts">Prompts of {shown.length > 2 ? "all these runs" : "both runs"}</h2>
      {error && <Problem text={error} />}
      {data && !data.total && <p class="note">They have no prompt in common.</p>}
      {!!data?.total && (
        <>
          <p class="note">Mean reward of the groups of each prompt, and their number.</p>
          <Table data={data} shown={shown} />
        </>
      )}
      {!!data && data.total > PAGE && (
        <p class="controls">
          <button type="button" disabled={!offset} onClick={() => setOffset(offset - PAGE)}>
            Previous
          </button>
          <button type="button" disabled={offset + PAGE >= data.total} onClick={() => setOffset(offset + PAGE)}>
            Next
          </button>
          <span class="note">
            {offset + 1} to {Math.min(offset + PAGE, data.total)} of {count(data.total, "prompt")}
          </span>
        </p>
      )}
    </section>
  );
}

function Table({ data, shown }: { data: Prompts; shown: Run[] }) {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-labelledby="prompts">
      <table class="prompts">
        <thead>
          <tr>
            <th scope="col">Prompt</th>
            {shown.map(({ id, name }, place) => (
              <th key={id} scope="col" class="number">
                <span class={`swatch series-${place % 6}`} />
                {name}
              </th>
            ))}
            <th scope="col" class="number">
              Difference
            </th>
          </tr>
        </thead>
        <tbody>
          {data.rows.map(({ key, prompt, rewards, groups, difference }) => (
            <tr key={key}>
              <td>
                <a href={promptLink(shown, key)}>{prompt.trim() || "(no text)"}</a>
              </td>
              {rewards.map((reward, place) => (
                <td key={place} class="number">
                  {number(reward, 3)} <span class="note">({number(groups[place])})</span>
                </td>
              ))}
              <td class="number">{number(difference, 3)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
