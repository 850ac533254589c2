import { useState } from "preact/hooks";
import { isExport } from "../client";
import { setting } from "../format";
import { Problem } from "../shared/Problem";
import type { Config, Run, SettingDiff } from "../types";
import { useData } from "../useData";

/** The settings of one run; of several, what differs. */
export function ConfigPanel({ shown }: { shown: Run[] }) {
  return shown.length > 1 ? <Diff shown={shown} /> : <Settings run={shown[0]} />;
}

function Settings({ run }: { run: Run }) {
  const [isOpen, setOpen] = useState(false);
  const { data, error } = useData<Config>(isOpen ? `runs/${run.id}/config` : null);
  return (
    <section aria-labelledby="settings">
      <h2 id="settings">Settings</h2>
      <details onToggle={(event) => setOpen(event.currentTarget.open)}>
        <summary>config.toml</summary>
        {error && <Problem text={error} />}
        {data && (
          <pre class="config" tabIndex={0}>
            {data.text}
          </pre>
        )}
      </details>
    </section>
  );
}

function Diff({ shown }: { shown: Run[] }) {
  const [second, setSecond] = useState(shown[1].id);
  const { data, error } = useData<SettingDiff[]>(isExport() ? null : `diff?a=${shown[0].id}&b=${second}`);
  return (
    <section aria-labelledby="settings">
      <h2 id="settings">Settings that differ</h2>
      {shown.length > 2 && (
        <label>
          {shown[0].name} against{" "}
          <select value={second} onChange={(event) => setSecond(Number(event.currentTarget.value))}>
            {shown.slice(1).map(({ id, name }) => (
              <option key={id} value={id}>
                {name}
              </option>
            ))}
          </select>
        </label>
      )}
      {error && <Problem text={error} />}
      {data && !data.length && <p class="note">None.</p>}
      {!!data?.length && (
        <div class="scroll" tabIndex={0} role="region" aria-labelledby="settings">
          <table>
            <thead>
              <tr>
                <th scope="col">Setting</th>
                <th scope="col">{shown[0].name}</th>
                <th scope="col">{shown.find(({ id }) => id === second)?.name}</th>
              </tr>
            </thead>
            <tbody>
              {data.map(({ key, a, b }) => (
                <tr key={key}>
                  <td>
                    <code>{key}</code>
                  </td>
                  <td>{setting(a)}</td>
                  <td>{setting(b)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}
