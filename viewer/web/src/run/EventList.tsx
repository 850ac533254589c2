import { Problem } from "../shared/Problem";
import type { Run, RunEvent } from "../types";
import { number } from "../format";
import { EVENT_WORDS, eventClass } from "./events";

interface Props {
  events: RunEvent[];
  error: string | null;
  runs: Run[];
}

/** Events as a list, newest first; the charts mark them on their axis. */
export function EventList({ events, error, runs }: Props) {
  const newest = [...events].reverse();
  return (
    <section aria-labelledby="events">
      <h2 id="events">What happened</h2>
      {error && <Problem text={error} />}
      {!events.length && !error && <p class="note">None recorded.</p>}
      {!!events.length && (
        <div class="scroll events" tabIndex={0} role="region" aria-labelledby="events">
          <table>
            <thead>
              <tr>
                <th scope="col">Step</th>
                <th scope="col">Event</th>
                <th scope="col">What</th>
                <th scope="col">Time</th>
              </tr>
            </thead>
            <tbody>
              {newest.slice(0, 500).map((event, place) => (
                <tr key={place}>
                  <td class="number">{number(event.step)}</td>
                  <td>
                    <span class={`dot ${eventClass(event.kind)}`} />
                    {EVENT_WORDS[event.kind] ?? event.kind}
                  </td>
                  <td>
                    {runs.length > 1 && (
                      <>
                        <span class={`swatch series-${(event.run ?? 0) % 6}`} />{" "}
                        <b>{runs[event.run ?? 0]?.name}</b>{" "}
                      </>
                    )}
                    {event.text}
                    {event.seconds ? ` (${number(event.seconds, 3)} s)` : ""}
                  </td>
                  <td class="nowrap">{event.time ? new Date(event.time * 1000).toLocaleTimeString() : "-"}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}
