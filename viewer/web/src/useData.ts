// Loading JSON in a component: the latest request wins, errors are shown, polls every few seconds where asked for.

import { useEffect, useState } from "preact/hooks";
import { get, isExport } from "./client";

export const POLL_MILLISECONDS = 2000;

export interface Loaded<T> {
  data: T | null;
  error: string | null;
}

/** JSON of /api/`path` (null: nothing yet); reads it again every two seconds where `isLive`. */
export function useData<T>(path: string | null, isLive = false): Loaded<T> {
  return useLoaded(path, (signal) => get<T>(path as string, signal), isLive);
}

/** What `read` returns, which `path` names; null reads nothing. */
export function useLoaded<T>(
  path: string | null,
  read: (signal: AbortSignal) => Promise<T>,
  isLive: boolean,
): Loaded<T> {
  const [state, setState] = useState<Loaded<T> & { path: string | null }>({ data: null, error: null, path });
  useEffect(() => {
    if (path === null) return;
    const abort = new AbortController();
    const load = () =>
      read(abort.signal).then(
        (data) => {
          if (!abort.signal.aborted) setState({ data, error: null, path });
        },
        (error: Error) => {
          if (!abort.signal.aborted) setState((before) => ({ ...before, error: error.message, path }));
        },
      );
    void load();
    const stop = isLive ? poll(load) : () => undefined;
    return () => {
      abort.abort();
      stop();
    };
  }, [path, isLive]);
  return state.path === path ? state : { data: null, error: null };
}

/** Calls `load` again POLL_MILLISECONDS after it has finished, while the page is visible; returns what stops it. */
export function poll(load: () => Promise<void>): () => void {
  let timer = 0;
  const again = () => {
    timer = window.setTimeout(async () => {
      if (!document.hidden) await load();
      if (timer) again();
    }, POLL_MILLISECONDS);
  };
  if (!isExport()) again();
  return () => {
    window.clearTimeout(timer);
    timer = 0;
  };
}
