// The page and its state, all in the URL's hash: links can be shared and "back" works.

import { useEffect, useState } from "preact/hooks";
import type { Run } from "./types";

export type PageName = "run" | "rollouts" | "rollout" | "experts" | "compare";

export interface Route {
  page: PageName;
  run: number;
  key: string;
  query: URLSearchParams;
}

const listeners = new Set<() => void>();

/** #/run/0, #/run/0/rollouts?sort=kl, #/run/0/rollout/KEY?color=ratio, #/run/0/experts, #/compare?runs=0,1,
 *  #/compare?runs=0,1&prompt=KEY */
export function parseRoute(hash: string): Route {
  const [path, search = ""] = hash.replace(/^#\/?/, "").split("?");
  const query = new URLSearchParams(search);
  const [first, run, page, ...key] = path.split("/");
  if (first === "compare") {
    return { page: "compare", run: Number(query.get("runs")?.split(",")[0]) || 0, key: "", query };
  }
  const name = page === "rollouts" || page === "experts" || (page === "rollout" && key.length) ? page : "run";
  return { page: name as PageName, run: Number(run) || 0, key: key.join("/"), query };
}

export function useRoute(): Route {
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const update = () => setHash(location.hash);
    listeners.add(update);
    window.addEventListener("hashchange", update);
    update(); // the address may have changed between the first picture and this
    return () => {
      listeners.delete(update);
      window.removeEventListener("hashchange", update);
    };
  }, []);
  return parseRoute(hash);
}

/** Changes values of the query without a new entry in the history; null or "" removes one. */
export function setQuery(changes: Record<string, string | null>): void {
  const [path, search = ""] = location.hash.split("?");
  const query = new URLSearchParams(search);
  for (const [name, value] of Object.entries(changes)) {
    if (value) query.set(name, value);
    else query.delete(name);
  }
  history.replaceState(null, "", `${path || "#/run/0"}${query.size ? `?${query}` : ""}`);
  listeners.forEach((update) => update());
}

export const promptLink = (runs: Run[], key: string): string =>
  `#/compare?runs=${runs.map(({ id }) => id).join()}&prompt=${key}`;

export const rolloutLink = (run: number, key: string, color?: string | null): string =>
  `#/run/${run}/rollout/${key}${color ? `?color=${color}` : ""}`;
