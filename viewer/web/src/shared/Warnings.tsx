import { count } from "../format";

/** What could not be read, with the file's name; the rest of the page shows what is readable. */
export function Warnings({ texts }: { texts: string[] }) {
  if (!texts.length) return null;
  return (
    <details class="warnings" open={texts.length <= 3}>
      <summary>{count(texts.length, "part")} of this run could not be read; what is readable is shown</summary>
      <ul>
        {texts.slice(0, 200).map((text) => (
          <li key={text}>{text}</li>
        ))}
      </ul>
    </details>
  );
}
